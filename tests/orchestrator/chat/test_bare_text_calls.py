"""Required calls of families that write texts bare: what their templates show is allowed, and read back."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from orchestrator.front.http.chat.families import FORMATS, CallFormat, ThoughtMarks
from orchestrator.front.http.chat.output_parser import Parsed, ParsedCall
from orchestrator.front.http.chat.plan import Thought
from orchestrator.front.http.chat.schema_view import with_types
from orchestrator.front.http.chat.tool_grammar import CalledFunction, calls_grammar
from orchestrator.front.http.field_faults import FieldRefused
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest
from speculative.grammar import Grammar, GrammarKind
from speculative.request_bounds import MAX_LARK_BYTES
from tests.conftest import writing_tokenizer
from tests.in_time import in_time
from tests.orchestrator.chat.judging import END, Judge, known, read_by
from verifier_service.grammar.library import MatcherFactory

MARKS = ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"]
ANY = {"type": "string"}
PLACE = {
    "type": "object",
    "properties": {"y": {"type": "number"}, "x": {"type": "number"}},
    "required": ["x"],
}
LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "at": {"type": "array", "items": PLACE, "maxItems": 2},
    },
    "required": ["city"],
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
FUNCTIONS = [CalledFunction("look", LOOK), CalledFunction("now", None)]
WRITTEN = {
    "qwen_function": (
        "<tool_call>\n<function=look>\n<parameter=city>\n  New\nYork\n</parameter>\n<parameter=days>\n"
        '3\n</parameter>\n<parameter=unit>\nC\n</parameter>\n<parameter=at>\n[{"y": 1, "x": 2.5}]'
        "\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm": (
        "\n<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>  New\nYork</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n"
        '<arg_key>at</arg_key>\n<arg_value>[{"y": 1, "x": 2.5}]</arg_value>\n</tool_call>'
    ),
    "glm_flat": (
        "<tool_call>look<arg_key>city</arg_key><arg_value>  New\nYork</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value><arg_key>unit</arg_key><arg_value>C</arg_value><arg_key>at</arg_key>"
        '<arg_value>[{"y": 1, "x": 2.5}]</arg_value></tool_call>'
    ),
    "minimax_m2": (
        '<invoke name="look">\n<parameter name="city">  New\nYork</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="unit">C</parameter>\n'
        '<parameter name="at">[{"y": 1, "x": 2.5}]</parameter>\n</invoke>\n'
    ),
    "gemma4": (
        '<|tool_call>call:look{at:[{x:2.5,y:1}],city:<|"|>  New\nYork<|"|>,days:3,'
        'unit:<|"|>C<|"|>}<tool_call|>'
    ),
}
"""One call of each family, as the family's published chat template writes the call of an earlier turn."""
NOW = {
    "qwen_function": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>now\n</tool_call>",
    "glm_flat": "<tool_call>now</tool_call>",
    "minimax_m2": '<invoke name="now">\n</invoke>\n',
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
}
ARGUMENTS = {"city": "  New\nYork", "days": 3, "unit": "C", "at": [{"y": 1, "x": 2.5}]}
THOUGHTS = {"gemma4": ThoughtMarks("<|channel>thought\n", "<channel|>")}


@pytest.fixture(scope="module")
def table() -> TokenTable:
    """A tokenizer that writes any text, and has Gemma's marks as special tokens."""
    tokenizer = writing_tokenizer()
    tokenizer.add_special_tokens(MARKS)
    return TokenTable(tokenizer)


@pytest.fixture(scope="module")
def special(table: TokenTable) -> dict[str, int]:
    return {table.token(id_): id_ for id_ in table.special_ids if table.token(id_) in MARKS}


@pytest.fixture(scope="module")
def factory(table: TokenTable) -> MatcherFactory:
    return MatcherFactory(table, [END], table.size)


def answer(name: str, *calls: str) -> str:
    """The answer of these calls."""
    tags = known(name).tags
    assert tags is not None
    return tags.around[0] + tags.between.join(calls) + tags.around[1]


