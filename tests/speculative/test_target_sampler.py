"""The same request gives the same ids whatever is drafted: real noise, real processing, a toy target.

The Gumbel rule makes equality of ids the test. Each way of being silently wrong is planted beside production,
and the same comparison must notice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from speculative.acceptance.path_match import path_match
from speculative.choice import choose_token
from speculative.digest import HostDigest
from speculative.draft_pool import DraftPool
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.history import History
from speculative.logprobs import Logprobs, LogprobsOf, TokenLogprob
from speculative.lookup.suffix_automaton import SuffixAutomaton
from speculative.noise import NoiseRows, PositionNoise, gumbel, leads
from speculative.params import SamplingParams
from speculative.sampling import process_logits, sample_token
from speculative.stop import StopChecker, cut_at_stop
from speculative.target_sampler import TargetSampler
from speculative.tree import TokenTree

Ids = tuple[int, ...]
Logits = Callable[[int], NDArray[np.float32]]
Digests = Callable[[int], HostDigest]

PROMPT: Ids = (3, 1, 4, 1, 5)
WIDTH = 24


def target_logits(ids: Ids, width: int = WIDTH) -> NDArray[np.float32]:
    """A function of all ids; what lies beyond WIDTH is padding that the target never chooses."""
    padded = np.full(width, -60.0, dtype=np.float32)
    rng = np.random.default_rng(prefix_hash(ids[-3:]))
    padded[:WIDTH] = rng.normal(size=WIDTH).astype(np.float32) * 2
    return padded


def logits_below(ids: Ids, tree: TokenTree, width: int) -> Logits:
    return lambda node: target_logits((*ids, *(tree.tokens[n] for n in tree.path(node))), width)


@dataclass
class Request:
    """One request, decoded as a verifier does: merge, best tree, path match, cut, commit."""

    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 7
    max_tokens: int = 40
    eos: frozenset[int] = frozenset()
    stops: tuple[bytes, ...] = ()
    width: int = WIDTH
    noise: Any = None
    ask: Callable[..., Any] = TargetSampler
    asked: Logprobs | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def decode(self, drafts: str = "none", ids: Ids = PROMPT, node_limit: int = 8) -> Ids:
        limit = len(PROMPT) + self.max_tokens
        token_bytes = [chr(97 + token).encode() for token in range(WIDTH)]
        stop_checker = StopChecker(
            self.params.end_ids(self.eos),
            limit,
            self.stops,
            token_bytes.__getitem__,
            ids,
            len(PROMPT),
            self.params.min_tokens,
        )
        params = self.params.holding_back(self.eos)
        pool = DraftPool(ids, epoch=1, vocabulary_size=self.width, limit=limit)
        history = History.of(ids, len(PROMPT))
        noise = self.noise or NoiseRows(self.seed, self.width)
        random = Random(len(drafts))
        while stop_checker.finished is None:
            for fragment in DRAFTERS[drafts](self, ids, random):
                pool.offer(fragment)
            tree = pool.best_tree(node_limit)
            logits = logits_below(ids, tree, self.width)
            target = self.ask(params, history, noise, len(ids), lambda node, of=logits: HostDigest(of(node)))
            match = path_match(tree, target)
            committed, _ = cut_at_stop(stop_checker, match.tokens)
            if self.asked is not None:
                self.logprobs += target.with_logprobs(match, self.asked).logprobs[: len(committed)]
            pool.commit(committed)
            for token in committed:
                history.extend([token])
            ids += committed
        return ids


def chain(ids: Ids, tokens: Sequence[int], source: int = 1) -> Fragment:
    survival = tuple(0.9 ** (i + 1) for i in range(len(tokens)))
    parents = tuple(range(-1, len(tokens) - 1))
    return Fragment(source, 1, len(ids), prefix_hash(ids), tuple(tokens), parents, survival)


def no_drafts(request: Request, ids: Ids, random: Random) -> list[Fragment]:
    return []


def what_will_come(request: Request, ids: Ids, random: Random) -> list[Fragment]:
    """A perfect drafter: chains of several lengths, with wrong siblings beside."""
    chosen: list[int] = []
    history = History.of(ids, len(PROMPT))
    for position in range(len(ids), len(ids) + random.randint(1, 5)):
        row = gumbel(request.seed, position, WIDTH)
        logits = target_logits((*ids, *chosen))
        chosen.append(
            sample_token(logits, request.params.holding_back(request.eos), history.with_path(chosen), row)
        )
    wrong = chain(ids, [(chosen[0] + 1) % WIDTH], source=2)
    return [wrong, chain(ids, chosen), chain((*ids, *chosen[:1]), [random.randrange(WIDTH)], source=2)]


def rubbish(request: Request, ids: Ids, random: Random) -> list[Fragment]:
    back = random.randint(0, 2)
    return [chain(ids[: len(ids) - back], [random.randrange(WIDTH) for _ in range(4)]) for _ in range(3)]


def copies(request: Request, ids: Ids, random: Random) -> list[Fragment]:
    copied = SuffixAutomaton(ids).draft(6).tokens
    return [chain(ids, copied)] if copied else []


def everything(request: Request, ids: Ids, random: Random) -> list[Fragment]:
    return [
        *copies(request, ids, random),
        *rubbish(request, ids, random),
        *what_will_come(request, ids, random),
    ]


DRAFTERS: dict[str, Callable[[Request, Ids, Random], list[Fragment]]] = {
    "none": no_drafts,
    "what will come": what_will_come,
    "rubbish": rubbish,
    "copies": copies,
    "everything": everything,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"params": SamplingParams(temperature=0)},
    "greedy, penalised": {
        "params": SamplingParams(temperature=0, frequency_penalty=0.7, repetition_penalty=1.3)
    },
    "sampled": {},
    "cuts": {"params": SamplingParams(temperature=0.8, top_k=8, top_p=0.9, min_p=0.02)},
    "penalised": {
        "params": SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.4)
    },
    "biased": {"params": SamplingParams(logit_bias=((2, 3.0), (7, -5.0)))},
    "ends": {"eos": frozenset({2, 9}), "stops": (b"ab", b"cd", b"xa")},
    "ends late": {
        "params": SamplingParams(min_tokens=12, stop_ids=(3, 8, 11), logit_bias=((2, 3.0), (8, 4.0))),
        "eos": frozenset({2, 9}),
        "stops": (b"a", b"fg"),
    },
    "ends late, greedy": {
        "params": SamplingParams(temperature=0, min_tokens=9, stop_ids=(3, 8), logit_bias=((8, 6.0),)),
    },
    "ends nowhere": {
        "params": SamplingParams(ignore_eos=True, logit_bias=((2, 2.0),)),
        "eos": frozenset({2, 9}),
    },
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("drafts", DRAFTERS)
@pytest.mark.parametrize("node_limit", [1, 8])
def test_ids_equal_plain_decodings(kind: str, drafts: str, node_limit: int) -> None:
    request = Request(**REQUESTS[kind])
    assert request.decode(drafts, node_limit=node_limit) == request.decode()


def test_the_drafts_here_are_accepted_so_that_equality_means_something() -> None:
    rounds = 0

    def counting(*arguments: Any) -> TargetSampler:
        nonlocal rounds
        rounds += 1
        return TargetSampler(*arguments)

    ids = Request(ask=counting).decode("everything")
    assert len(ids) - len(PROMPT) > 2 * rounds


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_law_is_the_argmax_of_processed_plus_noise(kind: str) -> None:
    """Plain decoding written out from the rule itself."""
    request = Request(**REQUESTS[kind])
    ids = request.decode()
    for position in range(len(PROMPT), len(ids)):
        history = History.of(ids[:position], len(PROMPT))
        row = gumbel(request.seed, position, WIDTH)
        params = request.params.holding_back(request.eos)
        assert ids[position] == sample_token(target_logits(ids[:position]), params, history, row)


def test_min_tokens_is_reached_and_what_was_held_back_then_ends_the_request() -> None:
    generated = len(PROMPT) + REQUESTS["ends late"]["params"].min_tokens
    ids = Request(**REQUESTS["ends late"]).decode("everything")
    assert generated <= len(ids) < generated + 20
    assert not set(ids[len(PROMPT) : generated]) & {2, 3, 8, 9, 11}
    greedy = Request(**REQUESTS["ends late, greedy"]).decode("everything")
    assert (len(greedy), greedy[-1]) == (len(PROMPT) + 10, 8)
    endless = Request(**REQUESTS["ends nowhere"]).decode("everything")
    assert len(endless) == len(PROMPT) + 40
    assert {2, 9} & set(endless[len(PROMPT) :])


@pytest.mark.parametrize("of", LogprobsOf)
@pytest.mark.parametrize("kind", ["sampled", "penalised", "ends late"])
def test_logprobs_are_those_of_the_logits_that_chose(kind: str, of: LogprobsOf) -> None:
    """Accepted and own tokens alike, whatever was drafted, against the same computed position by position."""
    request = Request(**REQUESTS[kind], asked=Logprobs(3, of))
    ids = request.decode("everything")
    assert len(request.logprobs) == len(ids) - len(PROMPT)
    params = request.params.holding_back(request.eos)
    for position in range(len(PROMPT), len(ids)):
        scores = target_logits(ids[:position]).astype(np.float64)
        if of is LogprobsOf.PROCESSED:
            scores = process_logits(scores, params, History.of(ids[:position], len(PROMPT)))
        logprobs = scores - np.log(np.exp(scores).sum())
        one = request.logprobs[position - len(PROMPT)]
        assert one.logprob == pytest.approx(logprobs[ids[position]], abs=1e-9)
        assert list(one.top_logprobs) == pytest.approx(sorted(logprobs, reverse=True)[:3], abs=1e-5)


@pytest.mark.parametrize("cut", [1, 13, 39])
def test_a_request_rebuilt_from_its_ids_goes_on_as_it_would_have(cut: int) -> None:
    request = Request(**REQUESTS["penalised"])
    whole = request.decode("everything")
    assert request.decode("rubbish", ids=whole[: len(PROMPT) + cut]) == whole


def test_trap_6_processing_with_another_nodes_history_changes_ids() -> None:
    def the_roots_history(
        params: SamplingParams, history: History, noise: NoiseRows, length: int, digests: Digests
    ) -> Callable[[int, Ids], int]:
        return lambda node, path: choose_token(digests(node), params, history, noise.at(length + len(path)))

    request = Request(**REQUESTS["penalised"], ask=the_roots_history)
    assert request.decode("what will come") != request.decode()


def test_trap_7_padding_that_shifts_the_noise_changes_ids() -> None:
    """The same target, its logits padded to another width; a counter over positions x width is planted."""

    class FlatCounter:
        def __init__(self, width: int) -> None:
            self.width = width

        def at(self, position: int) -> PositionNoise:
            noise = PositionNoise(7, 0, self.width)
            noise.drawn = leads(7, 0, (position + 1) * self.width)[position * self.width :]
            return noise

    assert Request(width=64).decode("everything") == Request().decode()
    planted = [Request(width=width, noise=FlatCounter(width)).decode() for width in (WIDTH, 64)]
    assert planted[0] != planted[1]


def test_trap_7_an_id_that_the_target_does_not_have_never_reaches_its_tree() -> None:
    def widest_id(vocabulary_size: int) -> int:
        pool = DraftPool(PROMPT, epoch=1, vocabulary_size=vocabulary_size, limit=50)
        for tokens in ([WIDTH - 1], [WIDTH, 3]):
            try:
                pool.offer(chain(PROMPT, tokens))
            except MalformedDraft:
                continue
        return max(pool.best_tree(8).tokens)

    assert widest_id(WIDTH) == WIDTH - 1
    assert widest_id(64) == WIDTH  # planted: bounded by a padded drafter's width instead of the target's


def test_trap_8_randomness_consumed_in_order_changes_what_follows_a_cut() -> None:
    """A turn that ends inside an accepted run, and a next one from its ids on in the same worker."""

    class Stream:
        """Planted: noise in the order in which it is asked for."""

        def __init__(self) -> None:
            self.used = 0

        def at(self, position: int) -> PositionNoise:
            self.used += 1
            return PositionNoise(7, len(PROMPT) + self.used - 1, WIDTH)

    whole = Request().decode()

    def in_two_turns(drafts: str, last: int, noise: Any) -> Ids:
        first = Request(eos=frozenset({last}), noise=noise).decode(drafts)
        return Request(noise=noise).decode(drafts, ids=first)

    planted = []
    for last in whole[len(PROMPT) : len(PROMPT) + 10]:
        assert in_two_turns("everything", last, None) == in_two_turns("none", last, None) == whole
        assert in_two_turns("none", last, Stream()) == whole
        planted.append(in_two_turns("everything", last, Stream()))
    assert any(ids != whole for ids in planted)


def test_trap_9_noise_by_row_instead_of_depth_changes_ids() -> None:
    def position_of_the_row(
        params: SamplingParams, history: History, noise: NoiseRows, length: int, digests: Digests
    ) -> Callable[[int, Ids], int]:
        def token(node: int, path: Ids) -> int:
            return choose_token(digests(node), params, history.with_path(path), noise.at(length + node + 1))

        return token

    planted = Request(ask=position_of_the_row)
    assert planted.decode() == Request().decode()
    assert planted.decode("everything") != Request().decode()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, logit_bias=((7, 30.0),)),
        *(REQUESTS[kind]["params"] for kind in ("greedy, penalised", "cuts", "penalised", "biased")),
    ],
    ids=["greedy, biased", "greedy, penalised", "cuts", "penalised", "biased"],
)
def test_criteria_see_at_each_node_the_law_of_plain_decoding_there(params: SamplingParams) -> None:
    """The processed distribution after the path, with the path's history; greedily, one token."""
    ids = (*PROMPT, 2, 2)
    tree = TokenTree((2, 9, 5), (-1, 0, -1), (0.9, 0.8, 0.1), (1, 1, 2))
    rows = logits_below(ids, tree, WIDTH)
    sampler = TargetSampler(
        params,
        History.of(ids, len(PROMPT)),
        NoiseRows(7, WIDTH),
        len(ids),
        lambda node: HostDigest(rows(node)),
    )
    for node in (-1, 0, 1, 2):
        path = tuple(tree.tokens[above] for above in tree.path(node)) if node >= 0 else ()
        scores = process_logits(rows(node), params, History.of((*ids, *path), len(PROMPT)))
        weights = np.exp(scores - scores.max())
        if params.greedy:
            weights = np.eye(WIDTH)[sampler(node, path)]
            assert int(scores.argmax()) == sampler(node, path)
        assert sampler.probabilities(node, path) == pytest.approx(weights / weights.sum(), abs=1e-12)


def test_only_visited_nodes_are_processed() -> None:
    asked: list[int] = []

    def digests(node: int) -> HostDigest:
        asked.append(node)
        return HostDigest(target_logits(PROMPT))

    pool = DraftPool(PROMPT, epoch=1, vocabulary_size=WIDTH, limit=50)
    pool.offer(chain(PROMPT, [0]))
    pool.offer(chain(PROMPT, [1]))
    tokens = TargetSampler(
        SamplingParams(temperature=0), History.of(PROMPT, 5), NoiseRows(1, WIDTH), len(PROMPT), digests
    )
    match = path_match(pool.best_tree(8), tokens)
    assert asked == [-1, *match.path]
