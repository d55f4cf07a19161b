"""Sends the inputs of a class to the services, a few at a time, and tells what came back."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.hostile.attacked_services import Ports
from benchmarks.hostile.inputs import FAULTS, Input

HUNG_S = 60.0
"""Seconds after which an input without an outcome counts as hung."""


@dataclass(slots=True)
class Outcomes:
    """What came back to the inputs of a class."""

    statuses: Counter[str] = field(default_factory=Counter)
    hung: int = 0
    faults: list[str] = field(default_factory=list)
    """Statuses that no client may see, with the input's number."""


async def attack(ports: Ports, inputs: Sequence[Input], at_once: int, hung_s: float = HUNG_S) -> Outcomes:
    """Sends all inputs, `at_once` at a time, and returns their outcomes."""
    outcomes, waiting = Outcomes(), list(enumerate(inputs))[::-1]

    async def work() -> None:
        while waiting:
            number, send = waiting.pop()
            try:
                async with asyncio.timeout(hung_s):
                    status = await send(ports)
            except TimeoutError:
                outcomes.hung += 1
                status = "hung"
            except OSError as error:
                status = type(error).__name__
            outcomes.statuses[status] += 1
            if status in FAULTS:
                outcomes.faults.append(f"input {number}: {status}")

    await asyncio.gather(*(work() for _ in range(at_once)))
    return outcomes
