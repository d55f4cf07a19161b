"""A device with memory for a pass's rows but not for their digests: every session gets its tokens."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_source import FakeSource, Oracle, running
from harness import GREEDY, Verifier, serving

from outrider.lm.device.digest import RowDigester
from outrider.lm.device.layout import DigestLevel
from outrider.lm.runner import PackedLM
from speculative.params import SamplingParams
from tests.in_time import in_time

NEW = 24
REQUESTS = {
    (5, 17, 40): GREEDY,
    (60, 2, 33, 9, 80): SamplingParams(temperature=0.8),
    tuple(range(2, 50)): SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2),
    (11,): SamplingParams(temperature=0.7, top_k=5),
}
Ids = dict[tuple[int, ...], list[int]]


class Filling(RowDigester):
    """A digester whose device has memory for the first `left` passes' digests, and for none after them."""

    def __init__(self, vocabulary_size: int, left: int) -> None:
        super().__init__(vocabulary_size, torch.device("cpu"))
        self.left = left

    def compute(self, logits: torch.Tensor, asks: torch.Tensor, level: DigestLevel) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().compute(logits, asks, level)


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> Iterator[PackedLM]:
    lm = PackedLM.load(tiny_llama)
    yield lm
    lm.digester = None


async def generated(verifier: Verifier, expected: Ids | None = None) -> Ids:
    """The tokens of all requests at once, with drafts that follow `expected` where it is given."""
    async with running(FakeSource(Oracle(expected or {}, siblings=2))) as source:
        sources = [("drafter", source.address)] if expected else []
        answers = await asyncio.gather(
            *(
                verifier.generate(ids, params=params, new=NEW, sources=sources)
                for ids, params in REQUESTS.items()
            )
        )
    assert not verifier.failures
    return dict(zip(REQUESTS, [answer.ids for answer in answers], strict=True))


@pytest.mark.parametrize("left", [0, 3])
async def test_without_memory_for_digests_each_session_gets_its_tokens_from_whole_rows(
    target: PackedLM, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    target.digester = None
    async with serving(target) as verifier:
        expected = await generated(verifier)
    target.digester = Filling(target.vocabulary_size, left)
    fetched, planned = target.transfers.fetched_rows, target.transfers.planned_bytes
    async with serving(target) as verifier:
        found = await generated(verifier, expected)
        in_time(verifier.nodes("drafter", "accepted") > NEW, "drafts came too late")
        assert verifier.metric("failed_sessions_total") == 0
    assert found == expected
    assert target.digester.left < 0
    assert target.transfers.fetched_rows > fetched
    assert (target.transfers.planned_bytes > planned) == (left > 0)
    assert "no memory left to digest" in caplog.text
