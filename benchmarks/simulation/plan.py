"""The plan of one simulation, a function of its seed: the users' requests, and the faults and their times."""

import random
from dataclasses import dataclass, replace

from benchmarks.simulation.network import Weather
from benchmarks.simulation.source import SourceShape
from benchmarks.simulation.toy import VOCABULARY
from benchmarks.simulation.verifier import NODE_LIMIT, VerifierShape
from outrider.lm.kv.table import blocks_for

FAULTS_UNTIL_S = 1.0
"""Seconds in which faults begin."""
CANCELLED_TOKENS = 120
"""Token limit of a request that is to be cancelled: more than it could get before."""
FEWEST_RUNNING = 2
"""Sessions that every verifier decodes together, at least."""
TIGHT = 0
"""Stands for as many blocks as the longest session needs, and one more."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its kind, its victim and its times."""

    at_s: float
    kind: str
    which: int
    """Index of the victim, modulo the number of possible victims."""
    seconds: float
    """Seconds until the victim is well again."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    new_ids: tuple[int, ...]
    """Tokens that the user adds to the conversation so far."""
    max_tokens: int
    n: int
    seed: int
    first: int
    """Index of the orchestrator that is asked first."""
    timeout_s: float | None
    resumable: bool
    speculate: bool
    act: str
    """What the client does meanwhile: nothing, cancel, leave, return, rival, or stale; with a device also
    sleep, twice, or vanish."""
    act_after_s: float
    pause_s: float
    """Seconds after a turn, and before a client that left comes back."""
    by_hash: bool
    """Whether a client that comes back names its tokens by number and hash."""
    device: str = ""
    """Kind of the client's device: good, useless, hostile, replaying or claiming; empty: the client has no
    device."""
    asleep_s: float = 0.0
    """Seconds for which a device that sleeps is away."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided about a simulation before it runs."""

    seed: int
    weather: Weather
    verifiers: tuple[VerifierShape, ...]
    sources: tuple[SourceShape, ...]
    ahead_s: tuple[float, ...]
    """Seconds by which each orchestrator's wall clock is ahead."""
    conversations: tuple[tuple[float, tuple[Turn, ...]], ...]
    """The second at which each conversation begins, and its turns."""
    faults: tuple[Fault, ...]

    @property
    def cancels_hold(self) -> bool:
        """Whether no fault can make the services forget an answered Cancel."""
        forgetful = {"kill orchestrator", "stop orchestrator", "freeze orchestrator", "empty store"}
        forgetful |= {"freeze store", "cut", "break"}
        return not self.weather.lost and not any(fault.kind in forgetful for fault in self.faults)

    @property
    def moves_on(self) -> bool:
        """Whether a session whose verifier freezes finds another verifier at once.

        That holds where no second verifier freezes, no other fault is in the way, and every verifier can
        decode all sessions together and has memory for them.
        """
        kinds = [fault.kind for fault in self.faults]
        harmless = {"freeze verifier", "clock", "kill source", "freeze source", "swap source"}
        harmless |= {"empty store", "freeze store"}
        alone = kinds.count("freeze verifier") == 1 and harmless.issuperset(kinds)
        together = min(FEWEST_RUNNING, *[shape.blocks // self.most_blocks for shape in self.verifiers])
        return alone and len(self.verifiers) > 1 and not self.weather.lost and self._most_at_once <= together

    @property
    def asleep_s(self) -> float:
        """Seconds for which the devices sleep, all together."""
        return sum(turn.asleep_s for _, turns in self.conversations for turn in turns)

    @property
    def most_blocks(self) -> int:
        """Blocks that the longest session needs at its end."""
        return max(
            blocks_for(sum(len(turn.new_ids) + turn.max_tokens for turn in turns) + NODE_LIMIT)
            for _, turns in self.conversations
        )

    @property
    def _most_at_once(self) -> int:
        """Most sessions of all conversations at a time."""
        return sum(
            max(turn.n * (2 if turn.act in {"rival", "twice"} else 1) for turn in turns)
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
DEVICES = (*("",) * 7, "good", "useless", "hostile")
DEVICE_FAULTS = (*("",) * 3, "replaying", "claiming")
DEVICE_ACTS = ("nothing", "sleep", "twice", "vanish")
NAPS_S = (*(2.0, 14.0) * 10, 3600.0)
"""Seconds for which devices sleep. Peers notice it after 12 s; the longest lease has 300 s."""
ACTS = (*("nothing",) * 8, "cancel", "leave", "return", "return", "rival", "rival", "stale", "stale")


def plan_of(seed: int) -> Plan:
    """The plan of a seed."""
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


@dataclass(frozen=True, slots=True)
class Additions:
    """What is added to every plan. Each has a chance of its own: all else in a plan stays as it is."""

    drafters: int = 0
    """Drafters of one name, one of which fails; 0: the plan's own sources."""
    heads: bool = False
    """Whether some verifiers of every second plan have a head."""
    swaps: bool = False
    """Whether the sources of every second plan swap their weights once."""

    def to(self, plan: Plan) -> Plan:
        """The plan with all of these."""
        if self.drafters:
            plan = with_pool(plan, self.drafters)
        if self.heads:
            plan = with_heads(plan)
        return with_swap(plan) if self.swaps else plan


def with_heads(plan: Plan) -> Plan:
    """The plan with heads in some of its verifiers, in every second plan."""
    chance = random.Random(f"heads {plan.seed}")
    share = chance.choice((0.0, 0.7))
    shapes = tuple(replace(shape, head=chance.random() < share) for shape in plan.verifiers)
    return replace(plan, verifiers=shapes)


def with_swap(plan: Plan) -> Plan:
    """The plan with a swap of its sources' weights, in every second plan that has a source."""
    chance = random.Random(f"swap {plan.seed}")
    if not plan.sources or chance.random() < 0.5:
        return plan
    at_s, seconds = chance.uniform(0.0, FAULTS_UNTIL_S), chance.choice((0.0, 0.1, 0.4))
    return replace(plan, faults=(*plan.faults, Fault(at_s, "swap source", 0, seconds)))


def with_pool(plan: Plan, drafters: int) -> Plan:
    """The plan with `drafters` drafters of one name, one of which dies or freezes sooner or later."""
    chance = random.Random(f"pool {plan.seed}")
    fault = replace(_fault(chance), kind=chance.choice(("kill source", "freeze source")))
    pool = tuple(_source(chance) for _ in range(drafters))
    return replace(plan, sources=pool, faults=(*plan.faults, fault))


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
        most_running=chance.choice((8, 8, FEWEST_RUNNING)),
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
    turn = Turn(
        new_ids=tuple(chance.randrange(1, VOCABULARY) for _ in range(chance.randint(1, 12))),
        max_tokens=CANCELLED_TOKENS if act == "cancel" else chance.randint(1, 40),
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
    return _with_device(turn)


def _with_device(turn: Turn) -> Turn:
    """The turn with its device and the device's faults, which the turn's own seed decides."""
    chance = random.Random(turn.seed)
    kind = chance.choice(DEVICES)
    if not turn.speculate or not kind:
        return turn
    turn = replace(turn, device=chance.choice(DEVICE_FAULTS) or kind)
    if turn.act != "nothing" or turn.timeout_s is not None:
        return turn
    act = chance.choice(DEVICE_ACTS)
    return replace(turn, act=act, asleep_s=chance.choice(NAPS_S) if act == "sleep" else 0.0)


def _fault(chance: random.Random) -> Fault:
    kind = chance.choice(KINDS)
    # A client leaves a frozen orchestrator only after its pings went long without an answer.
    longest_s = 15.0 if kind == "freeze orchestrator" else 4.0
    return Fault(
        at_s=chance.uniform(0.02, FAULTS_UNTIL_S),
        kind=kind,
        which=chance.randrange(6),
        seconds=chance.choice((0.05, 0.3, 1.0, 2.0, longest_s)),
    )
