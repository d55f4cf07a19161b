"""Bodies of HTTP requests that differ from a legal one in a field: its size, nesting, type or repetition.

A body is put together from texts: JSON that no encoder would write can be written, too.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from hypothesis import strategies as st

LARGEST = 1 << 17
"""Most characters of one value."""
COUNTS = (*(0, 1, 2, 3, 15, 16, 17, 64, 65, 255, 256, 257) * 2, 1000, 4096, 4097, 20_000)
"""How often a value is repeated in a list; the limits of fields are among them, or next to them. Large counts
are rare: they cost as much as many inputs."""
DEPTHS = (1, 2, 3, 30, 100, 255, 256, 1000, 5000)

_DECODING: dict[str, Any] = {
    "model": None,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1.0},
    "contrast_strength": 0.5,
    "contrast_plausibility": 0.2,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [7],
    "seed": 1,
    "structured_outputs": {
        "json": "{}",
        "regex": "a",
        "json_object": True,
        "choice": ["a"],
        "grammar": "start: A",
    },
    "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]},
    "references": ["x", "y"],
    "stream": False,
    "speculation": {
        "enabled": True,
        "sources": ["lookup"],
        "nodes": 4,
        "learn": False,
        "corpora": ["c"],
        "edit": True,
    },
    "return_token_ids": True,
}
_GENERATION: dict[str, Any] = _DECODING | {
    "max_tokens": 2,
    "stop": ["stop"],
    "n": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}},
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_token_sources": True,
    "per_request_spec_decode_metrics": "none",
}
_CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
_MESSAGE = {
    "role": "assistant",
    "content": [{"type": "text", "text": "x"}],
    "name": "n",
    "reasoning_content": "r",
    "reasoning": "r",
    "tool_calls": [_CALL],
    "tool_call_id": "c",
}
_FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
_IGNORED: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"a": [1]},
    "prompt_cache_retention": "24h",
}
_ABSENT = ("function_call", "audio", "verbosity", "web_search_options", "moderation")
_SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}}
_ITEMS: list[Any] = [
    {"role": "developer", "content": "x"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
]
_TURNS: list[Any] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "x", "signature": ""},
            {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": None}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
]
_OF_TURNS: dict[str, Any] = {
    "messages": _TURNS,
    "system": [{"type": "text", "text": "x"}],
    "tools": [{"name": "f", "description": "x", "input_schema": _SCHEMA}, {"type": "bash_1", "name": "b"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    "chat_template_kwargs": {"x": 1},
    "cache_control": {"type": "ephemeral"},
    **dict.fromkeys(("speed", "user_profile_id", "workspace_id", "mcp_servers", "context_management")),
}


class Body(NamedTuple):
    """What one path takes."""

    legal: dict[str, Any]
    """The smallest body that is answered."""
    full: dict[str, Any]
    """Every field of the body, with a value that is legal by itself. A value is fuzzed at every depth."""


BODIES: dict[str, Body] = {
    "/v1/completions": Body(
        {"prompt": [5, 9], "max_tokens": 2},
        {
            **_GENERATION,
            **_IGNORED,
            "prompt": [[5, 9]],
            "suffix": None,
            "logprobs": 1,
            "echo": False,
            "best_of": 1,
        },
    ),
    "/v1/chat/completions": Body(
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        {
            **_GENERATION,
            **_IGNORED,
            **dict.fromkeys(_ABSENT),
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "reasoning_effort": "none",
            "chat_template_kwargs": {"x": 1},
            "continue_final_message": False,
            "add_generation_prompt": True,
            "functions": [],
            "parallel_tool_calls": True,
            "modalities": ["text"],
            "messages": [_MESSAGE],
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": 1,
        },
    ),
    "/v1/responses": Body(
        {"input": "x", "max_output_tokens": 2},
        {
            **_DECODING,
            **_IGNORED,
            "input": _ITEMS,
            "instructions": "x",
            "tools": [
                {"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True},
                {"type": "mcp"},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
            "parallel_tool_calls": True,
            "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
            "reasoning": {"effort": "none", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "truncation": "disabled",
            "background": False,
            "top_logprobs": 0,
            "stop": ["stop"],
            "stream_options": {"include_obfuscation": True},
            "chat_template_kwargs": {"x": 1},
            "client_metadata": {"a": "b"},
            **dict.fromkeys(
                (
                    "previous_response_id",
                    "conversation",
                    "prompt",
                    "context_management",
                    "moderation",
                    "max_tool_calls",
                )
            ),
        },
    ),
    "/v1/messages": Body(
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        {
            **_DECODING,
            **_IGNORED,
            **_OF_TURNS,
            "max_tokens": 2,
            "stop_sequences": ["stop"],
            **dict.fromkeys(("inference_geo", "diagnostics", "container")),
        },
    ),
    "/v1/messages/count_tokens": Body(
        {"messages": [{"role": "user", "content": "x"}]}, {"model": None, **_OF_TURNS}
    ),
    "/tokenize": Body(
        {"prompt": "x"},
        {
            "model": None,
            "prompt": "x",
            "messages": [_MESSAGE],
            "add_special_tokens": True,
            "add_generation_prompt": True,
            "return_token_strs": True,
        },
    ),
    "/detokenize": Body({"tokens": [5]}, {"model": None, "tokens": [5]}),
}
"""By path, what is fuzzed. A new body needs an entry here and nothing else."""


class Hole(NamedTuple):
    """A place in a body: a field, and the text of its value around the place."""

    field: str
    before: str
    after: str

    def filled(self, value: str) -> tuple[str, str]:
        """The field and its text with this value in the place."""
        return self.field, f"{self.before}{value}{self.after}"


def holes(path: str) -> list[Hole]:
    """Every place of a path's body, at every depth, and the name of a field as well."""
    made = []
    for field, example in BODIES[path].full.items():
        for marked in _marked(example):
            before, _, after = json.dumps(marked).partition(json.dumps(_MARK))
            made.append(Hole(field, before, after))
    return made


