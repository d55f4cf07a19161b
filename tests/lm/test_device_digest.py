"""Digests made in torch, and by Triton's kernels, against the rows that they are digests of."""

import os
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.lm.device import digest
from outrider.lm.device.digest import REDUCTIONS, RowDigester, TorchReductions, digester_for
from outrider.lm.device.layout import MOST_BYTES, Asks, DigestCapacity, DigestLevel
from outrider.lm.device.noise import leads, leads_of, signed
from outrider.lm.device.outcome import DeviceDigest, DeviceOutcome
from outrider.lm.outcome import TransferCounts
from speculative import noise
from speculative.choice import choose_token, digest_logprob, row_ask
from speculative.digest import HostDigest, RowAsk
from speculative.history import History
from speculative.implementations import load_implementation
from speculative.logprobs import Logprobs
from speculative.noise import PositionNoise
from speculative.params import SamplingParams
from speculative.sampling import sample_token, token_logprob
from tests.speculative.choosing import Case, cases, check

CPU = torch.device("cpu")
TINY = DigestCapacity(listed=3, named=2, candidates=4, ranked=2)


INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
BY_ALL = pytest.mark.parametrize(
    "by",
    [
        "torch",
        pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")),
    ],
)


def digested(
    rows: torch.Tensor, asks: list[RowAsk], capacity: DigestCapacity, top: int = 0, by: str = "torch"
) -> DeviceOutcome:
    reductions = load_implementation(REDUCTIONS, by)()
    digester = RowDigester(rows.shape[1], CPU, capacity, reductions)
    asked = Asks.of(asks, digester.capacity, top)
    words = np.zeros((len(asks), 0), np.int64) if asked.words is None else asked.words
    found = digester.compute(rows, torch.from_numpy(words), asked.level)
    assert found.nbytes == len(rows) * 4 * digester.capacity.words(asked.level)
    return DeviceOutcome(rows, None, found.numpy(), asked, digester.capacity, TransferCounts())


@pytest.mark.parametrize("vocabulary_size", [1, 15, 16, 17, 1000, 5001])
def test_the_device_draws_the_leads_that_the_host_draws(vocabulary_size: int) -> None:
    seeds, positions = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF], [0, 7, 2**31, 5, 2**40]
    found = leads(torch.tensor([signed(seed) for seed in seeds]), torch.tensor(positions), vocabulary_size)
    for row, seed, position in zip(found.numpy(), seeds, positions, strict=True):
        assert np.array_equal(row, noise.leads(seed, position, vocabulary_size))


def test_the_leads_of_some_ids_are_those_of_all_ids() -> None:
    seeds, positions = torch.tensor([7, signed(2**64 - 3)]), torch.tensor([3, 2**40])
    every = leads(seeds, positions, 5000)
    ids = torch.tensor([[0, 4999, 17, 1234], [15, 16, 3, 4095]])
    assert torch.equal(leads_of(seeds, positions, ids), every.gather(1, ids))


def test_the_host_draws_no_noise_for_a_token_that_a_digest_decides() -> None:
    rows = 3 * torch.randn(20, 5001, generator=torch.Generator().manual_seed(2))
    params, history = SamplingParams(temperature=0.8), History.of([], 0)
    asks = [row_ask(params, history, seed, 3, None) for seed in range(20)]
    found = digested(rows, asks, DigestCapacity())
    for index in range(20):
        drawn = PositionNoise(index, 3, 5001)
        token = choose_token(found.digest(index), params, history, drawn)
        assert drawn.drawn is None
        assert token == sample_token(rows[index].numpy(), params, history, drawn.full())


@st.composite
def rows_of_logits(draw: st.DrawFn) -> np.ndarray:
    """A row: flat or peaked, on a coarse grid with ties or not, with dropped ids or not."""
    size = draw(st.one_of(st.integers(1, 40), st.integers(41, 700)))
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = (dice.standard_normal(size) * draw(st.sampled_from([0.0, 0.3, 2.0, 20.0]))).astype(np.float32)
    if draw(st.booleans()):
        row = torch.from_numpy(row).bfloat16().float().numpy()
    if draw(st.booleans()):
        row = np.round(row * 2) / 2
    if draw(st.booleans()):
        row[dice.random(size) < 0.5] = -np.inf
    if draw(st.integers(0, 9)) == 0:
        row[dice.integers(size)] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return row.astype(np.float32)


