"""Clients of an orchestrator: `Client` blocks, `AsyncClient` awaits; both take and return the same things.

    with outrider.Client("127.0.0.1:50051") as client:
        print(client.generate("def fibonacci(n):", max_tokens=64, temperature=0).text)

With the addresses of several orchestrators, a request that loses its orchestrator continues at another one,
from the next token. Errors are of the OutriderError family (`speculative.errors`). Knows nothing of verifiers
or drafters.
"""

from outrider.client.async_client import AsyncClient, AsyncStream
from outrider.client.blocking_client import Client, Stream
from outrider.client.completions import Choice, Chunk, Completion, Logprob, Model, Usage

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
