"""The check at load finds what a packed pass would get wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.lm import plan
from outrider.lm.attention import interface
from outrider.lm.load import check
from outrider.lm.load.check import Trial
from outrider.lm.plan import PackedRows, PassPlan
from outrider.lm.runner import PackedLM
from speculative.errors import ModelRefused
from tests.lm.families import VOCABULARY, WINDOW, check_pass, model_of


def test_a_model_that_is_served_rightly_passes_and_is_left_as_it_was() -> None:
    lm = PackedLM(model_of("mistral"))

    check_pass(lm)

    assert (lm.forward_calls, lm.rows, lm.pool.used_slots) == (0, 0, 0)
    assert lm.model.config._attn_implementation == interface.ATTENTION


@pytest.mark.parametrize(("dtype", "much"), [(torch.bfloat16, 0.4), (torch.float16, 0.1)])
def test_in_half_precision_the_difference_of_whole_rows_decides(
    dtype: torch.dtype, much: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    lm = PackedLM(model_of("llama").to(dtype))
    trial = Trial.of(lm)
    trial.verify(lm)
    (said,) = [record.__dict__["fields"] for record in caplog.records if "differ from" in record.message]
    assert 0 < said["row"] < said["row_accepted"]
    assert said["logit"] < said["logit_accepted"]

    expected = list(trial.expected)
    one = expected[0].clone()
    one[3, 7] += much * float(one[3].std())
    Trial(trial.sessions, (one, *expected[1:]), trial.own).verify(lm)
    row = expected[0].clone()
    row[3] += 0.2 * row[3].std() * torch.randn(len(row[3]), generator=torch.Generator().manual_seed(1))
    with pytest.raises(ModelRefused, match=r"and by 0\.\d+ of a row"):
        Trial(trial.sessions, (row, *expected[1:]), trial.own).verify(lm)


def test_a_model_that_differs_from_itself_by_its_batch_is_given_that_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lm = PackedLM(model_of("llama").to(torch.bfloat16))
    trial = Trial.of(lm)
    row = trial.expected[0].clone()
    row[3] += 0.1 * row[3].std() * torch.randn(len(row[3]), generator=torch.Generator().manual_seed(1))
    expected = (row, *trial.expected[1:])

    with pytest.raises(ModelRefused):
        Trial(trial.sessions, expected, 0.001).verify(lm)
    Trial(trial.sessions, expected, 0.04).verify(lm)
    row[3] *= 2
    with pytest.raises(ModelRefused):
        Trial(trial.sessions, expected, 10.0).verify(lm)


def refused(lm: PackedLM, match: str) -> None:
    with pytest.raises(ModelRefused, match=match) as found:
        check_pass(lm)
    assert lm.model_type in str(found.value)
    assert lm.pool.used_slots == 0


def test_a_window_that_is_one_too_wide_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = PassPlan.visible
    monkeypatch.setattr(PassPlan, "visible", lambda self, window: seen(self, window and window + 1))

    refused(PackedLM(model_of("mistral")), "differs from its own eager forward")


def test_a_window_that_is_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = PassPlan.visible
    monkeypatch.setattr(PassPlan, "visible", lambda self, window: seen(self, None))

    refused(PackedLM(model_of("gemma3_text")), "differs from its own eager forward")
    check_pass(PackedLM(model_of("llama")))


def test_a_branch_that_sees_its_sibling_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything_before(self: PackedRows) -> Any:
        kept, nodes = self.table.nodes, len(self.parents)
        return plan.np.tri(nodes, dtype=plan.np.uint8)[kept:]

    monkeypatch.setattr(PackedRows, "ancestors", everything_before)

    refused(PackedLM(model_of("llama")), "differs from its own eager forward")


def test_positions_that_count_rows_instead_of_depth_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_row(self: PassPlan) -> list[int]:
        return [rows.positions[0] + at for rows in self.rows for at in range(len(rows.positions))]

    monkeypatch.setattr(PassPlan, "positions", by_row)

    refused(PackedLM(model_of("llama")), "differs from its own eager forward")


def test_kept_keys_that_were_not_moved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = PackedLM(model_of("llama"))
    monkeypatch.setattr(lm.pool, "copy", lambda sources, targets: None)
    with pytest.raises(ModelRefused, match="differs"):
        check_pass(lm)


def test_a_session_that_reads_its_neighbour_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = PassPlan.visible

    def swapped(self: PassPlan, window: int | None) -> Any:
        found = seen(self, window)
        if len(found) == 2 and found[0].views[0].shape == found[1].views[0].shape:
            raise AssertionError("the sessions of the check have different lengths")
        return (
            found
            if len(found) == 1
            else [found[0], plan.AttentionView(found[1].low, found[1].high, found[0].views, None, False)]
        )

    monkeypatch.setattr(PassPlan, "visible", swapped)

    refused(PackedLM(model_of("llama")), "differs from its own eager forward")


@pytest.mark.parametrize(
    ("name", "value"), [("head_mask", torch.ones(1)), ("position_bias", torch.zeros(1)), ("alibi", 1.0)]
)
def test_an_argument_of_the_attention_call_that_is_not_understood_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    model = model_of("llama")
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "forward", _with(layer.self_attn.forward, name, value))

    with pytest.raises(ModelRefused, match=f"llama is not served: its attention takes {name}"):
        PackedLM(model)


def _with(forward: Callable[..., Any], name: str, value: Any) -> Callable[..., Any]:
    def passing(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs, **{name: value})

    return passing


def test_weights_that_give_no_number_are_refused() -> None:
    model = model_of("llama")
    model.lm_head.weight.data[3] = float("nan")

    refused(PackedLM(model), "not finite")


def test_ids_that_can_be_chosen_but_not_embedded_are_refused() -> None:
    model = model_of("llama")
    model.model.embed_tokens = torch.nn.Embedding(VOCABULARY - 5, 32)

    refused(PackedLM(model), f"choose among {VOCABULARY} ids but embeds only {VOCABULARY - 5}")


def test_a_forward_of_its_own_that_fails_is_a_refusal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = PackedLM(model_of("llama"))
    monkeypatch.setattr(check, "_eager_logits", lambda *_: 1 / 0)

    refused(lm, "its own forward fails with ZeroDivisionError")


def test_the_check_goes_beyond_every_window_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_CHUNK", 7)
    lm = PackedLM(model_of("mistral"))
    trial = Trial.of(lm)
    passes = []
    forward = lm.forward
    monkeypatch.setattr(lm, "forward", lambda sequences: passes.append(len(sequences)) or forward(sequences))

    trial.verify(lm)

    assert len(trial.sessions[0].prompt) > WINDOW
    assert len(passes) >= 2 + 3


def test_a_window_longer_than_one_piece_is_compared_through_the_librarys_own_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Trial.of(PackedLM(model_of("gemma3_text")))
    monkeypatch.setattr(check, "_WHOLE", 4)
    monkeypatch.setattr(check, "_CHUNK", 5)
    lm = PackedLM(model_of("gemma3_text"))
    pieces = Trial.of(lm)

    for one, other in zip(whole.expected, pieces.expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    pieces.verify(lm)
