"""One step of the engine: its limits, how prompts and decoding share its rows, and each session's rows in it.

Chunked prefill is decided here. Pure: knows counts and milliseconds; the target is a protocol.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from outrider.lm.kv.pool import SlotPool
from outrider.lm.plan import SequenceRows
from speculative.acceptance.drawn import Draw
from speculative.acceptance.path_match import Match, path_match
from speculative.digest import RowDigest
from speculative.errors import DeadEnd, EmptySupport
from speculative.logprobs import TokenLogprob
from speculative.stop import FinishReason
from speculative.target_sampler import TargetSampler
from speculative.tree import EMPTY_TREE, ROOT, TokenTree

if TYPE_CHECKING:
    from verifier_service.engine.session import Session


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of the engine's steps and of what it keeps."""

    prefill_chunk: int = 512
    """The most rows that prefills share with decoding."""
    most_rows: int | None = None
    """The most rows of a step that has drafted nodes; None: any number."""
    wait_ms_most: float = 4.0
    """The longest wait for drafts before a step; 0: never."""
    beat_s: float = 0.1
    """Seconds between two beats of an idle engine."""
    stall_ms: float = 40.0
    """The longest step, in ms, that computes part of a prompt while other sessions decode."""
    most_running: int = 64
    """Sessions that may have keys and values at once; others wait."""
    reuse_prefixes: bool = True
    """Whether blocks of committed ids are kept for sessions that begin with the same ids."""
    lease_s: float = 300.0
    """Seconds for which the blocks of an ended or parked session are evicted after others."""
    adaptive: bool = True
    """Whether a step admits only nodes that pay for their rows, or all that the sessions' limits allow."""


class PassOutcome(Protocol):
    """The part of a pass's Outcome that decoding uses. Valid until the target's next pass."""

    @property
    def features(self) -> Tensor | None:
        """Hidden states of every row of the pass, [layers, rows, width]; None where no layer's are kept."""

    def digest(self, index: int) -> RowDigest:
        """Digest of one wanted row, counted from 0 in order of the sequences and of their `want`."""


class PackedTarget(Protocol):
    """The part of a PackedLM that decoding uses."""

    pool: SlotPool
    vocabulary_size: int
    """Width of the logits."""

    def forward(self, sequences: Sequence[SequenceRows]) -> PassOutcome:
        """Computes one pass; see PackedLM."""


class Scouts(NamedTuple):
    """Rows behind a draft tree that are computed only to learn what the target says there, never accepted."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Parent of each scout: -1 the last committed token, then the tree's nodes, then earlier scouts."""

    def first(self, count: int) -> "Scouts":
        """The first `count` scouts; parents precede them, so they hang together."""
        return Scouts(self.tokens[:count], self.parents[:count])


def scouts_behind(
    tree: TokenTree, tokens: Sequence[int], parents: Sequence[int], most: int, depth: int
) -> Scouts:
    """The scouts to compute behind a draft tree, at most `most`.

    A scout that the tree has as a node is no row of its own: what the target says there is known anyway.

    Args:
        tree: the drafts of the step.
        tokens, parents: the wanted scouts; a parent is -1 (the last committed token) or an earlier scout.
        most: the most scouts.
        depth: the deepest level of scouts, counted from 1 for those below the last committed token.
    """
    found: list[tuple[int, int]] = []
    known: dict[tuple[int, int], int] = {}
    places: list[tuple[int, int] | None] = []  # place among nodes and scouts, and depth; None: left out
    for token, parent in zip(tokens, parents, strict=True):
        above = (ROOT, 0) if parent == ROOT else places[parent]
        if above is None or above[1] >= depth:
            places.append(None)
            continue
        place = tree.children(above[0]).get(token, known.get((above[0], token)))
        if place is None and len(found) < most:
            place = known[above[0], token] = len(tree) + len(found)
            found.append((token, above[0]))
        places.append(None if place is None else (place, above[1] + 1))
    return Scouts(tuple([token for token, _ in found]), tuple([parent for _, parent in found]))


class StepRows(NamedTuple):
    """A session's rows in one step: a chain of committed ids, and below its last one a draft tree."""

    chain: tuple[int, ...]
    tree: TokenTree
    final: bool
    """Whether the chain reaches the last committed id, so that the step commits something."""
    candidates: int = 0
    """Drafted nodes that the step could have admitted."""
    scouts: Scouts = Scouts()
    scored: range = range(0)
    """Rows of the chain whose logits score the prompt's next token."""
    drawn: Mapping[int, tuple[Draw, ...]] = {}
    """What was drawn below which node of the tree, and from what, where the session's criterion asks."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token of each row."""
        return self.chain + self.tree.tokens + self.scouts.tokens

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return len(self.chain) + len(self.tree.tokens) + len(self.scouts.tokens)

    @property
    def parents(self) -> tuple[int, ...]:
        """Row that each row continues; -1 is the last cached position."""
        rows = len(self.chain)
        below = self.tree.parents + self.scouts.parents
        # The root is -1, so it becomes the chain's last row like any other parent.
        return (*range(-1, rows - 1), *[rows + parent for parent in below])

    @property
    def wanted(self) -> int:
        """Number of rows whose logits are needed."""
        return len(self.scored) + (1 + len(self.tree.tokens) + len(self.scouts.tokens) if self.final else 0)

    @property
    def want(self) -> tuple[int, ...]:
        """Rows whose logits are needed: scored ones, and the chain's last one, every node and every scout."""
        first = len(self.chain) - 1
        return (*self.scored, *range(first, first + self.wanted - len(self.scored)))


