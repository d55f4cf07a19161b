"""The retrieval worker among real processes: drafts of every memory, its death, garbage, and the same ids."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client, Completion
from tests.integration.live import ROOT, Up, start_up, stopped, until

LONG: dict[str, Any] = {"ids": [5, 9, 30], "max_tokens": 250, "logit_bias": {1: -100.0}}
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9},
    {"temperature": 1.2, "seed": 7, "repetition_penalty": 1.3},
]
OURS = ("corpus", "past", "dense")


@pytest.fixture(scope="module")
def retrieving(up: Up, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A target, no drafter, and a corpus of what the target says greedily and with a seed."""
    folder = tmp_path_factory.mktemp("retrieval")
    with Client(up.address) as client:
        said = [client.generate(**LONG, **way, learn=False).text for way in WAYS[:2]]
    (folder / "said.txt").write_text("\n".join(said), encoding="utf-8")
    command = [sys.executable, "-m", "outrider.cli", "index", "build", str(folder / "corpus")]
    command += [str(folder / "said.txt"), "--tokenizer", str(tiny_llama)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    flags = ["--corpus", str(folder / "corpus"), "--folder", str(folder / "kept")]
    stack = start_up("--target", str(tiny_llama), "--drafter", "none", *flags, log=folder / "stderr")
    try:
        stack.wait_ready()
        yield stack
    finally:
        assert stack.stop() == 0, stack.log()


@pytest.fixture(scope="module")
def client(retrieving: Up) -> Iterator[Client]:
    with Client(retrieving.address) as client:
        yield client


@pytest.fixture(scope="module")
def plain(client: Client) -> list[Completion]:
    """The answers to each kind of request without drafts."""
    return [client.generate(**LONG, **way, speculation=False) for way in WAYS]


def drafts(up: Up, client: Client) -> bool:
    """Whether the worker offers anything during a request."""
    offered = "outrider_verifier_source_nodes_total"
    before = up.metric("verifier", offered, source="corpus", outcome="offered")
    client.generate(**LONG, **WAYS[0], sources=OURS)
    return up.metric("verifier", offered, source="corpus", outcome="offered") > before


def test_what_a_corpus_drafts_is_credited_to_it(client: Client, plain: list[Completion]) -> None:
    for _ in range(200):  # it may rest for what other requests found, until one of them tries it again
        answer = client.generate(**LONG, **WAYS[0], sources=["corpus"], learn=False)
        assert answer.ids == plain[0].ids
        if answer.usage.accepted_by_source:
            break
    assert set(answer.usage.accepted_by_source) == {"corpus"}
    assert answer.usage.rounds < answer.usage.completion_tokens


def test_what_was_said_before_is_credited_to_the_past_of_its_own_tenant(
    client: Client, plain: list[Completion]
) -> None:
    def accepted(tenant: str, learn: bool) -> int:
        answer = client.generate(**LONG, **WAYS[2], sources=["past"], tenant=tenant, learn=learn)
        assert answer.ids == plain[2].ids
        return answer.usage.accepted_by_source.get("past", 0)

    assert not any(accepted("first", learn=False) for _ in range(2))
    until(lambda: accepted("second", learn=True))  # on a busy machine drafts may be late for all of a request
    again = client.generate(**LONG, **WAYS[2], sources=["past"], tenant="third")
    assert again.usage.accepted_by_source == {}, "another tenant has none of it"


def test_the_end_of_an_output_is_learnt_too(retrieving: Up, client: Client) -> None:
    learnt = "outrider_retrieval_tokens_learnt_total"
    until(lambda: not retrieving.metric("verifier", "outrider_num_requests_running"))
    until(lambda: not retrieving.metric("retrieval", "outrider_retrieval_sessions"))  # it knows all ends
    before = retrieving.metric("retrieval", learnt)
    answer = client.generate(ids=[5, 9, 30], max_tokens=40, temperature=0.8, seed=99, tenant="ends")
    until(lambda: retrieving.metric("retrieval", learnt) - before >= len(answer.ids))
    assert retrieving.metric("retrieval", learnt) - before == len(answer.ids)


def test_sessions_at_once_get_the_ids_of_plain_decoding(client: Client, plain: list[Completion]) -> None:
    asked = [(way, sources) for way in range(len(WAYS)) for sources in (None, OURS, ("past",))]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(lambda one: client.generate(**LONG, **WAYS[one[0]], sources=one[1]), asked)
        for (way, sources), answer in zip(asked, answers, strict=True):
            assert answer.ids == plain[way].ids, (way, sources)


@pytest.mark.parametrize("way", [0, 1])
def test_a_request_outlives_its_retrieval_worker(
    retrieving: Up, client: Client, plain: list[Completion], way: int
) -> None:
    first = retrieving.children()["retrieval"]
    stream = client.stream(**LONG, **WAYS[way])
    next(stream)
    os.kill(first, signal.SIGKILL)
    assert stream.completion().ids == plain[way].ids
    assert client.generate(**LONG, **WAYS[way]).ids == plain[way].ids, "without it"
    until(lambda: retrieving.children().get("retrieval", first) != first)
    until(lambda: drafts(retrieving, client))
    assert client.generate(**LONG, **WAYS[way]).ids == plain[way].ids
    assert "requests go on" in retrieving.log()


def test_a_worker_that_stalls_and_goes_on_costs_nobody_an_id(
    retrieving: Up, client: Client, plain: list[Completion]
) -> None:
    until(lambda: drafts(retrieving, client))
    worker = retrieving.children()["retrieval"]
    stream = client.stream(**LONG, **WAYS[1])
    next(stream)
    with stopped(worker):
        during = client.generate(**LONG, **WAYS[3])
    assert during.ids == plain[3].ids
    assert stream.completion().ids == plain[1].ids
    until(lambda: drafts(retrieving, client))


def test_a_corpus_that_is_not_there_costs_speed_alone(client: Client, plain: list[Completion]) -> None:
    answer = client.generate(**LONG, **WAYS[0], corpora=["nowhere"], sources=OURS)
    assert answer.ids == plain[0].ids
    assert answer.usage.accepted_by_source == {}


def test_a_corpus_that_is_named_is_drawn_on(client: Client) -> None:
    def accepted() -> int:
        named = client.generate(**LONG, **WAYS[0], corpora=["corpus"], sources=["corpus"], learn=False)
        return named.usage.accepted_by_source.get("corpus", 0)

    until(accepted)  # it may rest for what other requests found, until one of them tries it again
