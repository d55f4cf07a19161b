"""Sessions whose criterion needs q, through a real verifier and a source on a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
import numpy as np
import pytest
from fake_source import Draft, FakeSource, View, running, silent
from harness import GREEDY, Answer, Verifier, hold_steps_for_drafts, serving
from ngram_lm import NgramLM

from outrider.v1 import common_pb2
from outrider.wire.criteria import criterion_of, criterion_to_wire
from outrider.wire.drawn import laws_to_wire
from speculative.acceptance.lenience import Lenience
from speculative.draft_law import UNIT, DraftLaws, QuantisedLaw
from speculative.noise import draft_word
from speculative.params import SamplingParams
from speculative.window_shape import SHAPES
from tests.in_time import in_time
from verifier_service.remote_sources.link import DRAFTS_PER_PAUSE, _until_pause

PROMPT, WIDTH, NEW = (1, 2, 3), 24, 20
FEW = 5
SAMPLED = SamplingParams(temperature=0.8)


def greedy(target: NgramLM, count: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(np.argmax(target.logits(ids))))
    return ids[len(PROMPT) :]


class Patient(FakeSource):
    """Has rounds wait for its drafts, as a drafter that draws does."""

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for response in super().Attach(request_iterator, context):
            for draft in response.drafts:
                response.waits.add(alias=draft.alias, ms=300)
            yield response


def window(view: View, tokens: Sequence[int], laws: Sequence[QuantisedLaw], **others: Any) -> Draft:
    """A chain as a whole window."""
    return view.draft(tokens, survival=b"", q=laws_to_wire(tuple(laws)), whole=True, **others)


def drawing(target: NgramLM, params: SamplingParams, depth: int = 4) -> Callable[[View], list[Draft]]:
    """A source that draws chains from the target's own law, rounded, as an honest drafter would."""

    def behave(view: View) -> list[Draft]:
        ids, tokens, laws = list(view.ids), list[int](), []
        numbers = iter(range(depth))
        made = DraftLaws(params, ids, view.follow.prompt_length, width=WIDTH, bound=WIDTH)
        while len(tokens) < min(depth, view.follow.limit - 1 - len(view.ids)):
            law = made.after(target.logits([*ids, *tokens]), tokens)
            word = draft_word(view.follow.seed, len(ids), next(numbers))
            tokens += law.draw(1, iter([word]).__next__, distinct=False)
            laws.append(law)
        return [window(view, tokens, laws)] if tokens else []

    return behave


async def ask(verifier: Verifier, address: str, criterion: str, **asked: Any) -> Answer:
    return await verifier.generate(
        PROMPT,
        sources=[("drafter", address)],
        criterion=criterion_of({criterion: {}}),
        **{"new": NEW, **asked},
    )


@pytest.mark.parametrize("name", SHAPES)
async def test_what_a_source_drew_is_accepted_and_usage_says_what_was_promised(name: str) -> None:
    target = NgramLM(WIDTH)
    source = Patient(drawing(target, SAMPLED))
    async with running(source) as server, serving(target) as verifier:
        hold_steps_for_drafts(verifier)
        answer = await ask(verifier, server.address, name, params=SAMPLED)
        assert len(answer.ids) == NEW
        relaxed = name == "lenience"
        assert answer.usage.promise == (
            common_pb2.PROMISE_RELAXED if relaxed else common_pb2.PROMISE_SAME_LAW
        )
        in_time(answer.token_sources.count(1) > 0)
        assert source.follows[0].criterion.WhichOneof("kind") == name


@pytest.mark.parametrize("name", SHAPES)
async def test_greedy_decoding_has_one_law_and_so_the_ids_of_plain_decoding(name: str) -> None:
    target = NgramLM(WIDTH)
    async with running(Patient(drawing(target, GREEDY))) as server, serving(target) as verifier:
        hold_steps_for_drafts(verifier)
        answer = await ask(verifier, server.address, name)
        assert answer.ids == greedy(target, NEW)
        in_time(answer.token_sources.count(1) > 0)


async def test_without_any_window_tokens_are_the_targets_and_the_request_ends() -> None:
    """Sources that draft without q are legal: their drafts are point masses."""
    target = NgramLM(WIDTH)
    points = FakeSource(lambda view: [view.draft([5, 6]), view.draft([7])])
    for source in (points, FakeSource(silent)):
        async with running(source) as server, serving(target) as verifier:
            answer = await ask(verifier, server.address, "ratio", params=SAMPLED)
            assert len(answer.ids) == NEW
            again = await ask(verifier, server.address, "ratio")
            assert again.ids == greedy(target, NEW)


def muted(verifier: Verifier) -> float:
    return verifier.metric("source_sessions_lost_total", source="drafter", reason="muted")


async def asked_until_muted(verifier: Verifier, address: str, criterion: str) -> None:
    """On a busy machine an answer can be over before the source's draft comes."""
    async with asyncio.timeout(100):
        while not muted(verifier):
            answer = await ask(verifier, address, criterion, new=FEW)
            assert answer.ids == greedy(verifier.target, FEW)


