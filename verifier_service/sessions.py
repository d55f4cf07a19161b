"""One session as the engine decodes it: what is committed, what is drafted, and what the next step needs.

Pure: rows in, logits out, no model, clock or thread. Whoever has the running sessions owns it.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from speculative.acceptance.path_match import Match, path_match
from speculative.calibration import SessionJudge
from speculative.commit import Ending, commit_run
from speculative.errors import EmptySupport
from speculative.fragment import Fragment, Offer
from speculative.grammar import Matcher
from speculative.history import History
from speculative.merge import DraftPool
from speculative.noise import NoiseRows
from speculative.pending import NOTHING, Ranking
from speculative.stats import UsageCount
from speculative.target import TargetTokens
from speculative.tree import EMPTY_TREE, ROOT, TokenTree
from verifier_service.asking import Asking
from verifier_service.open_sessions.request import SessionRequest, SourceSet
from verifier_service.portion import Portion, Round
from verifier_service.proposers import ActiveProposer, ProposerInit, make_proposer
from verifier_service.reputation import Reputations
from verifier_service.wait import SourcePace, Standing


class Session:
    """A running session.

    Args:
        handle: its number in this worker.
        request: what was asked.
        ending: of the request, with its ids replayed; not finished.
        vocabulary_size: width of the target's logits.
        sources: which draft for it.
        deadline_s: when it is to end, on the engine's clock; None: never.
        reputations: what other sessions taught about the sources; None: nothing.
        usage: what it has cost before it was parked; None: it is new.
        grammar: what its text has to be, after its ids; None: anything.
    """

    def __init__(
        self,
        handle: int,
        request: SessionRequest,
        ending: Ending,
        vocabulary_size: int,
        sources: SourceSet,
        deadline_s: float | None = None,
        reputations: Reputations | None = None,
        usage: UsageCount | None = None,
        grammar: Matcher | None = None,
    ) -> None:
        self.handle = handle
        self.key = request.key
        self.ids = list(request.ids)
        self.cached = 0
        """Leading ids whose rows the target has computed."""
        self.node_limit = request.node_limit
        self.slots = request.limit + request.node_limit
        """The most rows that it ever has in the cache."""
        self.begun = request.recovered or len(self.ids) > request.prompt_length
        """Whether it has run before: here, or on a worker that is gone."""
        self.deadline_s = deadline_s
        self.paces: dict[int, SourcePace] = {}
        """How fast each remote source in use is, by credit index."""
        self._epoch = request.epoch
        self._params = request.params
        self._logprobs = request.logprobs
        self._ending = ending
        self._grammar = grammar
        self._history = History.of(self.ids, request.prompt_length)
        self._noise = NoiseRows(request.seed, vocabulary_size)
        self._reputations = reputations or Reputations()
        self._worth = SessionJudge()
        self._pool = DraftPool(
            self.ids,
            epoch=request.epoch,
            vocabulary_size=vocabulary_size,
            limit=request.limit,
            judge=self._worth,
        )
        self._usage = usage or UsageCount(
            prompt_tokens=request.prompt_length, replay_identical=request.replay_identical
        )
        self._drafted_before = dict(self._usage.drafted)
        self._asking: dict[int, Asking] = {}
        self._heard: set[int] = set()
        self._given = ProposerInit(request.prompt_length, request.prediction)
        self._locals: list[ActiveProposer] = []
        self._muted: set[int] = set()
        self._ranking: Ranking | None = None
        self._bare = True
        self._brought = self.node_limit
        self.use_sources(sources)

    def use_sources(self, sources: SourceSet) -> None:
        """From now on these draft; one that drafted before goes on where it was."""
        self._usage.source_names = sources.names
        reputations = [self._reputations.of(name, self._params) for name in sources.names]
        self._worth.use([reputation.calibration for reputation in reputations])
        self._active = sources.local | sources.remote
        known = {local.source_index: local for local in self._locals}
        self._locals = [
            known.get(credit) or ActiveProposer(credit, make_proposer(sources.names[credit - 1], self._given))
            for credit in sorted(sources.local)
        ]
        listening = sources.remote - self._muted
        self.paces = {credit: self.paces.get(credit) or SourcePace() for credit in listening}
        self._asking = {
            credit: self._asking.get(credit) or Asking(reputations[credit - 1].record) for credit in listening
        }

    @property
    def pending(self) -> int:
        """Committed ids that the target has not computed; at least 1."""
        return len(self.ids) - self.cached

    @property
    def likely_nodes(self) -> int:
        """How many drafted nodes the next step would bring: what stands, up to what the last one did."""
        return min(self.node_limit, self._pool.pending, max(1, self._brought))

    @property
    def prefix_hash(self) -> int:
        """Over all ids."""
        return self._pool.hash_at(len(self.ids))

    @property
    def resting(self) -> frozenset[int]:
        """Remote sources that are not told of the last round."""
        return frozenset([credit for credit, asking in self._asking.items() if not asking.asked])

    def resume_at(self, cached: int) -> None:
        """The target has the rows of so many leading ids, and no others."""
        self.cached = cached
        self._ranking = None

    def name_of(self, credit: int) -> str:
        """Which source a credit index means."""
        return self._usage.source_names[credit - 1]

    def listens_to(self, credit: int) -> bool:
        """Whether a source's drafts are used."""
        return credit in self._active and credit not in self._muted

    def mute(self, credit: int) -> None:
        """Uses nothing of this source from now on."""
        self._muted.add(credit)
        self.paces.pop(credit, None)
        self._asking.pop(credit, None)

    def offer(self, fragment: Fragment) -> Offer:
        """Takes a draft in. Raises MalformedDraft."""
        self._ranking = None
        self._heard.add(fragment.source)
        return self._pool.offer(fragment)

    def prepare(self, rows: int) -> list[tuple[Fragment, Offer]]:
        """Lets local sources draft for a step of so many pending ids; returns what each offered."""
        end = self.cached + rows
        offers = []
        for local in self._locals:
            local.proposer.append(self.ids[local.appended : end])
            local.appended = max(local.appended, end)
            if end == len(self.ids) and (found := local.proposer.propose(self.node_limit)) is not None:
                fragment = Fragment(
                    source=local.source_index,
                    epoch=self._epoch,
                    base=end,
                    prefix_hash=self.prefix_hash,
                    tokens=found.tokens,
                    parents=found.parents,
                    survival=found.survival,
                )
                offers.append((fragment, self.offer(fragment)))
        return offers

    def ranking(self, rows: int) -> Ranking:
        """The drafts that a step of `rows` pending ids could verify, likeliest first."""
        if rows < self.pending:
            return NOTHING
        if self._ranking is None:
            self._ranking = self._pool.rank(self.node_limit)
        return self._ranking

    def patience_ms(self, now_ms: float, step_ms: float, most_ms: float, nodes: int) -> dict[int, float]:
        """Remote sources whose next draft is worth waiting for, and how long, up to `most_ms`.

        `step_ms` is how long a step takes that brings so many nodes; where these are as many as there may be,
        nothing is waited for.
        """
        if all(pace.silent for pace in self.paces.values()):
            return {}
        standing = self._standing(step_ms, nodes)
        patience = {
            credit: pace.patience_ms(now_ms, standing, most_ms) for credit, pace in self.paces.items()
        }
        return {credit: ms for credit, ms in patience.items() if ms > 0.0}

    def begin(self, rows: int, nodes: int) -> Portion:
        """The rows of a step that computes `rows` (at least 1) pending ids and the likeliest `nodes`."""
        end = self.cached + rows
        self._brought = nodes
        chain, ranking = tuple(self.ids[self.cached : end]), self.ranking(rows)
        return Portion(chain, ranking.tree(nodes), end == len(self.ids), len(ranking.survivals))

    def match(self, portion: Portion, logits: NDArray[np.float32]) -> Match:
        """The target's own tokens along the tree of a final portion; changes nothing.

        `logits` are float32[len(portion.want), V]. Raises EmptySupport.
        """
        target = TargetTokens(
            self._params,
            self._history,
            self._noise,
            len(self.ids),
            lambda node: logits[node + 1],
            self._grammar,
        )
        try:
            match = path_match(portion.tree, target)
        except EmptySupport:
            # Perhaps past the request's end, where plain decoding never looks: go on as it does.
            match = path_match(EMPTY_TREE, target)
        return target.told(match, self._logprobs)

    def skip(self, portion: Portion) -> tuple[int, ...]:
        """After a step that was not final: the rows that are cached now."""
        self.cached += len(portion.chain)
        return tuple(range(len(portion.chain)))

    def commit(self, portion: Portion, match: Match, batch: int = 1, step: int = 0) -> Round:
        """After a final step, which was of so many sessions: takes over what was matched, up to the end."""
        tree, chain, sources = portion.tree, len(portion.chain), portion.tree.sources
        self._judge(tree, match)
        tokens, reason = commit_run(self._ending, match.tokens)
        if self._grammar is not None:
            self._grammar.commit(tokens)
        path = match.path[: len(tokens)]
        credits = bytes([sources[node] for node in path]).ljust(len(tokens), b"\0")
        self._usage.record_round(len(tokens), credits, len(tree))
        spared = not len(tree) and self._pool.pending > 0
        for credit, asking in self._asking.items():
            asking.committed(credits.count(credit), credit in self._heard, spared, batch, step)
        self._heard.clear()
        position = len(self.ids)
        self.ids.extend(tokens)
        self.cached += chain + len(path)
        self._history.extend(tokens)
        self._pool.commit(tokens)
        self._bare = not self._pool.pending
        self._noise.forget_before(len(self.ids))
        self._ranking = None
        rows = (*range(chain), *[chain + node for node in path])
        drafted = self._pool.drafted_by_source.copy()
        return Round(position, tokens, credits, rows, reason, match.logprobs[: len(tokens)], drafted)

    def committed(self, now_ms: float) -> None:
        """The last round was published: sources' clocks start."""
        for pace in self.paces.values():
            pace.committed(now_ms, self._bare)

    @property
    def cost(self) -> tuple[int, int]:
        """Rounds so far, and the drafted nodes that they computed."""
        return self._usage.rounds, self._usage.admitted

    def usage(self) -> UsageCount:
        """A copy of what the session has cost so far."""
        names = self._usage.source_names
        drafted = Counter(self._drafted_before)
        drafted.update({names[credit - 1]: count for credit, count in self._pool.drafted_by_source.items()})
        return replace(self._usage, accepted=dict(self._usage.accepted), drafted=dict(drafted))

    def _standing(self, step_ms: float, nodes: int) -> Standing:
        tree = self.ranking(self.pending).tree(nodes)
        leaf, survival = ROOT, 1.0
        while leaf + 1 < len(tree) and tree.parents[leaf + 1] == leaf:
            leaf += 1
            survival = tree.survival[leaf]
        if len(tree) >= self.node_limit:
            survival = 0.0  # nothing more would be admitted
        return Standing(1.0 + sum(tree.survival), step_ms, survival)

    def _judge(self, tree: TokenTree, match: Match) -> None:
        """Tells the remote sources' paces which of their drafts the target followed."""
        if not self.paces or not len(tree):
            return
        for node, following in zip((ROOT, *match.path), (*match.path, None), strict=True):
            followed = None if following is None else tree.sources[following]
            for credit in {tree.sources[child] for child in tree.children(node).values()}:
                if credit in self.paces:
                    self.paces[credit].judged(credit == followed)
