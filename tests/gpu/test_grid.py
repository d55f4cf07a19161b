"""Every step that settings and requests allow is a static step, of a size that was captured at load."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from outrider.lm import step_profile
from outrider.lm.attention.shapes import BUCKETS, all_shapes, graph_shape, smallest_holding
from outrider.lm.graphs import backend_choice
from outrider.lm.graphs.capture import Run
from outrider.lm.graphs.graph_runner import GraphRunner
from outrider.lm.plan import PassPlan, SequenceRows
from outrider.lm.runner import PackedLM
from outrider.lm.step_profile import profile_steps
from tests.lm.families import model_of
from verifier_service.engine.draft_budget import DraftBudget
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.server import engine_limits
from verifier_service.sessions.request import MAX_NODES
from verifier_service.settings import VerifierSettings

CAPTURE_S = 0.4
STEP_S = 0.005


@pytest.fixture(scope="module")
def steps() -> tuple[PackedLM, GraphRunner]:
    lm = PackedLM(model_of("llama", num_hidden_layers=1, max_position_embeddings=8192), kv_mb=64)
    return lm, backend_choice.use_graphs(lm, "gathered")


def plan_of(lm: PackedLM, sessions: int, nodes: int, prompt: int) -> PassPlan:
    """The plan of a step: sessions with a pending row and a tree below it, and a piece of one prompt."""
    # A branching tree: every third node begins at the pending row.
    parents = [-1, *(0 if node % 3 == 0 else node for node in range(nodes))]
    given = [SequenceRows(lm.table(), [1] * (nodes + 1), parents, range(nodes + 1)) for _ in range(sessions)]
    if prompt:
        given.append(SequenceRows(lm.table(), [1] * prompt, range(-1, prompt - 1), ()))
    return PassPlan(given, lm.pool, lm.logits_dtype)


SESSIONS = (0, 1, 8, 32, 64)
NODES = (0, 1, 16, 64, 255, MAX_NODES)
PROMPTS = (0, 1, 255, 256, 257, 512, 2048)


def test_no_step_of_the_grid_is_ragged_and_none_captures_after_load(
    steps: tuple[PackedLM, GraphRunner],
) -> None:
    lm, runner = steps
    captured_first, _ = all_shapes(runner.max_rows, lm.groups)
    tried = 0
    for sessions, nodes, prompt in product(SESSIONS, NODES, PROMPTS):
        rows = sessions * (nodes + 1) + prompt
        if not 0 < rows <= runner.max_rows:
            continue
        plan = plan_of(lm, sessions, nodes, prompt)
        assert runner.fits(plan), (sessions, nodes, prompt)
        shape = graph_shape(plan.rows, sessions * (nodes + 1), lm.groups)
        held_by = smallest_holding(shape, captured_first)
        assert held_by is not None
        assert held_by.rows >= rows
        for each in plan.rows:
            lm.release(each.table)
        tried += 1
    assert tried > 120


def test_steps_of_the_default_settings_have_room_for_all_their_rows() -> None:
    settings = VerifierSettings(model="model")

    decoding = settings.max_running * (settings.node_limit + 1)
    assert decoding + settings.prefill_chunk <= BUCKETS[-1]
    assert BUCKETS[-1] >= 15 * (MAX_NODES + 1), "so many sessions may ask for the largest trees"


def test_trees_that_exceed_the_largest_step_together_are_cut_to_fit_in_it(
    steps: tuple[PackedLM, GraphRunner],
) -> None:
    lm, runner = steps
    settings = VerifierSettings(model="model", prefill_chunk=10**6, budget="fixed")
    limits = engine_limits(settings, lm)
    assert (limits.prefill_chunk, limits.most_rows) == (runner.max_rows, runner.max_rows)

    budget = DraftBudget(StepCostModel(), limits.adaptive, limits.most_rows)
    nodes = budget.admit([[0.5] * MAX_NODES] * settings.max_running, [(1, 1)] * settings.max_running)
    assert settings.max_running + sum(nodes) == runner.max_rows


def test_ragged_passes_bound_no_step() -> None:
    lm = PackedLM(model_of("llama", num_hidden_layers=1), kv_mb=8)
    settings = VerifierSettings(model="model", prefill_chunk=10**6)
    limits = engine_limits(settings, lm)
    assert (limits.prefill_chunk, limits.most_rows) == (10**6, None)


class SlowCaptures:
    """A Capture that takes 0.4 s of a clock, and whose steps take 5 ms."""

    def __init__(self, slow: bool) -> None:
        self.now = 0.0
        self.captured = 0
        self._slow = slow

    def __call__(self, run: Run) -> Run:
        self.now += CAPTURE_S * self._slow
        self.captured += 1

        def replay() -> None:
            run()
            self.now += STEP_S

        return replay

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("limit_s", [0.0, 1e9])
def test_captures_that_take_long_change_neither_the_profile_nor_what_a_step_takes(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama", num_hidden_layers=1, max_position_embeddings=512)
    found = []
    for slow in (False, True):
        captures = SlowCaptures(slow)
        lm = PackedLM(model, kv_mb=8)
        runner = backend_choice.use_graphs(lm, "gathered", captures)
        runner._attend = lambda query, keys, values, *_: query.new_zeros(*query.shape[:2], values.shape[2])
        with torch.inference_mode():
            runner.capture_all(limit_s, captures.clock)
        captured = captures.captured
        with monkeypatch.context() as patch:
            patch.setattr(step_profile, "time", SimpleNamespace(perf_counter=captures.clock))
            costs = StepCostModel.of(profile_steps(lm))
        found.append({rows: costs.expected_ms(rows) for rows in (1, 9, 17, 64, 65, 200, 256, 400)})
        assert captures.captured == captured, "nothing is captured once a service serves"
        assert max(found[-1].values()) < 2 * STEP_S * 1000
    assert found[0] == pytest.approx(found[1])
