"""What both clients share: whom they ask, for how long, and what can be asked for. Pure but for the clock."""

import time
from dataclasses import dataclass

from outrider.options import Options
from outrider.v1 import generation_pb2
from speculative.errors import InvalidRequest

CONTROL_S = 10.0
"""Seconds that Cancel and ListModels may take."""
SEVERAL_S = 30.0
"""How long a request looks for another orchestrator where there are several."""
PATIENCE_MS = 10_000
"""How long the only orchestrator may leave a ping unanswered: there is nowhere else to go."""
AMONG_SEVERAL_MS = 450
"""How long one of several may: to go on at another costs little, even where this one was but slow."""


@dataclass(frozen=True, slots=True)
class Model:
    """A target that can be asked for."""

    name: str
    max_length: int
    """The most ids, prompt and generated ones together."""
    vocabulary_size: int
    has_tokenizer: bool
    """Whether text prompts and stop strings are possible."""
    sources: tuple[str, ...]


def addresses_in(address: str) -> list[str]:
    """Host:port of each; commas lie between. Raises InvalidRequest where there is none to dial."""
    addresses = [one.strip() for one in address.split(",")]
    if not all(addresses):
        raise InvalidRequest("the address is empty; give an orchestrator's host:port, or several with commas")
    return addresses


def ping_patience_ms(addresses: list[str]) -> int:
    """How long each of these orchestrators may leave a ping unanswered, in milliseconds."""
    return AMONG_SEVERAL_MS if len(addresses) > 1 else PATIENCE_MS


def patience_for(addresses: list[str], patience_s: float | None) -> float:
    """How long a request is asked again after a loss, in seconds. Raises InvalidRequest."""
    if patience_s is None:
        return SEVERAL_S if len(addresses) > 1 else 0.0
    if not patience_s >= 0:
        raise InvalidRequest(f"patience_s is {patience_s}; 0 or more seconds are possible")
    return patience_s


def ends_at(options: Options) -> float | None:
    """When the request's time is over."""
    timeout = options.get("timeout")
    return None if timeout is None else time.monotonic() + timeout


def time_left(ends: float | None) -> float | None:
    """Seconds until then, above 0."""
    return None if ends is None else max(0.001, ends - time.monotonic())


def model_from_wire(model: generation_pb2.Model) -> Model:
    """As an orchestrator describes it."""
    return Model(
        name=model.name,
        max_length=model.max_length,
        vocabulary_size=model.vocabulary_size,
        has_tokenizer=model.has_tokenizer,
        sources=tuple(model.sources),
    )