CAPACITIES = [TINY, DigestCapacity(1, 0, 1, 1), DigestCapacity(64, 16, 16, 4), DigestCapacity()]


@BY_ALL
@settings(max_examples=400, deadline=None)
@given(case=cases(), capacity=st.sampled_from(CAPACITIES))
def test_a_token_chosen_from_a_devices_digest_is_that_of_the_rule(
    by: str, case: Case, capacity: DigestCapacity
) -> None:
    check(lambda row, ask: digested(torch.from_numpy(row)[None], [ask], capacity, by=by).digest(0), case)


@BY_ALL
@settings(max_examples=200, deadline=None)
@given(
    row=rows_of_logits(),
    capacity=st.sampled_from(CAPACITIES),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_what_a_digest_says_is_true_of_its_row(
    by: str, row: np.ndarray, capacity: DigestCapacity, temperature: float, seed: int
) -> None:
    ask = RowAsk(seed, 3, temperature, (len(row) - 1,), nucleus=True, top=5)
    digest = digested(torch.from_numpy(row)[None], [ask], capacity, by=by).digest(0)
    truth = HostDigest(row)
    top, highest = digest.highest()
    if not np.isfinite(row.max()):
        assert (np.isnan(highest) and np.isnan(row).any()) or highest == row.max()
        return
    assert (top, highest) == truth.highest()
    ids = np.arange(len(row))
    for token in {0, top, len(row) - 1, len(row) // 2}:
        check_one(digest, truth, token, row, temperature)
    listed = digest.likeliest(1)
    if listed is not None:
        assert np.array_equal(row[listed.ids], listed.logits)
        assert (row[np.setdiff1d(ids, listed.ids)] < listed.bound).all()
    if temperature:
        drawn = PositionNoise(seed, 3, len(row))
        found = digest.candidates(temperature, drawn)
        assert found is not None
        assert np.array_equal(row[found.ids], found.logits)
        scores = np.divide(row, temperature, dtype=np.float64) + drawn.full()
        left = np.setdiff1d(ids, found.ids)
        assert (np.isneginf(row[left]) | (scores[left] < found.bound)).all()
        assert digest.candidates(temperature, PositionNoise(seed, 4, len(row))) is None
        assert digest.candidates(temperature + 1, drawn) is None


def check_one(
    digest: DeviceDigest, truth: HostDigest, token: int, row: np.ndarray, temperature: float
) -> None:
    known = digest.at(np.array([token]))
    assert known is None or known[0] == row[token]
    logit = float(row[token])
    rank = digest.ranked_before(token, logit)
    assert rank is None or rank == truth.ranked_before(token, logit)
    if temperature:
        for found, own in (
            (digest.mass(temperature), truth.mass(temperature)),
            (
                digest.mass_before(temperature, token, logit),
                truth.mass_before(temperature, token, logit),
            ),
        ):
            assert found is None or abs(found.total - own.total) <= found.error + own.error


@settings(max_examples=100, deadline=None)
@given(row=rows_of_logits(), temperature=st.sampled_from([0.0, 0.8]), top=st.integers(0, 5))
def test_log_probabilities_are_told_without_the_row(row: np.ndarray, temperature: float, top: int) -> None:
    params, history, named = SamplingParams(temperature=temperature), History.of([], 0), len(row) // 2
    ask = replace(row_ask(params, history, 5, 3, Logprobs(top)), named=(named,))
    digest = digested(torch.from_numpy(row)[None], [ask], DigestCapacity()).digest(0)
    found = digest_logprob(digest, named, top)
    if found is None:
        # Where many ids tie at the end of the list, the digest does not tell which of them are listed.
        assert not np.isfinite(row.max()) or (top and len(row) > DigestCapacity().listed)
        return
    wanted = token_logprob(row, named, top)
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-9)
    assert (found.top_ids, list(found.top_logprobs)) == (wanted.top_ids, pytest.approx(wanted.top_logprobs))


@BY_ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_wider_than_one_program_are_digested_as_the_rule_reads_them(by: str, dtype: torch.dtype) -> None:
    rows = (4 * torch.randn(3, 5001, generator=torch.Generator().manual_seed(1))).to(dtype)
    rows[1] = rows[1].round()
    params = SamplingParams(temperature=0.8, top_p=0.9)
    history = History.of([], 0)
    asks = [row_ask(params, history, seed, 3, None) for seed in (1, 2**63, 2**64 - 1)]
    found = digested(rows, asks, DigestCapacity(), by=by)
    for index, ask in enumerate(asks):
        drawn = PositionNoise(ask.seed, 3, 5001)
        full = PositionNoise(ask.seed, 3, 5001).full()
        wanted = sample_token(rows[index].float().numpy(), params, history, full)
        assert choose_token(found.digest(index), params, history, drawn) == wanted
        token = found.digest(index).highest()[0]
        assert token == int(np.argmax(rows[index].float().numpy()))


def test_a_device_whose_kernels_cannot_be_built_digests_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> RowDigester:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(digest, "find_spec", lambda name: object())
    monkeypatch.setattr(digest, "_with_kernels", broken)
    found = digester_for(100, torch.device("meta"))
    assert found is not None
    assert isinstance(found._over, TorchReductions)
    assert "without kernels, which is slow: Failed to find C compiler" in caplog.text


def test_a_digest_of_full_size_fits_a_page_whatever_the_vocabulary() -> None:
    for size in (1, 100, 4096, 128_256, 262_144):
        assert 4 * DigestCapacity().within(size).words(DigestLevel.SAMPLED) <= MOST_BYTES
    with pytest.raises(ValueError, match="exceeds 4096"):
        DigestCapacity(listed=400, candidates=200).within(1000)


def test_a_row_is_fetched_once_and_counted_and_not_after_it_is_overwritten() -> None:
    rows = torch.randn(3, 900)
    counts = TransferCounts()
    digester = RowDigester(900, CPU, TINY)
    asks = Asks.of([RowAsk()] * 3, TINY, 0)
    words = digester.compute(rows, torch.zeros(3, 0, dtype=torch.int64), asks.level).numpy()
    outcome = DeviceOutcome(rows, None, words, asks, TINY, counts)
    assert (counts.planned_bytes, counts.fetched_rows) == (3 * 16, 0)
    assert [outcome.digest(at).highest()[0] for at in range(3)] == rows.argmax(1).tolist()
    assert counts.fetched_rows == 0
    for _ in range(2):
        assert np.array_equal(outcome.digest(1).full(), rows[1].numpy())
    assert (counts.fetched_rows, counts.fetched_bytes) == (1, 3600)
    outcome.expire()
    assert np.array_equal(outcome.row(1), rows[1].numpy())
    with pytest.raises(RuntimeError, match="after the next pass had begun"):
        outcome.row(0)


def test_without_memory_for_digests_tokens_come_from_whole_rows() -> None:
    rows = torch.randn(2, 300)
    counts = TransferCounts()
    asks = Asks.of([RowAsk(5, 9, 0.8)] * 2, TINY, 0)
    outcome = DeviceOutcome(rows, None, None, asks, TINY, counts)
    drawn = PositionNoise(5, 9, 300)
    params, history = SamplingParams(temperature=0.8), History.of([1], 1)
    expected = sample_token(rows[1].numpy(), params, history, drawn.full())
    assert choose_token(outcome.digest(1), params, history, drawn) == expected
    assert choose_token(outcome.digest(0), SamplingParams(temperature=0), history, None) == int(
        rows[0].argmax()
    )
    assert (counts.planned_bytes, counts.fetched_rows) == (0, 2)


@pytest.mark.parametrize("capacity", [TINY, DigestCapacity(64, 4, 4, 1)])
def test_the_likeliest_come_from_the_digest_or_else_from_the_row(capacity: DigestCapacity) -> None:
    rows = torch.randn(4, 200).bfloat16()
    outcome = digested(rows, [RowAsk()] * 4, capacity, top=8)
    ids, logits = outcome.top(8)
    order = np.argsort(-rows.float().numpy(), axis=1, kind="stable")[:, :8]
    assert np.array_equal(ids, order)
    assert np.array_equal(logits, np.take_along_axis(rows.float().numpy(), order, axis=1))
    assert outcome._counts.fetched_rows == (4 if capacity is TINY else 0)
