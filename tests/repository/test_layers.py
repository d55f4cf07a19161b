"""Imports follow the layers: the core knows nothing of the wire, services nothing of each other."""

import subprocess
import sys
from typing import NamedTuple

import pytest
from source import PACKAGES, ROOT, imports, modules


class Layer(NamedTuple):
    """Modules that a layer may import, beside itself and the standard library."""

    ours: tuple[str, ...]
    others: tuple[str, ...]
    not_even: tuple[str, ...] = ()


TORCH = ("torch", "transformers", "safetensors")
SHARED = ("speculative", "outrider.wire", "outrider.runtime", "outrider.tokens", "outrider.v1")
RPC = ("grpc", "google")
MEMORY = ("speculative", "retrieval_service.trie")
SERVICES = ("verifier_service", "drafter_service", "retrieval_service", "orchestrator")
# The longest name that a module's begins with counts.
LAYERS = {
    "speculative": Layer((), ("numpy",), ("asyncio", "socket", "threading", "time")),
    "outrider": Layer(("outrider.client", "outrider.edge"), ()),
    "outrider.tokens": Layer((), ("tokenizers",)),
    "outrider.json_lines": Layer((), ()),
    "outrider.near_copies": Layer((), ("numpy",)),
    "outrider.skip_set": Layer(("speculative",), ()),
    "outrider.folder_lock": Layer(("speculative",), ()),
    "outrider.compiling": Layer((), ()),
    "outrider.wire": Layer(("speculative", "outrider.v1"), RPC),
    "outrider.runtime": Layer(
        ("speculative", "outrider.wire"),
        (
            *RPC,
            "grpc_health",
            "grpc_reflection",
            "opentelemetry",
            "prometheus_client",
            "pydantic",
            "pydantic_settings",
            "uvloop",
        ),
    ),
    "outrider.model_settings": Layer(("outrider.runtime",), ("pydantic",)),
    "outrider.learning": Layer(
        (
            "speculative",
            "outrider.folder_lock",
            "outrider.model_settings",
            "outrider.runtime.lifeline",
            "outrider.runtime.metrics",
        ),
        ("numpy",),
    ),
    "outrider.announcing": Layer(("speculative", "outrider.wire", "outrider.runtime", "outrider.v1"), RPC),
    "outrider.source": Layer(
        (
            "speculative",
            "outrider.wire",
            "outrider.v1",
            "outrider.runtime.metrics",
            "outrider.runtime.own_thread",
            "outrider.runtime.tracing",
        ),
        (*RPC, "prometheus_client"),
    ),
    "outrider.client": Layer(
        (
            "speculative",
            "outrider.wire",
            "outrider.v1",
            "outrider.client.option_checks",
            "outrider.client.resuming",
        ),
        RPC,
    ),
    "outrider.client.option_checks": Layer(("speculative",), ()),
    "outrider.client.resuming": Layer(
        ("speculative", "outrider.v1", "outrider.client.completions"), (), ("asyncio", "time")
    ),
    "outrider.edge": Layer(
        (
            "speculative",
            "outrider.client",
            "outrider.wire",
            "outrider.v1",
            "outrider.edge.backends.llama_cpp",
            "outrider.edge.backends.torch_model",
        ),
        (*RPC, "grpc_health", "numpy"),
    ),
    "outrider.edge.backends.llama_cpp": Layer(("speculative", "outrider.edge"), ("numpy", "llama_cpp")),
    "outrider.edge.backends.torch_model": Layer(
        ("speculative", "outrider.edge", "outrider.lm", "outrider.tokens"), ("numpy",)
    ),
    "outrider.rag": Layer(("speculative", "outrider.client"), ("numpy", "tokenizers", "faiss")),
    "outrider.lm": Layer(
        (
            "speculative",
            "outrider.tokens",
            "outrider.compiling",
            "outrider.lm.load.quantised",
            "outrider.skip_set",
        ),
        ("numpy", "tokenizers", "huggingface_hub", "triton", *TORCH),
    ),
    "outrider.lm.load.quantised": Layer(("speculative",), ()),
    "outrider.cli": Layer(
        (
            *SHARED,
            "outrider",
            "outrider.client",
            "outrider.edge",
            "outrider.hub",
            "outrider.lm.load.quantised",
            "outrider.pair",
            "retrieval_service.corpus",
            "training",
            *(f"{service}.settings" for service in SERVICES),
        ),
        (*RPC, "typer", "rich", "pydantic", "prometheus_client"),
    ),
    "outrider.hub": Layer(("speculative", "outrider.tokens"), ("huggingface_hub",)),
    "outrider.pair": Layer(
        (
            "speculative",
            "outrider.json_lines",
            "outrider.hub",
            "outrider.lm",
            "outrider.skip_set",
            "outrider.source",
            "outrider.tokens",
            "outrider.wire.codec",
            "drafter_service",
        ),
        ("huggingface_hub",),
    ),
    "verifier_service": Layer(
        (
            *SHARED,
            "outrider.announcing",
            "outrider.learning",
            "outrider.model_settings",
            "outrider.lm",
            "verifier_service.grammar",
        ),
        (*RPC, "numpy", "pydantic", "prometheus_client", *TORCH),
    ),
    "verifier_service.grammar": Layer(("speculative", "outrider.tokens"), ("numpy", "llguidance")),
    "drafter_service": Layer(
        (
            *SHARED,
            "outrider.announcing",
            "outrider.learning",
            "outrider.model_settings",
            "outrider.skip_set",
            "outrider.source",
            "outrider.lm",
        ),
        (*RPC, "numpy", "pydantic", "prometheus_client", *TORCH),
    ),
    # Run in processes of their own, which a service starts and never imports.
    "drafter_service.learning.child": Layer(
        ("outrider.learning", "training"),
        TORCH,
    ),
    "verifier_service.learning.child": Layer(("outrider.learning", "training"), TORCH),
    "retrieval_service": Layer(
        (
            *SHARED,
            "outrider.announcing",
            "outrider.compiling",
            "outrider.folder_lock",
            "outrider.source",
            "retrieval_service.corpus",
            "retrieval_service.past",
            "retrieval_service.dense",
        ),
        (*RPC, "numpy", "pydantic", "prometheus_client", "tokenizers", "huggingface_hub"),
    ),
    "retrieval_service.corpus": Layer(
        (*MEMORY, "outrider.tokens", "outrider.near_copies"), ("numpy", "tokenizers", "pydivsufsort")
    ),
    "retrieval_service.past": Layer((*MEMORY, "outrider.compiling", "outrider.folder_lock"), ("numpy",)),
    "retrieval_service.dense": Layer(
        (*MEMORY, "outrider.folder_lock", "outrider.tokens", "retrieval_service.corpus.disk"),
        ("numpy", "faiss", "safetensors"),
    ),
    "orchestrator": Layer(
        (
            *SHARED,
            *(
                f"orchestrator.{room}"
                for room in (
                    "admitted_request",
                    "store",
                    "fleet",
                    "relay",
                    "edge",
                    "front.http",
                    "front.web_tokens",
                )
            ),
        ),
        (*RPC, "pydantic", "prometheus_client", "tokenizers"),
    ),
    "orchestrator.admitted_request": Layer(("speculative", "outrider.wire"), ()),
    "orchestrator.store": Layer(
        (
            "speculative",
            "outrider.wire",
            "outrider.runtime.backoff",
            "orchestrator.admitted_request",
            "orchestrator.store.redis",
        ),
        (),
    ),
    "orchestrator.store.redis": Layer((*SHARED, "orchestrator.store"), ("redis",)),
    "orchestrator.store.connection": Layer(("orchestrator.store",), ("redis",)),
    "orchestrator.fleet": Layer((*SHARED, "orchestrator.store"), RPC),
    "orchestrator.relay": Layer(
        (*SHARED, "orchestrator.admitted_request", "orchestrator.fleet", "orchestrator.store"), ()
    ),
    "orchestrator.edge": Layer(
        (
            *SHARED,
            "outrider.source",
            "orchestrator.admitted_request",
            "orchestrator.fleet",
            "orchestrator.front.quota",
        ),
        (*RPC, "pydantic"),
    ),
    "orchestrator.front.web_tokens": Layer(
        ("speculative", "outrider.wire", "orchestrator.front.quota"), ("pydantic", "jwt")
    ),
    "orchestrator.front.http": Layer(
        (
            "speculative",
            "outrider.wire",
            "outrider.wire.origin",
            "outrider.tokens",
            "outrider.v1",
            "orchestrator",
        ),
        (*RPC, "fastapi", "starlette", "uvicorn", "h11", "pydantic", "pydantic_core", "jinja2"),
    ),
    # Belongs to a process of its own, which the front starts and never imports.
    "orchestrator.front.http.templated.template_parser": Layer(("orchestrator",), ("transformers",)),
    "training": Layer(
        (
            "speculative",
            "outrider.folder_lock",
            "outrider.json_lines",
            "outrider.lm",
            "outrider.near_copies",
            "outrider.tokens",
        ),
        ("numpy", "tokenizers", *TORCH),
    ),
}


