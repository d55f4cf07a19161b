"""The formats in which families of models write tool calls and reasoning, as a table. Pure.

A checkpoint's chat template shows the model its own format, so the template tells which entry is the model's.
"""

from dataclasses import dataclass
from enum import StrEnum


class Layout(StrEnum):
    """How the text of an answer contains its calls."""

    EACH = "each"
    """Marks around every call, anywhere in the text."""
    LIST = "list"
    """A mark, then a JSON list of all calls up to the end of the text."""
    BARE = "bare"
    """JSON objects without a mark, separated by semicolons, as the whole text."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format in which a family of models writes tool calls."""

    name: str
    layout: Layout
    arguments: str
    """The JSON key of a call's arguments."""
    begin: str = ""
    """The mark before a call, or before the list of calls; empty where the layout has none."""
    end: str = ""
    """The mark behind a call; empty where the layout has none."""
    shown_by: tuple[str, ...] = ()
    """Texts that the family's chat template must all contain."""
    not_with: tuple[str, ...] = ()
    """Texts that the family's chat template must not contain; they belong to formats outside this table, some
    of which have a response template."""
    special: bool = False
    """Whether the begin mark is a special token, which no grammar can ask for: the prompt ends with the mark
    where a call is required."""


FORMATS = (
    CallFormat(  # Hermes 2 and 3, Qwen 2.5, Qwen 3, QwQ, SmolLM3, and the embedded pair
        name="hermes",
        layout=Layout.EACH,
        begin="<tool_call>",
        end="</tool_call>",
        arguments="arguments",
        shown_by=("<tool_call>", "</tool_call>", "arguments"),
        not_with=("<function=", "<arg_key>", "<tool_sep>"),
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
    CallFormat(  # Llama 3.1, 3.2, 3.3
        name="llama3_json",
        layout=Layout.BARE,
        arguments="parameters",
        shown_by=("<|eot_id|>", '{"name": function name, "parameters":'),
    ),
)
"""All formats of tool calls that are known here."""

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
"""The marks around reasoning: of Qwen 3, QwQ, DeepSeek R1 and its distillations, SmolLM3, GLM, Nemotron."""


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


def has_thoughts(template: str) -> bool:
    """Whether a chat template marks reasoning."""
    return THOUGHT_END in template
