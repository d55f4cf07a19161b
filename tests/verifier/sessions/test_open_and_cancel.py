"""What Open and Cancel answer, and that whatever is wrong with one request is nobody else's concern."""

import asyncio
import math
import re
from typing import Any

import grpc
import pytest
from harness import GREEDY, Answer, Verifier, eventually, open_together, serving
from ngram_lm import NgramLM

from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.codec import epoch_from_text
from tests.in_time import in_time

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
CANCELLED = common_pb2.FINISH_REASON_CANCELLED
ERROR = common_pb2.FINISH_REASON_ERROR
Code = grpc.StatusCode


async def refused(verifier: Verifier, **asked: Any) -> grpc.aio.AioRpcError:
    ids = asked.pop("ids", [1, 2, 3])
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await verifier.open(verifier.request(ids, **asked))
    return failure.value


SOURCE = verifier_pb2.Source
BAD: dict[str, tuple[dict[str, Any], Code, str]] = {
    "no ids": ({"ids": []}, Code.INVALID_ARGUMENT, "ids is empty"),
    "an id outside the vocabulary": ({"ids": [1, 32]}, Code.INVALID_ARGUMENT, r"ids\[1\] is 32; .* below 32"),
    "no prompt": ({"prompt_length": 0}, Code.INVALID_ARGUMENT, "prompt_length is 0"),
    "more prompt than ids": ({"prompt_length": 4}, Code.INVALID_ARGUMENT, "prompt_length is 4; with 3 ids"),
    "nothing to generate": ({"limit": 3}, Code.INVALID_ARGUMENT, "limit is 3.* 4 to 256"),
    "too much to generate": ({"limit": 257}, Code.INVALID_ARGUMENT, "limit is 257.* 4 to 256"),
    "another model": ({"model": "other"}, Code.NOT_FOUND, "'other' is not served here; 'ngram' is"),
    "no session": ({"key": common_pb2.SessionKey()}, Code.INVALID_ARGUMENT, "session has 0 characters"),
    "a long tenant": (
        {"key": common_pb2.SessionKey(tenant="t" * 129, session="s")},
        Code.INVALID_ARGUMENT,
        "tenant has 129",
    ),
    "no temperature": (
        {"sampling": common_pb2.Sampling(temperature=math.nan)},
        Code.INVALID_ARGUMENT,
        "temperature is nan",
    ),
    "top_p 0": ({"sampling": common_pb2.Sampling(top_p=0.0)}, Code.INVALID_ARGUMENT, "top_p is 0"),
    "top_k beyond the vocabulary": (
        {"sampling": common_pb2.Sampling(top_k=33)},
        Code.INVALID_ARGUMENT,
        "top_k is 33",
    ),
    "a bias outside the vocabulary": (
        {"sampling": common_pb2.Sampling(logit_bias={32: 1.0})},
        Code.INVALID_ARGUMENT,
        "logit_bias names id 32",
    ),
    "a tenant with a zero byte": (
        {"key": common_pb2.SessionKey(tenant="t\0", session="s")},
        Code.INVALID_ARGUMENT,
        "tenant .* cannot be printed",
    ),
    "a seventeenth choice": (
        {"key": common_pb2.SessionKey(session="s", choice=16)},
        Code.INVALID_ARGUMENT,
        "choice is 16; 0 to 15",
    ),
    "more tokens at least than at most": (
        {"sampling": common_pb2.Sampling(min_tokens=25)},
        Code.INVALID_ARGUMENT,
        "min_tokens is 25, but at most 24 .* 0 to 24",
    ),
    "fewer tokens than none": (
        {"sampling": common_pb2.Sampling(min_tokens=-1)},
        Code.INVALID_ARGUMENT,
        "min_tokens is -1",
    ),
    "a stop id outside the vocabulary": (
        {"sampling": common_pb2.Sampling(stop_ids=[32])},
        Code.INVALID_ARGUMENT,
        "stop_ids has 32; ids are below 32",
    ),
    "too many logprobs": (
        {"logprobs": common_pb2.Logprobs(top_logprobs=21)},
        Code.INVALID_ARGUMENT,
        "top_logprobs is 21; 0 to 20",
    ),
    "a thousand stop strings": ({"stop": ["x"] * 1000}, Code.INVALID_ARGUMENT, "1000"),
    "stop strings without a tokenizer": ({"stop": ["x"]}, Code.INVALID_ARGUMENT, "need a tokenizer"),
    "too many nodes": ({"node_limit": 257}, Code.INVALID_ARGUMENT, "node_limit is 257"),
    "a wrong policy": ({"policy": "best"}, Code.INVALID_ARGUMENT, "'best'; give one of survival, fixed,"),
    "two sources of one name": (
        {"sources": [("a", "x:1"), ("a", "y:1")]},
        Code.INVALID_ARGUMENT,
        "one name",
    ),
    "a name of a source inside for one outside": (
        {"sources": [("lookup", "a:1")]},
        Code.INVALID_ARGUMENT,
        "'lookup' has an address, 'a:1'",
    ),
    "a source that is called as the target": (
        {"sources": [("target", "a:1")]},
        Code.INVALID_ARGUMENT,
        "'target' cannot name a source",
    ),
    "a source with two lines for a name": (
        {"sources": [("a\nb", "a:1")]},
        Code.INVALID_ARGUMENT,
        "printable characters",
    ),
    "an endless address": ({"sources": [("a", "x" * 300)]}, Code.INVALID_ARGUMENT, "has 300 characters"),
    "an epoch of the far future": ({"epoch": 2**64 - 1}, Code.INVALID_ARGUMENT, "days ahead"),
    "a corpus that cannot be one": (
        {"corpora": ["../etc"]},
        Code.INVALID_ARGUMENT,
        "'../etc' cannot name a corpus",
    ),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_open_says_what_is_wrong(what: str) -> None:
    asked, code, message = BAD[what]
    async with serving(NgramLM()) as verifier:
        error = await refused(verifier, **asked)
        assert error.code() is code
        assert re.search(message, error.details() or ""), error.details()
        assert len((await verifier.generate([1, 2, 3])).ids) == 24


async def test_ids_that_already_end_the_request_are_answered_with_why() -> None:
    async with serving(NgramLM(eos_ids=(5,))) as verifier:
        ended = verifier.request([1, 2, 3, 5], prompt_length=3)
        assert (await verifier.open(ended)).finished == STOP
        answer = await verifier.read(ended)
        assert (answer.ids, answer.finished, answer.usage.prompt_tokens) == ([], STOP, 3)
        full = verifier.request([1, 2, 3, 4], prompt_length=3, limit=4)
        assert (await verifier.open(full)).finished == LENGTH
        assert verifier.metric("steps_total") == 0


async def test_an_end_of_sequence_id_in_the_prompt_ends_nothing() -> None:
    async with serving(NgramLM(eos_ids=(5,))) as verifier:
        assert len((await verifier.generate([1, 5, 5], new=1)).ids) == 1


async def test_opening_again_under_the_same_epoch_changes_nothing() -> None:
    target = NgramLM()
    target.step_s = 0.006
    async with serving(target) as verifier:
        request = verifier.request([1, 2, 3], new=40)
        await verifier.open(request)
        await verifier.open(request)
        answer = await verifier.read(request)
        assert answer.ids == (await verifier.generate([1, 2, 3], new=40)).ids
        assert (await verifier.open(request)).finished == LENGTH


async def test_opening_again_with_other_sources_changes_those_and_keeps_their_indices() -> None:
    target = NgramLM(6)
    target.step_s = 0.006
    async with serving(target, budget="fixed") as verifier:
        expected = await verifier.generate([1, 2, 3], new=150)
        request = verifier.request([1, 2, 3], new=150, sources=[("nobody", "127.0.0.1:9")])
        assert list((await verifier.open(request)).source_names) == ["nobody"]
        del request.sources[:]
        request.sources.add(name="lookup")
        assert list((await verifier.open(request)).source_names) == ["nobody", "lookup"]
        answer = await verifier.read(request)
    assert answer.ids == expected.ids
    in_time(2 in answer.token_sources, "the session had ended before it was opened again")
    assert set(answer.token_sources) == {0, 2}
    assert answer.usage.accepted_by_source["lookup"] == answer.token_sources.count(2)


async def test_a_higher_epoch_takes_a_session_over_and_an_older_one_is_refused() -> None:
    target = NgramLM()
    target.step_s = 0.006
    async with serving(target) as verifier:
        expected = (await verifier.generate([1, 2, 3], new=60)).ids
        first = verifier.request([1, 2, 3], new=60, session="s", epoch=5)
        await verifier.open(first)
        got = Answer()
        reading = asyncio.create_task(verifier.read(first, into=got))
        await eventually(lambda: got.ids)
        again = verifier.request([1, 2, 3, *expected[:4]], session="s", epoch=6, prompt_length=3, limit=63)
        await open_together(verifier, [again])
        lost = await reading
        assert (lost.finished, lost.code) == (ERROR, 10)
        assert "taken over" in lost.message
        assert lost.ids == expected[: len(lost.ids)]
        assert (await verifier.read(again)).ids == expected[4:]
        older = await refused(verifier, session="s", epoch=5)
        assert older.code() is Code.FAILED_PRECONDITION
        metadata = dict(older.trailing_metadata() or ())
        assert epoch_from_text(metadata["outrider-epoch"]) == 6
        with pytest.raises(grpc.aio.AioRpcError, match="older"):
            await verifier.cancel(first)
        assert verifier.target.pool.used_slots == 0


async def test_a_later_request_ends_the_choices_of_an_earlier_one_that_it_does_not_have() -> None:
    target = NgramLM()
    target.step_s = 0.006

    def asked(verifier: Verifier, choice: int, epoch: int) -> verifier_pb2.OpenRequest:
        key = common_pb2.SessionKey(session="s", choice=choice)
        return verifier.request([1, 2, 3], new=150, key=key, epoch=epoch, seed=7 + choice)

    async with serving(target) as verifier:
        earlier = [asked(verifier, choice, 5) for choice in range(3)]
        for request in earlier:
            await verifier.open(request)
        other = verifier.request([1, 2, 3], new=150, session="other", epoch=5)
        await verifier.open(other)
        got = Answer()
        reading = asyncio.create_task(verifier.read(earlier[2], into=got))
        await eventually(lambda: got.ids)
        later = [asked(verifier, choice, 6) for choice in range(2)]
        await open_together(verifier, later)
        assert ((lost := await reading).finished, lost.code) == (ERROR, 10)
        whole = [await verifier.read(request) for request in (*later, other)]
        assert [answer.finished for answer in whole] == [LENGTH] * 3
        assert target.pool.used_slots == 0, "nothing of the third choice is left"


async def test_cancel_ends_a_session_and_is_idempotent() -> None:
    target = NgramLM()
    target.step_s = 0.005
    async with serving(target) as verifier:
        before = target.pool.used_slots
        request = verifier.request([1, 2, 3], new=200)
        await verifier.open(request)
        await eventually(lambda: target.pool.used_slots > before)
        assert await verifier.cancel(request)
        answer = await verifier.read(request)
        assert answer.finished == CANCELLED
        assert len(answer.ids) < 200
        assert target.pool.used_slots == before
        assert not await verifier.cancel(request)
        assert not await verifier.cancel(verifier.request([1], session="nobody"))


@pytest.mark.parametrize("before", [None, 5])
async def test_a_cancel_that_overtakes_the_open_of_its_epoch_ends_what_that_opens(before: int | None) -> None:
    async with serving(NgramLM()) as verifier:
        if before is not None:
            await verifier.open(verifier.request([1, 2, 3], new=200, session="s", epoch=before))
        late = verifier.request([1, 2, 3], session="s", epoch=6)
        assert await verifier.cancel(late) is (before is not None)
        assert (await verifier.open(late)).finished == CANCELLED
        answer = await verifier.read(late)
        assert (answer.ids, answer.finished, answer.code) == ([], CANCELLED, 0)
        assert len((await verifier.generate([1, 2, 3], session="s", epoch=7)).ids) == 24
        await eventually(lambda: verifier.target.pool.used_slots == 0)


async def test_a_cancel_of_a_later_epoch_is_a_takeover_to_those_who_read_the_session() -> None:
    target = NgramLM()
    target.step_s = 0.006
    async with serving(target) as verifier:
        request = verifier.request([1, 2, 3], new=200, session="s", epoch=5)
        await verifier.open(request)
        got = Answer()
        reading = asyncio.create_task(verifier.read(request, into=got))
        await eventually(lambda: got.ids)
        assert await verifier.cancel(verifier.request([1], session="s", epoch=6))
        lost = await reading
        assert (lost.finished, lost.code) == (ERROR, 10)
        await eventually(lambda: verifier.target.pool.used_slots == 0)
        assert not await verifier.cancel(verifier.request([1], session="s", epoch=6))


async def test_a_cancel_from_the_far_future_leaves_the_session_to_those_who_have_it() -> None:
    async with serving(NgramLM()) as verifier:
        with pytest.raises(grpc.aio.AioRpcError, match="days ahead"):
            await verifier.cancel(verifier.request([1], session="s", epoch=2**64 - 1))
        assert len((await verifier.generate([1, 2, 3], session="s")).ids) == 24


async def test_a_deadline_ends_a_session() -> None:
    target = NgramLM()
    target.step_s = 0.005
    async with serving(target) as verifier:
        answer = await verifier.generate([1, 2, 3], new=200, time_left_ms=60)
        assert answer.finished == CANCELLED
        assert "deadline" in answer.message
        assert len(answer.ids) < 40
        in_time(answer.ids, "the time was over before the first step")
        assert target.pool.used_slots == 0


async def test_a_full_worker_says_when_to_come_back() -> None:
    target = NgramLM()
    target.step_s = 0.005
    async with serving(target, max_sessions=2) as verifier:
        for name in ("a", "b"):
            await verifier.open(verifier.request([1, 2], new=200, session=name))
        error = await refused(verifier)
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert float(dict(error.trailing_metadata() or ())["retry-after"]) > 0
        await verifier.open(verifier.request([1, 2], session="a", epoch=1 << 30))


async def test_sessions_that_do_not_fit_together_take_turns_and_all_come_to_their_end() -> None:
    seen = list[float]()
    target = NgramLM(slots=512)
    async with serving(target) as verifier:
        assert (await verifier.stub.Describe(verifier_pb2.VerifierDescribeRequest())).max_length == 256
        alone = [(await verifier.generate([1, 2, n], new=200)).ids for n in range(4)]
        requests = [verifier.request([1, 2, n], new=200) for n in range(4)]
        target.before_forward = lambda: any(seen) or seen.append(verifier.metric("num_requests_waiting"))
        await open_together(verifier, requests)
        together = await asyncio.gather(*(verifier.read(request) for request in requests))
        assert [answer.ids for answer in together] == alone
        assert verifier.metric("num_preemptions_total") > 0
        assert any(seen), "some of them waited"
        assert verifier.metric("num_requests_waiting") == 0
    assert target.pool.used_slots == 0


async def test_a_worker_describes_itself() -> None:
    async with serving(NgramLM(eos_ids=(1, 2)), max_sessions=7) as verifier:
        said = await verifier.stub.Describe(verifier_pb2.VerifierDescribeRequest())
        chunks = [c async for c in verifier.stub.Tokenizer(verifier_pb2.TokenizerRequest())]
    assert (said.model, said.vocabulary_size, said.max_length) == ("ngram", 32, 256)
    assert list(said.eos_ids) == [1, 2]
    assert list(said.local_sources) == ["grammar", "lookup", "prediction", "references"]
    assert (said.max_sessions, said.node_limit) == (7, 256)
    assert said.tokenizer_digest == ""
    assert chunks == []


async def test_greedy_defaults_are_plain() -> None:
    async with serving(NgramLM()) as verifier:
        answer = await verifier.generate(
            [1, 2], params=GREEDY, speculate=True, node_limit=0, sources=[("lookup", "")]
        )
    assert answer.usage.admitted == 0
    assert set(answer.token_sources) == {0}


async def test_a_worker_that_stops_lets_its_sessions_finish_and_opens_no_more() -> None:
    target = NgramLM()
    target.step_s = 0.01
    async with serving(target) as verifier:
        request = verifier.request([1, 2, 3], new=30)
        await verifier.open(request)
        reading = asyncio.create_task(verifier.read(request))
        stopping = asyncio.create_task(verifier.server.stop(100.0))
        await asyncio.sleep(0.02)
        assert (await refused(verifier)).code() is Code.UNAVAILABLE
        assert len((await reading).ids) == 30
        await asyncio.wait_for(stopping, 90)
