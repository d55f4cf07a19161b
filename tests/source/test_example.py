"""docs/examples/last_time.py as a process: thirty lines that are right about hashes and second follows."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from outrider.v1 import common_pb2, draft_source_pb2, draft_source_pb2_grpc
from outrider.wire.channel import open_channel
from speculative.hashing import prefix_hash
from tests.source.support.workers import EXAMPLE

PROMPT = (3, 1, 4, 1, 5, 9, 3, 1)
ROOT = EXAMPLE.parents[2]


@pytest.fixture
def address() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLE), "127.0.0.1:0"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=200)


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Any]:
    async with open_channel(address) as channel:
        yield draft_source_pb2_grpc.DraftSourceStub(channel)


def follow(alias: int, ids: Sequence[int], epoch: int) -> draft_source_pb2.AttachRequest:
    one = draft_source_pb2.Follow(
        alias=alias,
        key=common_pb2.SessionKey(session="s"),
        epoch=epoch,
        ids=ids,
        prompt_length=len(PROMPT),
        limit=100,
        sampling=common_pb2.Sampling(temperature=0),
        node_limit=100,
        vocabulary_size=24,
    )
    return draft_source_pb2.AttachRequest(follow=[one])


def progress(alias: int, before: Sequence[int], ids: Sequence[int], wrong: int = 0) -> Any:
    hash_ = prefix_hash([*before, *ids]) ^ wrong
    one = draft_source_pb2.Progress(alias=alias, position=len(before), ids=ids, prefix_hash=hash_)
    return draft_source_pb2.AttachRequest(progress=[one])


async def test_a_wrong_hash_and_a_second_follow_are_refused_on_the_stream_that_they_concern(
    stub: Any,
) -> None:
    described = await stub.Describe(draft_source_pb2.SourceDescribeRequest())
    assert (described.name, described.max_sessions) == ("last-time", 256)
    first, second = stub.Attach(), stub.Attach()
    await first.write(follow(1, PROMPT, epoch=7))
    (draft,) = (await first.read()).drafts
    assert (draft.alias, draft.epoch, draft.base, list(draft.ids)) == (1, 7, len(PROMPT), [5, 9, 3, 1])
    assert draft.prefix_hash == prefix_hash(PROMPT)

    await first.write(progress(1, PROMPT, [4], wrong=1))
    (refusal,) = (await first.read()).refusals
    assert refusal.alias == 1
    assert "the hash over 9 ids" in refusal.message

    ids = (*PROMPT, 4)
    await first.write(follow(2, ids, epoch=7))
    (draft,) = (await first.read()).drafts
    assert (draft.alias, draft.prefix_hash, list(draft.ids)) == (2, prefix_hash(ids), [1, 5, 9, 3])

    await second.write(follow(5, ids, epoch=8))
    (draft,) = (await second.read()).drafts
    assert (draft.alias, draft.epoch) == (5, 8)
    (refusal,) = (await first.read()).refusals
    assert (refusal.alias, "followed by someone else" in refusal.message) == (2, True)

    await first.write(follow(3, ids, epoch=7))
    (refusal,) = (await first.read()).refusals
    assert refusal.alias == 3
    assert "is older than" in refusal.message
    await second.write(progress(5, ids, [1]))
    (draft,) = (await second.read()).drafts
    assert draft.base == len(ids) + 1
    first.cancel()
    second.cancel()
