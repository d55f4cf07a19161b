"""One request of each arm across a link: the time of its tokens, and the device's contribution."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.client.options import Options
from outrider.edge.backends import DraftModel
from outrider.edge.device_report import DeviceReport
from outrider.edge.edge_drafter import EdgeDrafter
from outrider.edge.top_k import TopK

FIXED = ("cloud", "waiting", "pipelined", "hinting")
ARMS = (*FIXED, "automatic", "economy")
"""Arms: the modes that are kept, and the controller's choice by `latency` and by `economy`."""


class ModelShare:
    """One drafter's share of a model that several drafters use, one request at a time; none closes it.

    Args:
        users: the share that used the model last, and nothing else; the same list for all shares.
    """

    def __init__(self, model: DraftModel, users: "list[ModelShare]") -> None:
        self.name, self.max_length, self.digest = model.name, model.max_length, model.digest
        self._model, self._users = model, users
        self._ids: list[int] = []

    def forward(self, ids: Sequence[int]) -> TopK:
        """Reads further ids, and first those before, where another share has used the model."""
        before = [] if self._is_user() else list(self._ids)
        if not self._is_user():
            self._model.rewind(0)
            self._users[:] = [self]
        self._ids.extend(ids)
        return self._model.forward([*before, *ids])

    def rewind(self, to: int) -> None:
        """Forgets all ids but the first `to`."""
        del self._ids[to:]
        if self._is_user():
            self._model.rewind(to)

    def close(self) -> None:
        """Leaves the model open."""

    def _is_user(self) -> bool:
        return bool(self._users) and self._users[0] is self


@dataclass(frozen=True, slots=True)
class EdgeRun:
    """One answer of one arm."""

    arm: str
    prompt: int
    ids: tuple[int, ...]
    ms: float
    """Milliseconds from the first tokens to the last ones."""
    timed: int
    """Tokens that came in that time."""
    rounds: int
    """Passes of the target that committed tokens."""
    device: DeviceReport
    measured: dict[str, object]
    """What the device measured: `Controller.explain`."""


class EdgeArm:
    """A drafter that keeps to one arm; what it measures lasts over its requests.

    Args:
        address: host:port of the orchestrator, or of a link before it.
    """

    def __init__(self, arm: str, address: str, share: ModelShare) -> None:
        self._arm = arm
        mode = arm if arm in FIXED else None
        preference = "economy" if arm == "economy" else "latency"
        self._drafter = EdgeDrafter(address, share, mode=mode, preference=preference)

    def run(self, number: int, prompt: Sequence[int], tokens: int, temperature: float) -> EdgeRun:
        """Asks for `tokens` tokens behind prompt number `number`; no other source drafts."""
        options = Options(
            ids=prompt,
            max_tokens=tokens,
            temperature=temperature,
            seed=number,
            ignore_eos=True,
            sources=["edge"],
            learn=False,
        )
        stream = self._drafter.stream(**options)
        first = next(stream)
        began = time.perf_counter()
        for _ in stream:
            pass
        ended = time.perf_counter()
        completion = stream.completion()
        return EdgeRun(
            self._arm,
            number,
            completion.ids,
            1000 * (ended - began),
            len(completion.ids) - len(first.ids),
            completion.usage.rounds,
            stream.device,
            stream.explain(),
        )

    def close(self) -> None:
        """Closes the connection; the model stays."""
        self._drafter.close()
