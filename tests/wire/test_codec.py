"""Messages and values: values arrive as they were sent, and keep within their bytes."""

import time
from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.v1 import common_pb2, draft_source_pb2
from outrider.wire import codec
from outrider.wire.codec import CommittedCode, SessionKey
from outrider.wire.status import status_of
from speculative.errors import InvalidRequest, MalformedDraft, Superseded, UnknownSession
from speculative.fragment import Fragment
from speculative.grammar import Grammar, GrammarKind
from speculative.logprobs import Logprobs, LogprobsOf, TokenLogprob
from speculative.params import SamplingParams
from speculative.stats import UsageCount
from speculative.stop import FinishReason
from tests.in_time import in_time

VOCABULARY = 152_000
NEVER_SHORT = VOCABULARY - 1  # ids from 2^14 on take three bytes, the most that this vocabulary needs

params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, VOCABULARY),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=20).map(
        lambda biases: tuple(biases.items())
    ),
    min_tokens=st.integers(0, 2**40),
    ignore_eos=st.booleans(),
    stop_ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=64).map(tuple),
)


@st.composite
def fragments(draw: st.DrawFn) -> Fragment:
    count = draw(st.integers(1, 40))
    return Fragment(
        source=draw(st.integers(1, 20)),
        epoch=draw(st.integers(0, 2**64 - 1)),
        base=draw(st.integers(0, 2**32 - 1)),
        prefix_hash=draw(st.integers(0, 2**64 - 1)),
        tokens=tuple(draw(st.integers(0, VOCABULARY - 1)) for _ in range(count)),
        parents=tuple(draw(st.integers(-1, node - 1)) for node in range(count)),
        survival=tuple(draw(st.floats(0, 1)) for _ in range(count)),
    )


def chain(count: int) -> Fragment:
    return Fragment(
        source=1,
        epoch=2**63,
        base=3_000,
        prefix_hash=2**63 + 1,
        tokens=(NEVER_SHORT,) * count,
        parents=tuple(range(-1, count - 1)),
        survival=(0.5,) * count,
    )


