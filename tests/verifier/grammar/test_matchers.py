"""The grammar library behind the core's protocol.

Masks are a function of the ids, and hostile grammars end in errors.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.tokens import TokenTable
from speculative.errors import EmptySupport, InvalidRequest, Overloaded, Unavailable
from speculative.grammar import Grammar, GrammarKind
from tests.conftest import tiny_tokenizer, writing_tokenizer
from tests.in_time import in_time
from verifier_service.grammar import vetting
from verifier_service.grammar.grammars import Grammars
from verifier_service.grammar.library import MatcherFactory
from verifier_service.grammar.vetting import Vetting

EOS, WIDTH = 1, 320
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
OBJECT = Grammar(GrammarKind.JSON_OBJECT)


def schema(of: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(of, separators=(",", ":")))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


SUM = lark("""
start: sum
sum: term (("+" | "-") term)*
term: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
""")
# As the front writes it: a mark may open it, another one closes it, and line ends may follow.
THOUGHT = r"""
start: ("<t>" rule_2)?
reasoning_1[lazy]: /(?s:.*)<\/t>/
rule_2: reasoning_1 /\n{0,2}/
"""
COLOURS = Grammar.one_of(["red", "reddish", "red wine", 'a "quoted" one', "naïve\n"])


@pytest.fixture(scope="module")
def tokens() -> TokenTable:
    return TokenTable.from_json(writing_tokenizer().to_str())


@pytest.fixture(scope="module")
def factory(tokens: TokenTable) -> MatcherFactory:
    return MatcherFactory(tokens, (EOS,), WIDTH)


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


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def chain(length: int) -> dict[str, Any]:
    """Definitions that each contain the next one."""
    defs: dict[str, Any] = {f"{n}": {"items": {"$ref": f"#/d/{n + 1}"}} for n in range(length)}
    return {"d": {**defs, f"{length}": {}}, "$ref": "#/d/0"}


BAD = {
    "an unknown type": (schema({"type": "nonsense"}), "nonsense"),
    "false": (schema({"properties": {"a": False}, "required": ["a"], "type": "object"}), "unsatisfiable"),
    "an empty enum": (schema({"enum": []}), "empty"),
    "lengths crossed": (schema({"type": "string", "minLength": 3, "maxLength": 1}), "minLength"),
    "ranges crossed": (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "two types at once": (schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "incompatible"),
    "a bad pattern": (schema({"type": "string", "pattern": "(("}), "unclosed group"),
    "a reference to nothing": (schema({"$ref": "#/$defs/none"}), "/$defs/none"),
    "a reference to a file": (schema({"$ref": "file:///etc/passwd"}), "does not fetch"),
    "itself": (schema({"$ref": "#"}), "no text at all"),
    "what cannot be enforced": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "the library's own options": (schema({"x-guidance": {"lenient": True}, "not": {}}), "x-guidance"),
    "too many cases": (
        schema(
            {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]}
        ),
        "too large",
    ),
    "a long chain": (schema(chain(1_500)), "nested too deeply"),
    "2,000 levels": (Grammar(GrammarKind.JSON_SCHEMA, nested(130)), "recursion limit"),
    "a counter to a million": (schema({"type": "integer", "multipleOf": 1_000_003}), "more than 1 s"),
    "a lone surrogate": (Grammar(GrammarKind.JSON_SCHEMA, '{"const": "\\ud800"}'), "hex escape"),
    "not a number": (Grammar(GrammarKind.JSON_SCHEMA, '{"const": NaN}'), "json_schema"),
    "an open group": (regex("(("), "unclosed group"),
    "nothing matches": (regex(r"[^\s\S]"), "no text at all"),
    "look-ahead": (regex("(?=a)b"), "look-ahead"),
    "a back-reference": (regex(r"(a)\1"), "backreferences"),
    "a word boundary": (regex(r"a\bb"), "not supported"),
    "a lone backslash": (regex("a\\"), "backslash"),
    "300 groups in each other": (regex("(" * 300 + "a" + ")" * 300), "nest"),
    "no start": (lark("begin: /a/"), "has no rule `start`"),
    "another language": (lark('root ::= "a"'), "the text looks like GBNF"),
    "options of the library": (lark('%llguidance {"no_forcing": false}\nstart: /a/'), "%llguidance"),
    "a special token": (lark('start: "<|eos|>" <|eos|>'), "lark has <|eos|>: special tokens"),
    "a rule's temperature": (lark("start: x\nx[temperature=0.5]: /a*/"), "set the request's temperature"),
    "a rule that is not there": (lark("start: nothing"), 'unknown name: "nothing"'),
    "a quote without an end": (lark('start: x\nx: "a'), "line 2, column 6: lexer error"),
    "a rule of itself alone": (lark("start: start"), "no text at all"),
    "an import of a file": (lark("%import python.name\nstart: name"), "Unknown common regex: python.name"),
    "an explosion": (regex("a?" * 1000 + "a" * 1000), "too many expressions"),
}

FAULTS = {
    "preamble has <x>: special tokens": replace(regex("a"), preamble="start: <x>"),
    "preamble has %llguidance": replace(lark("start: /a/"), preamble="%llguidance {}\nstart: /a/"),
    "preamble has temperature": replace(OBJECT, preamble="start: x\nx[temperature=0.5]: /a/"),
    "preamble has no rule `start`": replace(SUM, preamble="begin: /a/"),
    f"preamble has <[{EOS}]>, but": replace(COLOURS, preamble=f"start: <[{EOS}]>"),
    "preamble cannot be used: line 3, column 6: lexer error": replace(
        regex("a"), preamble='start: x\n\nx: "a'
    ),
    "regex cannot be used: unclosed group": replace(regex("(("), preamble=THOUGHT),
    "lark has <x>: special tokens": replace(lark("start: <x>"), preamble=THOUGHT),
    f"lark has <[{EOS}]>, but": replace(lark(f"start: <[{EOS}]>"), preamble=THOUGHT),
    "lark cannot be used: line 3, column 6: lexer error": replace(
        lark('start: x\n\nx: "a'), preamble=THOUGHT
    ),
}
"""Faults of one part of a grammar: the message names the part, and lines count from its own first one."""


@pytest.mark.parametrize("says", FAULTS)
async def test_a_fault_is_told_of_the_part_that_has_it(
    tokens: TokenTable, factory: MatcherFactory, says: str
) -> None:
    async with serving(tokens) as grammars:
        with pytest.raises(InvalidRequest, match=f"^{re.escape(says)}"):
            await verdict(grammars, FAULTS[says])
    with pytest.raises(InvalidRequest, match=f"^{re.escape(says)}"):
        factory.matcher(FAULTS[says], ())


@asynccontextmanager
async def serving(tokens: TokenTable | None, end_ids: tuple[int, ...] = (EOS,)) -> AsyncIterator[Grammars]:
    grammars = Grammars(tokens, end_ids, WIDTH)
    try:
        yield grammars
    finally:
        grammars.close()


async def verdict(grammars: Grammars, grammar: Grammar) -> None:
    """As a client finds out, who comes again while there is no time for it."""
    while True:
        try:
            await grammars.matcher(grammar, ())
            return
        except Overloaded:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_grammar_is_refused_with_what_is_wrong(tokens: TokenTable, what: str) -> None:
    grammar, says = BAD[what]
    async with serving(tokens) as grammars:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=re.escape(says)) as caught:
                await verdict(grammars, grammar)
            assert str(caught.value).startswith(str(grammar.kind))
            assert "\n" not in str(caught.value)
            assert "no_forcing" not in str(caught.value), "none of our own words"


async def test_a_target_without_the_means_says_so(tokens: TokenTable) -> None:
    for table, ends, says in ((None, (EOS,), "no tokenizer"), (tokens, (), "no end-of-sequence id")):
        async with serving(table, ends) as grammars:
            with pytest.raises(InvalidRequest, match=f"json_object is not possible: the target has {says}"):
                await grammars.matcher(OBJECT, ())


async def test_the_loop_goes_on_while_grammars_are_compiled(tokens: TokenTable) -> None:
    """A hostile one does not hold up those that are known already, nor the loop."""
    async with serving(tokens) as grammars:
        await grammars.matcher(OBJECT, ())
        hostile = asyncio.create_task(grammars.matcher(BAD["a counter to a million"][0], ()))
        count, began = 0, time.monotonic()
        while not hostile.done() and count < 20:
            await grammars.matcher(OBJECT, ())
            count += 1
        in_time(not hostile.done())
        assert count == 20
        in_time(time.monotonic() - began < 20 * 0.5)
        with pytest.raises((InvalidRequest, Overloaded)):
            await hostile


async def test_too_many_at_once_are_refused_with_a_time(
    tokens: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vetting, "fault", lambda self, text: time.sleep(0.01) or "")
    async with serving(tokens) as grammars:
        tasks = [asyncio.create_task(grammars.matcher(regex(f"a{{{n}}}"), ())) for n in range(1, 25)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, Overloaded)]
        in_time(len(refused) == 8, len(refused))
        assert refused[0].retry_after_s > 0
        await grammars.matcher(regex("a{24}"), ())


async def test_many_sessions_of_one_grammar_at_once_are_no_crowd(tokens: TokenTable) -> None:
    async with serving(tokens) as grammars:
        made = await asyncio.gather(*(grammars.matcher(OBJECT, ()) for _ in range(100)))
        assert len({id(matcher) for matcher in made}) == 100
        crowd = (grammars.matcher(OBJECT, ()) for _ in range(300))
        answers = await asyncio.gather(*crowd, return_exceptions=True)
        assert sum(isinstance(answer, Overloaded) for answer in answers) == 300 - 256


async def test_one_vetting_serves_all_that_ask_the_same(
    tokens: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    real = Vetting.fault
    monkeypatch.setattr(Vetting, "fault", lambda self, text: (tried.append(text), real(self, text))[1])
    async with serving(tokens) as grammars:
        made = await asyncio.gather(*(grammars.matcher(OBJECT, ()) for _ in range(16)))
        assert len(tried) == 1
        assert len({id(matcher) for matcher in made}) == 16, "each session has its own"
        for n in range(300):
            grammars._verdicts[regex(f"x{n}")] = next(iter(grammars._verdicts.values()))
        await grammars.matcher(regex("y"), ())
        assert len(grammars._verdicts) == 256
        assert OBJECT not in grammars._verdicts


async def test_no_time_to_find_out_is_no_verdict(tokens: TokenTable, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tokens) as grammars:
        with monkeypatch.context() as patched:
            patched.setattr(vetting, "WALL_S", 0.0)
            with pytest.raises(Overloaded, match="too busy"):
                await grammars.matcher(OBJECT, ())
        await grammars.matcher(OBJECT, ())


async def test_a_trial_that_a_full_machine_ends_is_no_verdict(
    tokens: TokenTable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o700)
    async with serving(tokens) as grammars:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", str(killed))
            with pytest.raises(Overloaded, match="could not compile"):
                await grammars.matcher(OBJECT, ())
        await grammars.matcher(OBJECT, ())


def test_closing_ends_a_trial() -> None:
    hostile = BAD["a counter to a million"][0]
    from threading import Timer

    from verifier_service.grammar.library import written

    vetting = Vetting()
    timer = Timer(0.05, vetting.close)
    timer.start()
    began = time.monotonic()
    with pytest.raises(Overloaded):
        vetting.fault(written(hostile))
    in_time(time.monotonic() - began < 5)
    timer.join()


async def test_whoever_waits_as_it_closes_is_sent_elsewhere(tokens: TokenTable) -> None:
    async with serving(tokens) as grammars:
        await grammars.matcher(OBJECT, ())
        waiting = [asyncio.create_task(grammars.matcher(regex(f"a{{{n}}}"), ())) for n in range(1, 4)]
        gone = asyncio.create_task(grammars.matcher(regex("b"), ()))
        await asyncio.sleep(0)
        grammars.close()
        gone.cancel()
        waiting += [asyncio.create_task(grammars.matcher(known, ())) for known in (OBJECT, regex("c"))]
        answers = await asyncio.gather(*waiting, gone, return_exceptions=True)
    assert {str(answer) for answer in answers[:-1]} == {"this verifier is stopping"}
    assert {type(answer) for answer in answers[:-1]} == {Unavailable}
    assert gone.cancelled(), "who has left is told nothing"


def test_a_trial_needs_nothing_of_the_repository() -> None:
    from pathlib import Path

    import verifier_service.grammar.trial as trial

    text = Path(trial.__file__).read_text()
    assert not re.search(r"^(from|import) (speculative|outrider|verifier_service)", text, re.M)
    assert sys.modules["verifier_service.grammar.trial"] is trial
