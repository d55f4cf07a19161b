"""Answers of the device's own model: whole, marked, on demand alone, and never mixed with the cloud's."""

import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from outrider.edge.async_edge_drafter import AsyncEdgeDrafter
from outrider.edge.backends import DraftModel
from outrider.edge.drafted_request import DraftedRequest
from outrider.edge.drafting import DraftingThread
from outrider.edge.edge_drafter import EdgeDrafter
from outrider.edge.endpoint.cloud import Cloud
from outrider.edge.endpoint.server import EdgeEndpoint
from outrider.edge.local_answer import LocalRequest, LocalStream
from outrider.edge.top_k import DraftModelFailed, TopK
from speculative.errors import InvalidRequest, OutriderError, Overloaded, Unavailable
from speculative.stop import FinishReason
from tests.edge.toy import VOCABULARY, TextToy, ToyModel, guess
from tests.integration.live import until

WAIT_S = 20.0
NOWHERE = "127.0.0.1:9"
PROMPT = "ab c"
IDS = tuple(TextToy().encode(PROMPT))


def greedy(count: int) -> list[int]:
    """The ids that the toy finds likeliest behind the prompt."""
    ids = list(IDS)
    for _ in range(count):
        ids.append(guess(ids))
    return ids[len(IDS) :]


@pytest.fixture
def model() -> TextToy:
    return TextToy()


@pytest.fixture
def drafter(model: TextToy) -> Iterator[EdgeDrafter]:
    with EdgeDrafter(NOWHERE, model, patience_s=0.0) as drafter:
        yield drafter


LEFT_OPEN = """
import sys
from outrider.edge.edge_drafter import EdgeDrafter
drafter = EdgeDrafter("127.0.0.1:9", sys.argv[1])
stream = drafter.stream_locally("def", max_tokens=200, ignore_eos=True)
next(stream)
"""


def test_a_program_that_leaves_its_drafter_open_amid_an_answer_ends_cleanly(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", LEFT_OPEN, str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_the_models_own_text_and_says_so(drafter: EdgeDrafter) -> None:
    stream = drafter.stream_locally(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    chunks = list(stream)
    completion = stream.completion()
    assert [id_ for chunk in chunks for id_ in chunk.ids] == list(completion.ids) == greedy(12)
    assert completion.text == "".join(chr(32 + id_) for id_ in greedy(12))
    assert stream.provenance == completion.provenance == "local"
    assert completion.finish_reason is FinishReason.LENGTH
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(IDS), 12)
    assert completion.usage.rounds == 0  # no pass of the target


def test_the_seed_decides_sampled_text(drafter: EdgeDrafter) -> None:
    answers = [drafter.generate_locally(PROMPT, max_tokens=24, seed=seed).ids for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]
    unseeded = drafter.generate_locally(ids=IDS, max_tokens=24)
    assert drafter.generate_locally(ids=IDS, max_tokens=24, seed=unseeded.seed).ids == unseeded.ids


def test_the_model_is_free_for_the_next_answer_once_the_end_is_read(
    drafter: EdgeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = DraftingThread.release

    def late(self: DraftingThread, request: DraftedRequest) -> None:
        time.sleep(0.05)
        release(self, request)

    monkeypatch.setattr(DraftingThread, "release", late)
    first, second = (drafter.generate_locally(PROMPT, max_tokens=2, seed=1).ids for _ in range(2))
    assert first == second


def test_stops_end_it_as_they_end_the_targets_text(drafter: EdgeDrafter) -> None:
    text = "".join(chr(32 + id_) for id_ in greedy(12))
    stopped = drafter.generate_locally(
        PROMPT, max_tokens=12, temperature=0, ignore_eos=True, stop=[text[4:6]]
    )
    assert (stopped.text, stopped.finish_reason) == (text[:4], FinishReason.STOP)
    ended = drafter.generate_locally(
        PROMPT, max_tokens=12, temperature=0, ignore_eos=True, stop_ids=[greedy(12)[3]]
    )
    assert len(ended.ids) == greedy(12).index(greedy(12)[3]) + 1
    assert ended.finish_reason is FinishReason.STOP


def test_it_ends_where_the_model_can_read_no_further(drafter: EdgeDrafter, model: TextToy) -> None:
    model.max_length = len(IDS) + 3
    answer = drafter.generate_locally(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    assert len(answer.ids) == 3
    assert answer.finish_reason is FinishReason.LENGTH


def test_a_stream_of_the_cloud_never_becomes_local(drafter: EdgeDrafter) -> None:
    with pytest.raises(Unavailable):
        drafter.generate(PROMPT, max_tokens=4)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"logprobs": True},
        {"regex": "a+"},
        {"stop_ids": [VOCABULARY]},
        {"logit_bias": {VOCABULARY: 1.0}},
        {"ids": ()},
        {"ids": [1] * 600},
    ],
    ids=str,
)
def test_what_a_device_alone_cannot_do_is_refused(drafter: EdgeDrafter, options: dict[str, Any]) -> None:
    prompt = None if "ids" in options else PROMPT
    with pytest.raises(InvalidRequest):
        drafter.generate_locally(prompt, **options)


