"""The bound of a Generate: the largest legal request passes, and one byte more is refused by name."""

import pytest

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.message_bounds import LEAST_TOKEN_BYTES, generate_bounds, most_text_bytes
from outrider.tokens import TokenTable
from outrider.v1 import generation_pb2 as pb
from outrider.wire.codec import MAX_CHOICES
from outrider.wire.incoming.shape import MOST_NUMBERS
from outrider.wire.incoming.unparsed import Unparsed
from speculative.errors import InvalidRequest
from speculative.params import MAX_BIAS_ENTRIES, MAX_STOP_IDS
from speculative.request_bounds import MAX_SCHEMA_BYTES
from speculative.stop import MAX_STOP_BYTES, MAX_STOPS

LARGEST_ID = 2**32 - 1


def target(context: int, tokens: TokenTable | None) -> TargetModel:
    """A model of this context whose ids are as large as ids may be."""
    return TargetModel("m", context, LARGEST_ID + 1, "", tokens, ())


def largest(context: int, text: int) -> pb.GenerateStart:
    """A request with every field as large as it may be, which resumes all choices behind their last token.

    Args:
        text: bytes of the prompt and of the texts to copy from; 0: ids in place of text.
    """
    start = pb.GenerateStart(
        seed=2**63, session="s" * 256, tenant="t" * 256, model="m" * 256, max_tokens=context
    )
    if text:
        start.text = "x" * text
        start.speculation.prediction = "x" * text
    else:
        start.ids.ids.extend([LARGEST_ID] * context)
    for _ in range(MAX_CHOICES):
        start.have.add().ids.extend([LARGEST_ID] * (context - 1))
    start.sampling.stop_ids.extend([LARGEST_ID] * MAX_STOP_IDS)
    for number in range(MAX_BIAS_ENTRIES):
        start.sampling.logit_bias[LARGEST_ID - number] = 0.5
    start.stop.extend(["s" * MAX_STOP_BYTES] * MAX_STOPS)
    start.grammar.json_schema = "x" * MAX_SCHEMA_BYTES
    start.speculation.sources.extend(["s" * 64] * 16)
    return start


@pytest.mark.parametrize("context", [64, 2_048, MOST_NUMBERS // (1 + MAX_CHOICES) - 64])
@pytest.mark.parametrize("as_text", [False, True])
async def test_the_largest_legal_request_passes(context: int, as_text: bool, table: TokenTable) -> None:
    model = target(context, table if as_text else None)
    text = context * LEAST_TOKEN_BYTES if as_text else 0
    assert most_text_bytes(model) == text
    request = pb.GenerateRequest(start=largest(context, text))
    small = target(16, None)
    for served in ([model], [small, model]):
        read = Unparsed(request.SerializeToString(), pb.GenerateRequest, "Generation/Generate")
        assert await read.parse(generate_bounds(served)) == request


async def test_choices_that_bring_more_ids_than_a_message_may_have_are_refused_by_that_number() -> None:
    context = MOST_NUMBERS // (1 + MAX_CHOICES) + 64
    data = pb.GenerateRequest(start=largest(context, 0)).SerializeToString()
    with pytest.raises(InvalidRequest, match=f"at most {MOST_NUMBERS} are read in one message here"):
        await Unparsed(data, pb.GenerateRequest, "Generate").parse(generate_bounds([target(context, None)]))


async def test_one_byte_more_than_any_served_model_takes_is_refused_with_both_sizes() -> None:
    bounds = generate_bounds([target(64, None), target(2_048, None)])
    data = bytes(bounds.most_bytes + 1)
    told = (
        f"{bounds.most_bytes + 1} bytes; at most {bounds.most_bytes} are read here: "
        "no request to a context of 2048 tokens is larger"
    )
    with pytest.raises(InvalidRequest, match=told):
        await Unparsed(data, pb.GenerateRequest, "Generation/Generate").parse(bounds)


def test_the_bound_is_little_more_than_what_the_context_needs() -> None:
    for context in (64, 2_048, 131_072):
        needed = pb.GenerateRequest(start=largest(context, 0)).ByteSize()
        assert needed <= generate_bounds([target(context, None)]).most_bytes <= 1.1 * needed + 96 * 1024
