"""What a source asks about, off a text's path, takes nothing from the limits of the text's grammar."""

import pytest
from core_driver import CoreDriver
from ngram_lm import NgramLM

from outrider.tokens import TokenTable
from speculative.fragment import Fragment
from speculative.grammar import Grammar, GrammarKind
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from tests.conftest import writing_tokenizer
from verifier_service.engine.messages import InFlight, Observe, Offers
from verifier_service.engine.session import Session
from verifier_service.grammar.library import MatcherFactory

EOS, WIDTH = 1, 320
GROWING = Grammar(GrammarKind.REGEX, "([a-z]{1,200}){1,200}[a-z]{20000}")
"""Needs more than its limits allow after some hundred tokens."""


@pytest.fixture(scope="module")
def factory() -> MatcherFactory:
    return MatcherFactory(TokenTable.from_json(writing_tokenizer().to_str()), (EOS,), WIDTH)


def decoded(factory: MatcherFactory, params: SamplingParams, *, observed: bool) -> tuple[list[int], str]:
    """A text and why it ended; where it is observed, the source that asks has drafted other texts."""
    driver = CoreDriver(NgramLM(WIDTH))
    session = driver.open(new=400, params=params, remote=("far",), matcher=factory.matcher(GROWING, ()))
    if observed:
        driver.core.apply(Observe(session.handle, 1, 4), driver.now)
    words = factory.matcher(GROWING, ()).allowed(()).nonzero()[0].tolist()
    said = 0
    while driver.step():
        said += sum(len(each.observed.off_path) for each in driver.updates if each.observed is not None)
        if session in driver.core.sessions:
            offer_texts(driver, session, words)
    assert bool(said) == observed
    return driver.generated(session), driver.finish_of(session).message


def offer_texts(driver: CoreDriver, session: Session, words: list[int]) -> None:
    """Four texts of two tokens each, which the grammar allows."""
    begin = 7 * len(session.ids)
    tokens = tuple(words[(begin + at) % len(words)] for at in range(8))
    parents = (-1, -1, -1, -1, 0, 1, 2, 3)
    base = prefix_hash(session.ids)
    draft = Fragment(1, 1, len(session.ids), base, tokens, parents, (0.5,) * 4 + (0.4,) * 4)
    driver.core.apply(Offers(((session.handle, draft),), driver.now, InFlight(put=1)), driver.now)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_that_is_observed_goes_as_far_as_one_that_is_not(
    factory: MatcherFactory, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature)
    text, ended = decoded(factory, params, observed=False)
    assert "grammar" in ended
    assert len(text) > 30
    assert decoded(factory, params, observed=True) == (text, ended)
