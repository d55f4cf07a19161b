"""The formats in which families of models write tool calls and reasoning, as a table. Pure.

A checkpoint's chat template shows the model its own format, so the template tells which entry is the model's.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Layout(StrEnum):
    """How the text of an answer contains its calls."""

    TAGGED = "tagged"
    """Tags around every call, and around each name and value of its arguments; text stands bare."""
    NAMED = "named"
    """A mark, the function's name, a mark, and the arguments as JSON, for every call; in some families also
    each call's id, and marks around all calls."""
    BRACED = "braced"
    """Braces around every call's arguments: JSON with bare names, and marks around texts."""

    EACH = "each"
    """Marks around every call, anywhere in the text."""
    LIST = "list"
    """A mark, then a JSON list of all calls up to the end of the text."""
    BARE = "bare"
    """JSON objects without a mark, separated by semicolons, as the whole text."""


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands between the parts of a call whose layout is TAGGED, NAMED or BRACED."""

    named: str
    """Text behind the function's name."""
    text: str = ""
    """The mark behind a text among the arguments, which no text contains; BRACED: on both sides."""
    key: tuple[str, str] = ("", "")
    """Texts around the name of an argument."""
    value: str = ""
    """Text behind an argument's value, and behind `text`."""
    between: str = ""
    """Text between two calls."""
    lead: str = ""
    """Text that may stand before the answer's first mark."""
    around: tuple[str, str] = ("", "")
    """Texts around all calls together."""
    id: str = ""
    """NAMED: the pattern of the id that a call has behind `named`; empty: calls have none."""
    identified: str = ""
    """Text behind a call's id."""
    thought: str = ""
    """Text between the end of the reasoning and the first call."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format in which a family of models writes tool calls."""

    name: str
    layout: Layout
    arguments: str = ""
    """The JSON key of a call's arguments."""
    begin: str = ""
    """The mark before a call, or before the list of calls; empty where the layout has none."""
    end: str = ""
    """The mark behind a call; empty where the layout has none."""
    tags: Tags | None = None
    """The further marks of the layouts TAGGED, NAMED and BRACED. A response template parses their answers."""
    shown_by: tuple[str, ...] = ()
    """Texts that the family's chat template must all contain."""
    not_with: tuple[str, ...] = ()
    """Texts that the family's chat template must not contain; they belong to formats outside this table, some
    of which have a response template."""
    special: bool = False
    """Whether the begin mark is a special token, which no grammar can ask for: the prompt ends with the mark
    where a call is required."""
    alone: bool = False
    """Whether an answer ends behind its first call."""
    earlier_ids: str = ""
    """The id that the family's chat template expects of an earlier call, with the places `name` and `number`;
    empty: any id. Calls count from 0 in a whole conversation."""
    null_content: bool = False
    """Whether the family's chat template shows calls only in messages whose content is null."""


