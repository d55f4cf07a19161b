"""A real (tiny) model as the drafter: drafters that go token by token draft what that model would say."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from drafter_service.draft_tree import Growth
from drafter_service.drafters import Drafter, load
from drafter_service.drafters.causal_lm import CausalLMDrafter
from drafter_service.session import DraftingSession
from drafter_service.settings import DRAFTERS, DrafterSettings
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.source.events import DecodingRequest
from speculative.hashing import prefix_hash
from speculative.history import History
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.sampling import sample_token
from tests.drafter.support.fake_drafter import report, session_of

PROMPT = (7, 30, 31, 32, 7, 55, 60, 12)
SEED = 99

PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "greedy penalised": SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5),
    "sampled": SamplingParams(temperature=0.8),
    "cut": SamplingParams(temperature=1.1, top_k=20, top_p=0.9, min_p=0.01),
    "all": SamplingParams(
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias=((12, 1.5), (13, -2.0)),
    ),
}


@pytest.fixture(scope="module", params=sorted(DRAFTERS.keys() - {"block", "ngram"}))
def drafter(request: pytest.FixtureRequest, tiny_llama_bare: Path) -> Drafter:
    """Each way to draft, over the same weights as the target; a block is not meant to be right throughout."""
    model = str(tiny_llama_bare)
    return load(DrafterSettings(model=model, drafter=request.param, threads=1, passes="eager"))


@pytest.fixture(scope="module")
def target(tiny_llama_bare: Path) -> PackedLM:
    return PackedLM.load(tiny_llama_bare, check=False)


def plain_ids(lm: PackedLM, params: SamplingParams, count: int) -> list[int]:
    """The target's own continuation, one token at a time."""
    table, history = lm.table(), History.of(PROMPT, len(PROMPT))
    noise = NoiseRows(SEED, lm.vocabulary_size)
    ids, fresh = list(PROMPT), list(PROMPT)
    for _ in range(count):
        share = SequenceRows(table, fresh, range(-1, len(fresh) - 1), [len(fresh) - 1])
        logits = lm.forward([share]).row(0)
        table.commit(range(len(fresh)))
        row = None if params.greedy else noise.at(len(ids)).full()
        token = sample_token(logits, params, history, row)
        history.extend([token])
        ids.append(token)
        fresh = [token]
    lm.release(table)
    return ids


def request_of(ids: Sequence[int], params: SamplingParams, *, node_limit: int = 64) -> DecodingRequest:
    return DecodingRequest(
        epoch=1,
        ids=tuple(ids),
        prompt_length=len(PROMPT),
        limit=200,
        params=params,
        seed=SEED,
        node_limit=node_limit,
        vocabulary_size=96,
    )


@pytest.mark.parametrize("kind", PARAMS)
def test_a_drafter_that_is_the_target_is_always_right(
    drafter: Drafter, target: PackedLM, one_pass: Callable[..., int], kind: str
) -> None:
    params = PARAMS[kind]
    truth = plain_ids(target, params, 60)
    cache = drafter.open(0)
    growth = Growth(children=3, scale=0.05, floor=0.02, depth=12)
    session = session_of(request_of(PROMPT, params), cache, drafter.abilities, growth)
    chance = random.Random(3)
    right = 0
    while len(session.ids) < len(truth) - 12:
        for _ in range(chance.randrange(2, 8)):
            one_pass(drafter, session, nodes=chance.randint(1, 2))
            session.take_fragments()
        node, length = session._tree.root, len(session.ids)
        while node.children:
            best = max(node.children.values(), key=lambda child: child.survival)
            assert best.token == truth[length], f"position {length}"
            node, length, right = best, length + 1, right + 1
        run = truth[len(session.ids) : min(length + chance.randint(-2, 1), len(truth))]
        report(session, len(session.ids), run, prefix_hash(truth[: len(session.ids) + len(run)]))
    assert right > 40
    drafter.close(cache)


