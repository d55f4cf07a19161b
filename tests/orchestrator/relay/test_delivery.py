"""What a client has been given, epochs, and the store: pure parts of a session."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.relay.delivery import Delivery, Delta
from orchestrator.relay.epochs import Epochs
from outrider.v1 import common_pb2
from speculative.errors import InvalidRequest
from speculative.stop import FinishReason
from speculative.text import TextStream

ROOT = Path(__file__).resolve().parents[2]


def test_ids_that_come_twice_are_given_once() -> None:
    delivery = Delivery(3, None)
    assert delivery.take(3, (7, 8), b"\0\1") == Delta(3, (7, 8), b"\0\1", "")
    assert delivery.take(3, (7, 8), b"\0\1") is None
    assert delivery.take(4, (8, 9), b"\1\2") == Delta(5, (9,), b"\2", "")
    assert delivery.position == 6


def test_ids_that_leave_a_gap_are_an_error() -> None:
    with pytest.raises(ValueError, match="start at 5, but the client has 3"):
        Delivery(3, None).take(5, (7,), b"\0")
    with pytest.raises(ValueError, match="2 committed ids came with 1 token_sources"):
        Delivery(3, None).take(3, (7, 8), b"\0")


def test_logprobs_belong_to_the_last_ids() -> None:
    one, two, three = (common_pb2.TokenLogprob(logprob=-n) for n in (1, 2, 3))
    delivery = Delivery(3, None)
    first = delivery.take(3, (7, 8), b"\0\0", [one, two])
    again = delivery.take(4, (8, 9), b"\0\0", [two, three])
    assert first is not None
    assert again is not None
    assert (first.logprobs, again.logprobs) == ((one, two), (three,))
    with pytest.raises(ValueError, match="2 committed ids came with 1 logprobs"):
        delivery.take(6, (1, 2), b"\0\0", [one])


def test_text_is_held_back_until_it_is_decided() -> None:
    pieces = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"ST"}
    delivery = Delivery(1, TextStream(lambda id_: pieces[id_], (b"STOP",)))
    texts = [delta.text for id_ in (1, 2, 3, 4) if (delta := delivery.take(id_, (id_,), b"\0")) is not None]
    assert texts == ["a", "", "é", ""]
    assert delivery.finish(FinishReason.LENGTH) == "ST"


def test_epochs_rise_by_the_clock_and_what_a_stranger_used_moves_one_session_alone() -> None:
    now = iter((1000, 1000, 900, 1000, 1000))
    epochs = Epochs(lambda: next(now), random.Random(0).getrandbits)
    first, second, third = epochs.next(), epochs.next(), epochs.next()
    assert [epoch >> 20 for epoch in (first, second, third)] == [1000, 1001, 1002]
    assert epochs.above(5000 << 20 | 7) >> 20 == 5001
    assert epochs.next() >> 20 == 1003


@pytest.mark.parametrize("highest", [2**64 - 1, (1000 + 86_400_000) << 20])
def test_there_is_no_epoch_above_one_of_the_far_future(highest: int) -> None:
    epochs = Epochs(lambda: 1000, random.Random(0).getrandbits)
    with pytest.raises(InvalidRequest, match="days ahead"):
        epochs.above(highest)
    assert epochs.next() >> 20 == 1000


def test_the_orchestrator_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, orchestrator.service; print({'torch', 'transformers'} & set(sys.modules) or 'neither')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "neither\n"