FORMATS = (
    CallFormat(  # Hermes 2 and 3, Qwen 2.5, Qwen 3, QwQ, SmolLM3, and the embedded pair
        name="hermes",
        layout=Layout.EACH,
        begin="<tool_call>",
        end="</tool_call>",
        arguments="arguments",
        shown_by=("<tool_call>", "</tool_call>", "arguments"),
        not_with=("<function=", "<arg_key>", "<tool_sep>", "<tool_calls>", "<invoke"),
    ),
    CallFormat(  # Qwen 3 Coder, Qwen 3.5, Nemotron 3
        name="qwen_function",
        layout=Layout.TAGGED,
        begin="<tool_call>\n<function=",
        end="</function>\n</tool_call>",
        tags=Tags(
            named=">\n",
            key=("<parameter=", ">\n"),
            text="\n</parameter>",
            value="\n",
            between="\n",
        ),
        shown_by=("<tool_call>", "<function=", "<parameter=", "<|im_start|>"),
    ),
    CallFormat(  # GLM 4.7 and later
        name="glm_flat",
        layout=Layout.TAGGED,
        begin="<tool_call>",
        end="</tool_call>",
        tags=Tags(named="", key=("<arg_key>", "</arg_key><arg_value>"), text="</arg_value>"),
        shown_by=("<tool_call>", "</arg_key><arg_value>", "<|assistant|>"),
    ),
    CallFormat(  # GLM 4.5, GLM 4.6
        name="glm",
        layout=Layout.TAGGED,
        begin="<tool_call>",
        end="</tool_call>",
        tags=Tags(
            named="\n",
            key=("<arg_key>", "</arg_key>\n<arg_value>"),
            text="</arg_value>",
            value="\n",
            between="\n",
            lead="\n",
        ),
        shown_by=("<tool_call>", "<arg_key>", "<arg_value>", "<|assistant|>"),
    ),
    CallFormat(
        name="gemma4",
        layout=Layout.BRACED,
        begin="<|tool_call>call:",
        end="<tool_call|>",
        tags=Tags(named="", text='<|"|>'),
        shown_by=("<|tool_call>", "<tool_call|>", "<|turn>"),
    ),
    CallFormat(  # Mistral 7B v0.3, Mixtral, Nemo, Ministral and Mistral Large of 2024
        name="mistral",
        layout=Layout.LIST,
        begin="[TOOL_CALLS]",
        arguments="arguments",
        shown_by=("[TOOL_CALLS]",),
        not_with=("[ARGS]",),
        special=True,
    ),
    CallFormat(  # Devstral, Ministral 3
        name="mistral_args",
        layout=Layout.NAMED,
        begin="[TOOL_CALLS]",
        tags=Tags(named="[ARGS]"),
        shown_by=("[TOOL_CALLS]", "[ARGS]"),
        not_with=("[CALL_ID]",),
    ),
    CallFormat(  # Mistral Small 3.2, Devstral Small 1.1
        name="mistral_id",
        layout=Layout.NAMED,
        begin="[TOOL_CALLS]",
        tags=Tags(named="[CALL_ID]", id="[A-Za-z0-9]{9}", identified="[ARGS]"),
        shown_by=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    CallFormat(  # DeepSeek V3 and R1, and their versions up to V3-0324 and R1-0528
        name="deepseek",
        layout=Layout.NAMED,
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        end="\n```<｜tool▁call▁end｜>",
        tags=Tags(
            named="\n```json\n",
            between="\n",
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        shown_by=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
        null_content=True,
    ),
    CallFormat(
        name="deepseek_v31",
        layout=Layout.NAMED,
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        tags=Tags(
            named="<｜tool▁sep｜>",
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        shown_by=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    CallFormat(
        name="kimi_k2",
        layout=Layout.NAMED,
        begin="<|tool_call_begin|>functions.",
        end="<|tool_call_end|>",
        tags=Tags(
            named=":",
            id="[0-9]{1,3}",
            identified="<|tool_call_argument_begin|>",
            around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
        shown_by=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
        earlier_ids="functions.{name}:{number}",
    ),
    CallFormat(  # gpt-oss
        name="harmony",
        layout=Layout.NAMED,
        begin="<|channel|>commentary to=functions.",
        tags=Tags(named=" <|constrain|>json<|message|>", thought="<|start|>assistant"),
        shown_by=("<|start|>assistant", "<|channel|>", "<|message|>", "<|call|>"),
        alone=True,
    ),
    CallFormat(
        name="minimax_m2",
        layout=Layout.TAGGED,
        begin='<invoke name="',
        end="</invoke>\n",
        tags=Tags(
            named='">\n',
            key=('<parameter name="', '">'),
            text="</parameter>",
            value="\n",
            around=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        ),
        shown_by=("<minimax:tool_call>", '<invoke name="', '<parameter name="'),
    ),
    CallFormat(  # Llama 3.1, 3.2, 3.3
        name="llama3_json",
        layout=Layout.BARE,
        alone=True,  # as its template asks
        arguments="parameters",
        shown_by=("<|eot_id|>", '{"name": function name, "parameters":'),
    ),
)
"""All formats of tool calls that are known here."""


class ThoughtMarks(NamedTuple):
    """The marks around the reasoning of an answer."""

    begin: str
    end: str


THINK = ThoughtMarks("<think>", "</think>")
"""The marks of Qwen 3, QwQ, DeepSeek R1 and V3.1, their distillations, Kimi K2 Thinking, MiniMax M2,
SmolLM3, GLM, Nemotron."""


def format_of(template: str) -> CallFormat | None:
    """The format of tool calls that a chat template shows the model; None: no entry of the table fits."""
    for entry in FORMATS:
        if all(text in template for text in entry.shown_by) and not any(
            text in template for text in entry.not_with
        ):
            return entry
    return None


def format_named(name: str) -> CallFormat | None:
    """The call format of this name; None for an empty name."""
    return next((entry for entry in FORMATS if entry.name == name), None)