def tree(count: int) -> Fragment:
    plain = chain(count)
    return Fragment(
        source=plain.source,
        epoch=plain.epoch,
        base=plain.base,
        prefix_hash=plain.prefix_hash,
        tokens=plain.tokens,
        parents=tuple((node - 1) // 2 for node in range(count)),
        survival=plain.survival,
    )


@given(params)
def test_sampling_parameters_arrive_as_they_were_sent(sent: SamplingParams) -> None:
    message = common_pb2.Sampling.FromString(codec.sampling_to_wire(sent).SerializeToString())
    assert codec.sampling_from_wire(message) == sent


@pytest.mark.parametrize(
    "sent",
    [
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        Grammar(GrammarKind.REGEX, "a+é"),
        Grammar(GrammarKind.JSON_OBJECT),
        Grammar.one_of(["yes", 'nö "', "yes"]),
        Grammar(GrammarKind.LARK, "start: /a+é/"),
        *(
            replace(grammar, preamble='start: "é"?')
            for grammar in (
                Grammar(GrammarKind.JSON_SCHEMA, "{}"),
                Grammar(GrammarKind.REGEX, "a"),
                Grammar(GrammarKind.JSON_OBJECT),
                Grammar.one_of(["yes"]),
                Grammar(GrammarKind.LARK, "start: /a/"),
            )
        ),
    ],
)
def test_a_grammar_arrives_as_it_was_sent(sent: Grammar) -> None:
    message = common_pb2.Grammar.FromString(codec.grammar_to_wire(sent).SerializeToString())
    assert codec.grammar_from_wire(message) == sent


@pytest.mark.parametrize("said", [common_pb2.Grammar(), common_pb2.Grammar(json_object=False)])
def test_a_grammar_that_says_nothing_is_refused(said: common_pb2.Grammar) -> None:
    with pytest.raises(InvalidRequest, match="give one of json_schema, regex, json_object, choice, lark"):
        codec.grammar_from_wire(said)


def test_a_choice_with_an_empty_text_is_refused() -> None:
    said = common_pb2.Grammar(choice=common_pb2.AllowedTexts(texts=["a", ""]))
    with pytest.raises(InvalidRequest, match="choice has an empty text, number 1"):
        codec.grammar_from_wire(said)


def test_plain_sampling_takes_no_bytes_and_no_bytes_are_plain_sampling() -> None:
    assert codec.sampling_to_wire(SamplingParams()).SerializeToString() == b""
    assert codec.sampling_from_wire(common_pb2.Sampling()) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 101.0),
        ("frequency_penalty", -101.0),
        ("min_tokens", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_and_value(field: str, value: float) -> None:
    message = common_pb2.Sampling()
    setattr(message, field, value)
    with pytest.raises(InvalidRequest, match=rf"{field} is {value}"):
        codec.sampling_from_wire(message)


def test_too_many_biases_are_refused() -> None:
    message = common_pb2.Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(InvalidRequest, match="logit_bias has 1025 entries"):
        codec.sampling_from_wire(message)


@pytest.mark.parametrize(
    "message",
    [
        common_pb2.Sampling(top_k=97),
        common_pb2.Sampling(logit_bias={96: 1.0}),
        common_pb2.Sampling(stop_ids=[96]),
    ],
    ids=["top_k", "logit_bias", "stop_ids"],
)
def test_ids_beyond_a_known_vocabulary_are_refused(message: common_pb2.Sampling) -> None:
    codec.sampling_from_wire(message)
    with pytest.raises(InvalidRequest, match="96"):
        codec.sampling_from_wire(message, vocabulary_size=96)


@given(fragments(), st.integers(0, 1000))
def test_a_fragment_arrives_as_it_was_sent_but_for_rounding(sent: Fragment, alias: int) -> None:
    draft = draft_source_pb2.Draft.FromString(codec.fragment_to_wire(sent, alias).SerializeToString())
    received = codec.fragment_from_wire(draft, sent.source)
    assert draft.alias == alias
    assert (received.source, received.epoch, received.base) == (sent.source, sent.epoch, sent.base)
    assert (received.prefix_hash, received.tokens) == (sent.prefix_hash, sent.tokens)
    assert received.parents == sent.parents
    for mine, theirs in zip(sent.survival, received.survival, strict=True):
        assert theirs == pytest.approx(mine, abs=1 / 255)
        assert (mine > 0) == (theirs > 0)


@given(st.floats(0, 1), st.floats(0, 1))
def test_rounding_never_turns_the_order_of_two_survivals(one: float, other: float) -> None:
    sent = Fragment(1, 0, 0, 0, (1, 2), (-1, -1), (min(one, other), max(one, other)))
    low, high = codec.fragment_from_wire(codec.fragment_to_wire(sent, 1), 1).survival
    assert low <= high


@pytest.mark.parametrize(
    ("fragment", "budget"), [(chain(8), 60), (tree(32), 190)], ids=["chain of 8", "tree of 32"]
)
def test_a_draft_keeps_within_its_bytes(fragment: Fragment, budget: int) -> None:
    assert codec.fragment_to_wire(fragment, alias=127).ByteSize() <= budget


def test_a_chain_sends_no_parents() -> None:
    assert codec.fragment_to_wire(chain(8), 1).parents == b""


def test_one_node_below_the_base_is_a_chain() -> None:
    assert codec.fragment_from_wire(codec.fragment_to_wire(chain(1), 1), 1).parents == (-1,)


@pytest.mark.parametrize(
    "draft",
    [
        draft_source_pb2.Draft(),
        draft_source_pb2.Draft(ids=range(256), survival=bytes(256)),
        draft_source_pb2.Draft(ids=range(1_000_000), survival=bytes(1_000_000)),
        draft_source_pb2.Draft(ids=[1, 2], survival=b"\xff"),
        draft_source_pb2.Draft(ids=[1, 2], survival=b"\xff\xff", parents=b"\x00"),
        draft_source_pb2.Draft(ids=[1, 2], survival=b"\xff\xff", parents=b"\x00\x02"),
        draft_source_pb2.Draft(ids=[1, 2], survival=b"\xff\xff", parents=b"\x02\x01"),
        draft_source_pb2.Draft(ids=[1], survival=bytes(2_000_000)),
        draft_source_pb2.Draft(ids=[1], parents=bytes(2_000_000)),
    ],
    ids=[
        "no node",
        "256 nodes",
        "a million",
        "survival short",
        "parents short",
        "own parent",
        "cycle",
        "survival long",
        "parents long",
    ],
)
def test_a_malformed_draft_is_refused_before_it_is_converted(draft: draft_source_pb2.Draft) -> None:
    began = time.thread_time()
    with pytest.raises(MalformedDraft):
        codec.fragment_from_wire(draft, source=1)
    in_time(time.thread_time() - began < 0.01)


@pytest.mark.parametrize("key", [SessionKey("", "s"), SessionKey("t" * 128, "s" * 128, 7)])
def test_a_key_arrives_as_it_was_sent(key: SessionKey) -> None:
    assert codec.key_from_wire(codec.key_to_wire(key)) == key


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        (SessionKey("t" * 129, "s"), "tenant has 129 characters"),
        (SessionKey("t", ""), "session has 0 characters"),
        (SessionKey("t", "s" * 129), "session has 129 characters"),
        (SessionKey("t\0", "s"), "tenant 't.x00' has characters that cannot be printed"),
        (SessionKey("t", "a\nb"), "session 'a.nb' has characters that cannot be printed"),
        (SessionKey("t", "s", 16), "choice is 16; 0 to 15"),
    ],
)
def test_a_key_out_of_range_is_refused(key: SessionKey, fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault):
        codec.key_from_wire(codec.key_to_wire(key))