def parsed(name: str, text: str, functions: Sequence[CalledFunction] = FUNCTIONS) -> Parsed:
    return read_by(name, text, functions)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_recorded_call_is_allowed_and_read_back_with_its_types(
    name: str, factory: MatcherFactory, table: TokenTable, special: dict[str, int]
) -> None:
    several, one = (
        Judge(
            factory,
            table,
            calls_grammar(known(name), FUNCTIONS, Thought.NONE, several=many, special=special),
        )
        for many in (True, False)
    )
    text, now = answer(name, WRITTEN[name]), answer(name, NOW[name])
    pair = answer(name, WRITTEN[name], NOW[name])
    assert [several(text), one(text), one(now)] == [True] * 3
    assert [several(pair), one(pair)] == [True, False]
    for wrong in (text.replace("3", "12"), text.replace("3", "three"), "Certainly!", text[:-1]):
        assert not one(wrong)
    for wrong in (
        "C",
        "New\nYork",
        "city",
        "look",
    ):  # no such unit, too short, no such argument, no such function
        assert not one(text.replace(wrong, "Z" if wrong != "New\nYork" else "", 1).replace("  ", ""))
    calls = parsed(name, pair).calls
    assert [call.name for call in calls] == ["look", "now"]
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS, {}]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_may_hold_anything_but_the_marks_that_end_it(
    name: str, factory: MatcherFactory, table: TokenTable, special: dict[str, int]
) -> None:
    functions = [CalledFunction("put", {"properties": {"text": ANY}, "required": ["text"]})]
    judge = Judge(
        factory, table, calls_grammar(known(name), functions, Thought.NONE, several=False, special=special)
    )
    empty = parsed_text(name, "")
    for text in ("", " ", "a < b", '{"x": "</x>"}', "\n\n# é\n", "null", "12", "<parameter", "\\"):
        written = empty.replace("\0", text)
        assert judge(written), text
        (call,) = parsed(name, written, functions).calls
        assert json.loads(call.arguments) == {"text": text}
    tags = known(name).tags
    assert tags is not None
    assert not judge(empty.replace("\0", f"a{tags.text.strip()}b"))


def parsed_text(name: str, text: str) -> str:
    """The call `put` with a text whose place is a null character."""
    tags, format_ = known(name).tags, known(name)
    assert tags is not None
    if name == "gemma4":
        return f"{format_.begin}put{{text:{tags.text}\0{tags.text}}}{format_.end}"
    begin, end = tags.key
    return answer(
        name, f"{format_.begin}put{tags.named}{begin}text{end}\0{tags.text}{tags.value}{format_.end}"
    )


def test_calls_of_a_name_and_json_stand_behind_one_another() -> None:
    tokenizer = writing_tokenizer()
    marks = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
    tokenizer.add_special_tokens(marks)
    table = TokenTable(tokenizer)
    special = {table.token(id_): id_ for id_ in table.special_ids if table.token(id_) in marks}
    thinking = ThoughtMarks("[THINK]", "[/THINK]")
    grammar = calls_grammar(
        known("mistral_args"), FUNCTIONS, Thought.POSSIBLE, several=True, marks=thinking, special=special
    )
    judge = Judge(MatcherFactory(table, [END], table.size), table, grammar)
    call = '[TOOL_CALLS]look[ARGS]{"city": "New\\nYork", "days": 3}'
    text = f"[THINK]So [it] is.[/THINK]{call}[TOOL_CALLS]now[ARGS]{{}}"
    assert judge(text)
    assert judge(call)
    assert not judge(call.replace("3", "12"))
    expected = (ParsedCall("look", '{"city": "New\\nYork", "days": 3}'), ParsedCall("now", "{}"))
    assert parsed("mistral_args", text) == Parsed("", "So [it] is.", expected)


@pytest.mark.parametrize("thought", Thought)
@pytest.mark.parametrize("name", WRITTEN)
def test_reasoning_may_stand_before_a_required_call(
    name: str, thought: Thought, factory: MatcherFactory, table: TokenTable, special: dict[str, int]
) -> None:
    marks = THOUGHTS.get(name, ThoughtMarks("<think>", "</think>"))
    grammar = calls_grammar(known(name), FUNCTIONS, thought, several=False, marks=marks, special=special)
    judge, call = Judge(factory, table, grammar), answer(name, NOW[name])
    texts = (call, f"{marks.begin}So <it> is.{marks.end}{call}", f"hm{marks.end}{call}")
    assert [judge(text) for text in texts] == {
        Thought.NONE: [True, False, False],
        Thought.POSSIBLE: [True, True, False],
        Thought.OPEN: [False, name != "gemma4", True],  # no text stands for a special token
    }[thought]