def test_a_model_without_text_says_so() -> None:
    with (
        EdgeDrafter(NOWHERE, ToyModel()) as drafter,
        pytest.raises(InvalidRequest, match="toy only drafts"),
    ):
        drafter.generate_locally(PROMPT)


def test_a_model_that_fails_ends_the_answer_with_its_error(drafter: EdgeDrafter, model: TextToy) -> None:
    model.fails = 1
    with pytest.raises(OutriderError, match="the toy is tired"):
        drafter.generate_locally(PROMPT, max_tokens=4)
    assert len(drafter.generate_locally(PROMPT, max_tokens=4, ignore_eos=True).ids) == 4


class SlowToy(TextToy):
    """A toy that waits before each token until it is let go; `began` counts those it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, ids: Sequence[int]) -> TopK:
        self.began.release()
        self.go.acquire()
        return super().forward(ids)


def test_one_answer_at_a_time_and_a_closed_one_makes_room() -> None:
    model = SlowToy()
    opened: DraftModel = model
    drafting = DraftingThread(lambda: opened)
    request = LocalRequest.of(PROMPT, {"ignore_eos": True})
    first = LocalStream(drafting, request)
    model.go.release()
    assert next(first).ids
    with pytest.raises(Overloaded, match="another request"):
        LocalStream(drafting, request)
    first.close()
    model.go.release(200)
    drafting.idle()
    assert first.completion().finish_reason is FinishReason.CANCELLED
    assert len(LocalStream(drafting, request).completion().ids) == 128
    drafting.close()


async def test_an_answer_that_runs_while_its_drafter_closes_ends_behind_the_token_in_hand() -> None:
    model = SlowToy()
    async with AsyncEdgeDrafter(NOWHERE, model) as drafter:
        answering = asyncio.create_task(drafter.generate_locally(PROMPT, ignore_eos=True))
        await asyncio.to_thread(model.began.acquire)
        closing = asyncio.create_task(drafter.close())
        await asyncio.to_thread(until, lambda: drafter._drafting.is_closed)
        model.go.release(200)
        await closing
        assert (await answering).finish_reason is FinishReason.CANCELLED
    assert model.reads == len(IDS), "nothing more is generated for nobody"


def test_an_answer_that_takes_longer_than_its_timeout_is_given_up() -> None:
    model = SlowToy()
    opened: DraftModel = model
    drafting = DraftingThread(lambda: opened)
    late = LocalStream(drafting, LocalRequest.of(PROMPT, {"ignore_eos": True, "timeout": 0.05}))
    with pytest.raises(Unavailable, match="longer than the request's timeout"):
        late.completion()
    model.go.release(2)
    drafting.idle()
    assert model.reads == len(IDS), "nothing more is generated for nobody"
    in_time = LocalStream(drafting, LocalRequest.of(PROMPT, {"max_tokens": 1, "timeout": WAIT_S}))
    assert len(in_time.completion().ids) == 1
    drafting.close()


def test_a_closed_drafter_answers_nobody_and_says_so(model: TextToy) -> None:
    drafter = EdgeDrafter(NOWHERE, model, patience_s=0.0)
    drafter.close()
    with pytest.raises(Unavailable, match="is closed"):
        drafter.generate_locally(PROMPT)


def test_an_answer_that_is_asked_for_while_the_drafter_closes_ends(model: TextToy) -> None:
    drafting = DraftingThread(lambda: model)
    drafting.wait_open()
    drafting.close()
    why: list[OutriderError] = []
    drafting.lend(lambda _: None, why.append)
    assert isinstance(why[0], Unavailable)


class UnrewindableToy(TextToy):
    """A toy that fails when its first answer is cleared away, once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def rewind(self, to: int) -> None:
        if self.ids:
            assert self.go.wait(WAIT_S)
            raise RuntimeError("the cache is gone")


