"""Usage of a request: its cost in passes and nodes, and the tokens that speculation gave it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from speculative.acceptance.criterion import Promise


@dataclass(slots=True)
class UsageCount:
    """Running counts of one request."""

    prompt_tokens: int
    """Number of prompt tokens."""
    completion_tokens: int = 0
    """Number of tokens delivered."""
    rounds: int = 0
    """Number of target passes that committed at least one token, the last prefill pass included."""
    admitted: int = 0
    """Number of drafted nodes that target passes computed."""
    accepted: dict[str, int] = field(default_factory=dict)
    """Number of drafted tokens that were delivered, by source name."""
    drafted: dict[str, int] = field(default_factory=dict)
    """Number of nodes offered, admitted or not, by source name."""
    source_names: tuple[str, ...] = ()
    """Names by source index: index 0 is the target itself, index k is source_names[k - 1]."""
    cached_tokens: int = 0
    """Number of prompt tokens whose keys and values were cached when the request began."""
    replay_identical: bool = False
    """Whether every verifier of the same numerics gives the same ids."""
    promise: Promise = Promise.SAME_IDS
    """What the request's criterion promises."""

    def record_round(self, committed_count: int, token_sources: Sequence[int], admitted: int) -> None:
        """Counts a target pass that computed `admitted` nodes and committed `committed_count` ids.

        `token_sources` has one source index per committed id.
        """
        assert len(token_sources) == committed_count, (
            f"{len(token_sources)} token_sources for {committed_count} committed ids"
        )
        self.admitted += admitted
        self.completion_tokens += committed_count
        self.rounds += committed_count > 0
        for source_index in set(token_sources) - {0}:
            name = self.source_names[source_index - 1]
            self.accepted[name] = self.accepted.get(name, 0) + token_sources.count(source_index)

    @property
    def acceptance_length(self) -> float:
        """Completion tokens per round: exactly 1 where no draft is accepted; 0 before the first round."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0
