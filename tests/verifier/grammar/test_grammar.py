"""Structured output through a verifier's socket: the ids are the same with drafts and without."""

import asyncio
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from fake_source import FakeSource, Garbage, Oracle, running
from harness import Answer, Verifier, hold_steps_for_drafts, open_together, serving, until_parked
from ngram_lm import NgramLM

from outrider.lm.runner import PackedLM
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2
from outrider.wire.codec import CommittedCode
from speculative.params import SamplingParams
from tests.conftest import tiny_tokenizer, writing_tokenizer
from tests.in_time import in_time
from verifier_service.engine.session import Session

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
ERROR = common_pb2.FINISH_REASON_ERROR
EOS, WIDTH, NEW = 1, 320, 90
PROMPT = (40, 41, 42)
LOOKUP = [("lookup", "")]
PATTERN = r"(ab|[c-e]{1,3}[0-9]{1,3},){2,9};"
ORDER = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["sale", "return"]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 2},
        "paid": {"type": "boolean"},
    },
    "required": ["kind", "items", "paid"],
    "additionalProperties": False,
    "$defs": {
        "item": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 1, "maximum": 999},
                "of": {"pattern": "^[a-f]{2}$"},
            },
            "required": ["n"],
            "additionalProperties": False,
        }
    },
}
CHOICE = ("the first of three texts", "the first of two", "quite another one")
SUM = """
start: term ("+" term){2,8} ";"
term: NUMBER | "(" term ("-" term)+ ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
# Any text up to an end mark that a target with random weights writes soon enough.
THOUGHT = r"""
start: thought /\n{0,2}/
thought[lazy]: /(?s:.*)[m-z]/
"""
GRAMMARS = {
    "schema": common_pb2.Grammar(json_schema=json.dumps(ORDER)),
    "regex": common_pb2.Grammar(regex=PATTERN),
    "choice": common_pb2.Grammar(choice=common_pb2.AllowedTexts(texts=CHOICE)),
    "lark": common_pb2.Grammar(lark=SUM),
    "reasoned": common_pb2.Grammar(regex=PATTERN, preamble=THOUGHT),
}
TOKENS = TokenTable.from_json(writing_tokenizer().to_str())
# White space is free between the parts of JSON; a target with random weights would write nothing else.
BLANK = tuple((id_, -100.0) for id_ in range(TOKENS.size) if id_ > 1 and not TOKENS.token_bytes(id_).strip())
FIRST = {"schema": "{", "regex": "acde", "choice": "tq", "lark": "123456789("}
greedy = partial(SamplingParams, temperature=0.0, logit_bias=BLANK)
sampled = partial(SamplingParams, temperature=0.8, logit_bias=BLANK)


def writer(**asked: Any) -> NgramLM:
    """A toy target, wider than its tokenizer, that can write any text."""
    target = NgramLM(WIDTH, eos_ids=(EOS,), **asked)
    target.tokenizer_json = TOKENS.to_json()
    return target


def text_of(ids: Sequence[int]) -> str:
    return b"".join(map(TOKENS.token_bytes, ids)).decode()


def check(kind: str, answer: Answer) -> None:
    """The text is what was asked for, if the answer came to its end; else the beginning of it."""
    text = text_of(answer.ids)
    assert answer.finished in (STOP, LENGTH)
    assert (answer.ids[-1] == EOS) == (answer.finished == STOP)
    if answer.finished == STOP and kind == "schema":
        jsonschema.validate(json.loads(text), ORDER)
    elif answer.finished == STOP and kind == "choice":
        assert text in CHOICE
    elif answer.finished == STOP and kind == "lark":
        assert isinstance(eval(text.removesuffix(";")), int)  # Python reads sums and brackets in the same way
    elif answer.finished == STOP and kind == "reasoned":
        assert re.fullmatch(rf"(?s:[^m-z]*)[m-z]\n{{0,2}}{PATTERN}", text)
    elif answer.finished == STOP:
        assert re.fullmatch(PATTERN, text)
    elif kind != "reasoned":
        assert text.startswith(tuple(FIRST[kind]))


async def plainly(verifier: Verifier, kind: str, params: SamplingParams, **asked: Any) -> Answer:
    answer = await verifier.generate(PROMPT, params=params, new=NEW, grammar=GRAMMARS[kind], **asked)
    check(kind, answer)
    return answer


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("make", [greedy, sampled])
async def test_drafts_change_nothing_and_the_text_is_what_was_asked_for(kind: str, make: Any) -> None:
    params, ended = make(), 0
    async with serving(writer(seed=3), node_limit=12) as verifier:
        hold_steps_for_drafts(verifier)
        for seed in (7, 8) if kind == "regex" else (8,):
            plain = await plainly(verifier, kind, params, seed=seed)
            ended += plain.finished == STOP
            # The oracle goes on past the end, so that there is something to cut.
            oracle = Oracle({PROMPT: [*plain.ids, EOS, 5, 7]}, siblings=3)
            for name, behaviour in (("oracle", oracle), ("garbage", Garbage())):
                async with running(FakeSource(behaviour)) as source:
                    sources = [(name, source.address), *LOOKUP]
                    drafted = await plainly(verifier, kind, params, seed=seed, sources=sources)
                assert (drafted.ids, drafted.finished) == (plain.ids, plain.finished)
        in_time(verifier.nodes("oracle", "accepted") > 5)
        assert verifier.metric("failed_sessions_total") == 0
    assert ended


async def test_a_mask_of_the_root_for_every_node_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what engines did that masked a draft's last id only, or all of it by one state."""
    async with serving(writer(seed=3), node_limit=12) as verifier:
        hold_steps_for_drafts(verifier)
        plain = await plainly(verifier, "regex", sampled())
        use = Session.__init__

        def with_roots_mask(self: Session, *arguments: Any) -> None:
            use(self, *arguments)
            matcher = self._grammar
            assert matcher is not None
            right = matcher.allowed
            monkeypatch.setattr(type(matcher), "allowed", lambda _, path: right(()))

        monkeypatch.setattr(Session, "__init__", with_roots_mask)
        async with running(FakeSource(Oracle({PROMPT: plain.ids}))) as source:
            asked: Any = {"params": sampled(), "new": NEW, "sources": [("drafter", source.address)]}
            wrong = await verifier.generate(PROMPT, grammar=GRAMMARS["regex"], **asked)
    in_time(wrong.ids != plain.ids, "no draft came")