def test_the_model_reads_the_prompt_once_and_then_only_what_it_expands(
    tiny_llama_bare: Path, target: PackedLM, one_pass: Callable[..., int]
) -> None:
    lm = PackedLM.load(tiny_llama_bare, check=False)
    drafter = CausalLMDrafter(lm)
    greedy = PARAMS["greedy"]
    truth = plain_ids(target, greedy, 61)
    lm.rows = 0
    growth = Growth(children=1, floor=0.0, depth=5)
    session = session_of(request_of(PROMPT, greedy), drafter.open(0), drafter.abilities, growth)
    while len(session.ids) < len(truth) - 5:
        while one_pass(drafter, session):
            session.take_fragments()
        run = truth[len(session.ids) : len(session.ids) + 4]
        report(session, len(session.ids), run, prefix_hash(truth[: len(session.ids) + 4]))
    assert lm.rows == len(
        session.ids
    )  # every committed id but the last once, and one node that is still in flight


def test_sessions_in_one_batch_draft_what_each_would_alone(
    drafter: Drafter, one_pass: Callable[..., int]
) -> None:
    growth = Growth(children=2, floor=0.0, depth=4)

    def fragments(sessions: list[DraftingSession], rounds: int) -> list[set[Any]]:
        sent: list[set[Any]] = [set() for _ in sessions]
        for _ in range(rounds):
            one_pass(drafter, *sessions)
            for into, session in zip(sent, sessions, strict=True):
                into.update((one.base, one.prefix_hash, one.tokens) for one in session.take_fragments())
        return sent

    def follow(params: SamplingParams, length: int) -> DraftingSession:
        request = request_of(PROMPT * length, params)
        return session_of(request, drafter.open(0), drafter.abilities, growth)

    cases = [(PARAMS["greedy"], 1), (PARAMS["sampled"], 3), (PARAMS["all"], 2)]
    together = fragments([follow(*case) for case in cases], 8)
    alone = [fragments([follow(*case)], 8)[0] for case in cases]
    assert together == alone
    assert all(len(one) == 8 for one in alone)


def test_a_rewound_cache_goes_on_as_a_new_one_would(drafter: Drafter, one_pass: Callable[..., int]) -> None:
    growth = Growth(children=2, floor=0.05, depth=3)
    request = request_of(PROMPT, PARAMS["greedy"])
    used = drafter.open(0)
    session = session_of(
        request_of([*PROMPT, 40, 41, 42], PARAMS["sampled"]), used, drafter.abilities, growth
    )
    for _ in range(4):
        one_pass(drafter, session)
        session.take_fragments()
    drafter.rewind(used, len(PROMPT) - 1)
    sent = []
    for cache in (used, drafter.open(0)):
        session = session_of(request, cache, drafter.abilities, growth)
        rows = [one_pass(drafter, session)]
        sent_first = session.take_fragments()
        while more := one_pass(drafter, session):
            rows.append(more)
            sent_first += session.take_fragments()
        sent.append([fragment.tokens for fragment in sent_first])
        assert rows[0] == (1 if cache is used else len(PROMPT))
    assert sent[0] == sent[1]


def test_closing_a_cache_gives_its_memory_back(drafter: Drafter, one_pass: Callable[..., int]) -> None:
    before = drafter.cached_tokens
    cache = drafter.open(100)
    assert drafter.cached_tokens >= before + 100
    session = session_of(request_of(PROMPT, PARAMS["greedy"]), cache, drafter.abilities, Growth())
    one_pass(drafter, session)
    drafter.close(cache)
    drafter.close(cache)
    assert drafter.cached_tokens == before


def test_a_drafter_says_what_it_can_do(drafter: Drafter, tiny_llama: Path) -> None:
    assert drafter.tokenizer_digest == ""
    assert (drafter.abilities.width, drafter.abilities.bound, drafter.abilities.max_length) == (96, 96, 256)
    assert drafter.abilities.eos_ids == {1}
    with_tokenizer = load(DrafterSettings(model=str(tiny_llama), threads=1, passes="eager"))
    assert len(with_tokenizer.tokenizer_digest) == 64
