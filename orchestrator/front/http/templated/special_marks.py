"""Which special tokens of a model are marks in its answers: parsers need their text, grammars their ids."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.http.chat.families import THINK
from orchestrator.front.http.templated.known_templates import response_template
from orchestrator.front.http.templated.parse_order import marks_of
from outrider.tokens import TokenTable


def special_marks(target: TargetModel) -> Mapping[str, int]:
    """Ids of the special tokens that are marks in the model's answers, by their text.

    The marks are those of its response template; without one, those around reasoning.
    """
    if target.chat is None or target.tokens is None:
        return MappingProxyType({})
    response = response_template(target.chat)
    marks = marks_of(response) if response else "\n".join(THINK) if THINK.end in target.chat.source else ""
    return _special_marks(target.tokens, marks, target.eos_ids)


@lru_cache(maxsize=16)  # a vocabulary may have thousands of special tokens
def _special_marks(tokens: TokenTable, marks: str, end_ids: frozenset[int]) -> Mapping[str, int]:
    named = ((tokens.token(id_), id_) for id_ in sorted(tokens.special_ids - end_ids))
    return MappingProxyType({name: id_ for name, id_ in named if name and name in marks})
