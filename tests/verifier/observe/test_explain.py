"""A verifier explains how a session's rounds went, and traces what its caller traces."""

from typing import Any

import pytest
from fake_source import FakeSource, Oracle, running
from harness import Verifier, eventually, hold_steps_for_drafts, hold_steps_until, serving
from ngram_lm import NgramLM

from outrider.runtime.tracing import Tracing
from outrider.v1 import common_pb2, explain_pb2
from outrider.wire.origin import TRACE_KEY
from verifier_service.engine.step_cost import StepCostModel

PROMPT = [1, 2, 3, 1, 2, 3]
TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = f"00-{TRACE}-b7ad6b7169203331-01"


async def explained(
    verifier: Verifier, session: str, tenant: str = "", *, nodes: bool = False
) -> list[explain_pb2.Incarnation]:
    key = common_pb2.SessionKey(session=session, tenant=tenant)
    answer = await verifier.stub.Explain(explain_pb2.ExplainRequest(key=key, nodes=nodes), timeout=100)
    return list(answer.incarnations)


async def test_rounds_add_up_to_the_answer() -> None:
    async with serving(NgramLM(8)) as verifier:
        answer = await verifier.generate(PROMPT, new=40, session="one", sources=[("lookup", "")])
        await eventually(lambda: verifier.metric("num_requests_running") == 0)
        (explanation,) = await explained(verifier, "one")
    assert sum(found.committed for found in explanation.rounds) == len(answer.ids)
    assert len(explanation.rounds) == answer.usage.rounds
    assert sum(found.admitted for found in explanation.rounds) == answer.usage.admitted
    shares = [share for found in explanation.rounds for share in found.by_source]
    assert {explanation.source_names[share.source - 1] for share in shares} == {"lookup"}
    assert sum(share.accepted for share in shares) == answer.usage.accepted_by_source["lookup"]
    assert sum(share.drafted for share in shares) == answer.usage.drafted_by_source["lookup"]
    assert (explanation.prompt_tokens, explanation.forgotten, explanation.finished) == (6, 0, answer.finished)
    first = explanation.rounds[0]
    assert (first.position, first.pending, first.sessions) == (6, 6, 1)
    positions = [found.position for found in explanation.rounds]
    assert positions == sorted(positions)
    assert all(found.admitted <= found.candidates for found in explanation.rounds)
    assert all(found.forward_ms > 0 for found in explanation.rounds)


async def test_the_trees_of_rounds_hold_the_answer_and_what_was_accepted() -> None:
    async with serving(NgramLM(8), budget="fixed") as verifier:
        answer = await verifier.generate(PROMPT, new=40, session="one", sources=[("lookup", "")])
        await eventually(lambda: verifier.metric("num_requests_running") == 0)
        (explanation,) = await explained(verifier, "one", nodes=True)
        (short,) = await explained(verifier, "one")
    rounds = explanation.rounds
    assert [token.id for found in rounds for token in found.tokens] == list(answer.ids)
    assert [len(found.nodes) for found in rounds] == [found.admitted for found in rounds]
    for found in rounds:
        assert all(node.parent <= index for index, node in enumerate(found.nodes))
        drafted = [token.id for token in found.tokens if token.source]
        assert [node.id for node in found.nodes if node.accepted] == drafted
    assert any(node.accepted for found in rounds for node in found.nodes)
    assert not any(found.nodes or found.tokens for found in short.rounds)


async def test_rounds_name_what_a_batched_proposer_drafted() -> None:
    async with serving(NgramLM(8), proposers="bigram", budget="fixed") as verifier:
        sources = [("lookup", ""), ("bigram", "")]
        answer = await verifier.generate(PROMPT, new=40, session="one", sources=sources)
        await eventually(lambda: verifier.metric("num_requests_running") == 0)
        (explanation,) = await explained(verifier, "one", nodes=True)
    assert list(explanation.source_names) == ["lookup", "bigram"]
    bigram = [share for found in explanation.rounds for share in found.by_source if share.source == 2]
    assert sum(share.drafted for share in bigram) == answer.usage.drafted_by_source["bigram"] > 0
    assert sum(share.accepted for share in bigram) == answer.usage.accepted_by_source["bigram"] > 0
    nodes = [node for found in explanation.rounds for node in found.nodes if node.source == 2]
    assert len(nodes) == sum(share.admitted for share in bigram)
    tokens = [token for found in explanation.rounds for token in found.tokens if token.source == 2]
    assert len(tokens) == sum(share.accepted for share in bigram)


async def test_a_long_prompt_s_passes_are_counted_to_its_first_round() -> None:
    async with serving(NgramLM(8), prefill_chunk=4) as verifier:
        await verifier.generate([1, 2] * 10, new=3, session="long")
        (explanation,) = await explained(verifier, "long")
    assert explanation.rounds[0].prompt_passes >= 3
    assert [found.prompt_passes for found in explanation.rounds[1:]] == [0, 0]


async def test_another_tenant_s_session_is_not_known() -> None:
    async with serving(NgramLM(8)) as verifier:
        key = common_pb2.SessionKey(session="mine", tenant="us")
        await verifier.generate(PROMPT, new=4, key=key)
        assert await explained(verifier, "mine", "us")
        assert await explained(verifier, "mine", "them") == []
        assert await explained(verifier, "mine") == []
        assert await explained(verifier, "never") == []


