"""Noise is drawn while the target computes, most urgent first, and changes no token."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from harness import Answer, serving
from ngram_lm import NgramLM

from speculative.noise import NoiseRows, PositionNoise
from speculative.params import SamplingParams
from speculative.tree import EMPTY_TREE, ROOT, TokenTree
from verifier_service.engine import noise_ahead, thread
from verifier_service.engine.noise_ahead import LEAST_FOR_KERNEL, NoiseAhead, positions_ahead

WIDE = thread.LEAST_VOCABULARY
SAMPLED = SamplingParams(temperature=0.9)


class SlowRows(NoiseRows):
    """Noise of one session that notes what is drawn, and lets a test hold the drawing."""

    __slots__ = ("gate", "log")

    def __init__(self, log: list[tuple[str, int]]) -> None:
        super().__init__(1, 64)
        self.log = log
        self.gate = threading.Event()
        self.gate.set()

    def draw_ahead(self, position: int) -> PositionNoise:
        self.log.append((threading.current_thread().name, position))
        self.gate.wait(60)
        return super().draw_ahead(position)


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < ends, "it did not happen within 100 s"
        time.sleep(0.005)


@pytest.fixture
def ahead() -> Iterator[NoiseAhead]:
    drawing = NoiseAhead(WIDE)
    drawing.start()
    yield drawing
    drawing.stop(60)


def test_without_drafts_the_next_two_positions_are_drawn() -> None:
    assert positions_ahead(10, EMPTY_TREE) == [10, 11]


def test_along_a_tree_positions_are_drawn_as_deep_as_its_likely_nodes() -> None:
    chain = TokenTree((5, 6, 7, 8), (ROOT, 0, 1, 2), (0.9, 0.8, 0.5, 0.1), (1, 1, 1, 1))
    bush = TokenTree((5, 6, 7), (ROOT, ROOT, 1), (0.6, 0.3, 0.2), (1, 1, 1))

    assert positions_ahead(10, chain) == [10, 11, 12, 13]
    assert positions_ahead(10, bush) == [10, 11]


def test_every_session_gets_its_first_position_before_any_gets_its_second(ahead: NoiseAhead) -> None:
    log: list[tuple[str, int]] = []
    rows = SlowRows(log)
    ahead.draw([(rows, [1, 2]), (rows, [11, 12, 13])])

    wait_for(lambda: len(log) == 5)
    assert [position for _, position in log] == [1, 11, 2, 12, 13]
    assert {name for name, _ in log} == {"noise"}


def test_a_new_request_replaces_what_is_left_of_the_one_before(ahead: NoiseAhead) -> None:
    log: list[tuple[str, int]] = []
    rows = SlowRows(log)
    rows.gate.clear()
    ahead.draw([(rows, [1, 2, 3])])
    wait_for(lambda: len(log) == 1)
    ahead.draw([(rows, [7])])
    rows.gate.set()

    wait_for(lambda: len(log) == 2)
    assert ahead.stop(60)
    assert [position for _, position in log] == [1, 7]


def test_little_noise_is_not_handed_over_where_a_kernel_draws_it_sooner(
    ahead: NoiseAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_ahead, "current_kernel", object)
    log: list[tuple[str, int]] = []
    rows = SlowRows(log)
    ahead.draw([(rows, [1])])
    ahead.draw([(rows, [2])] * (LEAST_FOR_KERNEL // WIDE))

    wait_for(lambda: len(log) == LEAST_FOR_KERNEL // WIDE)
    assert {position for _, position in log} == {2}


def test_noise_that_cannot_be_drawn_is_reported_and_the_rest_goes_on(
    ahead: NoiseAhead, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, int]] = []
    rows = SlowRows(log)

    class Broken(SlowRows):
        def draw_ahead(self, position: int) -> PositionNoise:
            raise MemoryError("no room")

    ahead.draw([(Broken([]), [1])])
    wait_for(lambda: "could not be drawn" in caplog.text)
    ahead.draw([(rows, [4])])

    wait_for(lambda: len(log) == 1)
    assert [position for _, position in log] == [4]


async def sampled_answer() -> Answer:
    target = NgramLM(vocabulary_size=WIDE)
    target.step_s = 0.005
    async with serving(target) as verifier:
        return await verifier.generate([1, 2, 3], new=12, params=SAMPLED, sources=[("lookup", "")])


async def test_the_engine_draws_ahead_and_every_token_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, int]] = []
    draw = NoiseRows.draw_ahead

    def noted(self: NoiseRows, position: int) -> PositionNoise:
        drawn.append((threading.current_thread().name, position))
        return draw(self, position)

    monkeypatch.setattr(NoiseRows, "draw_ahead", noted)
    answer = await sampled_answer()
    threads = {name for name, _ in drawn}
    monkeypatch.setattr(thread, "LEAST_VOCABULARY", 1 << 30)
    drawn.clear()
    plain = await sampled_answer()

    assert "noise" in threads
    assert "noise" not in {name for name, _ in drawn}
    assert len(answer.ids) == 12
    assert answer.ids == plain.ids


async def test_greedy_sessions_and_small_vocabularies_draw_nothing_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(self: NoiseRows, position: int) -> PositionNoise:
        raise AssertionError("nothing is to be drawn")

    monkeypatch.setattr(NoiseRows, "draw_ahead", refused)
    async with serving(NgramLM(vocabulary_size=WIDE)) as verifier:
        assert len((await verifier.generate([1, 2, 3], new=6)).ids) == 6
    assert "noise" not in {running.name for running in threading.enumerate()}, "the thread has ended"
    async with serving(NgramLM()) as verifier:
        await verifier.generate([1, 2, 3], new=6)
        assert "noise" not in {running.name for running in threading.enumerate()}
