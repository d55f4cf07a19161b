"""What a request cost and what speculation gave it; counts are of tokens delivered."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class UsageCount:
    """Running counts of one request."""

    prompt_tokens: int
    completion_tokens: int = 0
    rounds: int = 0
    """Target passes that committed at least one token, the one that ended the prefill included."""
    admitted: int = 0
    """Drafted nodes that the target's passes computed."""
    accepted: dict[str, int] = field(default_factory=dict)
    """Drafted and delivered tokens by source name."""
    drafted: dict[str, int] = field(default_factory=dict)
    """Nodes offered by source name, whether admitted or not."""
    source_names: tuple[str, ...] = ()
    """What credits mean: 0 is the target itself, k is source_names[k - 1]."""
    replay_identical: bool = False
    """Whether the same ids come from every verifier of the same numerics."""

    def record_round(self, committed_count: int, credits: Sequence[int], admitted: int) -> None:
        """Counts a target pass that computed `admitted` nodes and committed `committed_count` ids.

        `credits` has one credit index per committed id.
        """
        assert len(credits) == committed_count, f"{len(credits)} credits for {committed_count} committed ids"
        self.admitted += admitted
        self.completion_tokens += committed_count
        self.rounds += committed_count > 0
        for credit in set(credits) - {0}:
            name = self.source_names[credit - 1]
            self.accepted[name] = self.accepted.get(name, 0) + credits.count(credit)

    @property
    def acceptance_length(self) -> float:
        """Completion tokens per round: exactly 1 where nothing is accepted; 0 before the first round."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0
