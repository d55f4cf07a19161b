"""A grammar's fuel runs out at the same token, whether drafts or another verifier brought the text."""

from contextlib import suppress

import pytest

from outrider.tokens import TokenTable
from speculative.errors import DeadEnd
from speculative.grammar import Grammar, GrammarKind
from tests.conftest import writing_tokenizer
from verifier_service.grammar.library import LibraryMatcher, MatcherFactory

EOS, WIDTH = 1, 320


@pytest.fixture(scope="module")
def factory() -> MatcherFactory:
    return MatcherFactory(TokenTable.from_json(writing_tokenizer().to_str()), (EOS,), WIDTH)


COSTLY = Grammar(GrammarKind.REGEX, "([a-c]{1,90}|[b-e]{3,70}){1,50}z")
"""Without a mask for each token its fuel would run out at the 128th."""
GROWING = Grammar(GrammarKind.REGEX, "([a-z]{1,200}){1,200}[a-z]{20000}")
"""Its fuel runs out at the 103rd token."""
MOST = 200


def extended(matcher: LibraryMatcher, most: int) -> list[int]:
    """The first allowed id at each place, up to `most` ids or to the end of what the grammar can do."""
    ids: list[int] = []
    with suppress(DeadEnd):
        while len(ids) < most:
            ids.append(int(matcher.allowed(()).nonzero()[0][0]))
            matcher.commit(ids[-1:])
    return ids


@pytest.mark.parametrize("grammar", [COSTLY, GROWING], ids=["costly", "growing"])
@pytest.mark.parametrize("moved_at", [60, 150])
def test_a_session_that_moves_goes_as_far_as_one_that_stays(
    factory: MatcherFactory, grammar: Grammar, moved_at: int
) -> None:
    stayed = extended(factory.matcher(grammar, ()), MOST)
    assert len(stayed) > 100
    moved = factory.matcher(grammar, stayed[:moved_at])
    assert stayed[:moved_at] + extended(moved, MOST - moved_at) == stayed


@pytest.mark.parametrize("at_once", [2, 7])
@pytest.mark.parametrize("looks_aside", [False, True], ids=["straight", "looking aside"])
@pytest.mark.parametrize("grammar", [COSTLY, GROWING], ids=["costly", "growing"])
def test_accepted_drafts_take_a_text_as_far_as_plain_decoding(
    factory: MatcherFactory, grammar: Grammar, at_once: int, looks_aside: bool
) -> None:
    stayed = extended(factory.matcher(grammar, ()), MOST)
    drafted = factory.matcher(grammar, ())
    ids: list[int] = []
    path: list[int] = [0]
    while path and len(ids) < MOST:
        path = []
        with suppress(DeadEnd):
            for _ in range(min(at_once, MOST - len(ids))):
                path.append(int(drafted.allowed(path).nonzero()[0][0]))
            if looks_aside:
                drafted.allowed([int(drafted.allowed(()).nonzero()[0][1])])
        drafted.commit(path)
        ids += path
    assert ids == stayed
