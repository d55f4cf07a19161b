"""In which order sessions from a lost verifier are read again, so that they wait little on average.

Sessions that share a beginning share its cost, and a short rest holds few others up. Reading is one machine
with a tree of jobs before it: a shared prefix has to be read before what continues it, and a session is
served once its own end is read. Horn's algorithm (SIAM J. Appl. Math. 23, 1972) gives the order with the
least sum of waits. Pure: knows hashes and numbers of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import merge


@dataclass(frozen=True, slots=True)
class UnreadPrompt:
    """What is left to read of one session."""

    handle: int
    blocks: Sequence[bytes]
    """Hashes of the full blocks that are not cached, in order; equal ones hold equal beginnings."""
    rest: int
    """Number of tokens behind the last full block."""


@dataclass(slots=True)
class _Job:
    """Pieces that are read one after another, and the sessions that are served by them."""

    cost: int
    arrival: int
    """The smallest place of its sessions in the order of arrival."""
    handles: list[int] = field(default_factory=list)

    @property
    def rank(self) -> tuple[float, int]:
        """Tokens for each session that is served: the job with the fewest goes first."""
        return self.cost / len(self.handles), self.arrival


@dataclass(slots=True)
class _Prefix:
    """Blocks that a group of sessions shares."""

    cost: int
    """Tokens to read behind those of the prefix above."""
    above: int
    """Place of the prefix that it continues in the list of all."""
    branches: list[list[_Job]] = field(default_factory=list)
    """Jobs of each way in which sessions go on, the first to be read in front."""


def reading_order(prompts: Sequence[UnreadPrompt], block: int) -> list[int]:
    """Handles in the order with the least sum of waits; equals stay in order of arrival.

    Args:
        prompts: sessions in order of arrival.
        block: number of tokens in a block.
    """
    prefixes = _prefixes(list(enumerate(prompts)), block)
    # Backwards, as a prefix comes behind the one that it continues. No recursion: thousands may be nested.
    for prefix in prefixes[:0:-1]:
        prefixes[prefix.above].branches.append(_before(prefix.cost, _merged(prefix.branches)))
    return [handle for job in _merged(prefixes[0].branches) for handle in job.handles]


def _prefixes(prompts: list[tuple[int, UnreadPrompt]], block: int) -> list[_Prefix]:
    """All shared prefixes, the empty one in front, with the jobs of the sessions that end right behind."""
    prefixes = [_Prefix(0, 0)]
    groups = [(0, prompts, 0)]
    while groups:
        above, group, read = groups.pop()
        by_next: dict[bytes, list[tuple[int, UnreadPrompt]]] = {}
        for arrival, prompt in group:
            if len(prompt.blocks) == read:
                prefixes[above].branches.append([_Job(prompt.rest, arrival, [prompt.handle])])
            else:
                by_next.setdefault(prompt.blocks[read], []).append((arrival, prompt))
        for same in by_next.values():
            shared = _shared(same, read)
            groups.append((len(prefixes), same, shared))
            prefixes.append(_Prefix((shared - read) * block, above))
    return prefixes


def _merged(branches: list[list[_Job]]) -> list[_Job]:
    return list(merge(*branches, key=lambda job: job.rank))


def _shared(group: list[tuple[int, UnreadPrompt]], read: int) -> int:
    """Number of blocks that the sessions have in common; at least `read` + 1, all of a single session's."""
    first = group[0][1].blocks
    shared = min(len(prompt.blocks) for _, prompt in group)
    for _, prompt in group[1:]:
        shared = next((at for at in range(read + 1, shared) if prompt.blocks[at] != first[at]), shared)
    return shared


def _before(cost: int, jobs: list[_Job]) -> list[_Job]:
    """The jobs behind a prefix of this cost, which the first of them takes along as long as that pays."""
    first, *others = jobs
    first.cost += cost
    while others and others[0].rank <= first.rank:
        more = others.pop(0)
        first.cost += more.cost
        first.arrival = min(first.arrival, more.arrival)
        first.handles += more.handles
    return [first, *others]