def test_nested_values_and_schemas_that_contain_themselves(
    factory: MatcherFactory, table: TokenTable, special: dict[str, int]
) -> None:
    tree = {
        "type": "object",
        "properties": {
            "in-side": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            "b": {"type": "boolean"},
        },
    }
    schema = {"properties": {"tree": {"$ref": "#/$defs/tree"}, "any": {}}, "$defs": {"tree": tree}}
    functions = [CalledFunction("grow", schema)]
    grammar = calls_grammar(known("gemma4"), functions, Thought.NONE, several=False, special=special)
    judge = Judge(factory, table, grammar)
    text = (
        '<|tool_call>call:grow{any:{<|"|>k<|"|>:[1,null,<|"|>s<|"|>]},tree:{b:true,<|"|>in-side<|"|>:[{},'
        '{<|"|>in-side<|"|>:[]}]}}<tool_call|>'
    )
    assert judge(text)
    (call,) = parsed("gemma4", text, functions).calls
    assert json.loads(call.arguments) == {
        "any": {"k": [1, None, "s"]},
        "tree": {"b": True, "in-side": [{}, {"in-side": []}]},
    }


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [("^[a-z]+$", "ab", "a1"), ("[0-9]/x", "a1/xb", "a1x"), ("^(a|b)", "bz", "za"), (r"\$$", "a$", "a")],
)
def test_a_text_has_its_schema_s_pattern(
    pattern: str, right: str, wrong: str, factory: MatcherFactory, table: TokenTable
) -> None:
    functions = [CalledFunction("f", {"properties": {"text": {"type": "string", "pattern": pattern}}})]
    judge = Judge(factory, table, calls_grammar(known("glm_flat"), functions, Thought.NONE, several=False))
    found = parsed_text("glm_flat", "").replace("put", "f")
    assert [judge(found.replace("\0", text)) for text in (right, wrong)] == [True, False]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a word that narrows texts": (
        "glm",
        {"properties": {"a": {"type": "string", "not": {}}}},
        "have not at a",
    ),
    "a word about all arguments": ("glm", {"minProperties": 1}, "have minProperties at their top"),
    "unique items": (
        "gemma4",
        {"properties": {"a": {"uniqueItems": True, "type": "array"}}},
        "uniqueItems at a",
    ),
    "a name that no tag can have": ("qwen_function", {"properties": {"a>b": ANY}}, 'the name "a>b"'),
    "a reference out of $defs": (
        "glm",
        {"properties": {"a": {"type": "array", "items": {"$ref": "#/properties/b"}}, "b": ANY}},
        "refer to '#/properties/b'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_schema_that_the_format_cannot_enforce_is_refused_by_name(case: str) -> None:
    name, schema, says = REFUSED[case]
    with pytest.raises(FieldRefused, match=says) as refused:
        calls_grammar(known(name), [CalledFunction("f", schema)], Thought.NONE, several=False)
    assert refused.value.param == "tools"


DOUBLING = {
    "properties": {"a": {"$ref": "#/$defs/0"}},
    "$defs": {
        **{str(step): {"anyOf": [{"$ref": f"#/$defs/{step + 1}"}] * 2} for step in range(40)},
        "40": {"type": "string"},
    },
}
"""A schema whose references double at each step."""


def test_references_that_double_at_each_step_are_no_work_that_doubles() -> None:
    began, function = time.process_time(), CalledFunction("f", DOUBLING)
    with pytest.raises(FieldRefused, match="more than 4096 schemas"):
        calls_grammar(known("glm"), [function], Thought.NONE, several=False)
    assert len(calls_grammar(known("gemma4"), [function], Thought.NONE, several=False)) < 4096
    with pytest.raises(FieldRefused, match="more than 4096 schemas"):
        with_types("f", DOUBLING)
    in_time(time.process_time() - began < 2.0)


@pytest.mark.parametrize("format_", FORMATS, ids=lambda format_: format_.name)
def test_as_many_tools_as_a_request_may_have_make_a_grammar_that_is_taken(format_: CallFormat) -> None:
    schema = {"properties": {f"argument_{number}": ANY for number in range(10)}, "required": ["argument_3"]}
    functions = [CalledFunction(f"function_{number}", schema) for number in range(128)]
    grammar = calls_grammar(format_, functions, Thought.POSSIBLE, several=True)
    assert len(grammar) < MAX_LARK_BYTES


def test_an_object_that_allows_nothing_is_empty(
    factory: MatcherFactory, table: TokenTable, special: dict[str, int]
) -> None:
    nothing = {"type": "object", "additionalProperties": False}
    functions = [CalledFunction("f", {"properties": {"a": nothing}})]
    grammar = calls_grammar(known("gemma4"), functions, Thought.NONE, several=False, special=special)
    judge = Judge(factory, table, grammar)
    texts = ("{}", "{a:{}}", "{a:{b:1}}")
    assert [judge(f"<|tool_call>call:f{text}<tool_call|>") for text in texts] == [True, True, False]


def test_an_id_that_is_no_special_token_of_the_target_is_refused(factory: MatcherFactory) -> None:
    for id_ in (END, 70, 99_999):
        with pytest.raises(InvalidRequest, match=f"{id_} is no special token"):
            factory.matcher(Grammar(GrammarKind.LARK, f"start: <[{id_}]>"), ())