async def test_a_running_session_is_explained_too_and_a_takeover_is_another_incarnation() -> None:
    target = NgramLM(8)
    target.step_s = 0.002
    async with serving(target) as verifier:
        first = verifier.request(PROMPT, new=200, session="one")
        await verifier.open(first)
        await eventually(lambda: verifier.metric("rounds_total") > 3)
        (running_one,) = await explained(verifier, "one")
        assert running_one.finished == common_pb2.FINISH_REASON_UNSPECIFIED
        assert running_one.rounds
        second = verifier.request(PROMPT, new=5, session="one", epoch=first.epoch + 1)
        await verifier.open(second)
        await verifier.read(second)
        explanation = await explained(verifier, "one")
    assert [found.epoch for found in explanation] == [first.epoch, second.epoch]


def recording() -> tuple[Tracing, Any]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from outrider.runtime.tracing import traced

    spans = InMemorySpanExporter()
    return traced("verifier", SimpleSpanProcessor(spans), 0.0), spans


async def test_a_traced_session_has_a_span_its_rounds_below_it_and_hands_its_context_to_its_sources() -> None:
    tracing, spans = recording()
    source = FakeSource(lambda view: [])
    async with serving(NgramLM(8), tracing=tracing, budget="fixed") as verifier, running(source) as server:
        hold_steps_until(verifier, lambda: len(source.follows) >= 1)
        request = verifier.request(PROMPT, new=6, sources=[("drafter", server.address)])
        await verifier.stub.Open(request, timeout=100, metadata=((TRACE_KEY, CLIENT),))
        answer = await verifier.read(request)
        await eventually(lambda: any(one.name == "outrider.decode" for one in spans.get_finished_spans()))
        plain = verifier.request(PROMPT, new=6, sources=[("drafter", server.address)])
        hold_steps_until(verifier, lambda: len(source.follows) >= 2)
        await verifier.open(plain)
        await verifier.read(plain)
    finished = spans.get_finished_spans()
    (whole,) = [one for one in finished if one.name == "outrider.decode"]
    rounds = [one for one in finished if one.name == "outrider.round"]
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert len(rounds) == answer.usage.rounds == whole.attributes["specdec.rounds"]
    assert {one.parent.span_id for one in rounds} == {whole.context.span_id}
    traced_follow, plain_follow = source.follows
    assert traced_follow.traceparent == f"00-{TRACE}-{whole.context.span_id:016x}-01"
    assert plain_follow.traceparent == ""


STATE = explain_pb2.SourceState
FREE_ROWS = StepCostModel({1: 5.0, 256: 5.0})


async def test_rounds_say_whether_a_source_was_sent_them_and_why_not() -> None:
    async with serving(NgramLM(24), costs=FREE_ROWS) as verifier:
        whole = [1, 2, 3, *(await verifier.generate([1, 2, 3], new=200)).ids]
        source = FakeSource(lambda view: [view.draft([(whole[len(view.ids)] + 1) % 24])])
        async with running(source) as server:
            hold_steps_for_drafts(verifier)
            sources = [("lookup", ""), ("drafter", server.address)]
            answer = await verifier.generate([1, 2, 3], new=190, session="one", sources=sources)
            await eventually(lambda: verifier.metric("num_requests_running") == 0)
        (explanation,) = await explained(verifier, "one")
    drafter = list(explanation.source_names).index("drafter") + 1
    found = [state for each in explanation.rounds for state in each.source_states]
    states = [state for state in found if state.source == drafter]
    assert len(states) == len(explanation.rounds) == answer.usage.rounds
    assert len(found) == 2 * len(states), "lookup may rest, too"
    assert states[0].rest == STATE.REST_NONE
    rests = {state.rest for state in states}
    resting = {STATE.REST_GAINS_TOO_LITTLE, STATE.REST_NOT_ADMITTED}
    assert rests & resting
    assert rests <= {STATE.REST_NONE, STATE.REST_COMPARED, *resting}
    assert not states[0].HasField("slowdown")
    assert all(0 <= state.slowdown < 1 for state in states)
    assert {state.weights_version for state in states} == {0}


async def test_rounds_say_when_lookup_rests() -> None:
    async with serving(NgramLM(24), costs=FREE_ROWS) as verifier:
        await verifier.generate([1, 2, 3], new=190, session="one", sources=[("lookup", "")])
        await eventually(lambda: verifier.metric("num_requests_running") == 0)
        (explanation,) = await explained(verifier, "one")
    rests = [state.rest for each in explanation.rounds for state in each.source_states]
    assert len(rests) == len(explanation.rounds)
    assert rests[0] == STATE.REST_NONE
    assert set(rests) == {STATE.REST_NONE, STATE.REST_GAINS_TOO_LITTLE}


async def test_rounds_say_which_version_of_its_weights_a_drafter_drafted_with() -> None:
    async with serving(NgramLM(24), costs=FREE_ROWS) as verifier:
        plain = (await verifier.generate([1, 2, 3], new=20)).ids
        source = FakeSource(Oracle({(1, 2, 3): plain}))
        source.weights_version = 3
        async with running(source) as server:
            hold_steps_for_drafts(verifier)
            named = {"sources": [("drafter", server.address)]}
            await verifier.generate([1, 2, 3], new=20, session="one", **named)
            source.weights_version = 4
            await verifier.generate([1, 2, 3], new=20, session="two", **named)
            await eventually(lambda: verifier.metric("num_requests_running") == 0)
        versions = []
        for session in ("one", "two"):
            (explanation,) = await explained(verifier, session)
            versions.append([found.source_states[0].weights_version for found in explanation.rounds])
    assert versions[0][-1] == 3
    assert versions[1][-1] == 4
    assert versions[1] == sorted(versions[1])
