"""Chat templates render as transformers renders them."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from orchestrator.front.http.bodies.templates import render_conversation
from orchestrator.front.http.chat.conversation import ChatConversation
from orchestrator.front.http.field_faults import FieldRefused

MESSAGES = [
    {"role": "system", "content": "Be <kind> & \u00e9."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho", "reasoning_content": "hm"},
    {"role": "user", "content": "and?"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
EACH = "{% for m in messages %}"
TEMPLATES = [
    EACH + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    EACH + "{{ m | tojson(sort_keys=true) }}{{ m | tojson(ensure_ascii=true, indent=2) }}{% endfor %}",
    "{{ messages | tojson(separators=(',', ':')) }}",
    "{% if tools is defined and tools %}x{% endif %}{% if tools is none and documents is none %}y{% endif %}",
    EACH + "{% if loop.index > 2 %}{% break %}{% endif %}{{ bos_token + m.content | trim }}{% endfor %}",
    "{% set ns = namespace(n=0, self=1) %}" + EACH + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    EACH + "{{ m.reasoning_content or '' }}{{ m.thinking or '' }}{% endfor %}",
    "{% set d = dict(a=1, **{'b': 2}) %}{{ d | tojson }}{% if add_generation_prompt %}a:{% endif %}",
    "   {% for m in messages %}\n  {{ m.role }}\n{% endfor %}\n",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("follows", [True, False])
def test_a_template_renders_as_transformers_renders_it(template: str, follows: bool) -> None:
    conversations: list[Any] = [MESSAGES]
    (theirs,), _ = render_jinja_template(
        conversations, chat_template=template, add_generation_prompt=follows, **TOKENS
    )
    ours = render_conversation(template, TOKENS, ChatConversation(MESSAGES, answer_follows=follows))
    assert ours == theirs


KNOWN_ROLES = (  # as the templates of Qwen 2.5 and 3 do it: other roles are left out
    EACH
    + "{% if m.role == 'system' or m.role == 'user' %}{{ m.role }}:{{ m.content }}|{% endif %}{% endfor %}"
)


def test_a_developer_s_message_is_the_system_s_where_the_template_knows_no_developer() -> None:
    turns = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    conversation = ChatConversation(turns)
    assert render_conversation(KNOWN_ROLES, {}, conversation) == "system:Be kind.|user:hi|"
    for name in ("'developer'", '"developer"'):
        knowing = KNOWN_ROLES.replace("'system'", name)
        assert render_conversation(knowing, {}, conversation) == "developer:Be kind.|user:hi|"


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages[0].update({}) }}",
    ],
)
def test_a_template_reaches_nothing_of_python(template: str) -> None:
    with pytest.raises(FieldRefused, match="chat template"):
        render_conversation(template, TOKENS, ChatConversation(MESSAGES))


TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "<adds>", "parameters": {"type": "object"}},
}
CALLING = [
    {"role": "user", "content": "1 + 1?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"b": 1, "a": [1]}}}
        ],
    },
    {"role": "tool", "content": "2", "tool_call_id": "a"},
    {"role": "assistant", "content": " So it is "},
]
WITH_TOOLS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}{{ m.tool_call_id }}>"
    "{{ m.content | trim if trimmed else m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{{ reasoning_effort }}{% endif %}"
)


@pytest.mark.parametrize("continued", [True, False])
@pytest.mark.parametrize("trimmed", [True, False])
def test_tools_calls_and_variables_render_as_in_transformers(continued: bool, trimmed: bool) -> None:
    conversations: list[Any] = [[dict(message) for message in CALLING]]
    (theirs,), _ = render_jinja_template(
        conversations,
        tools=[TOOL],
        chat_template=WITH_TOOLS,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        reasoning_effort="low",
        trimmed=trimmed,
    )
    ours = render_conversation(
        WITH_TOOLS,
        {},
        ChatConversation(
            CALLING,
            [TOOL],
            {"reasoning_effort": "low", "trimmed": trimmed},
            answer_follows=not continued,
            continued=continued,
        ),
    )
    assert ours == theirs


def test_a_template_that_leaves_out_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(FieldRefused, match="leaves out the last message"):
        render_conversation("nothing", {}, ChatConversation(CALLING, continued=True, answer_follows=False))
