"""What happens in one simulation: who asks for what, and what goes wrong when. A function of the seed."""

import random
from dataclasses import dataclass, replace

from benchmarks.simulation.network import Weather
from benchmarks.simulation.source import SourceShape
from benchmarks.simulation.toy import VOCABULARY
from benchmarks.simulation.verifier import NODE_LIMIT, VerifierShape
from outrider.lm.table import blocks_for

FAULTS_UNTIL_S = 1.0
LONG = 120
"""Ids of a request that is to be cancelled: more than it could get before."""


FEWEST = 2
"""Sessions that each verifier decodes together."""
TIGHT = 0
"""Stands for as many blocks as the longest session needs, and one more."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something goes wrong."""

    at_s: float
    kind: str
    which: int
    """Of those that it can happen to, modulo how many there are."""
    seconds: float
    """Until it is well again."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    new_ids: tuple[int, ...]
    """Behind what was said before."""
    max_tokens: int
    n: int
    seed: int
    first: int
    """Orchestrator that is asked first."""
    timeout_s: float | None
    resumable: bool
    speculate: bool
    act: str
    """What its client does meanwhile: nothing, cancel, leave, return, rival, or stale."""
    act_after_s: float
    pause_s: float
    """After a turn, and before a client that left comes back."""
    by_hash: bool
    """Whether the one that comes back names what it has by number and hash."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a simulation."""

    seed: int
    weather: Weather
    verifiers: tuple[VerifierShape, ...]
    sources: tuple[SourceShape, ...]
    ahead_s: tuple[float, ...]
    """How far each orchestrator's wall clock is ahead."""
    conversations: tuple[tuple[float, tuple[Turn, ...]], ...]
    """When each begins, and its turns."""
    faults: tuple[Fault, ...]

    @property
    def cancels_hold(self) -> bool:
        """Whether nothing happens that can make a Cancel that was answered be forgotten."""
        forgetful = {"kill orchestrator", "stop orchestrator", "freeze orchestrator", "empty store"}
        forgetful |= {"freeze store", "cut", "break"}
        return not self.weather.lost and not any(fault.kind in forgetful for fault in self.faults)

    @property
    def moves_on(self) -> bool:
        """Whether a session whose verifier freezes has another to go to: no second one freezes, nothing is in
        the way, and there are no more sessions than decode together and fit into memory anywhere."""
        kinds = [fault.kind for fault in self.faults]
        harmless = {"freeze verifier", "clock", "kill source", "freeze source", "empty store", "freeze store"}
        alone = kinds.count("freeze verifier") == 1 and harmless.issuperset(kinds)
        room = self._most_at_once <= min(
            FEWEST, *[shape.blocks // self.most_blocks for shape in self.verifiers]
        )
        return alone and len(self.verifiers) > 1 and not self.weather.lost and room

    @property
    def most_blocks(self) -> int:
        """Blocks that the longest session needs at its end."""
        return max(
            blocks_for(sum(len(turn.new_ids) + turn.max_tokens for turn in turns) + NODE_LIMIT)
            for _, turns in self.conversations
        )

    @property
    def _most_at_once(self) -> int:
        """Sessions of all conversations."""
        return sum(
            max(turn.n * (2 if turn.act == "rival" else 1) for turn in turns)
            for _, turns in self.conversations
        )


KINDS = (
    "kill verifier",
    "kill verifier",
    "stop verifier",
    "freeze verifier",
    "freeze verifier",
    "kill orchestrator",
    "stop orchestrator",
    "freeze orchestrator",
    "break",
    "break",
    "cut",
    "empty store",
    "freeze store",
    "kill source",
    "freeze source",
    "clock",
)
ACTS = (*("nothing",) * 8, "cancel", "leave", "return", "return", "rival", "rival", "stale", "stale")


def plan_of(seed: int) -> Plan:
    """The plan that this seed stands for."""
    chance = random.Random(seed)
    plan = Plan(
        seed=seed,
        weather=_weather(chance),
        verifiers=tuple(_verifier(chance) for _ in range(chance.choice((1, 2, 2, 2, 3)))),
        sources=tuple(_source(chance) for _ in range(chance.choice((0, 1)))),
        ahead_s=tuple(chance.choice((0.0, 0.0, 0.03, -0.03, 3600.0, -3600.0)) for _ in range(2)),
        conversations=tuple(
            (chance.uniform(0.0, 0.2), tuple(_turns(chance))) for _ in range(chance.choice((1, 1, 2)))
        ),
        faults=tuple(_fault(chance) for _ in range(chance.choice((0, 1, 1, 2, 2, 3)))),
    )
    tight = plan.most_blocks + 1
    shapes = [replace(shape, blocks=tight) if shape.blocks == TIGHT else shape for shape in plan.verifiers]
    return replace(plan, verifiers=tuple(shapes))


def _weather(chance: random.Random) -> Weather:
    return Weather(
        delay_s=chance.choice((0.0005, 0.002, 0.01)),
        late=chance.choice((0.0, 0.0, 0.05)),
        lost=chance.choice((0.0, 0.0, 0.03)),
        twice=chance.choice((0.0, 0.1, 0.3)),
        stutter=chance.choice((0.0, 0.0, 0.1)),
    )


def _verifier(chance: random.Random) -> VerifierShape:
    return VerifierShape(
        step_s=chance.choice((0.015, 0.03, 0.05)),
        blocks=chance.choice((64, 64, TIGHT)),
        most_running=chance.choice((8, 8, FEWEST)),
    )


def _source(chance: random.Random) -> SourceShape:
    return SourceShape(
        right=chance.choice((0.95, 0.7, 0.0)),
        think_s=chance.choice((0.002, 0.02)),
        malformed=chance.choice((0.0, 0.0, 0.05)),
    )


def _turns(chance: random.Random) -> list[Turn]:
    return [_turn(chance) for _ in range(chance.choice((1, 1, 2)))]


def _turn(chance: random.Random) -> Turn:
    act = chance.choice(ACTS)
    return Turn(
        new_ids=tuple(chance.randrange(1, VOCABULARY) for _ in range(chance.randint(1, 12))),
        max_tokens=LONG if act == "cancel" else chance.randint(1, 40),
        n=chance.choice((1, 1, 1, 2)),
        seed=chance.getrandbits(64),
        first=chance.randrange(2),
        timeout_s=chance.choice((None, None, None, None, None, chance.uniform(0.05, 1.5))),
        resumable=act == "return" or chance.random() < 0.2,
        speculate=chance.random() < 0.8,
        act=act,
        act_after_s=chance.uniform(0.01, 0.4),
        pause_s=chance.choice((0.0, 0.05, 0.6)),
        by_hash=chance.random() < 0.5,
    )


def _fault(chance: random.Random) -> Fault:
    kind = chance.choice(KINDS)
    # A client leaves an orchestrator that is frozen only after its pings had much time.
    longest_s = 15.0 if kind == "freeze orchestrator" else 4.0
    return Fault(
        at_s=chance.uniform(0.02, FAULTS_UNTIL_S),
        kind=kind,
        which=chance.randrange(6),
        seconds=chance.choice((0.05, 0.3, 1.0, 2.0, longest_s)),
    )