@pytest.mark.parametrize("of", LogprobsOf)
def test_requested_logprobs_arrive_as_they_were_sent(of: LogprobsOf) -> None:
    sent = Logprobs(20, of)
    assert codec.logprobs_from_wire(codec.logprobs_to_wire(sent)) == sent
    assert codec.logprobs_from_wire(common_pb2.Logprobs()) == Logprobs(0, LogprobsOf.RAW)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (common_pb2.Logprobs(top_logprobs=21), "top_logprobs is 21; 0 to 20"),
        (common_pb2.Logprobs(top_logprobs=-1), "top_logprobs is -1"),
        (common_pb2.Logprobs(logprobs_of=9), "logprobs_of is 9"),  # type: ignore[arg-type]
    ],
)
def test_invalid_logprobs_are_refused(message: common_pb2.Logprobs, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        codec.logprobs_from_wire(message)


def test_a_logprob_arrives_as_it_was_computed() -> None:
    message = codec.token_logprob_to_wire(TokenLogprob.of(-0.25, [7, NEVER_SHORT], [-0.25, -8.5]))
    assert (message.logprob, list(message.top_ids), list(message.top_logprobs)) == (
        -0.25,
        [7, NEVER_SHORT],
        [-0.25, -8.5],
    )


def test_usage_is_sent_as_it_was_counted() -> None:
    counted = UsageCount(
        prompt_tokens=5,
        completion_tokens=9,
        rounds=4,
        admitted=20,
        accepted={"lookup": 5},
        drafted={"lookup": 30},
        replay_identical=True,
    )
    assert codec.usage_to_wire(counted) == common_pb2.Usage(
        prompt_tokens=5,
        completion_tokens=9,
        rounds=4,
        admitted=20,
        accepted_by_source={"lookup": 5},
        drafted_by_source={"lookup": 30},
        replay_identical=True,
        promise=common_pb2.PROMISE_SAME_IDS,
    )


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_a_finish_reason_arrives_as_it_was_sent(reason: FinishReason | None) -> None:
    assert codec.finish_from_wire(codec.finish_to_wire(reason)) is reason


def test_a_reason_of_a_newer_contract_is_an_error() -> None:
    assert codec.finish_from_wire(99) is FinishReason.ERROR  # type: ignore[arg-type]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_epochs_as_text_sort_as_epochs(one: int, other: int) -> None:
    assert (codec.epoch_to_text(one) < codec.epoch_to_text(other)) == (one < other)
    assert codec.epoch_from_text(codec.epoch_to_text(one)) == one


@pytest.mark.parametrize("text", ["", "12", "x" * 16, "0" * 17])
def test_a_text_that_is_no_epoch_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"16 hexadecimal|invalid literal"):
        codec.epoch_from_text(text)


@pytest.mark.parametrize(("sources", "source_index"), [(b"", 4), (b"\x00\x00", 4), (b"\x01\x02", 9)])
def test_the_bytes_beside_drafts_give_each_draft_s_source(sources: bytes, source_index: int) -> None:
    response = draft_source_pb2.AttachResponse(drafts=[draft_source_pb2.Draft()] * 2, sources=sources)
    assert codec.source_index_from_wire(response, 1, (4, 8, 9)) == source_index


@pytest.mark.parametrize("sources", [b"\x00", b"\x00\x00\x00", b"\x00\x03"])
def test_bytes_that_name_nothing_are_malformed(sources: bytes) -> None:
    response = draft_source_pb2.AttachResponse(drafts=[draft_source_pb2.Draft()] * 2, sources=sources)
    with pytest.raises(MalformedDraft):
        codec.source_index_from_wire(response, 1, (4, 8, 9))


def test_codes_beside_committed_tokens_are_those_of_the_same_errors_as_statuses() -> None:
    assert status_of(UnknownSession("s")).code.value[0] == CommittedCode.UNKNOWN_SESSION
    assert status_of(Superseded("s")).code.value[0] == CommittedCode.TAKEN_OVER
    assert grpc.StatusCode.INTERNAL.value[0] == CommittedCode.BUG
    assert grpc.StatusCode.OK.value[0] == CommittedCode.NONE
