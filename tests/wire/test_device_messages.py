"""What a device sends and gets fits a narrow link: budgets in bytes, without framing and text."""

import pytest

from outrider.v1 import generation_pb2 as pb

VOCABULARY = 152_000
LONG = 120_000
"""A position that takes as many bytes as any position of a context of two million tokens."""
HASH = 2**64 - 1
EPOCH = 2**63 + 1


def window(count: int, epoch: int = 0) -> pb.GenerateRequest:
    """A chain of drafted ids, each of which takes as many bytes as an id can."""
    drafts = pb.DeviceDrafts(
        base=LONG,
        prefix_hash=HASH,
        ids=[VOCABULARY - 1 - place for place in range(count)],
        survival=bytes([255] * count),
        epoch=epoch,
    )
    return pb.GenerateRequest(drafts=drafts)


def commit(count: int, epoch: int = 0) -> pb.GenerateResponse:
    """Committed ids with their sources, without text."""
    tokens = pb.GeneratedTokens(
        position=LONG,
        ids=[VOCABULARY - 1 - place for place in range(count)],
        token_sources=bytes([3] * count),
        prefix_hash=HASH,
        epoch=epoch,
    )
    return pb.GenerateResponse(tokens=tokens)


@pytest.mark.parametrize("epoch", [0, EPOCH], ids=["the same epoch", "another epoch"])
def test_a_window_of_8_tokens_takes_at_most_60_bytes(epoch: int) -> None:
    assert window(8, epoch).ByteSize() <= 60


def test_a_commit_of_4_tokens_takes_at_most_40_bytes() -> None:
    assert commit(4).ByteSize() <= 40


def test_an_epoch_costs_a_message_nothing_while_it_stays() -> None:
    assert window(8, EPOCH).ByteSize() - window(8).ByteSize() == 9
    assert commit(4, EPOCH).ByteSize() - commit(4).ByteSize() == 9
