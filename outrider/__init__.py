"""Code that all processes and clients of Outrider share.

Importing this package costs nothing: the client's names are loaded when they are first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.client import AsyncClient, Chunk, Client, Completion
    from outrider.edge.async_edge_drafter import AsyncEdgeDrafter
    from outrider.edge.edge_drafter import EdgeDrafter

__all__ = [
    "AsyncClient",
    "AsyncEdgeDrafter",
    "Chunk",
    "Client",
    "Completion",
    "EdgeDrafter",
    "__version__",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "EdgeDrafter":
        from outrider.edge.edge_drafter import EdgeDrafter

        return EdgeDrafter
    if name == "AsyncEdgeDrafter":
        from outrider.edge.async_edge_drafter import AsyncEdgeDrafter

        return AsyncEdgeDrafter
    if name in __all__:
        from outrider import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
