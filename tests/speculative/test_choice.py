"""The token chosen from a digest is that of the rule on the whole row, whatever the digest holds."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from speculative.choice import ChoiceCounts, Fallback, choose_token, digest_logprob, row_ask
from speculative.digest import HostDigest, RowAsk
from speculative.history import History
from speculative.logprobs import Logprobs
from speculative.noise import PositionNoise
from speculative.params import SamplingParams
from speculative.sampling import process_logits, token_logprob
from tests.speculative.choosing import Capacities, Case, NarrowDigest, cases, check

NOTHING = History.of([], 0)
GENEROUS = Capacities(named=10_000, likeliest=64, candidates=64, sums=True, error=1e-6)
CAPACITIES = st.builds(
    Capacities,
    named=st.sampled_from([0, 1, 1000]),
    likeliest=st.sampled_from([1, 2, 8, 64]),
    candidates=st.sampled_from([0, 1, 2, 8, 64]),
    sums=st.booleans(),
    error=st.sampled_from([0.0, 1e-6, 0.01, 1.0]),
)


def host(row: np.ndarray, ask: RowAsk) -> HostDigest:
    return HostDigest(row)


@settings(max_examples=400)
@given(case=cases())
def test_a_row_in_memory_gives_the_rules_token(case: Case) -> None:
    check(host, case)


@settings(max_examples=400)
@given(case=cases(), capacities=CAPACITIES)
def test_a_device_of_any_capacity_gives_the_rules_token(case: Case, capacities: Capacities) -> None:
    made: list[NarrowDigest] = []

    def narrow(row: np.ndarray, ask: RowAsk) -> NarrowDigest:
        made.append(NarrowDigest(row, ask, capacities))
        return made[0]

    counts = check(narrow, case)
    assert made[0].fetched == counts.fallbacks.total(), "the row is fetched for the rule alone"


ROWS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "flat": lambda rng: rng.normal(size=4096) * 0.3,
    "peaked": lambda rng: np.where(
        rng.random(4096) < 0.01, rng.exponential(2, 4096) + 8, rng.normal(size=4096)
    ),
    "between": lambda rng: rng.normal(size=4096) * 2.5,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 20},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "cuts": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "greedy, penalties": {"temperature": 0, "frequency_penalty": 0.5},
    "bias": {"temperature": 0.8, "logit_bias": ((3, 5.0), (9, -100.0))},
    "held back": {"temperature": 0.8, "min_tokens": 9, "stop_ids": (1, 2, 3)},
}


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("request_", REQUESTS)
def test_usual_requests_need_no_whole_row(shape: str, request_: str) -> None:
    counts = ChoiceCounts()
    history = History.of([*range(0, 200, 3), 5, 5], 20)
    for position in range(40):
        row = ROWS[shape](np.random.default_rng(position)).astype(np.float32)
        case = Case(row, SamplingParams(**REQUESTS[request_]), history, 11, position, None)
        counts.add(check(host, case))
    assert counts.tokens == 40
    assert not counts.fallbacks


def test_a_device_needs_few_whole_rows_for_peaked_rows() -> None:
    counts = ChoiceCounts()
    for name, fields in REQUESTS.items():
        for position in range(20):
            row = ROWS["peaked"](np.random.default_rng([position, len(name)])).astype(np.float32)
            case = Case(row, SamplingParams(**fields), History.of([1, 2, 3], 1), 12, position, None)
            counts.add(check(lambda row, ask: NarrowDigest(row, ask, GENEROUS), case))
    assert counts.fallbacks.total() < 0.05 * counts.tokens


def reasons(case: Case, **capacities: Any) -> list[Fallback]:
    narrow = Capacities(**{**vars(GENEROUS), **capacities})
    return list(check(lambda row, ask: NarrowDigest(row, ask, narrow), case).fallbacks)


def test_every_fallback_says_why() -> None:
    flat = np.zeros(100, dtype=np.float32)

    def case(row: np.ndarray = flat, **fields: Any) -> Case:
        return Case(row, SamplingParams(**fields), History.of([1, 2], 1), 3, 4, None)

    assert reasons(case()) == []
    assert reasons(case(np.array([1, math.nan], dtype=np.float32))) == [Fallback.NOT_FINITE]
    assert reasons(case(logit_bias=((4, 1.0),)), named=0) == [Fallback.NAMED]
    assert reasons(case(), candidates=0) == [Fallback.CONTENDERS]
    assert reasons(case(top_p=0.5), error=1.0) == [Fallback.CUT]
    assert reasons(case(top_p=0.5), sums=False) == [Fallback.CUT]


def test_where_the_edge_of_a_cut_lies_within_rounding_the_rule_decides() -> None:
    """Eight equals and p of one half: four stay, and the sum before the fifth is p to the bit."""
    case = Case(np.zeros(8, dtype=np.float32), SamplingParams(top_p=0.5), NOTHING, 1, 0, None)
    found = [check(host, Case(case.row, case.params, NOTHING, 1, t, None)) for t in range(60)]
    assert sum(counts.fallbacks[Fallback.CUT] for counts in found) > 0


def test_counts_add_up() -> None:
    one, other = ChoiceCounts(), ChoiceCounts()
    one.tokens, other.tokens = 2, 3
    one.fallbacks[Fallback.CUT] = 1
    other.fallbacks.update([Fallback.CUT, Fallback.NAMED])
    one.add(other)
    assert (one.tokens, one.fallbacks) == (5, {Fallback.CUT: 2, Fallback.NAMED: 1})


def test_what_a_device_is_asked_for() -> None:
    history = History.of([4, 7, 7, 9], 1)
    greedy = row_ask(SamplingParams(temperature=0), history, 5, 4)
    assert greedy == RowAsk(5, 4, 0.0)
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "min_tokens": 9, "stop_ids": (2,)}
    assert row_ask(SamplingParams(**fields), history, 5, 4) == RowAsk(5, 4, 0.5, (2,), nucleus=True)
    penalised = SamplingParams(temperature=0.5, top_k=3, presence_penalty=1.0, logit_bias=((1, 2.0),))
    assert row_ask(penalised, history, 5, 4) == RowAsk(5, 4, 0.5, (1, 7, 9), top=6)
    repeated = SamplingParams(temperature=0.0, repetition_penalty=1.1)
    asked = row_ask(repeated, history, 5, 4, Logprobs(top_logprobs=4))
    assert asked == RowAsk(5, 4, 0.0, (4, 7, 9), top=4)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5, "min_p": 0.05}])
def test_tokens_from_digests_have_the_law_of_the_processed_logits(
    fields: dict[str, Any], assert_law: Callable[[Sequence[int], NDArray[np.float64]], None]
) -> None:
    params, positions = SamplingParams(**fields), 10_000
    values = (np.random.default_rng(8).normal(size=12) * 1.5).astype(np.float32)
    digest = HostDigest(values)
    chosen = [
        choose_token(digest, params, NOTHING, PositionNoise(77, position, 12))
        for position in range(positions)
    ]
    assert_law(chosen, process_logits(values, params, NOTHING))


@given(case=cases(), top=st.integers(0, 20), data=st.data())
def test_logprobs_of_a_digest_are_those_of_the_row(case: Case, top: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(case.row) - 1))
    with np.errstate(over="ignore", invalid="ignore"):
        found = digest_logprob(HostDigest(case.row), token, top)
    if found is None:
        assert not np.isfinite(case.row.max())
        return
    wanted = token_logprob(case.row, token, top)
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-6)
    assert list(found.top_logprobs) == pytest.approx(list(wanted.top_logprobs), abs=1e-6, rel=1e-6)
    # Beside a logit of 10**38 all others have equal log-probabilities, though not equal logits.
    if case.row.max() < 1e6:
        assert list(found.top_ids) == list(wanted.top_ids)


def test_a_digest_without_the_sum_does_not_tell_logprobs() -> None:
    row = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    silent = Capacities(**{**vars(GENEROUS), "sums": False})
    assert digest_logprob(NarrowDigest(row, RowAsk(named=(3,)), silent), 3, 2) is None
    assert digest_logprob(NarrowDigest(row, RowAsk(named=(3,)), GENEROUS), 3, 2) is not None
