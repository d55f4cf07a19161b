"""Lookup below the leaves of other sources' drafts: what it adds, and that it changes no token."""

from collections.abc import Callable, Sequence

import pytest
from core_driver import GREEDY, SAMPLED, CoreDriver
from fake_source import FakeSource, Oracle, running
from harness import Verifier, eventually, hold_steps_for_drafts, serving
from ngram_lm import NgramLM

from outrider.v1 import common_pb2, explain_pb2
from speculative.fragment import Fragment
from speculative.params import SamplingParams
from tests.in_time import in_time
from verifier_service.engine.messages import InFlight, Offers
from verifier_service.engine.session import Session
from verifier_service.observe.round_log import Rest
from verifier_service.proposers.own_text import lookup

BELOW = "lookup-below"
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
NEW = 200
PROMPT = (1, 2, 3)
Drafts = Callable[[Sequence[int]], Sequence[int]]


async def explained(verifier: Verifier, session: str) -> Sequence[explain_pb2.Round]:
    await eventually(lambda: verifier.metric("num_requests_running") == 0)
    key = common_pb2.SessionKey(session=session)
    answer = await verifier.stub.Explain(explain_pb2.ExplainRequest(key=key, nodes=True), timeout=100)
    (incarnation,) = answer.incarnations
    return list(incarnation.rounds)


def target(width: int = 5) -> NgramLM:
    """Of five ids, so that a sampled text repeats itself, too."""
    return NgramLM(width, max_length=1024)


def chain(session: Session, source: int, tokens: Sequence[int]) -> Fragment:
    survival = tuple(0.9 ** (depth + 1) for depth in range(len(tokens)))
    parents = tuple(range(-1, len(tokens) - 1))
    return Fragment(source, 1, len(session.ids), session.prefix_hash, tuple(tokens), parents, survival)


def decode(
    params: SamplingParams,
    sources: Sequence[str],
    draft: Drafts | None = None,
    new: int = NEW,
    width: int = 5,
) -> tuple[CoreDriver, Session]:
    """One request of these sources, with a drafter that drafts a chain below each committed token."""
    driver = CoreDriver(target(width))
    remote = () if draft is None else ("drafter",)
    session = driver.open(PROMPT, new, params, seed=4, sources=sources, remote=remote)
    index = len(sources) + 1
    while session in driver.core.sessions:
        if draft is not None and (tokens := draft(session.ids)):
            fragment = chain(session, index, tokens)
            driver.core.apply(Offers(((session.handle, fragment),), driver.now, InFlight(1)), driver.now)
        driver.step()
    driver.step()
    driver.core.kv.check()
    return driver, session


def plainly(params: SamplingParams, new: int = NEW) -> list[int]:
    driver, session = decode(params, (), new=new)
    return driver.generated(session)


def knowing(ids: Sequence[int], ahead: int = 1) -> Drafts:
    whole = [*PROMPT, *ids]
    return lambda prefix: whole[len(prefix) : len(prefix) + ahead]


@BOTH
def test_it_goes_on_where_a_short_draft_ends(params: SamplingParams) -> None:
    plain = plainly(params)
    without, alone = decode(params, (), knowing(plain))
    driver, session = decode(params, (BELOW,), knowing(plain))
    assert driver.generated(session) == without.generated(alone) == plain
    assert driver.core.counts[BELOW].accepted > 0.05 * NEW
    assert driver.core.totals.steps < 0.95 * without.core.totals.steps


@BOTH
def test_wrong_drafts_below_it_and_beside_it_change_no_token(params: SamplingParams) -> None:
    plain = plainly(params)
    right = knowing(plain, 3)
    driver, session = decode(params, ("lookup", BELOW), lambda ids: [*right(ids)[:2], (ids[-1] + 1) % 5])
    assert driver.generated(session) == plain


@BOTH
def test_without_other_drafts_there_is_nothing_to_continue(params: SamplingParams) -> None:
    driver, session = decode(params, ("lookup", BELOW))
    assert driver.generated(session) == plainly(params)
    assert not driver.core.counts[BELOW].kept


