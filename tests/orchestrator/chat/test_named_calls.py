"""Families that write calls as a name and JSON between marks: what their published formats show is read, in
any pieces, and is what a required call may be."""

import pytest

from orchestrator.front.http.chat.families import FORMATS, ThoughtMarks
from orchestrator.front.http.chat.output_parser import Parsed, ParsedCall
from orchestrator.front.http.chat.plan import Thought
from orchestrator.front.http.chat.planning import thought_marks
from orchestrator.front.http.chat.tool_grammar import CalledFunction, calls_grammar
from orchestrator.front.http.templated.known_templates import response_template
from orchestrator.front.http.templated.parse_order import marks_of
from outrider.tokens import ChatTemplate, TokenTable
from tests.conftest import writing_tokenizer
from tests.orchestrator.chat.judging import END, Judge, known, read_by
from verifier_service.grammar.library import MatcherFactory

LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [CalledFunction("look", LOOK), CalledFunction("now", None)]
OSLO = ParsedCall("look", '{"city": "Oslo", "days": 3}')
NOW = ParsedCall("now", "{}")
JSON = '{"city": "Oslo", "days": 3}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
HARMONY = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>" + JSON
NEXT = "<|start|>assistant"
SMALL = "[TOOL_CALLS]{}[CALL_ID]{}[ARGS]{}"
SPECIAL = {
    "deepseek": ["<｜begin▁of▁sentence｜>"],
    "deepseek_v31": ["<｜begin▁of▁sentence｜>"],
    "kimi_k2": ["<|im_middle|>"],
    "harmony": [
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|return|>",
        "<|call|>",
    ],
    "mistral_id": ["[INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
}
"""Special tokens of the families' tokenizers; the marks of the others are ordinary tokens."""

CALLS = {
    "deepseek": (
        f"<｜tool▁calls▁begin｜>{V3.format('look', JSON)}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{V3.format('look', JSON)}\n{V3.format('now', '{}')}<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜>{V31.format('look', JSON)}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{V31.format('look', JSON)}{V31.format('now', '{}')}<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        f"<|tool_calls_section_begin|>{KIMI.format('look', 0, JSON)}<|tool_calls_section_end|>",
        f"<|tool_calls_section_begin|>{KIMI.format('look', 2, JSON)}{KIMI.format('now', 3, '{}')}"
        "<|tool_calls_section_end|>",
    ),
    "mistral_id": (
        SMALL.format("look", "bVxZ0q123", JSON),
        SMALL.format("look", "bVxZ0q123", JSON) + SMALL.format("now", "000000001", "{}"),
    ),
    "harmony": (HARMONY, HARMONY + NEXT + HARMONY),
}
"""One call, and two, as the published formats have them: the chat templates of DeepSeek, Moonshot AI and
Mistral, and OpenAI's description of the harmony format."""
THOUGHTS = {"harmony": ThoughtMarks("<|channel|>analysis<|message|>", "<|end|>")}

RECORDED: dict[str, tuple[str, str, str, Parsed]] = {
    "deepseek v3, words before two calls": (
        "deepseek",
        "<｜User｜>hi<｜Assistant｜>",
        "I look.\n" + CALLS["deepseek"][1],
        Parsed("I look.", "", (OSLO, NOW)),
    ),
    "deepseek r1, behind the results of an earlier call": (
        "deepseek",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        "<think>\nHm.\n</think>\n\nIt is 4.",
        Parsed("It is 4.", "Hm."),
    ),
    "deepseek r1, reasoning that the prompt began": (
        "deepseek",
        "<｜User｜>hi<｜Assistant｜><think>\n",
        "Hm.\n</think>\n\n" + CALLS["deepseek"][0],
        Parsed("", "Hm.", (OSLO,)),
    ),
    "deepseek v3.1": (
        "deepseek_v31",
        "<｜User｜>hi<｜Assistant｜></think>",
        "I look." + CALLS["deepseek_v31"][1],
        Parsed("I look.", "", (OSLO, NOW)),
    ),
    "kimi k2": (
        "kimi_k2",
        "<|im_assistant|>assistant<|im_middle|>",
        "<think>Hm.</think>I look." + CALLS["kimi_k2"][1],
        Parsed("I look.", "Hm.", (OSLO, NOW)),
    ),
    "gpt-oss, reasoning and an answer": (
        "harmony",
        f"<|start|>user<|message|>2 + 2?<|end|>{NEXT}",
        f"<|channel|>analysis<|message|>Simple.<|end|>{NEXT}<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        Parsed("2 + 2 = 4.", "Simple."),
    ),
    "gpt-oss, reasoning and a call": (
        "harmony",
        f"<|end|>{NEXT}",
        f"<|channel|>analysis<|message|>Look.<|end|>{NEXT}{HARMONY}<|call|>",
        Parsed("", "Look.", (OSLO,)),
    ),
    "gpt-oss, words before a call whose end is a stop token": (
        "harmony",
        f"<|end|>{NEXT}",
        f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{HARMONY}",
        Parsed("I look.", "", (OSLO,)),
    ),
    "gpt-oss, the name before the channel": (
        "harmony",
        f"<|end|>{NEXT}",
        f"<|channel|>analysis<|message|>Look.<|end|>{NEXT} to=functions.look<|channel|>commentary json"
        f"<|message|>{JSON}",
        Parsed("", "Look.", (OSLO,)),
    ),
    "gpt-oss, text that a grammar made": ("harmony", f"<|end|>{NEXT}", '{"a": 1}', Parsed('{"a": 1}')),
    "gpt-oss, an answer that goes on": (
        "harmony",
        f"<|end|>{NEXT}<|channel|>final<|message|>How are",
        " you.",
        Parsed(" you."),
    ),
    "mistral small 3.2": ("mistral_id", "[/INST]", CALLS["mistral_id"][1], Parsed(calls=(OSLO, NOW))),
    "mistral small 3.2, without an id": (
        "mistral_id",
        "[/INST]",
        f"I look.[TOOL_CALLS]look[ARGS]{JSON}",
        Parsed("I look.", "", (OSLO,)),
    ),
    "minimax m2": (
        "minimax_m2",
        "]~b]ai\n<think>\n",
        'Hm.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Oslo'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        Parsed("I look.", "Hm.", (OSLO, NOW)),
    ),
}


@pytest.mark.parametrize("size", [1, 2, 7, 0])
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_answer_is_read_however_it_is_cut(name: str, size: int) -> None:
    format_, prompt, text, expected = RECORDED[name]
    assert read_by(format_, text, FUNCTIONS, prompt=prompt, size=size) == expected


def judge(name: str, thought: Thought, *, several: bool) -> Judge:
    """Says which texts a required call of a family may be, with the special tokens of the family."""
    format_ = known(name)
    tokenizer = writing_tokenizer()
    tokenizer.add_special_tokens(SPECIAL[name])
    table = TokenTable(tokenizer)
    marks = marks_of(response_template(ChatTemplate("".join(format_.shown_by))))
    named = {table.token(id_): id_ for id_ in table.special_ids if id_ > END}
    special = {mark: id_ for mark, id_ in named.items() if mark in marks}
    thoughts = THOUGHTS.get(name, ThoughtMarks("<think>", "</think>"))
    grammar = calls_grammar(format_, FUNCTIONS, thought, several=several, marks=thoughts, special=special)
    return Judge(MatcherFactory(table, [END], table.size), table, grammar)


@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_call_is_what_a_required_call_may_be(name: str) -> None:
    several, one = (judge(name, Thought.NONE, several=many) for many in (True, False))
    call, pair = CALLS[name]
    assert [several(call), one(call)] == [True, True]
    assert [several(pair), one(pair)] == [not known(name).alone, False]
    wrong = [call.replace("3", "12"), call.replace("3", '"3"'), call.replace("Oslo", "O"), call[:-1]]
    wrong += [call.replace("look", "peek"), call.replace('"days"', '"hours"'), "Certainly!", JSON]
    assert not any(map(one, wrong))


@pytest.mark.parametrize("thought", Thought)
@pytest.mark.parametrize("name", CALLS)
def test_reasoning_may_stand_before_a_required_call(name: str, thought: Thought) -> None:
    allows, (call, _) = judge(name, thought, several=False), CALLS[name]
    marks, tags = THOUGHTS.get(name, ThoughtMarks("<think>", "</think>")), known(name).tags
    assert tags is not None
    rest = f"So it is.{marks.end}{tags.thought}{call}"
    assert [allows(text) for text in (call, marks.begin + rest, rest)] == {
        Thought.NONE: [True, False, False],
        Thought.POSSIBLE: [True, True, False],
        Thought.OPEN: [False, name != "harmony", True],  # no text stands for a special token
    }[thought]


def test_reasoning_stands_between_a_family_s_marks() -> None:
    found = {}
    for format_ in FORMATS:
        shown = "".join(format_.shown_by)
        template = shown + "</think><|end|>"
        found[format_.name] = thought_marks(template, response_template(ChatTemplate(shown)))
    usual = ThoughtMarks("<think>", "</think>")
    assert all(found[name] == usual for name in ("deepseek", "deepseek_v31", "kimi_k2", "minimax_m2"))
    assert found["harmony"] == THOUGHTS["harmony"]
