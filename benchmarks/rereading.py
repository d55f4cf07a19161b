"""How long sessions of a lost verifier wait for their next token, by the order in which they are read again.

A real engine core reads the tokens of all sessions at once, as after a verifier that held them was killed:
in order of arrival, and in the order that the verifier plans. Both orders take turns, and have to give the
same ids. docs/figures/rereading.md says what each field means.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from outrider.lm.runner import PackedLM
from outrider.runtime.settings import default_cache_dir
from outrider.wire.codec import SessionKey
from speculative.params import SamplingParams
from speculative.reading_order import UnreadPrompt, reading_order
from speculative.stop import StopChecker
from verifier_service.engine.core import EngineCore, TargetPass
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import Open
from verifier_service.engine.session import Session
from verifier_service.engine.stats import PassTimes
from verifier_service.engine.step import EngineLimits
from verifier_service.sessions.request import SessionRequest, SourceSet

Ids = tuple[int, ...]
ORDERS = ("arrival", "planned")
_NEW = 4
"""Tokens that each session still generates: its wait ends with the first of them."""


def _mixes(
    sessions: int, shared: int, own: int, vocabulary: int
) -> Mapping[str, Callable[[random.Random], list[Ids]]]:
    """Texts of all sessions by the name of the mix, in order of arrival."""

    def draw(dice: random.Random, length: int) -> Ids:
        return tuple(dice.randrange(vocabulary) for _ in range(length))

    def one_beginning(dice: random.Random) -> list[Ids]:
        beginning = draw(dice, shared)
        return [(*beginning, *draw(dice, own)) for _ in range(sessions)]

    def most_share(dice: random.Random) -> list[Ids]:
        beginning = draw(dice, shared)
        alone = [draw(dice, shared + own) if number % 8 < 3 else () for number in range(sessions)]
        return [text or (*beginning, *draw(dice, own)) for text in alone]

    def alone(dice: random.Random) -> list[Ids]:
        return [draw(dice, dice.randint(own, shared + own)) for _ in range(sessions)]

    return {"one_beginning": one_beginning, "most_share": most_share, "alone": alone}


def _session(tenant: str, handle: int, ids: Ids, vocabulary: int) -> Session:
    request = SessionRequest(
        key=SessionKey(tenant, f"session-{handle}"),
        epoch=1,
        ids=ids,
        prompt_length=len(ids),
        limit=len(ids) + _NEW,
        params=SamplingParams(),
        seed=handle,
        stops=(),
        time_left_s=None,
        node_limit=0,
        sources=(),
        recovered=True,
    )
    checker = StopChecker(frozenset(), request.limit, (), None, ids, len(ids), 0)
    return Session(handle, request, checker, vocabulary, SourceSet((), frozenset(), frozenset()))


def _by_arrival(unread: Sequence[UnreadPrompt], block: int) -> list[int]:
    return [each.handle for each in unread]


def recover(
    target: PackedLM, core: EngineCore, texts: Sequence[Ids], order: str, tenant: str
) -> tuple[list[float], list[list[int]]]:
    """Milliseconds until each session's next token, and all sessions' ids at their end.

    A tenant that had no sessions before finds nothing cached.
    """
    width = target.vocabulary_size
    sessions = [_session(tenant, handle, ids, width) for handle, ids in enumerate(texts, start=1)]
    in_order = reading_order if order == "planned" else _by_arrival
    waits: dict[int, float] = {}
    began = time.perf_counter()
    with patch("verifier_service.engine.session_pool.reading_order", in_order):
        for session in sessions:
            core.apply(Open(session), time.perf_counter())
        while len(core.sessions):
            begun = core.begin(time.perf_counter())
            if not isinstance(begun, TargetPass):
                continue
            started = time.perf_counter()
            outcome = target.forward(begun.sequences)
            ended = time.perf_counter()
            for update in core.finish(begun, outcome, PassTimes(started, ended)):
                waits.setdefault(update.handle, 1000 * (time.perf_counter() - began))
    core.collect()
    return [waits[session.handle] for session in sessions], [session.ids for session in sessions]


_OF_WAITS: Mapping[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "p50": statistics.median,
    "longest": max,
}


def _figures(by_order: Mapping[str, list[list[float]]]) -> dict[str, Any]:
    """Waits of one mix, and ratios of the waits of one repeat: medians over the repeats."""
    pairs = list(zip(by_order["planned"], by_order["arrival"], strict=True))
    return {
        "wait_ms": {
            order: {
                name: round(statistics.median([of(waits) for waits in by_order[order]]), 1)
                for name, of in _OF_WAITS.items()
            }
            for order in ORDERS
        },
        "planned_over_arrival": {
            name: round(statistics.median([of(planned) / of(arrival) for planned, arrival in pairs]), 3)
            for name, of in _OF_WAITS.items()
        },
    }


def measure(target: PackedLM, settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    core = EngineCore(KVCache(target.pool, True, 0.0), EngineLimits(wait_ms_most=0.0))
    identical, found = True, {}
    for name, texts_of in _mixes(
        settings.sessions, settings.shared, settings.own, target.vocabulary_size
    ).items():
        by_order: dict[str, list[list[float]]] = {order: [] for order in ORDERS}
        for repeat in range(-1, settings.repeats):
            texts, ids = texts_of(random.Random(repeat)), []
            for order in ORDERS if repeat % 2 else ORDERS[::-1]:
                waits, made = recover(target, core, texts, order, f"{name}-{repeat}-{order}")
                ids.append(made)
                if repeat >= 0:
                    by_order[order].append(waits)
            identical &= ids[0] == ids[1]
        found[name] = _figures(by_order)
    return {"identical": identical, "mixes": found}


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("rereading", __doc__)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--sessions", type=int, default=16, help="sessions that the lost verifier held")
    parser.add_argument(
        "--shared", type=int, default=400, help="tokens that sessions share at their beginning"
    )
    parser.add_argument("--own", type=int, default=48, help="tokens of each session behind these")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of both orders, after one to warm up")
    parser.add_argument(
        "--passes", choices=("eager", "compiled"), default="compiled", help="passes of the target"
    )
    return parser.parse_args()


def main() -> None:
    """Measures and prints the result."""
    settings, started = parse(), time.perf_counter()
    torch.set_num_threads(1)
    target = PackedLM.load(settings.target, kv_mb=256)
    target.compile_passes(settings.passes, default_cache_dir())
    print_result("rereading", settings_of(settings), started, measure(target, settings))


if __name__ == "__main__":
    main()
