"""Classes of hostile bodies over HTTP: what JSON and the fields of a request allow a client to write."""

import json
from collections.abc import Sequence

from benchmarks.hostile.inputs import HostileClass, Input, json_post, post
from speculative.params import MAX_BIAS_ENTRIES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
PATHS = (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE)
MB = 1 << 20


def bad_ids() -> Sequence[Input]:
    """Hundreds of thousands of ids, each out of range or of another type."""
    return [
        json_post(COMPLETIONS, prompt=[-1] * 300_000),
        json_post(COMPLETIONS, prompt=[[-1] * 1000] * 300),
        json_post(COMPLETIONS, prompt=[1.5] * 300_000),
        json_post(COMPLETIONS, prompt=[None] * 300_000),
        json_post(COMPLETIONS, prompt=[5] * 2_000_000),
        json_post(COMPLETIONS, prompt=[4_000_000_000] * 300_000),
    ]


def mixed_ids() -> Sequence[Input]:
    """Lists whose elements fit different kinds of a union."""
    return [
        json_post(COMPLETIONS, prompt=["x", 1] * 150_000),
        json_post(COMPLETIONS, prompt=[1, "x"] * 150_000),
        json_post(COMPLETIONS, prompt=[[1], "x", 1] * 80_000),
        json_post(COMPLETIONS, prompt=[{}] * 150_000),
        json_post(COMPLETIONS, prompt=[[]] * 300_000),
    ]


def many_prompts() -> Sequence[Input]:
    """More prompts than a request may have."""
    return [
        json_post(COMPLETIONS, prompt=["x"] * 100_000),
        json_post(COMPLETIONS, prompt=["def f(x): return x"] * 50_000),
        json_post(COMPLETIONS, prompt=[[5]] * 100_000),
        json_post(COMPLETIONS, prompt=["x" * 1000] * 10_000),
    ]


def messages() -> Sequence[Input]:
    """Many messages or parts, wrong and right ones."""
    right = {"role": "user", "content": "x"}
    parts = [{"type": "text", "text": "x"}] * 100_000
    return [
        json_post(CHAT, messages=[{"role": "robot", "content": 1}] * 100_000),
        json_post(CHAT, messages=[right] * 100_000),
        json_post(CHAT, messages=[{}] * 300_000),
        json_post(CHAT, messages=[{"role": "user", "content": parts}]),
        json_post(CHAT, messages=[{"role": "user", "content": [{"type": "image"}] * 100_000}]),
        json_post(TOKENIZE, messages=[right] * 100_000),
        json_post(CHAT, messages=[{"role": "user", "content": "x" * 20 * MB}]),
    ]


def tokenizing() -> Sequence[Input]:
    """Texts and ids that cost the tokenizer the most."""
    texts = ["a" * 10 * MB, " " * 2 * MB, "\n" * 2 * MB, "ab" * 50_000, "\u0301" * MB, "x " * 60_000]
    return [
        *(json_post(TOKENIZE, prompt=text) for text in texts),
        json_post(TOKENIZE, prompt="y" * 100_000, return_token_strs=True),
        json_post(DETOKENIZE, tokens=[-1] * 300_000),
        json_post(DETOKENIZE, tokens=[5] * 2_000_000),
        json_post(DETOKENIZE, tokens=["x"] * 300_000),
        json_post(DETOKENIZE, tokens=[4_000_000_000] * 300_000),
    ]


def numbers() -> Sequence[Input]:
    """Numbers of many digits, and numbers that are none."""
    digits = b"9" * MB
    bodies = [b'{"prompt":"x","seed":%s}' % digits, b'{"prompt":[%s]}' % digits, b'{"tokens":[%s]}' % digits]
    bodies += [
        b'{"prompt":"x","temperature":1e%s}' % digits[:100_000],
        b'{"prompt":"x","max_tokens":-%s}' % digits,
    ]
    bodies += [
        b'{"prompt":"x","temperature":%s}' % word for word in (b"NaN", b"Infinity", b"-Infinity", b"1e999")
    ]
    bodies += [
        b'{"prompt":"x","temperature":0.%s}' % digits,
        b'{"prompt":[%s]}' % b",".join([b"1e9"] * 200_000),
    ]
    return [post(DETOKENIZE if b'tokens":[' in body else COMPLETIONS, body) for body in bodies]


def nesting() -> Sequence[Input]:
    """Arrays and objects within one another, thousands of levels deep."""
    made = []
    for levels in (500, 5_000, 500_000):
        arrays = b"[" * levels + b"]" * levels
        objects = b'{"a":' * levels + b"1" + b"}" * levels
        made += [post(COMPLETIONS, b'{"prompt":%s}' % arrays), post(CHAT, b'{"messages":%s}' % arrays)]
        made += [post(COMPLETIONS, b'{"prompt":"x","z":%s}' % objects), post(DETOKENIZE, arrays)]
        schema = b'{"type":"json_schema","json_schema":{"name":"a","schema":%s}}' % objects
        made += [post(COMPLETIONS, b'{"prompt":"x","response_format":%s}' % schema)]
    return made


