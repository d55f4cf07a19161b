"""Families that write calls in formats of their own: a required call through real services, with drafts and
without."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import transformers

from tests.conftest import save_tiny_llama, writing_tokenizer
from tests.in_time import in_time
from tests.integration.live import start_up

MARKS = ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"]
MARKS += ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
MARKS += ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"]
ORDINARY = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
"""Marks of DeepSeek, which are tokens of their own, but not special."""
SHOWN = {
    "qwen": "<tool_call>\n<function=f>\n<parameter=p>\n</parameter>\n</function>\n</tool_call><|im_start|>",
    "glm": "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call><|assistant|>",
    "mistral": "[TOOL_CALLS]f[ARGS]{}",
    "gemma": "<|tool_call>call:f{}<tool_call|><|turn>",
    "mistral small 3.2": "[TOOL_CALLS]f[CALL_ID]000000000[ARGS]{}",
    "deepseek v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
    ),
    "deepseek v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
    "gpt-oss": "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="p">',
}
BEGINS = {
    "qwen": "<|im_start|>assistant\n",
    "glm": "<|assistant|>",
    "gemma": "<|turn>model\n",
    "mistral": "[/INST]",
    "mistral small 3.2": "[/INST]",
    "deepseek v3": "<｜Assistant｜>",
    "deepseek v3.1": "<｜Assistant｜></think>",
    "kimi": "<|im_assistant|>assistant<|im_middle|>",
    "gpt-oss": "<|start|>assistant",
    "minimax": "]~b]ai\n",
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "digit": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["digit", "name"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("warm", "cold")
]


@pytest.fixture(scope="module", params=SHOWN)
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A client of `outrider up` with a tiny model whose chat template shows a family's format."""
    family: str = request.param
    folder = tmp_path_factory.mktemp(family)
    tokenizer = writing_tokenizer()
    tokenizer.add_special_tokens(MARKS)
    tokenizer.add_tokens(ORDINARY)
    target = save_tiny_llama(folder / "target", seed=3, tokenizer=tokenizer, width=320)
    config = json.loads((target / "tokenizer_config.json").read_text())
    shown = f"{{% if tools %}}{{{{ tools | length }}}}{SHOWN[family]}{{% endif %}}"
    template = (
        f"{shown}{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}{BEGINS[family]}"
    )
    (target / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    limits = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(limits | {"max_position_embeddings": 1024}))
    assert transformers.AutoTokenizer.from_pretrained(target).chat_template == template
    stack = start_up("--target", str(target), "--drafter", str(target), log=folder / "stderr")
    try:
        stack.wait_ready()
        with openai.OpenAI(base_url=f"{stack.http}/v1", api_key="any", max_retries=0) as client:
            yield client
    finally:
        assert stack.stop() == 0, stack.log()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_required_call_has_the_same_ids_with_drafts_and_arguments_by_its_schema(
    asked: openai.OpenAI, temperature: float
) -> None:
    accepted = 0
    for seed in range(3):
        answers = [
            asked.chat.completions.create(
                model="target",
                messages=[{"role": "user", "content": "How warm is it?"}],
                tools=TOOLS,
                tool_choice="required",
                max_tokens=400,
                temperature=temperature,
                seed=seed,
                parallel_tool_calls=False,
                extra_body={
                    "speculation": {"enabled": enabled},
                    "return_token_ids": True,
                    "return_token_sources": True,
                },
            )
            for enabled in (False, True)
        ]
        plain, drafted = (answer.choices[0] for answer in answers)
        assert drafted.model_extra is not None
        assert plain.model_extra is not None
        assert drafted.model_extra["token_ids"] == plain.model_extra["token_ids"]
        (call,) = plain.message.tool_calls or ()
        assert call.type == "function"
        assert (plain.finish_reason, plain.message.content) == ("tool_calls", None)
        assert call.function.name in ("warm", "cold")
        arguments = json.loads(call.function.arguments)
        assert 0 <= arguments["digit"] <= 9
        assert len(arguments["name"]) <= 12
        assert arguments.get("unit", "C") in ("C", "F")
        accepted += sum(entry["source"] != "target" for entry in drafted.model_extra["token_sources"])
    in_time(accepted)
