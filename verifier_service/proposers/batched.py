"""Batched proposers: sources inside this worker that compute, one object for all sessions at once.

A `Proposer` drafts for one session from its tokens in microseconds. A batched proposer may run a model, learn
from what the target said, and read the target's hidden states. Its time is the engine's. So it drafts level
by level, and the engine stops it where a deeper level is not worth its time (`price.py`).

A proposer with a layer of attention of its own keeps keys and values in planes of the target's pool
(`planes/`). Slot i of a session holds what the layer computes of the pair (hidden state of position i - 1,
token i). That depends on tokens up to i alone, as the block does: so blocks stay shareable.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from outrider.lm.compiled.compiler import Passes
from outrider.lm.heads.target_parts import TargetPart
from outrider.lm.kv.pool import GuestRoom, Run
from outrider.lm.runner import PackedLM
from speculative.noise import NoiseRows
from speculative.observed import Observed
from speculative.params import SamplingParams
from verifier_service.proposers.planes.proposer_planes import ProposerPlanes


@dataclass(frozen=True, slots=True)
class ProposerNeeds:
    """What a batched proposer reads of the target's passes, beside the committed tokens, and whose passes."""

    tops: int = 0
    """Number of the target's likeliest ids of each verified row, 0 to 32."""
    layers: tuple[int, ...] = ()
    """Layers whose hidden states are kept; -1 is the output of the last norm."""
    prompts: bool = False
    """Whether passes that only read a part of a prompt are shown as well."""
    planes: tuple[tuple[int, int], ...] = ()
    """(heads, width) of each plane that the proposer wants in the target's pool: two for each layer of
    attention, its keys and its values. A proposer with planes needs `layers` and no `tops`; it is shown
    prompts as well, and the passes of all sessions of its `tenant`, since any session may begin with
    another's blocks. While it rests, several passes are shown as one: a round has the rows of all, and no
    tokens. While it rests for long it is shown none, and is asked for no session that has slots of these
    passes."""
    scout_ids: int = 0
    """Number of ids behind the vocabulary that its scouts may have; see `PackedLM.add_embeddings`."""
    tenant: str = ""
    """The only tenant whose sessions use the proposer; empty: those of any tenant do."""
    parts: tuple[TargetPart, ...] = ()
    """Layers of the target that it may compute with; the first of several ranks gets them whole."""


@dataclass(frozen=True, slots=True)
class ProposedSession:
    """A session as a batched proposer gets to know it."""

    handle: int
    """Number of the session in this worker."""
    tenant: str
    """The owner; nothing of one tenant may be drafted for another."""
    learn: bool
    """Whether what is learnt of the session may be kept to draft for other sessions of the tenant."""
    ids: Sequence[int]
    """All committed tokens; grows as the session decodes, and is to be read only."""
    prompt_length: int
    limit: int
    """The most tokens of the session, prompt and output."""
    params: SamplingParams
    seed: int
    noise: NoiseRows | None = None
    """The session's noise over all ids, shared with the target; None: the proposer draws its own noise."""
    planes: ProposerPlanes | None = None
    """The proposer's planes, the same for all sessions; None: the proposer wants none."""


class SeenRound(NamedTuple):
    """What one pass did for one session."""

    handle: int
    position: int
    """Position of the first committed token; `ids[position]` of the session is `tokens[0]`."""
    tokens: tuple[int, ...]
    """Tokens that were committed; none where the pass only read a part of the prompt."""
    said: Observed | None
    """What the target said, with at least as many top ids as the proposer needs; None: nothing is known."""
    first: int
    """Position of the first token in `rows`."""
    rows: tuple[int, ...]
    """Rows of the pass whose tokens are committed positions now, in order of position; for `features`."""
    runs: tuple[Run, ...] = ()
    """Runs of slots of these positions, for a proposer with planes: write the pairs of all of them, now."""
    before: Tensor | None = None
    """Hidden states of the position before `first`, [layers, width], in the planes' dtype, for a proposer
    with planes; None where `first` is 0."""


class SeenPass(NamedTuple):
    """What one pass did for the sessions of a proposer."""

    rounds: tuple[SeenRound, ...]
    features: Tensor | None
    """Hidden states of the needed layers, [layers, rows of the pass, width], where the model is. Valid until
    the next pass: copy what is to be kept."""


