"""The sources that draft for one session: which of them it listens to, how fast and how good they are.

Pure: knows the session's drafts and rounds, not its model, nor how drafts arrive.
"""

from collections.abc import Iterator, Sequence

from speculative.acceptance.path_match import Match
from speculative.calibration import SessionCalibrator
from speculative.draft import Draft
from speculative.tree import ROOT, TokenTree
from verifier_service.engine.source_policy import Reputations, SourceLatency, SourceThrottle
from verifier_service.proposers import ActiveProposer, ProposerInit, make_proposer
from verifier_service.proposers.batched import BATCHED_PROPOSERS
from verifier_service.sessions.request import SessionRequest, SourceSet


class SessionSources:
    """One session's sources, by source index from 1.

    Args:
        request: the session's request.
        reputations: what other sessions taught about the sources.
    """

    def __init__(self, request: SessionRequest, reputations: Reputations) -> None:
        self.latencies: dict[int, SourceLatency] = {}
        """Latency of each remote source in use, by source index."""
        self.batched: dict[str, int] = {}
        """Source index of each batched proposer in use, by name."""
        self.calibrator = SessionCalibrator()
        """Calibrates what each source says of its drafts."""
        self._params = request.params
        self._reputations = reputations
        self._proposer_init = ProposerInit(request.prompt_length, request.prediction)
        self._proposers: list[ActiveProposer] = []
        self._active: frozenset[int] = frozenset()
        self._muted: set[int] = set()
        self._throttles: dict[int, SourceThrottle] = {}
        self._heard: set[int] = set()
        """Sources whose drafts came since the last round, by source index."""
        self._tops: dict[int, int] = {}
        """How many of the target's likeliest ids a source wants, by source index."""

    def use(self, sources: SourceSet) -> None:
        """Changes the sources; a source that drafted before goes on where it was."""
        reputations = [self._reputations.of(name, self._params) for name in sources.names]
        self.calibrator.use([reputation.calibration for reputation in reputations])
        self._active = sources.proposers | sources.remote
        inside = {sources.names[index - 1]: index for index in sources.proposers}
        self.batched = {name: index for name, index in inside.items() if name in BATCHED_PROPOSERS}
        known = {active.source_index: active for active in self._proposers}
        self._proposers = [
            known.get(source_index)
            or ActiveProposer(
                source_index, make_proposer(sources.names[source_index - 1], self._proposer_init)
            )
            for source_index in sorted(sources.proposers - set(self.batched.values()))
        ]
        listening = sources.remote - self._muted
        self.latencies = {
            source_index: self.latencies.get(source_index) or SourceLatency() for source_index in listening
        }
        self._throttles = {
            source_index: self._throttles.get(source_index)
            or SourceThrottle(reputations[source_index - 1].activity)
            for source_index in listening
        }

    @property
    def resting(self) -> frozenset[int]:
        """Remote sources, by source index, that are not sent the last round."""
        return frozenset(
            [source_index for source_index, throttle in self._throttles.items() if throttle.resting]
        )

    def listens_to(self, source_index: int) -> bool:
        """Whether the session uses this source's drafts."""
        return source_index in self._active and source_index not in self._muted

    def mute(self, source_index: int) -> None:
        """Ignores this source from now on."""
        self._muted.add(source_index)
        self.latencies.pop(source_index, None)
        self._throttles.pop(source_index, None)

    def want_tops(self, source_index: int, tops: int) -> None:
        """Collects `tops` of the target's likeliest ids of each row for a source that drafts."""
        self._tops[source_index] = tops

    @property
    def tops(self) -> int:
        """Number of the target's likeliest ids that some source wants now; 0: none asks, or all rest."""
        if not self._tops:
            return 0
        wanted = [
            tops
            for source_index, tops in self._tops.items()
            if self.listens_to(source_index) and source_index not in self.resting
        ]
        return max(wanted, default=0)

    def proposals(self, ids: Sequence[int], end: int, node_limit: int) -> Iterator[tuple[int, Draft]]:
        """Gives proposers the first `end` of the session's ids; yields drafts, each with its source index.

        Proposers draft only where `end` is the number of all ids.
        """
        for active in self._proposers:
            active.proposer.append(ids[active.appended : end])
            active.appended = max(active.appended, end)
            if end == len(ids) and (found := active.proposer.propose(node_limit)) is not None:
                yield active.source_index, found

    def heard(self, source_index: int) -> None:
        """Notes that a draft of this source has come."""
        self._heard.add(source_index)

    def verified(self, tree: TokenTree, match: Match) -> None:
        """Notes which remote sources drafted the tokens that the target chose along a round's tree."""
        if not self.latencies or not tree.tokens:
            return
        sources, latencies, children_of = tree.sources, self.latencies, tree.children
        alone = sources.count(sources[0]) == len(sources)
        for node, following in zip((ROOT, *match.path), (*match.path, None), strict=True):
            children = children_of(node)
            if not children:
                continue
            followed = None if following is None else sources[following]
            # Most trees are of one source, and need no set of sources for each node.
            for source_index in sources[:1] if alone else {sources[child] for child in children.values()}:
                if source_index in latencies:
                    latencies[source_index].verified(source_index == followed)

    def committed(self, token_sources: bytes, spared: bool, batch: int, step: int) -> None:
        """Notes a committed round.

        Args:
            token_sources: source index of each committed token, 0 for the target itself.
            spared: whether drafts were there, of any source, and the step admitted none of them.
            batch: sessions in the step.
            step: the step's number; 0: each call is a step of its own.
        """
        heard = self._heard
        for source_index, throttle in self._throttles.items():
            throttle.committed(token_sources.count(source_index), source_index in heard, spared, batch, step)
        heard.clear()

    def published(self, now_ms: float, bare: bool) -> None:
        """Notes that the last round was sent: the time until each source's next draft counts from now on.

        `bare` says that no drafted node outlived the round.
        """
        for latency in self.latencies.values():
            latency.committed(now_ms, bare)
