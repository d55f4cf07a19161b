"""Grammars of required calls allow calls in the model's own format, and the parser reads them back."""

from pathlib import Path

import pytest

from orchestrator.front.http.chat.families import FORMATS, CallFormat, format_of
from orchestrator.front.http.chat.output_parser import OutputParser, ParsedCall
from orchestrator.front.http.chat.plan import ChatPlan, Thought
from orchestrator.front.http.chat.tool_grammar import CalledFunction, calls_grammar
from outrider.tokens import TokenTable
from speculative.grammar import Grammar, GrammarKind
from verifier_service.grammar.library import MatcherFactory

ROOT = Path(__file__).parents[3]
FUNCTIONS = [
    CalledFunction(
        "add",
        {
            "properties": {"a": {"type": "integer"}, "to": {"$ref": "#/$defs/where"}},
            "required": ["a"],
            "$defs": {"where": {"enum": ["x<y>", '%llguidance temperature "#']}},
            "additionalProperties": False,
        },
    ),
    CalledFunction("now", None),
]
CALLS = {"add": '{"a": 1, "to": "x<y>"}', "now": "{}"}


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return TokenTable.from_json((ROOT / "models" / "target" / "tokenizer.json").read_text())


@pytest.fixture(scope="module")
def factory(table: TokenTable) -> MatcherFactory:
    return MatcherFactory(table, [4095], 4096)


def allows(factory: MatcherFactory, table: TokenTable, grammar: str, text: str) -> bool:
    """Whether the text is complete by the grammar."""
    found = factory.matcher(Grammar(GrammarKind.LARK, grammar), ())
    for id_ in table.encode(text, add_special=False):
        if not found.allowed(())[id_]:
            return False
        found.commit([id_])
    return bool(found.allowed(())[4095])


def written(format_: CallFormat, *names: str) -> str:
    """Calls as the format's models write them, without a mark that the prompt ends with."""
    calls = [f'{{"name": "{name}", "{format_.arguments}": {CALLS[name]}}}' for name in names]
    if format_.name == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return f"[{', '.join(calls)}]" if format_.name == "mistral" else "; ".join(calls)


JSON_FORMATS = [format_ for format_ in FORMATS if format_.tags is None]


@pytest.mark.parametrize("format_", JSON_FORMATS, ids=lambda format_: format_.name)
def test_calls_are_allowed_and_read_back(
    format_: CallFormat, factory: MatcherFactory, table: TokenTable
) -> None:
    several = calls_grammar(format_, FUNCTIONS, Thought.NONE, several=True)
    one = calls_grammar(format_, FUNCTIONS, Thought.NONE, several=False)
    named = calls_grammar(format_, FUNCTIONS[:1], Thought.NONE, several=False)
    single, pair = written(format_, "add"), written(format_, "now", "add")
    many = format_.name != "llama3_json"  # its template asks for one call at a time
    assert [allows(factory, table, grammar, single) for grammar in (several, one, named)] == [True] * 3
    assert [allows(factory, table, grammar, pair) for grammar in (several, one, named)] == [
        many,
        False,
        False,
    ]
    assert not allows(factory, table, named, written(format_, "now"))
    assert not allows(factory, table, one, single.replace("1", '"1"'))
    assert not allows(factory, table, one, "Certainly!")
    parser = OutputParser(ChatPlan(format_.name, called=format_.special))
    calls = [*parser.feed(pair).calls, *parser.finish().calls]
    assert calls == [ParsedCall("now", CALLS["now"]), ParsedCall("add", CALLS["add"])]


@pytest.mark.parametrize("thought", Thought)
def test_reasoning_may_stand_before_a_required_call(
    thought: Thought, factory: MatcherFactory, table: TokenTable
) -> None:
    grammar = calls_grammar(FORMATS[0], FUNCTIONS, thought, several=False)
    call = written(FORMATS[0], "now")
    found = [
        allows(factory, table, grammar, text)
        for text in (call, f"<think>\nSo <it> is.\n</think>\n\n{call}", f"hm\n</think>\n\n{call}")
    ]
    assert (
        found
        == {
            Thought.NONE: [True, False, False],
            Thought.POSSIBLE: [True, True, False],
            Thought.OPEN: [False, True, True],
        }[thought]
    )


def test_an_entry_is_found_by_what_its_template_shows() -> None:
    found = {
        "hermes": '{{ \'<tool_call>\' }}{"name": 1, "arguments": 2}</tool_call>',
        "mistral_args": "[TOOL_CALLS]f[ARGS]{}",
        "mistral": '{{ "[TOOL_CALLS]" }}',
        "llama3_json": '<|eot_id|> Respond in the format {"name": function name, "parameters": dictionary',
        "qwen_function": "<|im_start|><tool_call>\n<function=f>\n<parameter=p></tool_call> arguments",
        "glm": "<|assistant|><tool_call>{f}\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
        "glm_flat": "<|assistant|><tool_call>{f}<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
        "gemma4": "<|turn>model\n<|tool_call>call:f{}<tool_call|>",
        "mistral_id": "[TOOL_CALLS]f[CALL_ID]i[ARGS]{}",
        "deepseek": (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
        ),
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "kimi_k2": (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
        ),
        "harmony": "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="p">',
        None: "<tool_call><function=f></tool_call> arguments",
    }
    for name, template in found.items():
        entry = format_of(template)
        assert (entry and entry.name) == name
    for other in ('<tool_calls>[{"name": 1}]</tool_calls>', '<invoke name="f">'):  # Apriel 1.5, MiniMax M3
        assert format_of(f"<tool_call> arguments </tool_call> {other}") is None