HALF = QuantisedLaw(np.array([4, 5]), np.array([UNIT // 2, UNIT // 2]))
FAR = QuantisedLaw(np.array([4, WIDTH]), np.array([1, UNIT - 1]))
WEIGHTS_OF_ZERO = b"\x02" + (4).to_bytes(4, "little") + b"\0\0" + (5).to_bytes(4, "little") + b"\0\0"
LIES: dict[str, Callable[[View], Draft]] = {
    "weights that sum to less than one": lambda view: view.draft(
        [4], survival=b"", q=WEIGHTS_OF_ZERO, whole=True
    ),
    "bytes of NaN, as float16 has them": lambda view: view.draft(
        [4], survival=b"", q=b"\x01\x04\0\0\0\x00\x7e", whole=True
    ),
    "a law too few": lambda view: window(view, [4, 5], [HALF]),
    "a law too many": lambda view: window(view, [4], [HALF, HALF]),
    "a law that is cut off": lambda view: view.draft(
        [4], survival=b"", q=laws_to_wire((HALF,))[:-1], whole=True
    ),
    "a token that q cannot draw": lambda view: window(view, [6], [HALF]),
    "an id outside the vocabulary": lambda view: window(view, [4], [FAR]),
    "no q": lambda view: view.draft([4], survival=b"", whole=True),
    "q without a window": lambda view: view.draft([4], q=laws_to_wire((HALF,))),
    "an epoch that does not exist yet": lambda view: window(view, [4], [HALF], epoch=view.follow.epoch + 1),
}


@pytest.mark.parametrize("kind", LIES)
async def test_a_q_that_is_none_mutes_the_source_and_the_session_goes_on(kind: str) -> None:
    target = NgramLM(WIDTH)
    source = FakeSource(lambda view: [LIES[kind](view)])
    async with running(source) as server, serving(target) as verifier:
        hold_steps_for_drafts(verifier)
        await asked_until_muted(verifier, server.address, "ratio")
        assert muted(verifier) == 1


async def test_repeated_draws_mute_a_source_only_where_siblings_are_to_be_distinct() -> None:
    target = NgramLM(WIDTH)

    def twice(view: View) -> list[Draft]:
        return [view.draft([4, 4], [-1, -1], survival=b"", q=laws_to_wire((HALF,)), whole=True)]

    async with running(FakeSource(twice)) as server, serving(target) as verifier:
        hold_steps_for_drafts(verifier)
        answer = await ask(verifier, server.address, "multi_step", new=FEW)
        assert answer.ids == greedy(target, FEW)
        assert muted(verifier) == 0
        await asked_until_muted(verifier, server.address, "without_replacement")
        assert muted(verifier) == 1


async def test_a_request_without_a_source_outside_is_refused_unless_its_session_moves() -> None:
    target = NgramLM(WIDTH)
    asked: dict[str, Any] = {
        "speculate": True,
        "new": FEW,
        "criterion": criterion_to_wire(Lenience()),
    }
    async with serving(target) as verifier:
        with pytest.raises(grpc.aio.AioRpcError, match=r"criterion\.lenience accepts drafts"):
            await verifier.generate(PROMPT, **asked)
        with pytest.raises(grpc.aio.AioRpcError, match="attach a drafter"):
            await verifier.generate(PROMPT, sources=[("lookup", "")], **asked)
        moved = await verifier.generate(PROMPT, recovered=True, **asked)
        assert moved.ids == greedy(target, FEW)


def test_the_event_loop_pauses_sooner_amid_drafts_with_much_q_or_many_nodes() -> None:
    small, large = Draft(ids=[1]), Draft(ids=[1], q=bytes(2048))
    assert _until_pause([small] * 100, 0) == DRAFTS_PER_PAUSE
    assert _until_pause([small] * 100, 90) == 10
    assert _until_pause([large] * 100, 0) == 2
    wide = Draft(ids=range(255))
    assert _until_pause([wide] * 100, 0) == 8
    assert _until_pause([wide] * 100, 0, 20) == 3


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_session_goes_on_behind_its_tokens_at_another_verifier(params: SamplingParams) -> None:
    """The first verifier is gone amid the request; the drafter draws for the second from there on."""
    target = NgramLM(WIDTH)
    source = Patient(drawing(target, params))
    async with running(source) as server:
        async with serving(target) as first:
            hold_steps_for_drafts(first)
            begun = await ask(first, server.address, "block", params=params, session="s")
        have = begun.ids[:9]
        async with serving(target) as second:
            hold_steps_for_drafts(second)
            request = second.request(
                [*PROMPT, *have],
                new=NEW - 9,
                params=params,
                sources=[("drafter", server.address)],
                criterion=criterion_of({"block": {}}),
                session="s",
                epoch=(1 << 20) + 1,
                prompt_length=len(PROMPT),
                recovered=True,
            )
            await second.open(request)
            rest = await second.read(request)
    assert len(rest.ids) == NEW - 9
    assert source.follows[-1].criterion.WhichOneof("kind") == "block"
    if params.greedy:
        assert have + rest.ids == greedy(target, NEW)
    in_time(rest.token_sources.count(1) > 0)