def test_a_model_that_fails_between_two_answers_ends_the_one_that_waits() -> None:
    model = UnrewindableToy()
    with EdgeDrafter(NOWHERE, model) as drafter:
        assert drafter.generate_locally(PROMPT, max_tokens=1).ids
        waiting = drafter.stream_locally(PROMPT, max_tokens=1)
        model.go.set()
        with pytest.raises(DraftModelFailed, match="the cache is gone"):
            next(waiting)
        with pytest.raises(DraftModelFailed, match="the cache is gone"):
            drafter.generate_locally(PROMPT)


async def test_the_same_inside_an_event_loop(model: TextToy) -> None:
    async with AsyncEdgeDrafter(NOWHERE, model) as drafter:
        answer = await drafter.generate_locally(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    assert (list(answer.ids), answer.provenance) == (greedy(12), "local")


@pytest.fixture
def endpoint(drafter: EdgeDrafter) -> Iterator[EdgeEndpoint]:
    with EdgeEndpoint(drafter, Cloud(f"http://{NOWHERE}")) as endpoint:
        yield endpoint


def post(endpoint: EdgeEndpoint, path: str, body: dict[str, Any], **headers: str) -> tuple[int, str]:
    host, _, port = endpoint.url.removeprefix("http://").rpartition(":")
    with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=30)) as connection:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **named})
        response = connection.getresponse()
        return response.status, response.read().decode()


BODY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}


def test_an_app_that_allows_it_gets_marked_text_while_the_cloud_is_away(endpoint: EdgeEndpoint) -> None:
    status, text = post(endpoint, "/v1/completions", BODY, Outrider_Unreachable="local")
    answer = json.loads(text)
    assert (status, answer["provenance"], answer["model"]) == (200, "local", "toy")
    assert answer["choices"][0]["text"] == "".join(chr(32 + id_) for id_ in greedy(6))


def test_the_endpoint_listens_at_an_ipv6_address_in_brackets(drafter: EdgeDrafter) -> None:
    with EdgeEndpoint(drafter, Cloud(f"http://{NOWHERE}"), "[::1]") as endpoint:
        assert endpoint.url.startswith("http://[::1]:")
        status, text = post(endpoint, "/v1/completions", BODY, Outrider_Unreachable="local")
    assert (status, json.loads(text)["provenance"]) == (200, "local")


def test_each_event_of_such_a_stream_is_marked(endpoint: EdgeEndpoint) -> None:
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    status, text = post(endpoint, "/v1/completions", body, Outrider_Unreachable="local")
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert (status, done) == (200, "[DONE]")
    assert {json.loads(event)["provenance"] for event in events} == {"local"}


@pytest.mark.parametrize(
    ("path", "body", "header", "why"),
    [
        ("/v1/completions", BODY, "", ""),
        ("/v1/completions", BODY, "cloud", ""),
        ("/v1/completions", {**BODY, "n": 2}, "local", "for one answer"),
        ("/v1/completions", {**BODY, "prompt": "a" * 600}, "local", "600 tokens"),
        ("/v1/chat/completions", CHAT, "local", "nothing but /v1/completions"),
        ("/v1/embeddings", {"input": "a"}, "local", "nothing but /v1/completions"),
    ],
    ids=["nobody asked", "asked for else", "two answers", "too long", "a conversation", "embeddings"],
)
def test_all_other_calls_fail_while_the_cloud_is_away(
    endpoint: EdgeEndpoint, path: str, body: dict[str, Any], header: str, why: str
) -> None:
    headers = {"Outrider_Unreachable": header} if header else {}
    status, text = post(endpoint, path, body, **headers)
    assert status == 502
    said = json.loads(text)["error"]["message"]
    assert "cannot be reached" in said
    assert ("the device cannot answer alone" in said) is bool(why)
    assert why in said
