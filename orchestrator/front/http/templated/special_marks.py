"""Which special tokens of a model are marks in its answers: parsers need their text, grammars their ids."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.http.templated.known_templates import response_template
from orchestrator.front.http.templated.parse_order import marks_of
from outrider.tokens import TokenTable


def special_marks(target: TargetModel) -> Mapping[str, int]:
    """Ids of the special tokens that the model's response template has as marks, by their text."""
    if target.chat is None or target.tokens is None or not (response := response_template(target.chat)):
        return MappingProxyType({})
    return _special_marks(target.tokens, response, target.eos_ids)


@lru_cache(maxsize=16)  # a vocabulary may have thousands of special tokens
def _special_marks(tokens: TokenTable, response: str, end_ids: frozenset[int]) -> Mapping[str, int]:
    marks = marks_of(response)
    named = ((tokens.token(id_), id_) for id_ in sorted(tokens.special_ids - end_ids))
    return MappingProxyType({name: id_ for name, id_ in named if name and name in marks})