def test_it_rests_where_it_gains_too_little_and_is_tried_again() -> None:
    wild = SamplingParams(temperature=6.0)  # what followed before says nothing of what comes now
    driver, session = decode(wild, (), new=900, width=24)
    plain = driver.generated(session)
    driver, session = decode(wild, (BELOW,), knowing(plain), 900, width=24)
    assert driver.generated(session) == plain
    records = [update.record for update in driver.updates if update.record is not None]
    rests = [record.states[0].rest is not Rest.NONE for record in records]
    assert sum(rests) > 0.5 * len(rests)
    assert False in rests[rests.index(True) :], "after a rest it is tried"


def test_a_token_that_the_drafter_drafts_as_well_counts_for_the_drafter() -> None:
    plain = plainly(GREEDY)
    right = knowing(plain, 4)
    offered: list[int] = []

    def growing(ids: Sequence[int]) -> Sequence[int]:
        """Drafts one token, and four where the last round was bare."""
        offered.append(len(ids))
        return right(ids)[: 4 if len(offered) % 2 else 1]

    driver, session = decode(GREEDY, (BELOW,), growing)
    gains = session.sources.share(2), session.sources.share(1)
    assert driver.generated(session) == plain
    assert gains[0] == 1.0, "nothing takes the drafter's tokens from it"


def test_its_work_is_bounded_whatever_is_drafted() -> None:
    driver = CoreDriver(target())
    prompt = [at % 5 for at in range(60)]
    session = driver.open(prompt, 40, GREEDY, sources=(BELOW,), remote=("drafter",), node_limit=64)
    driver.step()
    tokens = tuple(range(5)) * 5
    parents = (-1, -1, -1, -1, -1, *[node // 5 for node in range(20)])
    survival = (0.95, *(0.9,) * 5, 0.94, *(0.9,) * 18)  # likeliest: 0 and 1, which stand in the prompt
    fragment = Fragment(2, 1, len(session.ids), session.prefix_hash, tokens, parents, survival)
    driver.core.apply(Offers(((session.handle, fragment),), driver.now, InFlight(1)), driver.now)
    driver.step()
    assert 0 < driver.core.counts[BELOW].kept <= 6


def test_a_long_prompt_is_read_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    append = lookup.LookupBelow.append

    def counted(proposer: lookup.LookupBelow, tokens: Sequence[int]) -> None:
        read.append(len(tokens))
        append(proposer, tokens)

    monkeypatch.setattr(lookup.LookupBelow, "append", counted)
    monkeypatch.setattr(lookup, "MOST_READ", 16)
    driver = CoreDriver(target())
    session = driver.open([at % 5 for at in range(60)], 20, GREEDY, sources=(BELOW,), remote=("drafter",))
    while session in driver.core.sessions:
        fragment = chain(session, 2, [session.ids[-4]])
        driver.core.apply(Offers(((session.handle, fragment),), driver.now, InFlight(1)), driver.now)
        kept = driver.core.counts[BELOW].kept
        driver.step()
        assert driver.core.counts[BELOW].kept == kept or sum(read) >= 60, "it drafts from whole texts alone"
    assert read[:3] == [16, 16, 16]
    assert max(read) == 16
    assert driver.core.counts[BELOW].kept


@BOTH
async def test_a_session_that_was_moved_goes_on_with_the_same_tokens_and_is_explained(
    params: SamplingParams,
) -> None:
    async with serving(target(), node_limit=12, proposers=BELOW) as verifier:
        plain = (await verifier.generate(PROMPT, new=120, params=params)).ids
        hold_steps_for_drafts(verifier)
        async with running(FakeSource(Oracle({PROMPT: plain}, depth=3, siblings=0))) as source:
            sources = [(BELOW, ""), ("drafter", source.address)]
            asked = {"new": 120, "params": params, "sources": sources, "session": "one"}
            answer = await verifier.generate(PROMPT, **asked)
            rounds = await explained(verifier, "one")
            moved = await verifier.generate(
                (*PROMPT, *plain[:50]), new=70, params=params, sources=sources, prompt_length=len(PROMPT)
            )
    assert answer.ids == plain
    assert moved.ids == plain[50:]
    in_time(answer.usage.accepted_by_source.get(BELOW, 0) > 0, answer.usage)
    continued = [(found.nodes, node) for found in rounds for node in found.nodes if node.source == 1]
    assert continued
    assert any(node.parent and nodes[node.parent - 1].source == 2 for nodes, node in continued)
    accepted = sum(share.accepted for found in rounds for share in found.by_source if share.source == 1)
    assert accepted == answer.usage.accepted_by_source[BELOW]
