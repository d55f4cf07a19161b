"""Sends requests of different kinds at once, and lets a test wait until each has its first tokens."""

import threading
from collections.abc import Sequence
from typing import Any

from outrider.client import Client, Completion

ASKED: list[dict[str, Any]] = [
    {"ids": [5, 9, 30], "temperature": 0.0},
    {"ids": [5, 9, 30, 41], "temperature": 0.8, "seed": 11, "n": 2},
    {"ids": [7], "temperature": 1.1, "seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"ids": [8, 8], "temperature": 0.8, "seed": 4, "speculation": False, "logprobs": True},
    {"ids": [7, 7], "temperature": 0.9, "seed": 5, "references": ["abc def", "x = 1"]},
]
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


def together(
    client: Client,
    started: threading.Barrier | None = None,
    asked: Sequence[dict[str, Any]] = ASKED,
    **options: Any,
) -> list[Completion]:
    """Sends all requests at once, each with `options` added, and returns their answers in order.

    Args:
        started: a barrier that is passed once every request has its first tokens.
    """
    answers: list[Completion | BaseException] = [RuntimeError("never answered")] * len(asked)

    def ask(number: int) -> None:
        try:
            with client.stream(**LONG | asked[number] | options) as stream:
                next(stream)
                if started is not None:
                    started.wait(60)
                answers[number] = stream.completion()
        except BaseException as error:
            answers[number] = error

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    if started is not None:
        started.wait(60)
    for thread in threads:
        thread.join(200)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, Completion)]


def ids_of(answers: list[Completion]) -> list[tuple[tuple[int, ...], str]]:
    return [(choice.ids, choice.text) for answer in answers for choice in answer.choices]
