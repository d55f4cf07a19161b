"""Checks the names and types of the options of `generate` and `stream`, before they become a message.

The server checks ranges that depend on the target or that the contract sets. Pure.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard

from speculative.errors import InvalidRequest
from speculative.request_bounds import MAX_INTERVAL_MS

LONGEST_S = 1e9
"""The longest timeout of a request, in seconds: the most that gRPC can count."""

Check = Callable[[str, Any], None]


def check_options(prompt: object, options: Mapping[str, Any]) -> None:
    """Checks a request's options. Raises InvalidRequest, which names the option and its value."""
    for name, value in options.items():
        if name not in _CHECKS:
            raise InvalidRequest(f"there is no option {name!r}{_nearest(name)}")
        if value is not None:
            _CHECKS[name](name, value)
    if prompt is not None:
        _text("prompt", prompt)
    if (prompt is None) == (options.get("ids") is None):
        raise InvalidRequest("give either a prompt or ids")


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, _CHECKS, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(_CHECKS)}"


def fault(name: str, value: object, wanted: str) -> InvalidRequest:
    """The error for an argument's value, in at most 80 characters, that is not what is wanted."""
    said = repr(value)
    return InvalidRequest(f"{name} is {said if len(said) <= 80 else said[:80] + '...'}; it must be {wanted}")


def _is_whole(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: object) -> bool:
    """Whether a value is a real number, which True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _whole(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> None:
        if not _is_whole(value) or not low <= value < high:
            raise fault(name, value, f"a whole number from {low} to {high - 1}")

    return check


def _number(name: str, value: object) -> None:
    if not is_number(value):
        raise fault(name, value, "a number")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise fault(name, value, "True or False")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise fault(name, value, "a string")


def _texts(name: str, value: object) -> None:
    if isinstance(value, str):
        return
    if not _is_list(value) or not all(isinstance(part, str) for part in value):
        raise fault(name, value, "a string, or a list of strings")


def _ids(name: str, value: object) -> None:
    if not _is_list(value):
        raise fault(name, value, "a list of token ids, such as [5, 17]")
    for id_ in value:
        _id(name, id_)


def _id(name: str, id_: Any) -> None:
    if not _is_whole(id_):
        raise InvalidRequest(f"{name} has {id_!r}; token ids are whole numbers")
    if not 0 <= id_ < 2**32:
        raise InvalidRequest(f"{name} has {id_}; no vocabulary has such an id")


def _bias(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise fault(name, value, "token ids with a number each, such as {5: -2.5}")
    for id_, bias in value.items():
        _id(name, id_)
        _number(f"{name} of id {id_}", bias)


def _schema(name: str, value: object) -> None:
    if not isinstance(value, str | Mapping):
        raise fault(name, value, "a JSON schema, as a mapping or as text")


def _criterion(name: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(each, Mapping) for each in value.values()):
        raise fault(name, value, "{name: {parameter: value}}")


def _seconds(name: str, value: Any) -> None:
    if not is_number(value) or not math.isfinite(value) or not 0 < value <= LONGEST_S:
        raise fault(name, value, f"a number of seconds above 0, at most {LONGEST_S:g}; leave it out for none")


def _is_list(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether a value can be iterated more than once, and is neither a string nor a mapping."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Iterator)


def _signed(name: str, value: Any) -> None:
    # Which numbers make sense is the server's to say; a message holds any of 64 bits.
    if not _is_whole(value):
        raise fault(name, value, "a whole number")
    if not -(2**63) <= value < 2**63:
        raise fault(name, value, "a number of 64 bits")


_CHECKS: dict[str, Check] = {
    "ids": _ids,
    "max_tokens": _signed,
    "temperature": _number,
    "top_k": _signed,
    "top_p": _number,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _bias,
    "contrast_strength": _number,
    "contrast_plausibility": _number,
    "stop": _texts,
    "stop_ids": _ids,
    "ignore_eos": _flag,
    "min_tokens": _signed,
    "json_schema": _schema,
    "regex": _text,
    "json_object": _flag,
    "choice": _texts,
    "lark": _text,
    "n": _signed,
    "logprobs": _flag,
    "top_logprobs": _signed,
    "logprobs_of": _text,
    "seed": _whole(0, 2**64),
    "model": _text,
    "session": _text,
    "tenant": _text,
    "speculation": _flag,
    "sources": _texts,
    "nodes": _signed,
    "learn": _flag,
    "corpora": _texts,
    "prediction": _text,
    "criterion": _criterion,
    "references": _texts,
    "edit": _flag,
    "policy": _text,
    "message_interval_ms": _whole(0, MAX_INTERVAL_MS + 1),
    "timeout": _seconds,
}
