"""Drives one endpoint at one concurrency, and sums up its answers."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.event_stream import Endpoint, EndpointFailed, StreamedAnswer, stream_answer
from benchmarks.shared.figures import quantile

Body = Mapping[str, Any]


async def drive(
    endpoint: Endpoint, path: str, bodies: Sequence[Body], concurrency: int, timeout_s: float
) -> dict[str, Any]:
    """Sends all bodies, `concurrency` at a time, each as soon as one before it has ended.

    Raises:
        EndpointFailed: a request failed; the others are cancelled.
    """
    waiting = list(enumerate(bodies))[::-1]
    answers: dict[int, StreamedAnswer] = {}

    async def work() -> None:
        while waiting:
            number, body = waiting.pop()
            answers[number] = await stream_answer(endpoint, path, body, timeout_s)

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(bodies))):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        if failures.split(EndpointFailed)[1] is not None:
            raise
        raise EndpointFailed(str(failures.exceptions[0])) from failures.exceptions[0]
    seconds = time.perf_counter() - began
    return level_record([answers[number] for number in range(len(bodies))], seconds)


def level_record(answers: Sequence[StreamedAnswer], seconds: float) -> dict[str, Any]:
    """What is kept of a level: counts, times and texts, from which all figures follow."""
    return {
        "seconds": seconds,
        "tokens": sum(answer.tokens for answer in answers),
        "events": sum(len(answer.events) for answer in answers),
        "first_ms": [round(answer.first_ms, 3) for answer in answers],
        "token_ms": [round(answer.token_ms, 3) for answer in answers],
        "gaps_ms": [round(gap, 3) for answer in answers for gap in answer.gaps_ms],
        "texts": [answer.text for answer in answers],
    }


def level_figures(records: Sequence[Mapping[str, Any]], first: Sequence[str]) -> dict[str, Any]:
    """The figures of all repeats of a level.

    Args:
        first: texts of the first endpoint at the first level; the same requests' texts are compared to them.
    """
    pairs = [pair for record in records for pair in zip(record["texts"], first, strict=False)]
    first_ms = [ms for record in records for ms in record["first_ms"]]
    token_ms = [ms for record in records for ms in record["token_ms"]]
    gaps_ms = [ms for record in records for ms in record["gaps_ms"]] or [0.0]
    tokens = sum(record["tokens"] for record in records)
    return {
        "tokens_per_second": round(tokens / sum(record["seconds"] for record in records), 2),
        "first_token_ms": {"p50": quantile(first_ms, 0.5), "p99": quantile(first_ms, 0.99)},
        "token_ms": {"p50": quantile(token_ms, 0.5), "p99": quantile(token_ms, 0.99)},
        "gap_ms": {"p50": quantile(gaps_ms, 0.5), "p99": quantile(gaps_ms, 0.99)},
        "tokens_per_event": round(tokens / sum(record["events"] for record in records), 3),
        "requests": sum(len(record["texts"]) for record in records),
        "same_text": round(sum(text == expected for text, expected in pairs) / len(pairs), 3),
    }