_MARK = "the place"


def _marked(value: Any) -> Iterator[Any]:
    """The value with the mark in place of each of its parts, one at a time."""
    yield _MARK
    if isinstance(value, dict):
        for key, part in value.items():
            yield from ({**value, key: marked} for marked in _marked(part))
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from ([*value[:at], marked, *value[at + 1 :]] for marked in _marked(part))


def body(path: str, *overrides: tuple[str, str]) -> bytes:
    """A legal body with these fields, given as texts, in place of its own; a field may come twice."""
    legal = BODIES[path].legal
    named = {field for field, _ in overrides}
    kept = [(field, json.dumps(value)) for field, value in legal.items() if field not in named]
    text = ",".join(f"{json.dumps(field)}:{value}" for field, value in (*kept, *overrides))
    return f"{{{text}}}".encode("utf-8", "surrogatepass")


ODD = (
    *(
        "null",
        "true",
        "false",
        "{}",
        "[]",
        '""',
        "0",
        "-0",
        "-1",
        "1.0",
        "1e0",
        "0.1",
        "1e-400",
        "1e400",
        "1E+2",
    ),
    *(str(2**power + more) for power in (7, 8, 31, 32, 53, 63, 64, 128) for more in (-1, 0, 1)),
    *("NaN", "Infinity", "-Infinity", "01", "1.", ".5", "+1", "0x10", "1_000", "tru", "undefined", "'x'"),
    *('"', '"\\"', '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\x00"', '"\n"', '"\\x41"', '"\ud800"'),
    *('"user"', '"assistant"', '"system"', '"lookup"', '"content"', '"text"', '"5"', '"-1"', '"5 "', '"٣"'),
    *(
        '{"":1}',
        '{"a":1,"a":2}',
        '{"type":"text"}',
        '{"$ref":"#"}',
        "[1,]",
        "[,1]",
        "{,}",
        '{"a"}',
        "[1 2]",
        "// x",
    ),
    *("[[5]]", "[5,9]", '["x"]', "[-1]", "[4095]", "[4096]", "[4294967295]", "[[]]", '[["x"]]', '{"5":1}'),
)
"""JSON's odd corners, and values that some field takes."""


def _atoms() -> st.SearchStrategy[str]:
    return (
        st.sampled_from(ODD)
        | st.integers().map(str)
        | st.floats().map(repr)
        | st.text(max_size=20).map(json.dumps)
        | st.integers(1, 6000).map(lambda digits: "9" * digits)
        | st.text(max_size=8).map(lambda text: f'"{text}"')
    )


def _shaped(atoms: tuple[str, str], shape: str, count: int, depth: int) -> str:
    """Two values in a shape: repeated, nested or mixed."""
    first, second = atoms
    count = max(0, min(count, LARGEST // (len(first) + len(second) + 10)))
    match shape:
        case "list":
            return "[" + ",".join([first] * count) + "]"
        case "mixed":
            return "[" + ",".join([first, second] * (count // 2)) + "]"
        case "last":
            return "[" + ",".join([*[first] * count, second]) + "]"
        case "lists":
            return "[" + ",".join([f"[{first}]"] * count) + "]"
        case "numbered":
            return "{" + ",".join(f'"{at}":{first}' for at in range(count)) + "}"
        case "repeated":
            return "{" + ",".join([f'"5":{first}'] * count) + "}"
        case "deep":
            return "[" * depth + first + "]" * depth
        case "deep object":
            return '{"a":' * depth + first + "}" * depth
        case "unclosed":
            return "[" * depth + first
        case "long text":
            return '"' + "ab \\n"[: 1 + depth % 3] * count + '"'
    return first


SHAPES = (
    "atom",
    "atom",
    "list",
    "mixed",
    "last",
    "lists",
    "numbered",
    "repeated",
    "deep",
    "deep object",
    "long text",
)


@st.composite
def values(draw: st.DrawFn) -> str:
    """The text of a value: an atom, or atoms repeated, nested or mixed."""
    atoms = draw(_atoms()), draw(_atoms())
    shape = draw(st.sampled_from((*SHAPES, "unclosed")))
    return _shaped(atoms, shape, draw(st.sampled_from(COUNTS)), draw(st.sampled_from(DEPTHS)))