class DraftAsk(NamedTuple):
    """Asks for a draft that follows a session's last committed token."""

    handle: int
    node_limit: int
    """The most nodes that are of use, over all levels."""
    runs: tuple[Run, ...] = ()
    """Runs of slots of all tokens but the last, for a proposer with planes; `saw` has written them."""
    before: Tensor | None = None
    """Hidden states of the position before the last token, [layers, width], for a proposer with planes; with
    the last token they make the first row to draft from."""


class ScoutAsk(NamedTuple):
    """Rows that a proposer wants computed to learn what the target says there; they are never accepted."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Scout that each scout continues; -1 the last committed token."""
    worth: tuple[float, ...]
    """Tokens that each scout is expected to gain later; weighed against the cost of its row."""


class DraftLevel(NamedTuple):
    """Nodes that one more level adds to a session's draft."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Node that each node continues, counted over all levels of this draft; -1 the last committed token."""
    survival: tuple[float, ...]
    """Estimated probability that the whole path from the last committed token to the node is accepted."""
    scouts: ScoutAsk | None = None
    """Scouts to compute beside the draft; the last level that names some replaces those before."""


class BatchedProposer(Protocol):
    """Drafts for all sessions that name it. The engine's thread alone calls it.

    A call that raises, or that returns what is no draft, mutes the proposer for this worker; so do several
    calls that take long. No session ends. What takes long the first time belongs into the constructor.
    """

    needs: ProposerNeeds
    """The needs of the proposer, as in its plan."""

    def open(self, session: ProposedSession) -> None:
        """A session begins, with the tokens that it has by now; also one that was moved or parked before."""

    def saw(self, seen: SeenPass) -> None:
        """A pass was committed; called once per pass that had a session of this proposer.

        A proposer without planes misses the passes of its rests, but for the last ones. One with planes is
        shown several passes of its rests as one, and none of its long rests.
        """

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """Yields one level of the drafts after the other, each with one entry per ask, in their order.

        The next level is computed only when the engine asks for it, which it may never do.
        """

    def close(self, handle: int) -> None:
        """A session is over, or parked."""


@dataclass(frozen=True, slots=True)
class ProposerConfig:
    """Configuration of a batched proposer."""

    name: str
    """Name of the source."""
    model: str
    """Folder or id of the target."""
    checkpoint: str = ""
    """Folder or id of the proposer's own weights; empty: the proposer has none."""
    ranks: int = 1
    """Number of processes that share the target; the proposer is in the first of them alone."""
    passes: Passes = "eager"
    """How the passes of the proposer's own model run, if the proposer has a model."""
    cache_dir: Path | None = None
    """Folder that keeps compiled passes and measured times; None: nothing is kept."""
    tenant: str = ""
    """The only tenant whose sessions use the proposer; empty: those of any tenant do."""


class ProposerPlan(NamedTuple):
    """What is known of a batched proposer before the target is loaded.

    A verifier, and each rank of one, sizes the target's pool by `needs`; only the first rank calls `make`.
    """

    needs: ProposerNeeds
    make: Callable[[PackedLM], BatchedProposer]
    """Makes the proposer for the loaded target. Raises OutriderError for a checkpoint that does not fit."""


def all_needs(proposers: Iterable[BatchedProposer | ProposerPlan]) -> ProposerNeeds:
    """What some proposer or other needs; `layers` in the order in which the target's passes keep them."""
    needs = [proposer.needs for proposer in proposers]
    return ProposerNeeds(
        max((need.tops for need in needs), default=0),
        tuple(dict.fromkeys(layer for need in needs for layer in need.layers)),
        any(need.prompts for need in needs),
        tuple(shape for need in needs for shape in need.planes),
        sum(need.scout_ids for need in needs),
        parts=tuple(dict.fromkeys(part for need in needs for part in need.parts)),
    )


def guest_room(plans: Iterable[ProposerPlan]) -> GuestRoom | None:
    """The planes in the target's pool that these proposers need together; None if they need no planes."""
    needs = all_needs(plans)
    return GuestRoom(needs.planes, len(needs.layers)) if needs.planes else None
