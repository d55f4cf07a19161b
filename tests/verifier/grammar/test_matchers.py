"""Matchers of the grammar library behind the core's protocol: masks are a function of the ids."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.tokens import TokenTable
from speculative.errors import EmptySupport, InvalidRequest
from speculative.grammar import Grammar
from tests.conftest import tiny_tokenizer
from tests.verifier.grammar.samples import (
    COLOURS,
    EOS,
    OBJECT,
    PERSON,
    SUM,
    THOUGHT,
    WIDTH,
    lark,
    regex,
    schema,
)
from verifier_service.grammar.library import MatcherFactory


def ids_of(tokens: TokenTable, text: str) -> list[int]:
    return tokens.encode(text)


def walks(
    factory: MatcherFactory, grammar: Grammar, seed: int, most: int = 40
) -> Iterator[tuple[list[int], Any]]:
    """Random ways through a grammar: the ids so far and the mask after them, asked of one matcher."""
    chance = np.random.default_rng(seed)
    matcher, ids = factory.matcher(grammar, ()), list[int]()
    while len(ids) < most and ids[-1:] != [EOS]:
        mask = matcher.allowed(())
        yield ids, mask
        token = int(chance.choice(np.flatnonzero(mask)))
        matcher.commit([token])
        ids.append(token)


@pytest.mark.parametrize(
    "grammar",
    [
        schema(PERSON),
        regex(r"(ab|[c-e]+\d{1,3})*;"),
        OBJECT,
        SUM,
        COLOURS,
        replace(regex("[ab]{2}c"), preamble=THOUGHT),
    ],
    ids=lambda one: f"{one.kind} {one.preamble[:5]}",
)
def test_a_mask_is_a_function_of_the_ids(factory: MatcherFactory, grammar: Grammar) -> None:
    """However they came: one by one, replayed, as a path, or after other paths were looked at."""
    chance = np.random.default_rng(0)
    for seed in range(4):
        for ids, mask in walks(factory, grammar, seed):
            replayed = factory.matcher(grammar, ids)
            assert (replayed.allowed(()) == mask).all()
            cut = int(chance.integers(0, len(ids) + 1))
            matcher = factory.matcher(grammar, ids[:cut])
            for wrong in np.flatnonzero(matcher.allowed(()))[:3]:
                matcher.allowed((int(wrong),))
            for end in range(cut, len(ids) + 1):
                below = matcher.allowed(ids[cut:end])
            assert (below == mask).all()
            assert (matcher.allowed(ids[cut:]) == mask).all()


def test_what_follows_the_masks_is_what_the_grammar_says(factory: MatcherFactory, tokens: TokenTable) -> None:
    pattern = r"(ab|[c-e]+[0-9]{1,3})*;"
    ended = 0
    for seed in range(30):
        for ids, mask in walks(factory, regex(pattern), seed, 60):
            text = b"".join(map(tokens.token_bytes, ids)).decode(errors="replace")
            assert bool(mask[EOS]) == bool(re.fullmatch(pattern, text))
            ended += bool(mask[EOS])
    assert ended > 5


FORMS = [
    (schema(PERSON), '{"name":"Ada","age":36}', '{"name":"Ada"}'),
    (OBJECT, '{"}":"</t>"}', '["}"]'),
    (regex(r"\}[0-9]{2}/"), "}36/", "36/"),
    (SUM, "(1+2-36)", "(1+2"),
    (lark('start: A b // }\nA: "}" # {\nb: /[{}]{2}/'), "}{}", "}}"),
    (COLOURS, 'a "quoted" one', "blue"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), FORMS, ids=lambda one: getattr(one, "kind", None))
@pytest.mark.parametrize("thought", ["", "<t></t>", '<t>\nHm, {"name": <t> </ t>\n</t>\n\n'])
def test_a_text_may_follow_a_thought_and_is_bound_from_there_on(
    factory: MatcherFactory, tokens: TokenTable, grammar: Grammar, good: str, bad: str, thought: str
) -> None:
    reasoned = replace(grammar, preamble=THOUGHT)
    ids = ids_of(tokens, thought + good)
    assert factory.matcher(reasoned, ids).allowed(())[EOS]
    for cut in range(len(ids)):
        assert not factory.matcher(reasoned, ids[:cut]).allowed(())[EOS]
    with pytest.raises(InvalidRequest, match="is none that"):
        factory.matcher(reasoned, [*ids_of(tokens, thought + bad), EOS])


def test_within_a_thought_any_text_may_come_and_no_end(factory: MatcherFactory, tokens: TokenTable) -> None:
    matcher = factory.matcher(replace(OBJECT, preamble=THOUGHT), ids_of(tokens, "<t>Hm"))
    allowed = set(np.flatnonzero(matcher.allowed(())).tolist())
    ascii_ids = {id_ for id_ in range(tokens.size) if tokens.token_bytes(id_).isascii()}
    assert allowed & ascii_ids == {id_ for id_ in ascii_ids if tokens.token_bytes(id_)} - tokens.special_ids
    assert EOS not in allowed


def test_what_is_forced_behind_a_thought_is_drafted(factory: MatcherFactory, tokens: TokenTable) -> None:
    reasoned = replace(Grammar.one_of(["forced text"]), preamble=THOUGHT.replace(r" /\n{0,2}/", ""))
    assert list(factory.matcher(reasoned, ids_of(tokens, "<t>Hm")).forced(20)) == []
    chain = factory.matcher(reasoned, ids_of(tokens, "<t>Hm</t>")).forced(20)
    assert b"".join(tokens.token_bytes(one.token) for one in chain) == b"forced text"


@pytest.mark.parametrize(
    ("grammar", "text", "fits"),
    [
        (schema({"properties": {"a": {}}, "type": "object"}), '{"a":1,"a":2}', False),
        (schema({"properties": {"a": {}}, "type": "object"}), '{"a":1,"b":2,"b":3}', True),
        (schema({"additionalProperties": False, "type": "object"}), '{"b":1}', False),
        (OBJECT, '{"a":1,"a":2}', True),
    ],
)
def test_a_name_that_a_schema_lists_comes_once_and_another_may_come_twice(
    factory: MatcherFactory, tokens: TokenTable, grammar: Grammar, text: str, fits: bool
) -> None:
    matcher, ids = factory.matcher(grammar, ()), ids_of(tokens, text)
    assert all(matcher.allowed(ids[:place])[id_] for place, id_ in enumerate(ids)) == fits


def test_a_choice_allows_its_texts_and_nothing_else(factory: MatcherFactory, tokens: TokenTable) -> None:
    """Also where one text begins another, and with signs that notations of grammars use."""
    seen = set()
    for seed in range(40):
        *_, (ids, mask) = walks(factory, COLOURS, seed)
        text = b"".join(map(tokens.token_bytes, ids)).decode()
        assert mask[EOS]
        assert text in COLOURS.texts()
        seen.add(text)
    assert len(seen) > 3


def test_what_follows_a_lark_grammars_masks_is_a_text_of_the_grammar(
    factory: MatcherFactory, tokens: TokenTable
) -> None:
    ended = 0
    for seed in range(30):
        for ids, mask in walks(factory, SUM, seed):
            if mask[EOS]:
                text = b"".join(map(tokens.token_bytes, ids)).decode()
                assert re.fullmatch(r"[1-9(][0-9()+-]*", text)
                assert isinstance(eval(text), int)  # Python reads sums and brackets in the same way
                ended += 1
    assert ended > 30


def test_the_end_is_allowed_where_the_text_is_complete_and_forced_where_nothing_may_follow(
    factory: MatcherFactory, tokens: TokenTable
) -> None:
    matcher = factory.matcher(regex("ab?c?"), ())
    a, b, c = (ids_of(tokens, letter)[0] for letter in "abc")

    def allowed(*path: int) -> set[int]:
        return set(np.flatnonzero(matcher.allowed(path)).tolist())

    assert allowed() == {a}
    assert allowed(a) == {b, c, EOS}
    assert allowed(a, b) == {c, EOS}
    assert allowed(a, b, c) == {EOS}
    assert allowed(a, b, c, EOS) == {EOS}, "past the end, where a draft may lead"
    assert allowed(a, EOS, EOS) == {EOS}
    matcher.commit([a, b])
    assert allowed() == {c, EOS}
    assert matcher.allowed(()).shape == (WIDTH,)
    assert not matcher.allowed(())[tokens.size :].any(), "the padding of a wider target"


def test_ids_that_came_already_must_be_the_grammars(factory: MatcherFactory, tokens: TokenTable) -> None:
    ids = ids_of(tokens, '{"name": "Ada", "age": 36}')
    factory.matcher(schema(PERSON), [*ids, EOS])
    with pytest.raises(
        InvalidRequest, match=r"generated id \d+ \(number 3\) is none that json_schema allows"
    ):
        factory.matcher(schema(PERSON), [*ids[:3], EOS])


def test_a_dead_end_of_a_draft_does_not_last(tokens: TokenTable) -> None:
    """A tokenizer that cannot write a quote: an object opens, and then nothing can follow."""
    poor = TokenTable.from_json(tiny_tokenizer().to_str())
    factory = MatcherFactory(poor, (EOS,), 96)
    brace = ids_of(poor, "{")[0]
    matcher = factory.matcher(regex(r'\{"|[0-9]+'), ())
    with pytest.raises(EmptySupport, match="tokenizer"):
        matcher.allowed((brace,))
    assert matcher.allowed(())[brace]
    matcher.commit(ids_of(poor, "5"))
    assert matcher.allowed(())[EOS]
    with pytest.raises(InvalidRequest, match="tokenizer"):
        factory.matcher(regex('"a"'), ())


def test_one_sessions_work_is_no_burden_to_another_with_the_same_grammar(
    factory: MatcherFactory, tokens: TokenTable
) -> None:
    """Copies of one compiled grammar share its limits; sessions must not."""
    grammar, chance = regex("(a|b)*a(a|b){16}c"), np.random.default_rng(0)
    letters = [ids_of(tokens, letter)[0] for letter in "ab"]
    first, second = factory.matcher(grammar, ()), factory.matcher(grammar, ())

    def go_on() -> None:
        for _ in range(200_000):
            first.allowed(())
            first.commit([int(chance.choice(letters))])

    with pytest.raises(EmptySupport, match="too many states"):
        go_on()
    assert second.allowed(()).any()


def test_several_ends_and_special_ids(tokens: TokenTable) -> None:
    factory = MatcherFactory(tokens, (EOS, 0, 300), WIDTH)
    a = ids_of(tokens, "a")[0]
    assert np.flatnonzero(factory.matcher(regex("a"), [a]).allowed(())).tolist() == [0, EOS, 300]


@pytest.mark.parametrize("text", ["a/b", "a\nb", "a\\/b", 'a"b', "a/\nstart: /b", "[/]é", "<|eos|>x?", "#a"])
def test_a_regex_means_what_it_says_whatever_signs_it_has(
    factory: MatcherFactory, tokens: TokenTable, text: str
) -> None:
    plain = {"<|eos|>x?": "eos"}.get(text, text.replace("\\", "").replace("[/]", "/"))
    matcher = factory.matcher(regex(text), ids_of(tokens, plain))
    assert matcher.allowed(())[EOS]
