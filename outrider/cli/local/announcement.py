"""What `outrider up` prints once requests are answered: processes, models, and lines to paste."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from outrider.cli.local.stack import SECOND_VERIFIER, Stack
from outrider.cli.observe.gauges import Reading
from outrider.cli.observe.scrape import reading_of

INT8_KV = "int8-kv"
"""Word of a numerics class of keys and values in int8."""
RANKS = "ranks"
"""Word of a numerics class behind the number of ranks."""
WEIGHTS = "-weights"
"""How the word of a numerics class ends that names the format of linear layers' weights."""
GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder with an entry for each GPU that the driver sees."""


def announcement(stack: Stack, drafter: str) -> Iterator[str]:
    """The lines to print. `drafter` describes the drafter and the reason for it."""
    for child in stack.children:
        yield f"{child.role:<13}{child.address:<22} process {child.pid}, http://{child.metrics}/metrics"
    reading = reading_of(next(child.metrics for child in stack.children if child.role == "verifier"))
    yield f"target       {stack.target.model} on {computing(stack.target.numerics, reading)}"
    yield f"drafter      {drafter}"
    several = any(child.role == SECOND_VERIFIER for child in stack.children)
    if several:
        yield f"             answers requests, too, as {stack.target.model}:drafter; requests name a model"
    if stack.target.numerics.startswith("cpu") and GPUS.is_dir() and any(GPUS.iterdir()):
        yield "             the GPU is idle: to use it, give --device cuda with a CUDA build of torch"
    chat = stack.target.HasField("chat_template")
    yield "paste into a program:"
    yield from program(stack.http, stack.target.model, chat=chat, key=stack.asks_for_keys)
    yield "or into a shell:"
    yield curl(stack.http, stack.target.model, chat=chat, key=stack.asks_for_keys)
    if stack.asks_for_keys:
        yield "both, and `outrider generate`, read your API key from OUTRIDER_API_KEY"
    if stack.has_page:
        yield f"or look at {stack.http}/ in a browser"
    named = f"--model {shlex.quote(stack.target.model)} " if several else ""
    yield f"ready: outrider generate --address {stack.address} {named}--prompt ..."


def computing(numerics: str, reading: Reading) -> str:
    """Device, dtype and room for keys and values, from the verifier's numerics class and its metrics."""
    device, dtype, *kind = (word for word in numerics.split() if word != INT8_KV)
    over = ""
    if kind[-1:] == [RANKS]:
        over = f" over {kind[-2]} ranks"
        kind = kind[:-2]
    weights = next((word.removesuffix(WEIGHTS) for word in kind if word.endswith(WEIGHTS)), "")
    if weights:
        kind.remove(f"{weights}{WEIGHTS}")
        dtype = f"{dtype}, weights in {weights}"
    passes = f", {kind[0]} passes" if kind else ""
    slots = sum(
        int(one.labels["block_size"]) * int(one.labels["num_gpu_blocks"])
        for one in reading.of("cache_config_info")
    )
    kept = " in int8" if INT8_KV in numerics.split() else ""
    room = f", keys and values of {slots:,} tokens{kept}" if slots else ""
    return f"{device}{over} in {dtype}{passes}{room}"


def program(url: str, model: str, *, chat: bool, key: bool = False) -> Iterator[str]:
    """Lines of a Python program that asks the model through the `openai` package; `key`: with an API key."""
    shown = 'os.environ["OUTRIDER_API_KEY"]' if key else '"none"'
    yield f'  client = openai.OpenAI(base_url="{url}/v1", api_key={shown})'
    if chat:
        asked = 'messages=[{"role": "user", "content": "Hello"}], max_tokens=64'
        yield f"  client.chat.completions.create(model={json.dumps(model)}, {asked})"
    else:
        yield f'  client.completions.create(model={json.dumps(model)}, prompt="def fib(n):", max_tokens=64)'


def curl(url: str, model: str, *, chat: bool, key: bool = False) -> str:
    """A shell command that asks the model; `key`: with an API key."""
    body: dict[str, object] = {"model": model, "max_tokens": 64}
    if chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello"}]
    else:
        path, body["prompt"] = "completions", "def fib(n):"
    quoted = json.dumps(body).replace("'", "'\\''")
    shown = ' -H "authorization: Bearer $OUTRIDER_API_KEY"' if key else ""
    return f"  curl {url}/v1/{path}{shown} -H 'content-type: application/json' -d '{quoted}'"
