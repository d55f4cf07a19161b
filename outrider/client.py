"""Clients of an orchestrator: `Client` blocks, `AsyncClient` awaits; both ask and answer in the same words.

    with outrider.Client("127.0.0.1:50051") as client:
        print(client.generate("def fibonacci(n):", max_tokens=64, temperature=0).text)

Given several orchestrators, with commas between them, a request that loses its own goes on at another one,
at the next token. Errors are of the OutriderError family (`speculative.errors`). Knows nothing of verifiers
or drafters.
"""

from outrider.asking import Model
from outrider.async_client import AsyncClient, AsyncStream
from outrider.blocking_client import Client, Stream
from outrider.completions import Choice, Chunk, Completion, Logprob, Usage

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "Logprob",
    "Model",
    "Stream",
    "Usage",
]
