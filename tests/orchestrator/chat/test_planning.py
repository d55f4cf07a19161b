"""A conversation becomes a prompt and a plan, and the plan decides what the message of the answer holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.front.http.accumulator import Piece
from orchestrator.front.http.bodies.templates import render_conversation
from orchestrator.front.http.chat.chat_fields import ChatRequest
from orchestrator.front.http.chat.conversation import chat_conversation
from orchestrator.front.http.chat.families import ThoughtMarks
from orchestrator.front.http.chat.plan import ChatPlan, Thought
from orchestrator.front.http.chat.planning import Rendered, planned
from orchestrator.front.http.chat.reasoning_count import ReasoningCount
from orchestrator.front.http.chat.tool_grammar import thoughts_grammar
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.openai_format import ChatCompletionFormat
from orchestrator.front.http.templated.known_templates import KNOWN
from outrider.tokens import TokenTable
from tests.conftest import writing_tokenizer

ROOT = Path(__file__).parents[3]
EMBEDDED = json.loads((ROOT / "models" / "target" / "tokenizer_config.json").read_text())["chat_template"]
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add"}}
TYPED = {
    "type": "function",
    "function": {
        "name": "put",
        "parameters": {"properties": {"unit": {"enum": [1, 2]}, "text": {"minLength": 1}}},
    },
}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
MISTRAL = "{{ tools | length if tools else 0 }}[TOOL_CALLS]|{{ '' }}"
THINKING = "{% if enable_thinking is false %}<think></think>{% else %}<think>\n{% endif %}"
WORDS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def rendered_as(text: str, *more: Any) -> Rendered:
    """A prompt for a model whose reasoning can precede a format."""
    return Rendered(text, *more, can_reason_before_format=True)


def plan(template: str, **fields: Any) -> tuple[str, ChatPlan]:
    request = ChatRequest.model_validate({"messages": HI, **fields})
    conversation = chat_conversation(request.messages, request)
    return planned(request, rendered_as(render_conversation(template, {}, conversation), template))


def test_the_embedded_template_shows_tools_calls_and_results() -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    text, found = plan(EMBEDDED, messages=messages, tools=[TOOL])
    assert text == (
        'tools:\n{"type": "function", "function": {"name": "add"}}\ncall a tool by <tool_call>\n'
        '{"name": NAME, "arguments": OBJECT}\n</tool_call>\n'
        f"user: hi\nassistant: \n{WORDS}\ntool: 2\nassistant:"
    )
    assert found == ChatPlan("hermes")


def test_null_is_a_field_left_out_in_tools_and_in_calls() -> None:
    nothing = dict.fromkeys(("description", "parameters", "strict"))
    tool = {"type": "function", "function": {"name": "add"} | nothing}
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL | {"type": None, "index": None}]}
    sparse = [*HI, turn | {"tool_calls": [CALL]}]
    assert plan(EMBEDDED, messages=[*HI, turn], tools=[tool]) == plan(EMBEDDED, messages=sparse, tools=[TOOL])
    default = {"name": "put", "parameters": {"properties": {"a": {"default": None, "enum": [None, 1]}}}}
    text, _ = plan(EMBEDDED, tools=[{"type": "function", "function": default}])
    assert json.dumps(default) in text, "nulls of a schema are values"


def test_without_a_choice_of_tools_the_model_hears_of_none() -> None:
    assert plan(EMBEDDED, tools=[TOOL], tool_choice="none") == ("user: hi\nassistant:", ChatPlan())


def only(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


SUB = {"type": "function", "function": {"name": "sub"}}


def test_of_allowed_tools_the_model_hears_alone() -> None:
    alone, _ = plan(EMBEDDED, tools=[SUB])
    text, found = plan(EMBEDDED, tools=[TOOL, SUB], tool_choice=only("auto", "sub"))
    assert (text, found) == (alone, ChatPlan("hermes", allowed=("sub",)))
    assert plan(EMBEDDED, tools=[SUB], tool_choice=only("auto", "sub"))[1] == ChatPlan("hermes")


def test_a_choice_among_no_tools_is_refused_by_what_it_says() -> None:
    for mode, says in (("auto", "allows tools"), ("required", "asks for a call")):
        with pytest.raises(FieldRefused, match=f"tool_choice {says}, but tools is missing"):
            plan(EMBEDDED, tool_choice=only(mode, "add"))


def test_a_required_call_is_of_an_allowed_tool() -> None:
    text, found = plan(EMBEDDED, tools=[SUB, TOOL], tool_choice=only("required", "sub"))
    assert (text, found) == plan(EMBEDDED, tools=[SUB], tool_choice="required")
    assert '"sub\\"' in found.grammar
    assert '"add\\"' not in found.grammar


def test_a_call_of_a_tool_that_is_not_allowed_stays_text() -> None:
    allowed, forbidden = (ChatPlan("hermes", allowed=(name,)) for name in ("add", "sub"))
    taken = ChatCompletionFormat(None, plan=allowed).whole(Piece(0, WORDS, finish="stop"))
    left = ChatCompletionFormat(None, plan=forbidden).whole(Piece(0, WORDS, finish="stop"))
    assert taken["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert (left["message"]["content"], left["finish_reason"]) == (WORDS, "stop")


def test_a_special_token_before_required_calls_is_part_of_the_prompt() -> None:
    text, found = plan(MISTRAL, tools=[TOOL], tool_choice="required")
    assert text == "1[TOOL_CALLS]|[TOOL_CALLS]"
    assert found.called
    assert found.grammar.startswith("start: ")
    text, found = plan(MISTRAL, tools=[TOOL])
    assert (text, found) == ("1[TOOL_CALLS]|", ChatPlan("mistral"))


def test_a_model_without_an_entry_answers_in_text_or_refuses_to_be_made_to_call() -> None:
    assert plan("x", tools=[TOOL]) == ("x", ChatPlan())
    with pytest.raises(FieldRefused, match="format of this model's tool calls is not known") as refused:
        plan("x", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}})
    assert refused.value.param == "tool_choice"


def test_the_checkpoint_s_response_template_goes_before_the_table() -> None:
    response = json.dumps({"start_anchor": "a:", "fields": {"content": {}}})

    def planned_by(template: str, **fields: Any) -> ChatPlan:
        request = ChatRequest.model_validate({"messages": HI, **fields})
        return planned(request, rendered_as("a:", template, response))[1]

    free = planned_by(EMBEDDED, tools=[TOOL])
    assert (free.format, json.loads(free.order)["allowed"]) == ("", None)
    assert json.loads(free.order)["tools"] == [TOOL]
    for none in (planned_by(EMBEDDED), planned_by(EMBEDDED, tools=[TOOL], tool_choice="none")):
        assert json.loads(none.order)["allowed"] == []
    called = planned_by(EMBEDDED, tools=[TOOL], tool_choice="required")
    assert (called.format, called.order, bool(called.grammar)) == ("hermes", "", True)
    with pytest.raises(FieldRefused, match="format of this model's tool calls is not known"):
        planned_by("x", tools=[TOOL], tool_choice="required")


def test_a_family_s_response_template_reads_its_required_calls() -> None:
    template = "<|turn>model\n<|channel>thought\n<channel|><|tool_call><tool_call|>"
    response = json.dumps(KNOWN["gemma4"])
    request = ChatRequest.model_validate(
        {"messages": HI, "tools": [TYPED], "tool_choice": {"type": "function", "function": {"name": "put"}}}
    )
    special = {"<|tool_call>": 7, '<|"|>': 8, "<channel|>": 9}
    prompt, found = planned(request, rendered_as("<|turn>model\n", template, response, special))
    assert prompt == "<|turn>model\n"
    assert (found.format, found.named, found.thought) == ("", True, Thought.POSSIBLE)
    assert found.marks == ThoughtMarks("<|channel>thought\n", "<channel|>")
    assert all(f"<[{id_}]>" in found.grammar for id_ in special.values())
    (tool,) = json.loads(found.order)["tools"]
    assert tool["function"]["parameters"]["properties"]["unit"] == {"enum": [1, 2], "type": ["integer"]}
    with pytest.raises(FieldRefused, match="format of this model's tool calls is not known"):
        planned(request, rendered_as("<|turn>model\n", template))


def test_reasoning_between_a_family_s_own_marks_is_counted() -> None:
    tokenizer = writing_tokenizer()
    tokenizer.add_special_tokens(["<|channel>", "<channel|>"])
    table = TokenTable(tokenizer)
    thought, answer = "<|channel>thought\nHm.<channel|>", "Yes."
    ids = table.encode(thought, add_special=False)
    count = ReasoningCount(table, Thought.POSSIBLE, ThoughtMarks("<|channel>thought\n", "<channel|>"))
    count.add([*ids, *table.encode(answer, add_special=False)])
    assert count.count == len(ids)
    none = ReasoningCount(table, Thought.POSSIBLE, ThoughtMarks("<|channel>thought\n", "<channel|>"))
    none.add(table.encode("<think>Hm.</think>", add_special=False))
    assert none.count == 0


def test_effort_reaches_the_template_and_decides_where_reasoning_stands() -> None:
    assert plan(THINKING, reasoning_effort="low")[1].thought is Thought.OPEN
    assert plan(THINKING, reasoning_effort="none")[1].thought is Thought.NONE
    assert plan(THINKING, chat_template_kwargs={"enable_thinking": False})[1].thought is Thought.NONE
    assert plan("</think>x")[1].thought is Thought.POSSIBLE
    with pytest.raises(FieldRefused, match="knows no effort"):
        plan("x", reasoning_effort="low")


OBJECT = {"type": "json_object"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": OBJECT},
        {"response_format": SCHEMA},
        {"response_format": OBJECT, "tools": [TOOL]},
        {"structured_outputs": {"json": {}}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": "[0-9]{4}"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"structured_outputs": {"grammar": "start: /<[a-z]+>/ /<[0-9]>/"}},
        {"structured_outputs": {"grammar": 'start: "<[7]>" // <[7]>'}},
    ],
)
def test_reasoning_that_the_prompt_opens_precedes_the_client_s_format(form: dict[str, Any]) -> None:
    preamble = thoughts_grammar(Thought.OPEN)
    assert plan(THINKING, **form)[1] == ChatPlan(thought=Thought.OPEN, preamble=preamble)
    template = "<tool_call> <function= <parameter= <|im_start|>assistant\n</think><think>\n"
    request = ChatRequest.model_validate({"messages": HI, **form})
    _, found = planned(request, rendered_as(template, template, json.dumps(KNOWN["qwen_function"])))
    assert found == ChatPlan(thought=Thought.OPEN, preamble=preamble)
    answer = Piece(0, 'Hm.\n</think>\n\n{"a": 1}', finish="stop", first=True)
    message = ChatCompletionFormat(None, plan=found).whole(answer)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"a": 1}')
    assert plan(THINKING, **form, reasoning_effort="none")[1] == ChatPlan()


@pytest.mark.parametrize("form", [{"response_format": SCHEMA}, {"structured_outputs": {"choice": ["yes"]}}])
def test_reasoning_is_possible_before_the_client_s_format_where_the_model_knows_its_marks(
    form: dict[str, Any],
) -> None:
    template = "{# <think></think> #}x"
    preamble = thoughts_grammar(Thought.POSSIBLE)
    assert plan(template, **form)[1] == ChatPlan(thought=Thought.POSSIBLE, preamble=preamble)
    assert plan("x", **form)[1] == ChatPlan()


@pytest.mark.parametrize("template", ["<think>\n{# </think> reasoning_effort #}", "{# <think></think> #}x"])
@pytest.mark.parametrize(
    "off", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_a_client_that_wants_no_reasoning_has_none_before_its_format_whatever_the_template_does(
    template: str, off: dict[str, Any]
) -> None:
    assert plan(template, response_format=SCHEMA, **off)[1] == ChatPlan()


def test_marks_that_are_special_tokens_stand_around_reasoning_by_their_ids() -> None:
    template = "<|turn>model\n<|channel>thought\n<channel|><|tool_call><tool_call|>"
    special = {"<|channel>": 7, "<channel|>": 9}
    request = ChatRequest.model_validate({"messages": HI, "response_format": SCHEMA})
    _, found = planned(request, rendered_as("<|turn>model\n", template, json.dumps(KNOWN["gemma4"]), special))
    assert found.marks == ThoughtMarks("<|channel>thought\n", "<channel|>")
    assert found.preamble.startswith('start: (<[7]> "thought\\n" rule_1)?')
    assert "<[9]>" in found.preamble


def test_where_reasoning_is_a_message_of_its_own_the_answer_begins_in_the_client_s_format() -> None:
    template = "<|start|>assistant <|channel|> <|message|> <|call|> <|end|>"
    request = ChatRequest.model_validate({"messages": HI, "response_format": SCHEMA})
    rendered = rendered_as("<|start|>assistant", template, json.dumps(KNOWN["harmony"]))
    assert planned(request, rendered)[1] == ChatPlan()


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"regex": r"[a-z ]{9}<\/think>[0-9]{4}"}},
        {"structured_outputs": {"grammar": 'start: /[a-z]+/ "</think>" /[0-9]+/'}},
        {"structured_outputs": {"grammar": "start: /[a-z]+/ <[7]> /[0-9]+/"}},
    ],
)
def test_a_format_that_ends_the_reasoning_itself_has_reasoning(form: dict[str, Any]) -> None:
    found = plan(THINKING, **form)[1]
    assert (found.thought, found.preamble) == (Thought.OPEN, "")


def test_json_that_looks_like_a_call_is_content_where_the_client_asks_for_json() -> None:
    text = json.dumps({"name": "add", "parameters": {}})
    llama = '<|eot_id|> {"name": function name, "parameters":'
    called, asked = (plan(llama, tools=[TOOL], **form)[1] for form in ({}, {"response_format": OBJECT}))
    messages = [
        ChatCompletionFormat(None, plan=found).whole(Piece(0, text, finish="stop"))["message"]
        for found in (called, asked)
    ]
    assert [message["content"] for message in messages] == [None, text]
    assert ["tool_calls" in message for message in messages] == [True, False]


def test_a_stream_has_reasoning_content_and_calls_in_order() -> None:
    form = ChatCompletionFormat(None, plan=ChatPlan("hermes", Thought.OPEN))
    texts = ["Hm", ".\n</think>\n\nLet me see.\n" + WORDS[:30], WORDS[30:], "\n" + WORDS, ""]
    pieces = [
        Piece(0, text, finish="stop" if number == 4 else None, first=not number)
        for number, text in enumerate(texts)
    ]
    deltas = [form.chunk(piece) for piece in pieces]
    calls = [call for event in deltas for call in event["delta"].pop("tool_calls", [])]
    assert [event["delta"] for event in deltas] == [
        {"role": "assistant", "reasoning_content": "Hm"},
        {"reasoning_content": ".", "content": "Let me see."},
        {},
        {},
        {},
    ]
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert [event["finish_reason"] for event in deltas] == [None] * 4 + ["tool_calls"]
    whole = form.whole(Piece(0, "".join(texts), finish="length", first=True))
    assert whole["finish_reason"] == "length"
    assert whole["message"]["content"] == "Let me see."
    assert len(whole["message"]["tool_calls"]) == 2
