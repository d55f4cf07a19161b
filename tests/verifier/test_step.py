"""Who computes how much in a step."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from verifier_service.engine.step import chunk_size, schedule_rows


def cost(step_ms: float, row_ms: float) -> Callable[[int], float]:
    """A step's expected milliseconds by its rows."""
    return lambda rows: step_ms + row_ms * rows


def test_decoding_sessions_are_always_in() -> None:
    assert schedule_rows([1] * 100, [16] * 100, chunk=8) == [1] * 100


def test_prefills_share_what_decoding_leaves_first_come_first_served() -> None:
    assert schedule_rows([300, 1, 300], [0, 99, 0], chunk=512) == [300, 1, 112]


def test_a_prefill_that_finds_no_room_sits_out() -> None:
    assert schedule_rows([600, 600], [0, 0], chunk=512) == [512, 0]
    assert schedule_rows([20, 600], [0, 0], chunk=16) == [16, 0]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    assert schedule_rows([600, 20], [0, 0], chunk=512) == [492, 20]
    assert schedule_rows([600, 300, 100], [0, 0, 0], chunk=512) == [128, 284, 100]
    assert schedule_rows([2, 1, 600], [0, 3, 0], chunk=64) == [2, 1, 58]


def test_prompts_of_about_the_same_length_are_read_one_after_another() -> None:
    assert schedule_rows([600, 590, 301], [0, 0, 0], chunk=512) == [512, 0, 0]


def test_the_first_prompt_keeps_a_quarter_of_the_rows_however_many_short_ones_come() -> None:
    assert schedule_rows([600, *[10] * 100], [0] * 101, chunk=64)[0] == 16
    assert schedule_rows([600, *[10] * 100], [0] * 101, chunk=1) == [1, *[0] * 100]


def test_tenants_take_turns_among_the_short_prompts() -> None:
    tenants = ["a", *["a"] * 30, "b"]
    sizes = schedule_rows([600, *[3] * 30, 20], [0] * 32, 64, tenants)
    assert sizes[-1] == 20
    assert sum(sizes) == 64


def test_decoding_never_starves_a_prefill() -> None:
    assert schedule_rows([600, *[1] * 64], [0, *[16] * 64], chunk=512)[0] == 128


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 64)), min_size=1, max_size=40),
    st.integers(1, 1000),
)
def test_rows_are_bounded_and_somebody_always_moves(sessions: list[tuple[int, int]], chunk: int) -> None:
    uncomputed = [rows for rows, _ in sessions]
    sizes = schedule_rows(uncomputed, [nodes for _, nodes in sessions], chunk)
    assert all(0 <= size <= rows for size, rows in zip(sizes, uncomputed, strict=True))
    prompts = [(size, rows) for size, rows in zip(sizes, uncomputed, strict=True) if rows > 1]
    given = sum(size for size, _ in prompts)
    assert given <= chunk
    assert sum(sizes) > 0
    for size, rows in prompts[:1]:
        assert size >= min(rows, max(1, given // 4)), "the prompt that came first never starves"


def test_a_prompt_by_itself_takes_the_whole_chunk_where_its_step_is_short_or_smaller_ones_cost_more() -> None:
    assert chunk_size(512, decoding=0, expected_ms=lambda rows: 0.05 * rows, stall_ms=40.0) == 512
    assert chunk_size(512, decoding=0, expected_ms=lambda rows: 1000.0 + rows, stall_ms=40.0) == 448


def test_a_prompt_by_itself_leaves_a_newcomer_the_next_step_soon_where_that_costs_little() -> None:
    assert chunk_size(512, decoding=0, expected_ms=lambda rows: 10.0 + 0.6 * rows, stall_ms=40.0) == 128
    assert chunk_size(512, decoding=0, expected_ms=lambda rows: 0.6 * rows, stall_ms=40.0) == 64


@given(st.integers(1, 600), st.floats(0.0, 500.0), st.floats(0.01, 3.0), st.floats(1.0, 90.0))
def test_a_prompt_by_itself_is_read_nearly_as_fast_as_with_the_largest_chunks(
    most: int, step_ms: float, row_ms: float, stall: float
) -> None:
    expected_ms = cost(step_ms, row_ms)
    chunk = chunk_size(most, 0, expected_ms, stall)
    assert 1 <= chunk <= most
    nearly = expected_ms(chunk) / chunk <= 1.1 * expected_ms(most) / most + 1e-9
    assert nearly or expected_ms(chunk) <= stall, "only a short step may be a slow one"


def test_beside_other_streams_a_chunk_shrinks_until_they_do_not_stall() -> None:
    assert chunk_size(512, decoding=3, expected_ms=lambda rows: 0.3 * rows, stall_ms=40.0) == 128
    assert chunk_size(512, decoding=3, expected_ms=lambda rows: 20.0 * rows, stall_ms=40.0) == 16
    assert chunk_size(8, decoding=3, expected_ms=lambda rows: 20.0 * rows, stall_ms=40.0) == 8


@given(st.integers(1, 600), st.integers(1, 64), st.floats(0.01, 3.0), st.floats(1.0, 90.0))
def test_a_chunk_is_the_largest_that_does_not_stall(
    most: int, decoding: int, row_ms: float, stall: float
) -> None:
    expected_ms = cost(8.0, row_ms)
    chunk = chunk_size(most, decoding, expected_ms, stall)
    patience = max(stall, 2 * expected_ms(decoding))
    assert 1 <= chunk <= most
    assert chunk <= 16 or expected_ms(chunk) <= patience
    assert chunk == most or expected_ms(min(most, chunk + 16)) > patience


def test_where_decoding_alone_is_slow_a_prompt_still_gets_through() -> None:
    """A recovered session must not wait for all others to end, however slow the machine or the model is."""
    assert chunk_size(512, decoding=3, expected_ms=lambda rows: 100.0, stall_ms=40.0) == 512
    assert chunk_size(512, decoding=8, expected_ms=lambda rows: 300.0 + 3.0 * rows, stall_ms=60.0) == 112