async def test_in_a_batch_under_preemption_each_keeps_its_own_grammar() -> None:
    asked = [
        {"params": make(), "seed": seed, "grammar": GRAMMARS.get(kind)}
        for seed, kind in enumerate(["schema", "none", "regex", "schema", "none", "regex"])
        for make in (greedy, sampled)
    ]
    async with serving(writer()) as verifier:
        alone = [await verifier.generate([*PROMPT, n], new=NEW, **one) for n, one in enumerate(asked)]
    target = writer(slots=368)
    async with serving(target) as verifier:
        requests = [
            verifier.request([*PROMPT, n], new=NEW, sources=LOOKUP, **one) for n, one in enumerate(asked)
        ]
        await open_together(verifier, requests)
        together = await asyncio.gather(*(verifier.read(request) for request in requests))
        assert verifier.metric("num_preemptions_total") > 0
    for one, other in zip(together, alone, strict=True):
        assert (one.ids, one.finished) == (other.ids, other.finished)
    assert target.pool.used_slots == 0
    assert STOP in {answer.finished for answer in alone}


@pytest.mark.parametrize("kind", GRAMMARS)
async def test_a_session_that_moved_goes_on_in_its_grammar(kind: str) -> None:
    async with serving(writer(seed=3)) as verifier:
        whole = await plainly(verifier, kind, sampled(), seed=8)
        for at in (1, len(whole.ids) // 2, len(whole.ids) - 1, len(whole.ids)):
            moved = verifier.request(
                (*PROMPT, *whole.ids[:at]),
                params=sampled(),
                seed=8,
                prompt_length=3,
                limit=3 + NEW,
                grammar=GRAMMARS[kind],
                session="moved",
                epoch=(at + 1) << 20,
                sources=LOOKUP,
            )
            opened = await verifier.open(moved)
            assert bool(opened.finished) == (at == len(whole.ids))
            assert (await verifier.read(moved)).ids == whole.ids[at:]


async def refused(verifier: Verifier, **asked: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await verifier.open(verifier.request(asked.pop("ids", PROMPT), **asked))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


async def test_output_that_breaks_the_grammar_cannot_be_continued() -> None:
    async with serving(writer()) as verifier:
        says = await refused(verifier, ids=(*PROMPT, 9), prompt_length=3, grammar=GRAMMARS["regex"])
    assert "generated id 9 (number 0) is none that regex allows there" in says


@pytest.mark.parametrize(
    ("grammar", "asked", "says"),
    [
        (common_pb2.Grammar(), {}, "grammar is empty"),
        (common_pb2.Grammar(json_object=False), {}, "grammar is empty"),
        (common_pb2.Grammar(json_schema="x" * 70_000), {}, "json_schema has 70000 bytes"),
        (common_pb2.Grammar(json_schema="[]"), {}, "must be a JSON object"),
        (common_pb2.Grammar(json_schema='{"enum":[]}'), {}, "json_schema cannot be used"),
        (common_pb2.Grammar(regex="(("), {}, "unclosed group"),
        (common_pb2.Grammar(regex="((", preamble="start: /a/"), {}, "regex cannot be used: unclosed group"),
        (
            common_pb2.Grammar(regex="a", preamble="start: b"),
            {},
            'preamble cannot be used: unknown name: "b"',
        ),
        (common_pb2.Grammar(regex="a", preamble="x" * 5_000), {}, "preamble has 5000 bytes"),
        (common_pb2.Grammar(preamble="start: /a/"), {}, "grammar is empty"),
        (common_pb2.Grammar(regex="a"), {"params": greedy(ignore_eos=True)}, "ignore_eos"),
    ],
)
async def test_a_bad_grammar_is_refused_and_nobody_else_notices(
    grammar: common_pb2.Grammar, asked: dict[str, Any], says: str
) -> None:
    target = writer()
    async with serving(target) as verifier:
        expected = await verifier.generate([5, 6], new=100, sources=LOOKUP)
        target.step_s = 0.002
        other = verifier.request([5, 6], new=100, sources=LOOKUP)
        await verifier.open(other)
        for _ in range(3):
            assert says in await refused(verifier, grammar=grammar, **asked)
        assert (await verifier.read(other)).ids == expected.ids
        assert target.pool.used_slots == 0


async def test_a_target_without_the_means_refuses() -> None:
    bare, endless = NgramLM(WIDTH, eos_ids=(EOS,)), writer()
    endless.eos_ids = ()
    for target, says in ((bare, "no tokenizer"), (endless, "no end-of-sequence id")):
        async with serving(target) as verifier:
            assert says in await refused(verifier, grammar=GRAMMARS["regex"])


async def test_a_dead_end_ends_its_session_where_plain_decoding_does_and_says_why() -> None:
    """The tokenizer lacks quotes: after the brace nothing can follow, whatever was drafted there."""
    poor = TokenTable.from_json(tiny_tokenizer().to_str())
    (brace, five) = (poor.encode(letter)[0] for letter in "{5")
    grammar = common_pb2.Grammar(regex=r'5*\{"')
    target = NgramLM(96, eos_ids=(EOS,))
    target.tokenizer_json = poor.to_json()
    async with serving(target) as verifier:
        hold_steps_for_drafts(verifier)
        asked: Any = {"grammar": grammar, "new": 30, "params": SamplingParams(temperature=0.9)}
        plain = await verifier.generate(PROMPT, **asked)
        assert (plain.ids[-1], plain.finished) == (brace, ERROR)
        assert "cannot go on with the ids that the target's tokenizer has" in plain.message
        assert plain.code == CommittedCode.DEAD_END
        async with running(FakeSource(Oracle({PROMPT: [*plain.ids, five, five]}))) as source:
            drafted = await verifier.generate(PROMPT, sources=[("drafter", source.address)], **asked)
            assert (drafted.ids, drafted.message) == (plain.ids, plain.message)
            # Where a stop string ends it at the brace, the dead end behind it is nobody's business.
            for sources in ([], [("drafter", source.address)]):
                cut = await verifier.generate(PROMPT, stop=["{"], sources=sources, **asked)
                assert (cut.ids, cut.finished) == (plain.ids, STOP)


async def test_a_grammar_that_grows_too_large_ends_its_session_alone_and_is_the_clients_fault() -> None:
    """It compiles, and takes more states than allowed only once text is matched."""
    async with serving(writer()) as verifier:
        ask = partial(verifier.generate, PROMPT, new=90)
        grown, beside = await asyncio.gather(
            ask(grammar=common_pb2.Grammar(regex="([a-z]{1,200}){1,200}[a-z]{20000}"), params=sampled()),
            ask(grammar=GRAMMARS["regex"], params=sampled()),
        )
        assert (grown.finished, grown.code) == (ERROR, CommittedCode.DEAD_END)
        assert re.search("the grammar cannot go on: .*too many", grown.message)
        assert beside == await ask(grammar=GRAMMARS["regex"], params=sampled())


async def test_what_else_a_request_may_ask_goes_with_a_grammar() -> None:
    likely_end = (*BLANK, (EOS, 20.0))
    async with serving(writer()) as verifier:
        ask = partial(verifier.generate, PROMPT, new=60, sources=LOOKUP)
        early = await ask(
            params=SamplingParams(temperature=0.0, logit_bias=likely_end),
            grammar=common_pb2.Grammar(regex="[a-c]+"),
        )
        assert (len(early.ids), early.finished) == (2, STOP)
        late = await ask(
            params=SamplingParams(temperature=0.0, logit_bias=likely_end, min_tokens=12),
            grammar=common_pb2.Grammar(regex="[a-c]+"),
        )
        assert (len(late.ids), late.finished) == (13, STOP)
        forced = await ask(params=greedy(min_tokens=12), grammar=common_pb2.Grammar(regex="[a-c]{3}"))
        assert forced.finished == STOP
        assert re.fullmatch("[a-c]{3}", text_of(forced.ids))
        letters = common_pb2.Grammar(regex="[ab]{60}")
        stopped = await ask(params=sampled(), grammar=letters, stop=["a"])
        assert (text_of(stopped.ids)[-1], stopped.finished) == ("a", STOP)
        stop_id = TOKENS.encode("b")[0]
        cut = await ask(params=sampled(stop_ids=(stop_id,)), grammar=letters)
        assert (cut.ids[-1], cut.finished) == (stop_id, STOP)
        short = await verifier.generate(PROMPT, new=5, grammar=common_pb2.Grammar(json_object=True))
        assert (len(short.ids), short.finished) == (5, LENGTH)
        answer = await ask(
            params=sampled(),
            grammar=common_pb2.Grammar(regex="[a-c]+"),
            logprobs=common_pb2.Logprobs(top_logprobs=20, logprobs_of=2),  # type: ignore[arg-type]
        )
        assert {len(one.top_ids) for one in answer.logprobs} <= {3, 4}, "a, b, c and the end"


async def test_another_grammar_for_the_same_session_is_taken_over_by_epoch() -> None:
    async with serving(writer()) as verifier:
        first = verifier.request(PROMPT, new=200, session="s", epoch=5, grammar=GRAMMARS["regex"])
        await verifier.open(first)
        second = await verifier.generate(
            PROMPT, new=NEW, session="s", epoch=6, params=sampled(), grammar=GRAMMARS["schema"]
        )
        check("schema", second)


async def test_many_hostile_grammars_leave_nothing_behind() -> None:
    async with serving(writer()) as verifier:
        grammars = [common_pb2.Grammar(regex=f"(a|b)*a(a|b){{{n}}}c((") for n in range(24)]
        answers = await asyncio.gather(
            *(verifier.stub.Open(verifier.request(PROMPT, grammar=one), timeout=100) for one in grammars),
            return_exceptions=True,
        )
        codes = {answer.code() for answer in answers if isinstance(answer, grpc.aio.AioRpcError)}
        assert codes == {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert verifier.metric("sessions") == 0
        await plainly(verifier, "regex", sampled())


@pytest.fixture(scope="module")
def target(tiny_writer: Path) -> PackedLM:
    return PackedLM.load(tiny_writer)


@pytest.mark.parametrize("make", [greedy, sampled])
async def test_on_a_real_model_in_a_batch_with_others(target: PackedLM, make: Any) -> None:
    prompts: list[tuple[int, ...]] = [(5, 17, 40), (60, 2, 33, 33, 9), tuple(range(2, 70)), (11,), (12, 13)]
    kinds = ["schema", "regex", "none", "schema", "regex"]
    async with serving(target, prefill_chunk=32, prefix_cache=True, node_limit=12) as verifier:
        asked = [
            {"params": make(), "new": NEW, "seed": n, "grammar": GRAMMARS.get(kind)}
            for n, kind in enumerate(kinds)
        ]
        plain = [await verifier.generate(p, **one) for p, one in zip(prompts, asked, strict=True)]
        for kind, answer in zip(kinds, plain, strict=True):
            if kind != "none":
                check(kind, answer)
        truth = {prompt: answer.ids for prompt, answer in zip(prompts, plain, strict=True)}
        for behaviour in (Oracle(truth, siblings=3), Garbage()):
            async with running(FakeSource(behaviour)) as source:
                sources = [("drafter", source.address), *LOOKUP]
                drafted = await asyncio.gather(
                    *(
                        verifier.generate(p, sources=sources, **one)
                        for p, one in zip(prompts, asked, strict=True)
                    )
                )
            assert [answer.ids for answer in drafted] == [answer.ids for answer in plain]
            assert [answer.finished for answer in drafted] == [answer.finished for answer in plain]
        in_time(verifier.nodes("drafter", "accepted") > 20)


async def test_a_parked_session_goes_on_within_its_grammar() -> None:
    asked: dict[str, Any] = {"new": NEW, "params": sampled(), "grammar": GRAMMARS["schema"]}
    async with serving(writer()) as verifier:
        whole = await verifier.generate(PROMPT, **asked)
    target = writer()
    target.step_s = 0.02
    async with serving(target, orphan_grace_s=0.1) as verifier:
        request = verifier.request(PROMPT, **asked)
        await verifier.open(request)
        await until_parked(verifier)
        answer = await verifier.read(request)
    assert (answer.ids, answer.finished) == (whole.ids, whole.finished)
