"""Earlier calls of a conversation stand in the prompt as their family's chat template writes them."""

import re
from typing import Any

from orchestrator.front.http.bodies.templates import render_conversation
from orchestrator.front.http.chat.conversation import ChatConversation

EACH = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
KIMI = (
    EACH + "{% if loop.first %}<|tool_calls_section_begin|>{% endif %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' and m['content'] is none %}"
    "{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c['type'] + '<｜tool▁sep｜>' }}"
    "{{ c['function']['name'] + '\\n' + '```json' + '\\n' + c['function']['arguments'] + '\\n' + '```' }}"
    "<｜tool▁call▁end｜>{% endfor %}{% endif %}{% endfor %}"
)


def calling(*calls: tuple[str, str, dict[str, Any]], content: str = "") -> dict[str, Any]:
    """A message with these calls: their ids, functions and arguments."""
    shown = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": shown}


CONVERSATION = ChatConversation(
    [
        {"role": "user", "content": "hi"},
        calling(("x1", "look", {"city": "Ås"}), ("x2", "now", {})),
        {"role": "tool", "content": "12:00", "tool_call_id": "x2"},
        {"role": "tool", "content": "4", "tool_call_id": "x1"},
        calling(("x3", "now", {})),
        {"role": "tool", "content": "12:01", "tool_call_id": "x3"},
    ]
)


def test_kimi_s_calls_are_counted_in_the_whole_conversation() -> None:
    call = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>".format
    begin = "<|tool_calls_section_begin|>"
    city = '{"city": "Ås"}'
    assert render_conversation(KIMI, {}, CONVERSATION) == (
        f"{begin}{call('look:0', city)}{call('now:1', '{}')}"
        "## Return of functions.now:1\n12:00## Return of functions.look:0\n4"
        f"{begin}{call('now:2', '{}')}## Return of functions.now:2\n12:01"
    )


def test_kimi_s_calls_are_counted_where_a_client_gives_one_id_again() -> None:
    turn = [calling(("call_0", "now", {})), {"role": "tool", "content": "12:00", "tool_call_id": "call_0"}]
    text = render_conversation(KIMI, {}, ChatConversation(3 * turn))
    assert re.findall(r"now:\d", text) == ["now:0", "now:0", "now:1", "now:1", "now:2", "now:2"]


def test_ids_of_other_families_stay_as_they_are() -> None:
    template = EACH + "{{ c.id }} {% endfor %}{{ m.tool_call_id or '' }} {% endfor %}"
    assert render_conversation(template, {}, CONVERSATION).split() == ["x1", "x2", "x2", "x1", "x3", "x3"]


def test_arguments_are_text_where_a_template_joins_texts() -> None:
    assert render_conversation(DEEPSEEK, {}, CONVERSATION) == (
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"city": "Ås"}\n```<｜tool▁call▁end｜>'
        + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>" * 2
    )
