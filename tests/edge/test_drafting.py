"""The drafting thread drafts for one request at a time, says why not, and outlives a model's failures."""

import gc
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

import grpc
import pytest

from outrider.edge.controller import Controller, Preference
from outrider.edge.drafted_request import DraftedRequest
from outrider.edge.drafting import DraftingThread
from outrider.edge.edge_drafter import DraftedCall
from outrider.edge.latency_model import Mode
from outrider.edge.offer import EdgeOptions, offer
from outrider.edge.outbox import Outbox
from outrider.edge.top_k import DraftModelFailed, TopK
from outrider.v1 import generation_pb2
from outrider.wire.codec import sampling_to_wire
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from tests.edge.toy import DIGEST, VOCABULARY, ToyModel, guess

PROMPT = (3, 1, 4)
WAIT_S = 100.0


class Server:
    """The other end of a request's stream: what the device sent, and messages to show the device."""

    def __init__(self, drafting: DraftingThread, mode: Mode = Mode.PIPELINED) -> None:
        self.drafting = drafting
        self.sent: queue.Queue[generation_pb2.GenerateRequest] = queue.Queue()
        controller = Controller(Preference.LATENCY, drafting.measurements, fixed=mode)
        self.request = DraftedRequest(controller)
        self.ids = list(PROMPT)

    def start(self, digest: str = DIGEST, refused: str = "", epoch: int = 5) -> None:
        terms = generation_pb2.DeviceTerms(
            refused=refused,
            tokenizer_digest=digest,
            vocabulary_size=VOCABULARY,
            sampling=sampling_to_wire(SamplingParams(temperature=0.0)),
            limit=300,
            node_limit=32,
            credits=256,
            credits_per_token=16,
        )
        started = generation_pb2.GenerateStarted(epoch=epoch, prompt_ids=PROMPT, device=terms)
        self.show(generation_pb2.GenerateResponse(started=started))

    def commit(self, *ids: int) -> None:
        position = len(self.ids)
        self.ids += ids
        tokens = generation_pb2.GeneratedTokens(position=position, ids=ids, prefix_hash=prefix_hash(self.ids))
        self.show(generation_pb2.GenerateResponse(tokens=tokens))

    def show(self, response: generation_pb2.GenerateResponse) -> None:
        self.drafting.received(self.request, response, (), self.sent.put)

    def window(self) -> generation_pb2.DeviceDrafts:
        """The next message with drafts."""
        while True:
            drafts = self.sent.get(timeout=WAIT_S).drafts
            if drafts.ids:
                return drafts

    def last_wait_ms(self) -> int | None:
        """How long rounds wait by the last message that was sent; None: it says nothing of it."""
        self.drafting.idle()
        last = generation_pb2.GenerateRequest()
        while not self.sent.empty():
            last = self.sent.get()
        return last.drafts.wait_ms if last.drafts.HasField("wait_ms") else None

    def until_trouble(self) -> str:
        """Waits until the device has given the request up."""
        while not self.request.trouble:
            self.drafting.idle()
        return self.request.trouble


@pytest.fixture
def model() -> ToyModel:
    return ToyModel()


@pytest.fixture
def drafting(model: ToyModel) -> Iterator[DraftingThread]:
    thread = DraftingThread(lambda: model, pauses_s=(0.01, 0.01))
    thread.wait_open()
    yield thread
    thread.close()
    assert model.closed


def test_windows_follow_what_is_committed(drafting: DraftingThread) -> None:
    server = Server(drafting)
    assert drafting.claim(server.request)
    server.start()
    first = server.window()
    assert (first.base, first.prefix_hash, first.epoch) == (3, prefix_hash(PROMPT), 5)
    assert first.ids[0] == guess(PROMPT)
    server.commit((first.ids[0] + 1) % VOCABULARY)
    while (window := server.window()).base != 4:
        assert not window.epoch, "the epoch was told"
    assert window.ids[0] == guess(server.ids)
    drafting.idle()
    report = server.request.report()
    assert (report.mode, report.equal, report.trouble) == ("pipelined", 0, "")
    assert report.windows >= 2
    assert report.bytes_up > 0


