"""One session as the engine decodes it: its committed ids, its drafts, and its rows of the next step.

Pure: rows out, digests of logits in; no model, clock or thread. Belongs to the session pool.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from outrider.wire.criteria import criterion_name
from speculative.acceptance.criterion import KeyedChance
from speculative.acceptance.drawn import Drawn
from speculative.acceptance.path_match import Match, path_match
from speculative.choice import ChoiceCounts
from speculative.digest import RowAsk, RowDigest
from speculative.draft import Draft, check_nodes
from speculative.draft_nodes import NO_NODES, Leaf, RankedNodes
from speculative.draft_pool import DraftPool
from speculative.errors import EmptySupport, MalformedDraft
from speculative.fragment import Fragment, Offer
from speculative.grammar import Matcher
from speculative.history import History
from speculative.noise import NoiseRows
from speculative.observed import Observed
from speculative.sampling_kernel import current_kernel
from speculative.stats import UsageCount
from speculative.stop import StopChecker, cut_at_stop
from speculative.target_sampler import TargetSampler
from speculative.window_shape import SHAPES
from speculative.windows import WindowPool, WindowRanking
from verifier_service.engine.observing import Observer
from verifier_service.engine.prompt_scorer import scorer_of
from verifier_service.engine.session_sources import RoundScore, SessionSources
from verifier_service.engine.source_policy import Reputations, StepValue
from verifier_service.engine.step import Round, Scouts, StepRows, match_root, scouts_behind
from verifier_service.observe.round_log import UNTIMED_STEP, Step
from verifier_service.proposers.batched import ProposedSession, ScoutAsk
from verifier_service.sessions.request import SessionRequest, SourceSet


class Session:
    """A session that the engine has: it runs, or waits for memory.

    Args:
        handle: the session's number in this worker.
        request: the checked request.
        stop_checker: the request's stops and limits, with its ids replayed; not finished.
        vocabulary_size: width of the target's logits.
        sources: the sources that draft for the session.
        deadline_s: time at which the session has to end, on the engine's clock; None: never.
        reputations: what other sessions taught about the sources; None: nothing.
        usage: the session's cost before it was parked; None: the session is new.
        grammar: matcher of the session's text, after its ids; None: any text will do.
    """

    def __init__(
        self,
        handle: int,
        request: SessionRequest,
        stop_checker: StopChecker,
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
        """Number of leading ids whose keys and values are in memory."""
        self.node_limit = request.node_limit
        self.slots = request.limit + request.node_limit
        """The most rows that the session ever has in the cache."""
        self.begun = request.recovered or len(self.ids) > request.prompt_length
        """Whether the session has run before, here or on a worker that is gone."""
        self.chains_only = False
        """Whether the target verifies one chain of drafted nodes, and no branches."""
        self.deadline_s = deadline_s
        self.round_ended_s = 0.0
        """Time of the last committed round on the engine's clock; 0: no round was committed."""
        self.sources = SessionSources(request, reputations or Reputations(), grammar)
        """The sources that draft for the session."""
        self._request = request
        self._epoch = request.epoch
        self._params = request.params
        self.contrast = request.params.contrast
        """How the target's logits are contrasted with an amateur's; None: not at all."""
        self._logprobs = request.logprobs
        self.scorer = scorer_of(request)
        """Scores the prompt's tokens as they are computed; None where the request does not ask for it."""
        self._stop_checker = stop_checker
        self._grammar = grammar
        self._history = History.of(self.ids, request.prompt_length)
        self._noise = NoiseRows(request.seed, vocabulary_size)
        self._pool = _pool_of(request, self.ids, vocabulary_size, self.sources)
        self._usage = usage or UsageCount(
            prompt_tokens=request.prompt_length,
            replay_identical=request.replay_identical,
            promise=request.promise,
        )
        self._fresh = usage is None
        """Whether the session has not begun: what it finds cached then is other sessions' work."""
        self._drafted_before = dict(self._usage.drafted)
        self._scouts: ScoutAsk | None = None
        self._vocabulary_size = vocabulary_size
        self._ranking: RankedNodes | WindowRanking | None = None
        self._bare = True
        self._brought = self.node_limit
        self._admitted: dict[tuple[int, ...], int] = {}
        """Number of drafted nodes in the last step's rows by their source indices."""
        self.use_sources(sources)

    def use_sources(self, sources: SourceSet) -> None:
        """Changes the session's sources; a source that drafted before goes on where it was."""
        self._usage.source_names = sources.names
        self.sources.use(sources if self.node_limit else SourceSet(sources.names, frozenset(), frozenset()))

    def go_alone(self) -> None:
        """Has the session go on without drafts, whatever sources it is given."""
        self.node_limit, self._ranking, self._scouts = 0, None, None
        self.use_sources(SourceSet(self._usage.source_names, frozenset(), frozenset()))

    @property
    def greedy(self) -> bool:
        """Whether the request takes the likeliest token at each position."""
        return self._params.greedy

    @property
    def uncomputed(self) -> int:
        """Number of committed ids that the target has not computed; at least 1."""
        return len(self.ids) - self.cached

    @property
    def held_until_s(self) -> float:
        """Time on the engine's clock until which the next round waits for a draft; 0: the round does not
        wait."""
        is_last = len(self.ids) + 1 >= self._request.limit  # no draft can be for a token behind it
        waits = self.round_ended_s and self._pool.is_bare and not is_last and self.sources.waits.ms
        if self.uncomputed > 1 or not waits:
            return 0.0
        return self.round_ended_s + self.sources.waits.ms / 1000

    @property
    def likely_nodes(self) -> int:
        """Drafted nodes that the next step would bring: those in the pool, up to as many as last time."""
        scouts = 0 if self._scouts is None else len(self._scouts.tokens)
        return min(self.node_limit, self._pool.drafted + scouts, max(1, self._brought))

    @property
    def noise(self) -> NoiseRows | None:
        """Noise of the session's positions, which another thread may draw ahead; None: that gains nothing."""
        # A kernel draws the noise of the ids that a small top-k leaves, no others: SINGLE in row_kernel.cpp.
        few = 0 < self._params.top_k <= self._vocabulary_size // 64 and current_kernel() is not None
        return None if self._params.greedy or self.judges_draws or few else self._noise

    @property
    def judges_draws(self) -> bool:
        """Whether the criterion judges draws, so that tokens come from its own chance and not from noise."""
        criterion = self._request.criterion
        return criterion is not None and criterion.needs_q

    @property
    def prefix_hash(self) -> int:
        """Hash of all committed ids."""
        return self._pool.hash_at(len(self.ids))

    def resume_at(self, cached: int) -> None:
        """Sets how many leading ids have their keys and values in memory."""
        self.cached = cached
        if self._fresh:
            self._fresh = False
            self._usage.cached_tokens = min(cached, self._request.prompt_length)
        self._ranking = None

    def name_of(self, source_index: int) -> str:
        """Name of the source with this source index."""
        return self._usage.source_names[source_index - 1]

    def offer(self, fragment: Fragment) -> Offer:
        """Merges a draft. Raises MalformedDraft."""
        self._ranking = None
        self.sources.heard(fragment.source)
        return self._pool.offer(fragment)

    def prepare(self, rows: int, least: float = 0.0) -> list[tuple[Fragment, Offer]]:
        """Lets proposers draft for a step of `rows` uncomputed ids; returns what each source offered.

        `least` is the survival that a node needs to be worth its row.
        """
        proposals = self.sources.proposals(self.ids, self.cached + rows, self.node_limit, least)
        return [self.propose(source_index, found) for source_index, found in proposals]

    def prepare_below(self) -> list[tuple[Fragment, Offer]]:
        """Lets what is drafted be continued below its leaves; returns what each source offered."""
        if not isinstance(self._pool, DraftPool):
            return []
        proposals = list(self.sources.proposals_below(self.ids, self._pool, self.node_limit))
        return [self.propose(source_index, found, leaf) for source_index, leaf, found in proposals]

    def propose(self, source_index: int, draft: Draft, leaf: Leaf | None = None) -> tuple[Fragment, Offer]:
        """Merges a proposer's draft below a drafted leaf, or below the last committed token without one.

        Raises MalformedDraft.
        """
        fragment = Fragment(
            source=source_index,
            epoch=self._epoch,
            base=len(self.ids) + (0 if leaf is None else len(leaf.path)),
            prefix_hash=self.prefix_hash if leaf is None else leaf.hash,
            tokens=draft.tokens,
            parents=draft.parents,
            survival=draft.survival,
        )
        return fragment, self.offer(fragment)

    def proposed(self) -> ProposedSession:
        """The session as a batched proposer gets to know it."""
        request = self._request
        return ProposedSession(
            self.handle,
            request.key.tenant,
            request.learn,
            self.ids,
            request.prompt_length,
            request.limit,
            request.params,
            request.seed,
            self._noise,
        )

    def want_scouts(self, ask: ScoutAsk, behind: int = 0) -> None:
        """Has scouts computed in the next step that has room for them.

        Scouts may also have one of `behind` ids behind the vocabulary. Raises MalformedDraft.
        """
        if not all(worth >= 0 for worth in ask.worth):
            raise MalformedDraft(f"scouts are worth {ask.worth}; give 0 or more")
        check_nodes(ask.tokens, ask.parents, [min(1.0, worth) for worth in ask.worth])
        if max(ask.tokens) >= (known := self._vocabulary_size + behind):
            raise MalformedDraft(f"a scout holds id {max(ask.tokens)}; ids are below {known}")
        self._scouts = ask

    def scout_worths(self, rows: int) -> list[float]:
        """Worth of each scout that a step of `rows` uncomputed ids could compute, descending."""
        if rows < self.uncomputed or self._scouts is None or self.chains_only:
            return []
        return list(accumulate(self._scouts.worth[: self.node_limit], min))

    def ranking(self, rows: int) -> RankedNodes | WindowRanking:
        """Drafted nodes that a step of `rows` uncomputed ids could verify, likeliest first."""
        if rows < self.uncomputed:
            return NO_NODES
        if self._ranking is None:
            pool = self._pool
            if self.chains_only and isinstance(pool, DraftPool):
                self._ranking = pool.rank_chain(self.node_limit)
            else:
                self._ranking = pool.rank(self.node_limit)
        return self._ranking

    def patience_ms(self, now_ms: float, step_ms: float, most_ms: float, nodes: int) -> dict[int, float]:
        """Milliseconds, up to `most_ms`, that each remote source's next draft is worth waiting for.

        A step that begins now brings `nodes` drafted nodes and takes `step_ms`. Sources not worth a wait are
        left out, which is all of them where the step's nodes reach the limit.
        """
        if all(latency.silent for latency in self.sources.latencies.values()):
            return {}
        tree = self.ranking(self.uncomputed).tree(nodes)
        value = StepValue.of(tree, step_ms, is_full=len(tree) >= self.node_limit)
        patience = {
            source_index: latency.patience_ms(now_ms, value, most_ms)
            for source_index, latency in self.sources.latencies.items()
        }
        return {source_index: ms for source_index, ms in patience.items() if ms > 0.0}

    def step_rows(self, rows: int, nodes: int, scouts: int = 0) -> StepRows:
        """The session's rows of a step: `rows` (at least 1) uncomputed ids, and the likeliest `nodes`.

        The first `scouts` scouts come behind, within the session's node limit.
        """
        end = self.cached + rows
        chain, ranking = tuple(self.ids[self.cached : end]), self.ranking(rows)
        tree, behind, drawn = ranking.tree(nodes), Scouts(), self._drawn(ranking, nodes)
        if scouts and self._scouts is not None:
            depth = self._request.limit - 1 - len(self.ids)
            most = min(scouts, self.node_limit - len(tree))
            behind = scouts_behind(tree, self._scouts.tokens, self._scouts.parents, most, depth)
        self._brought = nodes + len(behind.tokens)
        self._admitted = ranking.sources(nodes)
        scored = range(0) if self.scorer is None else self.scorer.rows(self.cached, end)
        return StepRows(chain, tree, end == len(self.ids), len(ranking.survivals), behind, scored, drawn)

    def _drawn(self, ranking: RankedNodes | WindowRanking, nodes: int) -> Drawn:
        """What was drawn among the first `nodes` nodes; the next commit judges these levels."""
        if not isinstance(ranking, WindowRanking) or not isinstance(self._pool, WindowPool):
            return {}
        window = ranking.cut(nodes)
        self._pool.judges(window.depth)
        return window.drawn

    def match(self, step_rows: StepRows, target: TargetSampler) -> Match | None:
        """The target's own tokens along the tree of final rows; None: see `match_root`. Changes nothing.

        `target` is the session's `target` with the digests of these rows. Raises EmptySupport.
        """
        try:
            match: Match | None = self._matched(step_rows, target)
        except EmptySupport:
            # The drafts may have led past the request's end, where plain decoding never looks: do without.
            match = match_root(step_rows, target)
        return match and target.with_logprobs(match, self._logprobs)

    def _matched(self, step_rows: StepRows, target: TargetSampler) -> Match:
        criterion = self._request.criterion
        if criterion is None:
            return path_match(step_rows.tree, target)
        chance = KeyedChance(self._request.seed, len(self.ids))
        return criterion(step_rows.tree, target, step_rows.drawn, chance)

    def asks(self, step_rows: StepRows) -> list[RowAsk]:
        """What will be asked of each wanted row: a target on a device has to know ahead."""
        scores = [] if self.scorer is None else self.scorer.asks(step_rows.scored, self.cached)
        if not step_rows.final:
            return scores
        params, logprobs = self._params, self._logprobs
        top = max(self.sources.tops, params.top_k, 0 if logprobs is None else logprobs.listed)
        temperature = 0.0 if params.greedy else params.temperature
        named = self._named(step_rows)
        depths = [0]
        for parent in (*step_rows.tree.parents, *step_rows.scouts.parents):
            depths.append(depths[parent + 1] + 1)
        return scores + [
            RowAsk(self._request.seed, len(self.ids) + depth, temperature, named, params.top_p < 1, top)
            for depth in depths
        ]

    def _named(self, step_rows: StepRows) -> tuple[int, ...]:
        """Ids whose logits the request's parameters change at some row of the step."""
        params = self._params
        named = {token for token, _ in params.logit_bias}
        if params.penalised:
            scouts = [token for token in step_rows.scouts.tokens if token < self._vocabulary_size]
            named.update(self._history.seen().tolist(), step_rows.tree.tokens, scouts)
        if params.holds_back and self._history.generated_count < params.min_tokens:
            named.update(params.stop_ids)
        return tuple(sorted(named))

    def observe(
        self, step_rows: StepRows, match: Match, digests: Callable[[int], RowDigest]
    ) -> Observed | None:
        """What the target said at all rows, before the match is committed; None where no source asks."""
        if not self.sources.tops:
            return None
        observer = Observer(step_rows, digests, self.target(digests), self._grammar)
        return observer.observe(match.path, self.prefix_hash, self.sources.tops)

    def target(
        self, digests: Callable[[int], RowDigest], counts: ChoiceCounts | None = None
    ) -> TargetSampler:
        """Samples the target's tokens below the last committed one.

        `digests` gives the digest of a node's row, -1 is the last committed token; `counts` counts how tokens
        were chosen.
        """
        length = len(self.ids)
        return TargetSampler(self._params, self._history, self._noise, length, digests, self._grammar, counts)

    def skip(self, step_rows: StepRows) -> tuple[int, ...]:
        """Takes over a step that only read a part of the prompt; returns the rows to keep."""
        self.cached += len(step_rows.chain)
        return tuple(range(len(step_rows.chain)))

    def commit(
        self, step_rows: StepRows, match: Match, step: Step = UNTIMED_STEP, node_cost: float = 0.0
    ) -> Round:
        """Commits what was matched in a step, up to the request's end.

        `node_cost` is the cost of a drafted node's row, in tokens.
        """
        tree, chain, sources = step_rows.tree, len(step_rows.chain), step_rows.tree.sources
        tokens, reason = cut_at_stop(self._stop_checker, match.tokens)
        if self._grammar is not None:
            self._grammar.commit(tokens)
        path = match.path[: len(tokens)]
        token_sources = bytes([sources[node] for node in path]).ljust(len(tokens), b"\0")
        self._usage.record_round(len(tokens), token_sources, len(tree))
        spared = not len(tree) and self._pool.drafted > 0
        drafted_along = self._pool.drafted_along(tokens)
        own = self.sources.committed(
            tokens,
            token_sources,
            RoundScore(drafted_along, self._admitted, node_cost, step.pass_ms),
            spared=spared,
            batch=step.sessions,
            step=step.number,
        )
        position = len(self.ids)
        self.ids.extend(tokens)
        self.cached += chain + len(path)
        self._history.extend(tokens)
        self._pool.commit(tokens)
        self._bare = self._pool.is_bare
        self._noise.forget_before(len(self.ids))
        self._ranking = self._scouts = None
        rows = (*range(chain), *[chain + node for node in path])
        drafted = self._pool.drafted_by_source.copy()
        logprobs = match.logprobs[: len(tokens)]
        return Round(position, tokens, token_sources, rows, reason, logprobs, drafted, own)

    def published(self, now_ms: float) -> None:
        """Notes that the last round was sent: from now on the time until each source's next draft counts."""
        self.sources.published(now_ms, self._bare)

    @property
    def cost(self) -> tuple[int, int]:
        """Number of rounds so far, and of drafted nodes that they computed."""
        return self._usage.rounds, self._usage.admitted

    def usage(self) -> UsageCount:
        """A copy of the session's usage so far."""
        names = self._usage.source_names
        drafted = Counter(self._drafted_before)
        drafted.update(
            {names[source_index - 1]: count for source_index, count in self._pool.drafted_by_source.items()}
        )
        return replace(self._usage, accepted=dict(self._usage.accepted), drafted=dict(drafted))


def _pool_of(
    request: SessionRequest, ids: list[int], vocabulary_size: int, sources: SessionSources
) -> DraftPool | WindowPool:
    """The pool of a session's drafts, with a place for windows where the criterion judges draws."""
    pool = DraftPool(
        ids,
        epoch=request.epoch,
        vocabulary_size=vocabulary_size,
        limit=request.limit,
        calibrator=sources.calibrator,
    )
    if request.criterion is None or not request.criterion.needs_q:
        return pool
    shape = SHAPES[criterion_name(request.criterion)]
    return WindowPool(pool, vocabulary_size=vocabulary_size, limit=request.limit, distinct=shape.distinct)
