"""One session's draft while a batched proposer grows it, and what its nodes gain."""

from dataclasses import dataclass, field

from speculative.errors import MalformedDraft
from speculative.tree import ROOT
from verifier_service.engine.session import Session
from verifier_service.proposers.batched import DraftLevel, ScoutAsk


@dataclass(slots=True)
class GrowingDraft:
    """The draft of one session so far."""

    row_worth: float
    """Tokens that the step yields in the time of one more row."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    worth: list[float] = field(default_factory=list)
    """Calibrated survival of each node."""
    scouts: ScoutAsk | None = None

    def add(self, level: DraftLevel, session: Session, source_index: int) -> float:
        """Adds a level; returns the tokens that its nodes and scouts gain, net of their rows."""
        if not len(level.tokens) == len(level.parents) == len(level.survival):
            raise MalformedDraft("a level's tokens, parents and survivals differ in number")
        first = len(self.tokens)
        self.tokens += [int(token) for token in level.tokens]
        self.parents += [int(parent) for parent in level.parents]
        self.survival += [float(survival) for survival in level.survival]
        self.scouts = level.scouts or self.scouts
        for node in range(first, len(self.tokens)):
            parent = self.parents[node]
            if not ROOT <= parent < node:
                raise MalformedDraft(f"draft node {node} has parent {parent}; a parent precedes its child")
            above, known = (1.0, 1.0) if parent == ROOT else (self.survival[parent], self.worth[parent])
            given = min(1.0, self.survival[node] / above) if above > 0 else 0.0
            self.worth.append(known * session.sources.calibrator.worth(source_index, given))
        scouts = level.scouts.worth if level.scouts else ()
        return sum(map(self.net, self.worth[first:])) + sum(map(self.net, scouts))

    def net(self, worth: float) -> float:
        """What a node or scout gains beyond the worth of its row; without a gain the step leaves it out."""
        return max(0.0, worth - self.row_worth)
