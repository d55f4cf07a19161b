"""Feeds past outputs in children that are killed at seeded moments, and says what each left behind.

Run by test_kills.py in a process of its own, since it forks: `python killed.py FOLDER KILLS SEED`.
"""

import os
import random
import signal
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from retrieval_service.past.outputs import Limits, PastOutputs
from retrieval_service.past.text import PastText
from retrieval_service.past.writer import DiskPolicy

LIMIT = 700
TENANTS = ("one", "two")
Operation = tuple[str, str, str, list[int]]
State = list[tuple[str, list[int]]]


def operations(seed: int) -> Iterator[Operation]:
    choose = random.Random(seed)
    while True:
        tenant, session = choose.choice(TENANTS), f"s{choose.randrange(4)}"
        what = choose.choices(("extend", "finish", "flush", "forget"), (300, 25, 1, 3))[0]
        yield what, tenant, session, [choose.randrange(50) for _ in range(choose.randrange(1, 30))]


def opened(folder: Path) -> PastOutputs:
    policy = DiskPolicy(sync_s=0.003, rotate_bytes=1_500)
    return PastOutputs(folder, Limits(tenant_tokens=LIMIT), policy, say=lambda _: None)


def ingest(folder: Path, seed: int, acknowledge: int) -> None:
    """Runs operations until killed; reports through a pipe each after which all so far is durable."""
    outputs = opened(folder)
    for number, (what, tenant, session, ids) in enumerate(operations(seed), 1):
        if what == "extend":
            outputs.extend(tenant, session, ids)
        elif what == "finish":
            outputs.finish(tenant, session)
        elif what == "flush":
            if outputs.flush():
                os.write(acknowledge, number.to_bytes(4, "big"))
        else:
            outputs.forget(tenant, session)
            os.write(acknowledge, (number | 1 << 31).to_bytes(4, "big"))


def killed(folder: Path, seed: int, after: float) -> list[int]:
    """The numbers of the operations that were acknowledged before the kill."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        ingest(folder, seed, writing)
    os.close(writing)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    return [int.from_bytes(said[at : at + 4], "big") for at in range(0, len(said), 4)]


def states(outputs: PastOutputs) -> dict[str, State]:
    held = {name: tenant.text.sequences() for name, tenant in outputs._tenants.items()}
    return {name: [(session, list(ids)) for _, session, ids in held.get(name, [])] for name in TENANTS}


def follow(before: dict[str, State], seed: int, acknowledged: list[int], found: dict[str, State]) -> int:
    """The operation after which a tenant was as found; fails without one, or if it is too early."""
    last = {name: 0 for name in TENANTS}
    done = list(operations_until(seed, acknowledged))
    for number in acknowledged:
        if number < 1 << 31:
            last = dict.fromkeys(TENANTS, number)
        else:
            number -= 1 << 31
            last[done[number - 1][1]] = number
    reached = 0
    for name in TENANTS:
        at = first_as(found[name], before[name], name, seed, last[name])
        reached = max(reached, at)
    return reached


def operations_until(seed: int, acknowledged: list[int]) -> Iterator[Operation]:
    most = max((number & ~(1 << 31) for number in acknowledged), default=0)
    for _, one in zip(range(most), operations(seed), strict=False):
        yield one


def first_as(found: State, before: State, name: str, seed: int, least: int) -> int:
    text = PastText(LIMIT)
    text.restore(((at, session, ids_of(ids)) for at, (session, ids) in enumerate(before)), len(before))
    for number, (what, tenant, session, ids) in enumerate(operations(seed), 1):
        if number > least and found == [(one, list(held)) for _, one, held in text.sequences()]:
            return number - 1
        if number > least + 20_000:
            raise SystemExit(f"seed {seed}: tenant {name!r} is as it never was after operation {least}")
        if tenant != name:
            continue
        if what == "extend":
            text.extend(session, ids)
        elif what == "finish":
            text.finish(session)
        elif what == "forget":
            text.forget(session)
        while text.tidy(1_000):
            pass
    raise AssertionError


def ids_of(ids: list[int]) -> "array[int]":
    return array("I", ids)


def main() -> None:
    root, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    choose = random.Random(seed)
    before: dict[str, State] = {name: [] for name in TENANTS}
    operations_seen = 0
    for kill in range(kills):
        # Ten kills on a folder: what a kill left is what the next one starts from.
        folder = root / str(kill // 10)
        if kill % 10 == 0:
            before = {name: [] for name in TENANTS}
        acknowledged = killed(folder, seed + kill, choose.uniform(0, 0.1))
        outputs = opened(folder)
        found = states(outputs)
        outputs.close()
        operations_seen += follow(before, seed + kill, acknowledged, found)
        before = found
    print(operations_seen)


if __name__ == "__main__":
    main()
