"""How a session comes by its matcher: hostile grammars end in errors, and nobody waits for another's long."""

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest, Overloaded, Unavailable
from speculative.grammar import Grammar, GrammarKind
from tests.in_time import in_time
from tests.verifier.grammar.samples import (
    COLOURS,
    EOS,
    OBJECT,
    SUM,
    THOUGHT,
    WIDTH,
    lark,
    regex,
    schema,
)
from verifier_service.grammar import vetting
from verifier_service.grammar.grammars import Grammars
from verifier_service.grammar.library import MatcherFactory
from verifier_service.grammar.vetting import Vetting


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
