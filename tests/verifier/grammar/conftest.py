"""A tokenizer that writes any text, and a factory of matchers over it."""

import pytest

from outrider.tokens import TokenTable
from tests.conftest import writing_tokenizer
from tests.verifier.grammar.samples import EOS, WIDTH
from verifier_service.grammar.library import MatcherFactory


@pytest.fixture(scope="module")
def tokens() -> TokenTable:
    return TokenTable.from_json(writing_tokenizer().to_str())


@pytest.fixture(scope="module")
def factory(tokens: TokenTable) -> MatcherFactory:
    return MatcherFactory(tokens, (EOS,), WIDTH)
