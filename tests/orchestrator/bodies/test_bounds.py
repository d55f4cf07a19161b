"""The largest body of each kind: no legal request is larger, and little else is."""

import json

import pytest

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.http.bodies.bounds import BodyBounds, BodyKind
from orchestrator.front.http.bodies.intake import body_bounds
from outrider.tokens import TokenTable
from speculative.params import MAX_BIAS_ENTRIES, MAX_STOP_IDS
from speculative.request_bounds import MAX_SCHEMA_BYTES
from speculative.stop import MAX_STOP_BYTES, MAX_STOPS

BOUNDS = BodyBounds(context=1_000, text_bytes=64_000, prompts=4, most_bytes=2**40)
LONGEST = "\u0007" * 64_000
"""Text of which JSON writes six characters for each byte."""
MESSAGE = {"role": "assistant", "content": "", "name": ""}
FIELDS = {
    "logit_bias": {str(2**32 - 1 - at): -99.999999999999 for at in range(MAX_BIAS_ENTRIES)},
    "stop_token_ids": [2**32 - 1] * MAX_STOP_IDS,
    "stop": ["\u0007" * MAX_STOP_BYTES] * MAX_STOPS,
    "structured_outputs": {"json": "\u0007" * MAX_SCHEMA_BYTES},
    "prediction": {"type": "content", "content": LONGEST},
    "references": [""] * 16,
}
ITEM = {
    "type": "message",
    "id": "msg_" + "f" * 24,
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}],
}
CALL = {"type": "function_call", "id": "fc_" + "f" * 24, "call_id": "f" * 64, "name": "f" * 64}
USE = {
    "role": "assistant",
    "content": [
        {"type": "tool_use", "id": "f" * 64, "name": "f" * 64, "input": {}, "cache_control": {"type": "x"}}
    ],
}
LEGAL = {
    "texts": (BodyKind.COMPLETION, {"prompt": [LONGEST] * 4, **FIELDS}),
    "ids": (BodyKind.COMPLETION, {"prompt": [[2**32 - 1] * 1_000] * 4, **FIELDS}),
    "messages": (BodyKind.CHAT, {"messages": [MESSAGE] * 999 + [MESSAGE | {"content": LONGEST}], **FIELDS}),
    "items": (
        BodyKind.RESPONSES,
        {"input": [ITEM] * 500 + [CALL | {"arguments": "{}"}] * 500, "instructions": LONGEST, **FIELDS},
    ),
    "turns": (BodyKind.MESSAGES, {"messages": [USE] * 1_000, "system": LONGEST, **FIELDS}),
    "turns to count": (BodyKind.COUNT, {"messages": [USE] * 1_000, "system": LONGEST}),
    "a text": (BodyKind.TOKENIZE, {"prompt": LONGEST}),
    "a conversation": (BodyKind.TOKENIZE, {"messages": [MESSAGE] * 999 + [MESSAGE | {"content": LONGEST}]}),
    "tokens": (BodyKind.DETOKENIZE, {"tokens": [2**32 - 1] * 1_000}),
}


@pytest.mark.parametrize("what", LEGAL)
def test_the_largest_legal_request_fits_also_with_an_item_on_each_line(what: str) -> None:
    kind, body = LEGAL[what]
    assert len(json.dumps(body)) <= BOUNDS.largest(kind)
    assert len(json.dumps(body, indent=2)) <= BOUNDS.largest(kind)


@pytest.mark.parametrize("kind", BodyKind)
def test_a_larger_context_allows_a_larger_body_up_to_the_setting(kind: BodyKind) -> None:
    larger = BodyBounds(2_000, 128_000, 4, 2**40)
    assert BOUNDS.largest(kind) < larger.largest(kind)
    assert BodyBounds(2_000, 128_000, 4, 70_000).largest(kind) == 70_000


def test_a_small_model_has_small_bodies() -> None:
    assert BOUNDS.largest(BodyKind.DETOKENIZE) < 100_000


def test_the_largest_of_the_served_models_counts(table: TokenTable) -> None:
    with_tokens = TargetModel("a", 64, 96, "", table, ())
    without = TargetModel("b", 1_000, 96, "", None, ())
    bounds = body_bounds([with_tokens, without], 4, 2**20)
    assert bounds == BodyBounds(context=1_000, text_bytes=64 * 64, prompts=4, most_bytes=2**20)