def fields() -> Sequence[Input]:
    """Unknown fields, repeated fields, and fields of the wrong type."""
    unknown = {f"f{number}": 1 for number in range(200_000)}
    repeated = b"{" + b",".join([b'"prompt":"x"'] * 200_000) + b"}"
    return [
        json_post(COMPLETIONS, **unknown),
        json_post(CHAT, messages=[{"role": "user", "content": "x", **unknown}]),
        json_post(COMPLETIONS, prompt="x", speculation=unknown),
        post(COMPLETIONS, repeated),
        json_post(COMPLETIONS, **{"k" * 10 * MB: 1}),
        json_post(COMPLETIONS, prompt="x", model="m" * 10 * MB),
        json_post(COMPLETIONS, prompt=unknown),
    ]


def lists() -> Sequence[Input]:
    """Biases, stops and names beyond their numbers."""
    return [
        json_post(COMPLETIONS, prompt="x", logit_bias={str(number): 1.0 for number in range(500_000)}),
        json_post(COMPLETIONS, prompt="x", logit_bias={f"a{number}": 1.0 for number in range(300_000)}),
        json_post(COMPLETIONS, prompt="x", logit_bias={str(number): "x" for number in range(300_000)}),
        json_post(COMPLETIONS, prompt="x", stop=["s"] * 300_000),
        json_post(COMPLETIONS, prompt="x", stop=[1] * 300_000),
        json_post(COMPLETIONS, prompt="x", stop=["s" * 10 * MB]),
        json_post(COMPLETIONS, prompt="x", stop_token_ids=list(range(1_000_000))),
        json_post(COMPLETIONS, prompt="x", stop_token_ids=[-1] * 300_000),
        json_post(COMPLETIONS, prompt="x", speculation={"sources": ["s"] * 300_000}),
        json_post(COMPLETIONS, prompt="x", speculation={"corpora": [f"c{n}" for n in range(300_000)]}),
        json_post(COMPLETIONS, prompt="x", prediction={"type": "content", "content": "p" * 20 * MB}),
    ]


def grammars() -> Sequence[Input]:
    """Schemas and expressions that are large, deep or costly to compile."""
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(50_000)}}
    deep: dict[str, object] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    among = {"enum": [f"word {number}" for number in range(100_000)]}
    itself = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    expressions = ["(a{1000}){1000}", "(x+x+)+y", "(a?){5000}a{5000}", "(" * 50_000, "a|" * 200_000]
    expressions += ["[^\\x00-\\uffff]{9999}", "(?=a)b", "\\" * 99_999]
    return [
        *(
            json_post(COMPLETIONS, prompt="x", structured_outputs={"json": s})
            for s in (wide, deep, among, itself)
        ),
        *(json_post(COMPLETIONS, prompt="x", structured_outputs={"regex": text}) for text in expressions),
        json_post(COMPLETIONS, prompt="x", structured_outputs={"json": json.dumps(wide)}),
    ]


def encodings() -> Sequence[Input]:
    """Bodies that are no JSON, or no text."""
    bodies = [b"", b"null", b"[]", b"\xff" * MB, b'{"prompt":"\\ud800"}', b'{"prompt":"' + b"x" * 20 * MB]
    bodies += [
        '{"prompt":"x"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"prompt":"' + b"\\u0000" * 1_000_000 + b'"}',
    ]
    bodies += [
        b'{"prompt":"' + b"\\ud800" * 1_000_000 + b'"}',
        b"{" * 10 * MB,
        b'"' + b"\\" * 10 * MB,
        b" " * 30 * MB,
    ]
    return [post(path, body) for body in bodies for path in (COMPLETIONS, TOKENIZE)]


def large_and_legal() -> Sequence[Input]:
    """Bodies that are answered, and that are as large as they may be."""
    many = {"role": "user", "content": "if x:\n    return y\n"}
    bias = {str(number): 0.5 for number in range(MAX_BIAS_ENTRIES)}
    return [
        json_post(COMPLETIONS, prompt=[[5, 9, 30]] * 64, max_tokens=1),
        json_post(COMPLETIONS, prompt=[5] * 1_900, max_tokens=1, logit_bias=bias),
        json_post(COMPLETIONS, prompt=[5, 9], n=16, max_tokens=4, stop=["stop"] * 16),
        json_post(CHAT, messages=[many] * 60, max_tokens=1),
        json_post(DETOKENIZE, tokens=[5] * 2_000),
        json_post(TOKENIZE, prompt="return value\n" * 600, return_token_strs=True),
    ]


CLASSES = [
    HostileClass("http bad ids", bad_ids),
    HostileClass("http mixed ids", mixed_ids),
    HostileClass("http many prompts", many_prompts),
    HostileClass("http messages", messages),
    HostileClass("http tokenizing", tokenizing),
    HostileClass("http numbers", numbers),
    HostileClass("http nesting", nesting),
    HostileClass("http fields", fields),
    HostileClass("http lists", lists),
    HostileClass("http grammars", grammars),
    HostileClass("http encodings", encodings),
    HostileClass("http large and legal", large_and_legal),
]
