"""Bounds of an engine's steps and of what it keeps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of a step."""

    prefill_chunk: int = 512
    """The most rows that prefills share with decoding."""
    wait_ms_most: float = 4.0
    """The longest wait for drafts before a step; 0: never."""
    beat_s: float = 0.1
    """How often an idle engine says that it lives."""
    stall_ms: float = 60.0
    """How long a step may take that computes part of a prompt while other sessions decode."""
    most_running: int = 64
    """Sessions that have keys and values at once; others wait."""
    reuse_prefixes: bool = True
    """Whether blocks of committed ids are kept for sessions that begin with the same."""
    lease_s: float = 300.0
    """For how long the blocks of a session that ended or was parked are evicted after others."""
    adaptive: bool = True
    """Whether a step admits the nodes that pay for their rows, or all that the sessions' limits allow."""
