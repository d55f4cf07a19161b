"""What a verifier does not know is found by name; what only says how to draft does not matter."""

import pytest

from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.incoming.request_fields import FIRST_FIELDS, REQUEST_FIELDS, unknown_field

CONTRAST = verifier_pb2.OpenRequest(ids=[5], sampling=common_pb2.Sampling(contrast_strength=0.5))


def test_the_list_has_fields_inside_messages_and_no_entries_of_maps() -> None:
    assert {"ids", "sampling", "sampling.top_k", "criterion.typical.epsilon"} < set(REQUEST_FIELDS)
    assert "sampling.logit_bias" in REQUEST_FIELDS
    assert not any(field.endswith((".key", ".value")) for field in REQUEST_FIELDS)


def test_a_verifier_of_this_version_knows_every_field() -> None:
    assert unknown_field(CONTRAST, REQUEST_FIELDS) == ""


def test_a_field_that_a_verifier_without_a_list_would_ignore_is_named() -> None:
    assert unknown_field(CONTRAST, FIRST_FIELDS) == "sampling.contrast_strength"
    lark = verifier_pb2.OpenRequest(grammar=common_pb2.Grammar(lark="start: /a/"))
    assert unknown_field(lark, FIRST_FIELDS) == "grammar.lark"
    reasoned = verifier_pb2.OpenRequest(grammar=common_pb2.Grammar(regex="a", preamble='start: "b"'))
    assert unknown_field(reasoned, FIRST_FIELDS) == "grammar.preamble"


def test_a_field_at_its_default_asks_for_nothing() -> None:
    plain = verifier_pb2.OpenRequest(ids=[5], sampling=common_pb2.Sampling(temperature=0.5))
    assert unknown_field(plain, FIRST_FIELDS) == ""


@pytest.mark.parametrize("known", [(), ("ids", "sampling")])
def test_fields_that_are_not_listed_are_unknown_wherever_they_are(known: tuple[str, ...]) -> None:
    assert unknown_field(CONTRAST, known) == ("sampling.contrast_strength" if known else "ids")


def test_what_only_says_how_to_draft_may_be_ignored() -> None:
    drafting = verifier_pb2.OpenRequest(
        policy="fixed",
        learn=True,
        corpora=["code"],
        prediction=[1],
        references=[verifier_pb2.ReferenceIds(ids=[1])],
    )
    assert unknown_field(drafting, ()) == ""
