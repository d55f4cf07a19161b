"""Criteria on the wire: nothing is lost, and what no criterion can be is refused by name."""

from dataclasses import fields

import pytest

from outrider.v1 import common_pb2
from outrider.wire.criteria import (
    SERVED_CRITERIA,
    criterion_from_wire,
    criterion_name,
    criterion_of,
    criterion_to_wire,
    promise_from_wire,
    promise_to_wire,
)
from speculative.acceptance import CRITERIA
from speculative.acceptance.bild import BiLD
from speculative.acceptance.block import BlockVerification
from speculative.acceptance.blockwise import Blockwise
from speculative.acceptance.criterion import Criterion, Promise
from speculative.acceptance.lenience import Lenience
from speculative.acceptance.specdec import SpecDec
from speculative.acceptance.typical import Typical
from speculative.errors import InvalidRequest
from speculative.implementations import load_implementation


@pytest.mark.parametrize(
    "criterion",
    [
        Typical(epsilon=0.5, delta=0.25),
        SpecDec(beta=7, gap=0.0),
        Blockwise(top_k=2, distance=3, least_block=4),
        BiLD(fallback=0.5, rollback=0.0, dissent=0),
        BlockVerification(),
        Lenience(factor=0.25),
    ],
    ids=str,
)
def test_a_criterion_comes_back_as_it_was(criterion: Criterion) -> None:
    sent = common_pb2.Criterion.FromString(criterion_to_wire(criterion).SerializeToString())
    assert criterion_from_wire(sent) == criterion


@pytest.mark.parametrize("name", SERVED_CRITERIA)
def test_a_criterion_without_parameters_has_its_defaults(name: str) -> None:
    made = criterion_from_wire(criterion_of({name: {}}))
    assert made == load_implementation(CRITERIA, name)()
    assert criterion_name(made) == name


def test_a_criterion_has_one_name_in_python_and_on_the_wire() -> None:
    kinds = {field.name: field.message_type.name for field in common_pb2.Criterion.DESCRIPTOR.fields}
    assert kinds == {name: where.split(":")[1] for name, where in CRITERIA.items()}
    for name in CRITERIA:
        ours = [field.name for field in fields(load_implementation(CRITERIA, name))]
        sent = getattr(common_pb2.Criterion(), name)
        assert [field.name for field in sent.DESCRIPTOR.fields] == ours


@pytest.mark.parametrize("promise", Promise)
def test_a_promise_comes_back_as_it_was(promise: Promise) -> None:
    assert promise_from_wire(promise_to_wire(promise)) is promise


def test_a_verifier_that_sends_no_promise_gives_the_path_matchs() -> None:
    assert promise_from_wire(common_pb2.Usage().promise) is Promise.SAME_IDS


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "names 0 criteria; name one of typical"),
        ({"typical": {}, "bild": {}}, "names 2 criteria"),
        ({"tipical": {}}, "names 'tipical'; give one of typical"),
        ({"typical": {"epsilom": 1}}, "criterion.typical has no 'epsilom'; it has epsilon, delta"),
        ({"specdec": {"beta": 1.5}}, "criterion.specdec.beta is 1.5; give a whole number"),
        ({"specdec": {"beta": 1e30}}, r"criterion.specdec.beta is 1e\+30; give a whole number"),
        ({"specdec": {"gap": float("inf")}}, "criterion.specdec.gap is inf; give a finite number"),
        ({"lenience": {"factor": float("nan")}}, "criterion.lenience.factor is nan; give a finite number"),
    ],
)
def test_what_no_criterion_can_be_is_refused_by_name(given: dict[str, dict[str, float]], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        criterion_from_wire(criterion_of(given))


def test_a_message_without_a_kind_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="criterion has no kind"):
        criterion_from_wire(common_pb2.Criterion())
