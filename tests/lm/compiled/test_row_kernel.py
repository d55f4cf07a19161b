"""The compiled kernel draws the published noise bits, and chooses the rule's tokens or leaves them to it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.compiling import library
from outrider.compiling.library import LibrarySource
from outrider.compiling.store import CompileFailed
from outrider.compiling.toolchain import find_compiler
from outrider.lm.compiled.row_kernel import RowKernel, check_kernel, use_row_kernel
from speculative.acceptance.path_match import path_match
from speculative.batch_choice import RowChoice, sample_rows
from speculative.choice import ChoiceCounts, choose_token
from speculative.digest import HostDigest
from speculative.grammar import ForcedToken
from speculative.history import History
from speculative.noise import NoiseRows, PositionNoise, leads
from speculative.params import SamplingParams
from speculative.sampling_kernel import current_kernel, use_kernel
from speculative.target_sampler import TargetSampler, sample_together
from speculative.tree import TokenTree
from tests.speculative.choosing import Case, cases
from tests.speculative.test_batch_choice import walks
from tests.speculative.test_choice import REQUESTS, ROWS

SAMPLED = {name: fields for name, fields in REQUESTS.items() if "greedy" not in name}
CHANGED = {name: fields for name, fields in REQUESTS.items() if name != "greedy"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder with the kernel; the process uses NumPy again when the module's tests are done."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    folder = tmp_path_factory.mktemp("cache")
    before = use_kernel(None)
    use_row_kernel(folder, lambda: False)
    yield folder
    use_kernel(before)


@pytest.fixture(scope="module")
def kernel(cache: Path) -> RowKernel:
    found = current_kernel()
    assert isinstance(found, RowKernel)
    return found


@contextmanager
def numpy_alone() -> Iterator[None]:
    """Context in which the process uses no kernel at first."""
    used = use_kernel(None)
    try:
        yield
    finally:
        use_kernel(used)


def choice_of(case: Case, row: np.ndarray | None = None) -> RowChoice:
    digest = HostDigest(case.row if row is None else row)
    return RowChoice(
        digest, case.params, case.history, None if case.params.greedy else case.noise, case.allowed
    )


def token_of(kernel: RowKernel, case: Case) -> int | None:
    (token,) = kernel.tokens([choice_of(case)])
    return token


@pytest.mark.parametrize("size", [1, 15, 16, 17, 383, 384, 400, 4096, 40_001])
@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 2**40), (2**64 - 1, 1)])
def test_bits_are_those_of_numpy(kernel: RowKernel, seed: int, position: int, size: int) -> None:
    with numpy_alone():
        expected = leads(seed, position, size)
    assert np.array_equal(kernel.leads(seed, position, size), expected)
    for way in kernel.ways:
        assert np.array_equal(kernel.leads_by(way, seed, position, size), expected), way


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="no AVX-512 here")
def test_with_avx_512_bits_are_drawn_in_vectors_too(kernel: RowKernel) -> None:
    assert kernel.ways == ("singly", "in vectors")


def test_the_log_says_in_which_way_bits_are_drawn(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with numpy_alone(), caplog.at_level("INFO"):
        use_row_kernel(cache, lambda: False)
    (record,) = (one for one in caplog.records if "chosen by the compiled kernel" in one.message)
    fields = record.__dict__["fields"]
    assert fields["chosen"] in fields["ways of noise bits"]


@settings(max_examples=250)
@given(case=cases())
def test_a_row_of_any_kind_gives_the_rules_token_or_none(kernel: RowKernel, case: Case) -> None:
    before = case.row.tobytes()
    token = token_of(kernel, case)
    assert token is None or token == case.by_the_rule()
    assert case.row.tobytes() == before, "the row stays as it is"


@pytest.mark.parametrize("request_", CHANGED)
@pytest.mark.parametrize("shape", ROWS)
def test_usual_requests_leave_nothing_to_the_rule(kernel: RowKernel, shape: str, request_: str) -> None:
    params, history = SamplingParams(**CHANGED[request_]), History.of([*range(0, 200, 3), 5, 5], 20)
    for position in range(20):
        rng = np.random.default_rng(position)
        row = ROWS[shape](rng).astype(np.float32)
        allowed = rng.random(len(row)) < 0.2 if position % 2 else None
        case = Case(row, params, history.with_path([3, 700, 700][: position % 4]), 11, position, allowed)
        assert token_of(kernel, case) == case.by_the_rule()


@given(
    st.sampled_from([40, 300, 1000, 4096, 5000, 30_000]),
    st.sampled_from([1, 2, 17, 50, 300, 1024]),
    st.integers(0, 2**32),
    st.booleans(),
)
@settings(max_examples=60)
def test_top_k_of_any_size_is_decided_on_rows_of_any_width(
    kernel: RowKernel, size: int, top_k: int, seed: int, is_coarse: bool
) -> None:
    row = (np.random.default_rng(seed).normal(size=size) * 3).astype(np.float32)
    if is_coarse:
        row = np.round(row)  # many ids share the lowest logit that stays
    params = SamplingParams(temperature=0.8, top_k=min(top_k, size))
    case = Case(row, params, History.of([1, 2], 1), seed, 5, None)
    assert token_of(kernel, case) == case.by_the_rule()


def test_a_row_is_processed_afresh_whatever_the_row_before_it_named(kernel: RowKernel) -> None:
    named = SamplingParams(repetition_penalty=50.0, logit_bias=((3, -100.0),))
    made = []
    for at in range(6):
        row = np.random.default_rng(at).normal(size=500 + 90 * (at % 3)).astype(np.float32)
        row[3] = 20.0
        params = SamplingParams() if at % 2 else named
        made.append(Case(row, params, History.of([at, 3], 1), at, 4, None))
    assert kernel.tokens([choice_of(case) for case in made]) == [case.by_the_rule() for case in made]


@given(st.integers(0, 2**32), st.sampled_from([0.3, 1.0, 4.0, 12.0]), st.sampled_from(sorted(SAMPLED)))
@settings(max_examples=15)
def test_wide_rows_give_the_rules_token(kernel: RowKernel, seed: int, spread: float, request_: str) -> None:
    row = (np.random.default_rng(seed).normal(size=128_256) * spread).astype(np.float32)
    case = Case(row, SamplingParams(**SAMPLED[request_]), History.of([3, 9, 9], 1), seed, 5, None)
    assert token_of(kernel, case) in (None, case.by_the_rule())


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_finite_highest_logit_is_left_and_its_neighbours_are_chosen(
    kernel: RowKernel, broken: float
) -> None:
    rows = [np.random.default_rng(at).normal(size=700).astype(np.float32) for at in range(3)]
    rows[1][:] = broken
    made = [Case(row, SamplingParams(), History.of([], 0), 3, 4, None) for row in rows]
    tokens = sample_rows([RowChoice(HostDigest(c.row), c.params, c.history, c.noise) for c in made])
    assert tokens == [made[0].by_the_rule(), None, made[2].by_the_rule()]


def test_memory_behind_a_row_or_its_noise_is_never_read(kernel: RowKernel) -> None:
    row, history = np.zeros(700, dtype=np.float32), History.of([], 0)
    noise = PositionNoise(3, 4, 600)
    for logits, drawn in ((row, noise), (row[:600].astype(np.float16), noise)):
        with pytest.raises(ValueError, match=r"noise for 600 ids|takes float32"):
            kernel.tokens([RowChoice(HostDigest(logits), SamplingParams(), history, drawn)])


def test_a_mask_is_never_read_behind_its_end(kernel: RowKernel) -> None:
    row, history = np.zeros(700, dtype=np.float32), History.of([], 0)
    for allowed in (np.ones(699, dtype=np.bool_), np.ones(700, dtype=np.int64)):
        with pytest.raises(ValueError, match="it takes bool"):
            kernel.tokens(
                [RowChoice(HostDigest(row), SamplingParams(), history, PositionNoise(3, 4, 700), allowed)]
            )


def test_ids_that_the_row_does_not_have_are_left_to_the_rule(kernel: RowKernel) -> None:
    row, params = np.zeros(100, dtype=np.float32), SamplingParams(repetition_penalty=2.0)
    choice = RowChoice(HostDigest(row), params, History.of([100], 1), PositionNoise(3, 4, 100))
    assert kernel.tokens([choice]) == [None]


def test_equal_scores_are_chosen_as_by_the_rule_or_left(kernel: RowKernel) -> None:
    row = np.zeros(4096, dtype=np.float32)
    for temperature in (100.0, 0.01):
        for seed in range(40):
            case = Case(row, SamplingParams(temperature=temperature), History.of([], 0), seed, seed, None)
            assert token_of(kernel, case) in (None, case.by_the_rule())


@pytest.mark.parametrize("highest", [2.0, 0.0])
@pytest.mark.parametrize("last", [511, 512, 1299])
def test_the_first_of_equal_highest_logits_wins_however_far_apart_they_lie(
    kernel: RowKernel, last: int, highest: float
) -> None:
    row = np.full(1300, -50, np.float32)
    row[300], row[last], row[7] = highest, highest, -0.0 if highest == 0 else -1
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    choice = RowChoice(HostDigest(row), params, History.of([5], 1), None, None)

    (token,) = kernel.tokens([choice])

    assert token == choose_token(*choice) == (7 if highest == 0 else 300)


def test_trees_are_walked_with_the_kernel_as_without(cache: Path) -> None:
    drafts: dict[int, tuple[int, ...]] = {session: () for session in range(12)}
    for _ in range(3):
        with numpy_alone():
            alone = {session: path_match(tree, one) for session, (one, tree) in walks(drafts).items()}
        together = walks(drafts)
        sample_together(list(together.values()))
        assert {session: path_match(tree, one) for session, (one, tree) in together.items()} == alone
        drafts = {session: match.tokens for session, match in alone.items()}


class OddIds:
    """A grammar that allows odd ids alone, and only every third of them behind an id above 300."""

    def allowed(self, path: Sequence[int]) -> np.ndarray:
        mask = np.arange(600) % 2 == 1
        if path and path[-1] > 300:
            mask[np.arange(600) % 3 > 0] = False
        return mask

    def forced(self, most: int) -> Sequence[ForcedToken]:
        return ()

    def off_path_matcher(self) -> "OddIds":
        return self

    def commit(self, tokens: Sequence[int]) -> None:
        pass


def under_grammar(
    drafts: dict[int, tuple[int, ...]], counts: ChoiceCounts
) -> dict[int, tuple[TargetSampler, TokenTree]]:
    """A sampler with a grammar and a drafted chain for each session; some of the sessions are greedy."""
    found = {}
    for session, drafted in drafts.items():
        rng = np.random.default_rng(session)
        rows = [HostDigest((rng.normal(size=600) * 2).astype(np.float32)) for _ in range(5)]
        params = SamplingParams(**list(CHANGED.values())[session % len(CHANGED)])
        noise, count = NoiseRows(session, 600), len(drafted)
        history = History.of([1, 2, 3, 9], 2)
        sampler = TargetSampler(
            params, history, noise, 4, lambda node, rows=rows: rows[node + 1], OddIds(), counts
        )
        tree = TokenTree(drafted, tuple(range(-1, count - 1)), (1.0,) * count, (1,) * count)
        found[session] = sampler, tree
    return found


def test_trees_under_a_grammar_are_walked_with_the_kernel_as_without(cache: Path) -> None:
    drafts: dict[int, tuple[int, ...]] = {session: () for session in range(18)}
    counts = ChoiceCounts()
    for _ in range(3):
        with numpy_alone():
            walked = under_grammar(drafts, ChoiceCounts())
            alone = {session: path_match(tree, one) for session, (one, tree) in walked.items()}
        together = under_grammar(drafts, counts)
        sample_together(list(together.values()))
        assert {session: path_match(tree, one) for session, (one, tree) in together.items()} == alone
        drafts = {session: match.tokens for session, match in alone.items()}
    assert not counts.fallbacks, "the kernel left no row to the rule"


def test_a_second_process_finds_the_kernel_in_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(source: LibrarySource, compiler: str, folder: Path) -> list[str]:
        raise AssertionError("it is in the cache")

    monkeypatch.setattr(library, "compile_command", compile_nothing)
    with numpy_alone():
        use_row_kernel(cache, lambda: False, compiles=False)
        assert current_kernel() is not None


def test_without_compiling_an_empty_cache_leaves_the_work_to_numpy(tmp_path: Path) -> None:
    with numpy_alone():
        use_row_kernel(tmp_path, lambda: False, compiles=False)
        assert current_kernel() is None


def test_without_a_compiler_numpy_goes_on_choosing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    with numpy_alone(), caplog.at_level("INFO"):
        use_row_kernel(tmp_path, lambda: False)
        assert current_kernel() is None
        assert "chosen in NumPy: there is no C++ compiler" in caplog.text


@pytest.mark.parametrize("place", [0, -1])
def test_a_kernel_that_draws_other_bits_in_one_of_its_ways_is_refused(
    kernel: RowKernel, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    real, wrong = kernel.leads_by, kernel.ways[place]

    def draw(way: str, seed: int, position: int, size: int) -> np.ndarray:
        return np.zeros(size, np.uint16) if way == wrong else real(way, seed, position, size)

    monkeypatch.setattr(kernel, "leads_by", draw)
    with numpy_alone(), pytest.raises(CompileFailed, match="other noise bits"):
        check_kernel(kernel)


def test_a_kernel_that_chooses_another_token_is_refused(
    kernel: RowKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "tokens", lambda rows: [0] * len(rows))
    with numpy_alone(), pytest.raises(CompileFailed, match="chooses token 0 where the rule does not"):
        check_kernel(kernel)