def begins(name: str, start: str) -> bool:
    return name == start or name.startswith(f"{start}.")


def layer_of(name: str) -> str:
    return max((layer for layer in LAYERS if begins(name, layer)), key=len)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


def faults(name: str, imported: set[str]) -> list[str]:
    own = layer_of(name)
    layer = LAYERS[own]
    wrong = []
    for other in sorted(imported):
        top = other.partition(".")[0]
        if is_ours(other):
            fine = layer_of(other) == own or any(
                begins(other, allowed) for allowed in layer.ours if allowed != own
            )
            # `from outrider import client` names the package too, which holds nothing of its own.
            fine = fine or other == "outrider"
        elif top in sys.stdlib_module_names:
            fine = top not in layer.not_even
        else:
            fine = top in layer.others
        if not fine:
            wrong.append(other)
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_only_what_their_layer_may(package: str) -> None:
    wrong = {
        name: found
        for name, path in modules()
        if begins(name, package) and (found := faults(name, imports(name, path.read_text())))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("speculative.tree", "import grpc"),
        ("speculative.tree", "import asyncio"),
        ("speculative.tree", "import torch"),
        ("speculative.draft_pool", "from outrider.wire import codec"),
        ("orchestrator.front.grpc", "def f():\n    import torch"),
        ("orchestrator.front.grpc", "import llguidance"),
        ("orchestrator.store.ledger", "import redis"),
        ("orchestrator.front.grpc", "import fastapi"),
        ("orchestrator.front.http.app", "import torch"),
        ("orchestrator.front.http.app", "import transformers"),
        ("orchestrator.front.http.templated.template_parser", "import torch"),
        ("orchestrator.fleet.fleet", "from orchestrator.relay.relay import Relay"),
        ("orchestrator.fleet.fleet", "from orchestrator.admitted_request import Speculation"),
        ("orchestrator.relay.relay", "from orchestrator.front.admission import admit"),
        ("orchestrator.relay.relay", "from orchestrator.metrics import RequestMetrics"),
        ("orchestrator.store.ledger", "from orchestrator.fleet.fleet import Fleet"),
        ("speculative.grammar", "import llguidance"),
        ("orchestrator.front.grpc", "from outrider.lm.runner import PackedLM"),
        ("orchestrator.front.grpc", "from transformers import AutoTokenizer"),
        ("orchestrator.front.grpc", "import importlib\nimportlib.import_module('outrider.lm')"),
        ("verifier_service.engine", "from drafter_service import worker"),
        ("verifier_service.engine", "TABLE = {'x': 'drafter_service.drafters.causal_lm:CausalLM'}"),
        ("drafter_service.worker", "from outrider.cli import app"),
        ("outrider.lm.runner", "import grpc"),
        ("outrider.lm.runner", "from outrider import runtime"),
        ("outrider.wire.codec", "from outrider.runtime import serve"),
        ("outrider.tokens", "import transformers"),
        ("outrider.client", "from outrider.runtime import serve"),
        ("outrider.cli.app", "import torch"),
        ("outrider.edge.drafting", "from outrider.lm.runner import PackedLM"),
        ("outrider.edge.backends.llama_server", "import torch"),
        ("outrider.cli.config.check", "from verifier_service import engine"),
        ("outrider.pair.checking", "from verifier_service import engine"),
        ("outrider.source.events", "from drafter_service import worker"),
        ("retrieval_service.worker", "import torch"),
        ("retrieval_service.worker", "from outrider.lm import runner"),
        ("retrieval_service.worker", "from drafter_service import worker"),
        ("retrieval_service.past.disk", "import grpc"),
        ("training.loop", "from verifier_service import engine"),
    ],
)
def test_what_a_layer_may_not_import_is_found(module: str, text: str) -> None:
    assert faults(module, imports(module, text))


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules), sep='\\n')"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200, check=True
    )
    return set(ended.stdout.split())