def match_root(step_rows: StepRows, target: TargetSampler) -> Match | None:
    """The target's own token behind the chain of final rows alone.

    None: the logits are no numbers, and drafts may be the reason. Raises EmptySupport.
    """
    try:
        return path_match(EMPTY_TREE, target)
    except DeadEnd:
        raise
    except EmptySupport:
        # Attention weighs a row that another may not see by 0, and 0 times infinity or NaN is NaN.
        if step_rows.row_count == len(step_rows.chain):
            raise
        return None


class Round(NamedTuple):
    """Tokens that a step committed of one session, and where they came from."""

    position: int
    tokens: tuple[int, ...]
    token_sources: bytes
    path: tuple[int, ...]
    """Rows of the step that are committed positions now."""
    reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: Mapping[int, int] = {}
    """Drafted nodes offered so far, by source index."""
    own: Mapping[int, int] = {}
    """Accepted tokens that no better source had drafted, by source index."""


# Prefills keep this part (1 / n) of a step's rows however many sessions decode, so that none starves.
_PREFILL_FLOOR = 4
_FIRST_FLOOR = 4
"""The first prompt keeps this part (1 / n) of the prompts' rows however many shorter ones there are."""
_PIECE = 16
"""Chunks are multiples of this many rows."""
# A step may take this many times as long as its decoding alone. Where decoding alone is long, a prompt would
# otherwise get few rows of each step and hardly ever come to its end.
_SLOWER = 2.0
_NEARLY = 1.1
"""How many times as long as with the largest chunks a prompt may take where no stream stands still for it."""


def chunk_size(most: int, decoding: int, expected_ms: Callable[[int], float], stall_ms: float) -> int:
    """Rows that prefills and decoding share in the next step, at most `most`.

    The streams of the `decoding` other sessions stand still while the step runs. So it may take `stall_ms`,
    or twice what decoding takes alone where that is longer: smaller chunks would mean more steps, each with
    its own cost. Without such streams a session that comes next still waits for the end of the step. So the
    step may take `stall_ms` as well, but longer where the prompts would be read clearly slower otherwise.
    """
    patience_ms = max(stall_ms, _SLOWER * expected_ms(decoding)) if decoding else stall_ms
    if expected_ms(most) <= patience_ms:
        return max(1, most)
    pieces = range(2, most // _PIECE + 1)
    fitting = bisect_left(pieces, True, key=lambda count: expected_ms(count * _PIECE) > patience_ms)
    chunk = min(most, (fitting + 1) * _PIECE)
    return chunk if decoding else max(chunk, _quick_chunk(most, expected_ms))


def _quick_chunk(most: int, expected_ms: Callable[[int], float]) -> int:
    """The fewest rows with which prompts are read nearly as fast as with `most` rows at a time."""
    enough_ms = _NEARLY * expected_ms(most) / most
    sizes = range(_PIECE, most, _PIECE)
    return next((rows for rows in sizes if expected_ms(rows) <= rows * enough_ms), most)


def schedule_rows(
    uncomputed: Sequence[int], nodes: Sequence[int], chunk: int, tenants: Sequence[str] = ()
) -> list[int]:
    """Committed ids of each session that the next step computes; 0: the session sits this step out.

    A session with one uncomputed id decodes and is always in. The others prefill and share what decoding
    leaves of `chunk` rows, and at least a quarter of `chunk`: first come first served, but prompts with at
    most half as much left as the first one get up to three quarters of the rows, so that no short prompt
    waits for a long one. Prompts of about the same length gain nothing from turns: all would end later.

    Args:
        uncomputed: committed ids that the target has not computed, at least 1; sessions in order of arrival.
        nodes: drafted nodes that each session would bring.
        tenants: each session's tenant; tenants take turns among the short prompts. Empty: all have one.
    """
    decoding = sum(1 + count for rows, count in zip(uncomputed, nodes, strict=True) if rows == 1)
    left = max(chunk - decoding, chunk // _PREFILL_FLOOR, 1)
    sizes = [int(rows == 1) for rows in uncomputed]
    prompts = [at for at, rows in enumerate(uncomputed) if rows > 1]
    shorter = [at for at in prompts if 2 * uncomputed[at] <= uncomputed[prompts[0]]]
    share = left - max(1, left // _FIRST_FLOOR)
    for at in _in_turns(shorter, uncomputed, tenants):
        sizes[at] = min(uncomputed[at], share)
        share -= sizes[at]
        left -= sizes[at]
    for at in prompts:
        more = min(uncomputed[at] - sizes[at], left)
        sizes[at] += more
        left -= more
    return sizes


def _in_turns(prompts: Sequence[int], uncomputed: Sequence[int], tenants: Sequence[str]) -> list[int]:
    """The prompts, the shortest first, with one of each tenant before the second one of any."""
    turns: Counter[str] = Counter()
    placed = []
    for at in sorted(prompts, key=lambda at: uncomputed[at]):
        tenant = tenants[at] if tenants else ""
        placed.append((turns[tenant], at))
        turns[tenant] += 1
    return [at for _, at in sorted(placed, key=lambda place: place[0])]


@dataclass(slots=True)
class StepPlan:
    """A step before its drafted nodes are admitted."""

    ready: "list[Session]"
    sizes: list[int]
    depth: float
    drafts: bool
    """Whether drafted nodes may be admitted."""
    held_back: int
    """Number of drafts that proposers held back."""
    step_ms: float
    """Expected duration of the step, in ms."""


@dataclass(slots=True)
class DraftWait:
    """A step of one session that is held back for drafts."""

    plan: StepPlan
    began_s: float | None = None
    """When the wait began; None until the step's report is out."""
    waited_for: set[int] = field(default_factory=set)
    """Sources that were worth waiting for, by source index."""
    came: set[int] = field(default_factory=set)
    """Sources that have sent a draft meanwhile, by source index."""