def test_one_request_at_a_time_has_drafts(drafting: DraftingThread) -> None:
    one, two = Server(drafting), Server(drafting)
    assert drafting.claim(one.request)
    assert not drafting.claim(two.request)
    two.start()
    one.start()
    assert one.window()
    assert two.sent.empty()
    drafting.release(one.request)
    assert drafting.claim(two.request)
    two.start()
    assert two.window()


class FailedCall(grpc.RpcError):
    """A call of gRPC that has failed: it raises itself."""

    def __iter__(self) -> "FailedCall":
        return self

    def __next__(self) -> generation_pb2.GenerateResponse:
        raise self

    def cancel(self) -> None:
        pass


def test_a_broken_stream_that_python_frees_late_does_not_end_the_one_that_followed(
    drafting: DraftingThread,
) -> None:
    server = Server(drafting)
    drafting.claim(server.request)
    outbox = Outbox(generation_pb2.GenerateRequest())
    broken = DraftedCall(FailedCall(), outbox, lambda _: None, lambda: drafting.lost(server.request))
    with suppress(FailedCall):
        next(broken)
    del broken
    server.start()
    first = server.window()
    gc.collect()
    server.commit((first.ids[0] + 1) % VOCABULARY)
    drafting.idle()
    while server.sent.get(timeout=WAIT_S).drafts.base != 4:
        pass