def test_the_orchestrator_runs_without_torch() -> None:
    loaded = loaded_by("import orchestrator.__main__, orchestrator.service, orchestrator.settings")
    assert "grpc" in loaded
    assert not loaded & {"torch", "transformers", "outrider.lm", "redis"}
    assert "fastapi" not in loaded, "what has no HTTP front does not load one"
    loaded |= loaded_by("import orchestrator.front.http.app, orchestrator.front.http.connections.server")
    assert not loaded & {"torch", "transformers", "outrider.lm"}


def test_settings_are_checked_before_torch_is_loaded() -> None:
    for service in ("verifier_service", "drafter_service", "retrieval_service", "orchestrator"):
        assert not loaded_by(f"import {service}.settings") & {"torch", "transformers", "outrider.lm"}, service


def test_the_retrieval_service_runs_without_torch() -> None:
    loaded = loaded_by("import retrieval_service.__main__, retrieval_service.service")
    assert "grpc" in loaded
    assert not loaded & {"torch", "transformers", "outrider.lm"}


def test_the_client_and_the_core_are_light() -> None:
    assert not loaded_by("from outrider import Client") & {"torch", "transformers", "tokenizers", "pydantic"}
    assert not loaded_by("import outrider") & {"grpc", "numpy"}
    assert not loaded_by("import speculative.draft_pool, speculative.sampling") & {"grpc", "asyncio", "torch"}


def test_the_command_line_imports_little_before_a_command_runs() -> None:
    heavy = {"torch", "transformers", "grpc", "numpy", "pydantic", "tokenizers"}
    assert not loaded_by("import outrider.cli.app") & heavy
