"""A device's messages: small, and read by the orchestrator as they were meant."""

import pytest

from outrider.edge.wire import drafts_to_wire, terms_from_wire
from outrider.v1 import common_pb2, generation_pb2
from outrider.wire.codec import fragment_from_wire
from speculative.errors import InvalidRequest
from speculative.fragment import Fragment

CHAIN = Fragment(1, 5, 70_000, 0xFEDCBA9876543210, (120_000,) * 8, tuple(range(-1, 7)), (0.9,) * 8)


def test_a_window_of_eight_tokens_takes_at_most_60_bytes() -> None:
    assert drafts_to_wire(CHAIN).drafts.ByteSize() <= 60


def test_a_window_arrives_as_it_was_sent() -> None:
    for fragment in (CHAIN, Fragment(1, 5, 3, 7, (1, 2, 3), (-1, -1, 0), (0.5, 0.4, 0.001))):
        sent = drafts_to_wire(fragment, epoch=5).drafts
        arrived = fragment_from_wire(sent, source=1)
        assert arrived.tokens == fragment.tokens
        assert arrived.parents == fragment.parents
        assert arrived.survival == pytest.approx(fragment.survival, abs=1 / 255)
        assert (arrived.base, arrived.prefix_hash, arrived.epoch) == (fragment.base, fragment.prefix_hash, 5)


def test_a_wait_can_be_set_without_drafts_and_left_as_it_was() -> None:
    assert drafts_to_wire(None, wait_ms=0).drafts.HasField("wait_ms")
    assert not drafts_to_wire(CHAIN).drafts.HasField("wait_ms")


def started(**terms: object) -> generation_pb2.GenerateStarted:
    return generation_pb2.GenerateStarted(
        epoch=9,
        seed=4,
        prompt_ids=[1, 2],
        device=generation_pb2.DeviceTerms(vocabulary_size=50, limit=300, credits=9, end_ids=[0], **terms),
    )


def test_terms_hold_the_prompt_what_the_client_has_and_the_shorter_limit() -> None:
    terms = terms_from_wire(started(), (7, 8), max_length=100)
    assert (terms.ids, terms.prompt_length, terms.limit) == ((1, 2, 7, 8), 2, 100)
    assert (terms.epoch, terms.seed, terms.credits, terms.end_ids) == (9, 4, 9, frozenset({0}))


def test_sampling_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        terms_from_wire(started(sampling=common_pb2.Sampling(temperature=-1.0)), (), 100)
