"""Which special tokens of a model are marks in its answers: parsers need their text, grammars their ids."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.http.chat.planning import thought_marks
from orchestrator.front.http.templated.known_templates import response_template
from orchestrator.front.http.templated.parse_order import marks_of
from outrider.tokens import TokenTable


def special_marks(target: TargetModel) -> Mapping[str, int]:
    """Ids of the special tokens that are marks in the model's answers, by their text.

    The marks are those of its response template, and those around reasoning, which that template may leave
    out.
    """
    if target.chat is None:
        return MappingProxyType({})
    thought = thought_marks(target.chat.source, response_template(target.chat)) or ()
    return _among(target, "\n".join((_parsed(target), *thought)))


def parsed_marks(target: TargetModel) -> Mapping[str, int]:
    """As `special_marks`, but only for marks of the response template: its parser reads no others."""
    return _among(target, _parsed(target))


def can_reason_before_format(target: TargetModel) -> bool:
    """Whether reasoning can precede an answer in a client's format.

    Not where the verifier is too old for a grammar with a preamble, nor where the end mark of the reasoning
    ends the answer, too.
    """
    if target.chat is None or target.tokens is None or "grammar.preamble" not in target.request_fields:
        return False
    marks = thought_marks(target.chat.source, response_template(target.chat))
    ends = filter(None, map(target.tokens.token, target.eos_ids))
    return marks is not None and not any(end in marks.end for end in ends)


def _parsed(target: TargetModel) -> str:
    response = "" if target.chat is None else response_template(target.chat)
    return marks_of(response) if response else ""


def _among(target: TargetModel, marks: str) -> Mapping[str, int]:
    return MappingProxyType({}) if target.tokens is None else _special(target.tokens, marks, target.eos_ids)


@lru_cache(maxsize=32)  # a vocabulary may have thousands of special tokens
def _special(tokens: TokenTable, marks: str, end_ids: frozenset[int]) -> Mapping[str, int]:
    named = ((tokens.token(id_), id_) for id_ in sorted(tokens.special_ids - end_ids))
    return MappingProxyType({name: id_ for name, id_ in named if name and name in marks})
