"""Criteria and promises on the wire and back."""

import math
from collections.abc import Mapping
from dataclasses import fields

from google.protobuf.descriptor import FieldDescriptor

from outrider.v1 import common_pb2
from speculative.acceptance import CRITERIA
from speculative.acceptance.criterion import Criterion, Promise
from speculative.errors import InvalidRequest
from speculative.implementations import load_implementation

SERVED_CRITERIA = tuple(field.name for field in common_pb2.Criterion.DESCRIPTOR.fields)
"""Names of the criteria that a request can name."""

_PROMISES = {
    Promise.SAME_IDS: common_pb2.PROMISE_SAME_IDS,
    Promise.SAME_LAW: common_pb2.PROMISE_SAME_LAW,
    Promise.RELAXED: common_pb2.PROMISE_RELAXED,
}
_PROMISES_BACK = {number: promise for promise, number in _PROMISES.items()}


def criterion_from_wire(message: common_pb2.Criterion) -> Criterion:
    """The criterion of a request. Raises InvalidRequest without a kind, and for a parameter out of range."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(f"criterion has no kind; give one of {', '.join(SERVED_CRITERIA)}")
    sent = getattr(message, kind)
    names = [field.name for field in sent.DESCRIPTOR.fields]
    given = {name: getattr(sent, name) for name in names if sent.HasField(name)}
    criterion: Criterion = load_implementation(CRITERIA, kind)(**given)
    return criterion


def criterion_to_wire(criterion: Criterion) -> common_pb2.Criterion:
    """The criterion with all of its parameters."""
    message = common_pb2.Criterion()
    kind = criterion_name(criterion)
    sent = getattr(message, kind)
    sent.SetInParent()
    for field in fields(criterion):  # type: ignore[arg-type]
        setattr(sent, field.name, getattr(criterion, field.name))
    return message


def criterion_of(given: Mapping[str, Mapping[str, float]]) -> common_pb2.Criterion:
    """The message for {name: {parameter: value}}. Raises InvalidRequest for what no message can hold."""
    if len(given) != 1:
        raise InvalidRequest(
            f"criterion names {len(given)} criteria; name one of {', '.join(SERVED_CRITERIA)}"
        )
    ((kind, parameters),) = given.items()
    if kind not in SERVED_CRITERIA:
        raise InvalidRequest(f"criterion names {kind!r}; give one of {', '.join(SERVED_CRITERIA)}")
    message = common_pb2.Criterion()
    sent = getattr(message, kind)
    sent.SetInParent()
    for name, value in parameters.items():
        if name not in sent.DESCRIPTOR.fields_by_name:
            known = ", ".join(sent.DESCRIPTOR.fields_by_name) or "no parameter"
            raise InvalidRequest(f"criterion.{kind} has no {name!r}; it has {known}")
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"criterion.{kind}.{name} is {value!r}; give a finite number")
        try:
            setattr(sent, name, int(value) if value == int(value) else value)
        except (TypeError, ValueError, OverflowError):
            advice = _advice(sent.DESCRIPTOR.fields_by_name[name])
            raise InvalidRequest(f"criterion.{kind}.{name} is {value!r}; {advice}") from None
    return message


def _advice(parameter: FieldDescriptor) -> str:
    """What a parameter may be."""
    if parameter.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return "give a number"
    return "give a whole number of 64 bits at most"


def criterion_name(criterion: Criterion) -> str:
    """The name of a criterion, which is that of its kind on the wire."""
    ours = f"{type(criterion).__module__}:{type(criterion).__qualname__}"
    return next(name for name, where in CRITERIA.items() if where == ours)


def promise_to_wire(promise: Promise) -> common_pb2.Promise.ValueType:
    """The promise as the wire numbers it."""
    return _PROMISES[promise]


def promise_from_wire(number: common_pb2.Promise.ValueType) -> Promise:
    """A promise from the wire; SAME_IDS from older verifiers, which send none."""
    return _PROMISES_BACK.get(number, Promise.SAME_IDS)