class HeldModel(ToyModel):
    """A toy that holds each pass until it is let go.

    Attributes:
        passes: told when a pass begins.
        go: lets one pass end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, ids: Sequence[int]) -> TopK:
        self.passes.release()
        assert self.go.acquire(timeout=WAIT_S)
        return super().forward(ids)


def test_a_window_that_was_drafted_for_a_lost_stream_is_not_sent_on_the_next() -> None:
    model = HeldModel()
    drafting = DraftingThread(lambda: model)
    drafting.wait_open()
    try:
        server = Server(drafting, Mode.HINTING)
        drafting.claim(server.request)
        server.start(epoch=5)
        model.go.release(server.request.controller.decision.window - 1)
        for _ in range(server.request.controller.decision.window):
            assert model.passes.acquire(timeout=WAIT_S)
        # The pass that runs now makes the first window whole.
        lost, server.sent = server.sent, queue.Queue()
        drafting.lost(server.request)
        model.go.release(1000)
        drafting.idle()
        server.start(epoch=6)
        assert server.window().epoch == 6, "the server of this stream knows no other epoch"
        assert {message.drafts.epoch for message in lost.queue} <= {0, 5}
    finally:
        model.go.release(1000)
        drafting.close()


@pytest.mark.parametrize(
    ("digest", "refused", "why"),
    [
        ("e" * 64, "", "toy has vocabulary d{64}, the target has e{64}: their ids mean different tokens"),
        (DIGEST, "this orchestrator takes no devices", "takes no devices"),
    ],
)
def test_a_device_that_is_not_to_be_used_says_why(
    drafting: DraftingThread, digest: str, refused: str, why: str
) -> None:
    server = Server(drafting)
    drafting.claim(server.request)
    server.start(digest, refused)
    drafting.idle()
    assert server.sent.empty()
    with pytest.raises(DraftModelFailed, match=why):
        raise DraftModelFailed(server.until_trouble())


def test_an_orchestrator_that_knows_nothing_of_devices_is_left_alone(drafting: DraftingThread) -> None:
    server = Server(drafting)
    drafting.claim(server.request)
    started = generation_pb2.GenerateStarted(epoch=5, prompt_ids=PROMPT)
    server.show(generation_pb2.GenerateResponse(started=started))
    assert "knows nothing of drafts" in server.until_trouble()


def test_a_model_that_fails_is_tried_again_and_then_given_up(
    drafting: DraftingThread, model: ToyModel
) -> None:
    model.fails = 2
    server = Server(drafting)
    drafting.claim(server.request)
    server.start()
    assert server.window().ids[0] == guess(PROMPT), "the third try succeeds"
    model.fails = 1000
    server.commit((guess(PROMPT) + 1) % VOCABULARY)
    assert server.until_trouble() == "the toy is tired"
    drafting.release(server.request)
    model.fails = 0
    healthy = Server(drafting)
    assert drafting.claim(healthy.request)
    healthy.start()
    assert healthy.window().ids[0] == guess(PROMPT)


def test_a_report_says_why_the_model_fails_while_it_is_tried_again() -> None:
    model = ToyModel()
    drafting = DraftingThread(lambda: model, pauses_s=(0.05,) * 1000)
    try:
        drafting.wait_open()
        server = Server(drafting)
        drafting.claim(server.request)
        server.start()
        wrong = (server.window().ids[0] + 1) % VOCABULARY
        model.fails = 1000
        server.commit(wrong)
        while not server.request.report().trouble:
            drafting.idle()
        assert server.request.report().trouble == "the toy is tired"
        model.fails = 0
        while server.request.report().trouble:
            drafting.idle()
        assert server.window().ids, "it drafts again"
    finally:
        drafting.close()


def test_a_model_that_fails_outside_a_pass_is_used_no_more(drafting: DraftingThread, model: ToyModel) -> None:
    def rewind(to: int) -> None:
        raise RuntimeError("the cache is gone")

    server = Server(drafting, Mode.WAITING)
    drafting.claim(server.request)
    server.start()
    wrong = (server.window().ids[0] + 1) % VOCABULARY
    model.rewind = rewind  # type: ignore[method-assign]
    model.fails = 1
    server.commit(wrong)
    assert server.until_trouble() == "toy failed: RuntimeError: the cache is gone"
    assert server.last_wait_ms() == 0, "no round is to wait for a device that has given up"
    server.request.offered_wait_ms = 70
    server.start()
    assert server.last_wait_ms() == 0, "nor after the stream was resumed"
    drafting.release(server.request)
    assert not drafting.claim(Server(drafting).request)


def test_waits_are_asked_for_and_taken_back(drafting: DraftingThread, model: ToyModel) -> None:
    server = Server(drafting, Mode.WAITING)
    drafting.claim(server.request)
    server.start()
    assert server.sent.get(timeout=WAIT_S).drafts.wait_ms > 0
    first = server.window().ids[0]
    model.fails = 1000
    server.commit((first + 1) % VOCABULARY)
    server.until_trouble()
    assert server.last_wait_ms() == 0, "no round is to wait for a device that has given up"


def test_a_wait_that_came_with_the_request_is_not_told_again_and_is_taken_back(
    drafting: DraftingThread,
) -> None:
    server = Server(drafting, Mode.WAITING)
    server.request.offered_wait_ms = server.request.controller.decision.wait_ms
    drafting.claim(server.request)
    server.start()
    drafting.idle()
    first = server.sent.get(timeout=WAIT_S).drafts
    assert first.ids
    assert not first.HasField("wait_ms")
    drafting.release(server.request)
    other = Server(drafting, Mode.WAITING)
    other.request.offered_wait_ms = 70
    drafting.claim(other.request)
    other.start(digest="e" * 64)
    other.until_trouble()
    drafting.idle()
    taken_back = other.sent.get(timeout=WAIT_S).drafts
    assert taken_back.HasField("wait_ms")
    assert taken_back.wait_ms == 0
    assert other.sent.empty()


@pytest.mark.parametrize(("mode", "waits"), [("waiting", True), ("pipelined", True), ("hinting", False)])
def test_a_request_says_from_the_first_whether_rounds_wait(
    drafting: DraftingThread, mode: str, waits: bool
) -> None:
    offered = offer(drafting, EdgeOptions(mode=mode), True, "x", {})
    assert offered.message.start.HasField("device")
    assert (offered.message.start.device.wait_ms > 0) is waits
    assert offered.message.start.device.wait_ms == offered.request.offered_wait_ms


def test_a_message_out_of_place_costs_the_drafts_alone(drafting: DraftingThread) -> None:
    server = Server(drafting)
    drafting.claim(server.request)
    server.start()
    server.ids.append(1)
    server.commit(2)
    assert "position 4, but 3 is next" in server.until_trouble()


def test_a_model_that_cannot_be_opened_raises_where_it_was_wanted() -> None:
    def fail() -> ToyModel:
        raise DraftModelFailed("no such model")

    drafting = DraftingThread(fail)
    with pytest.raises(DraftModelFailed, match="no such model"):
        drafting.wait_open()
    server = Server(drafting)
    assert not drafting.claim(server.request)
    assert server.request.trouble == "no such model"
    drafting.idle()
