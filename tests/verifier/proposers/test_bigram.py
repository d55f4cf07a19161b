"""The bigram table that is fed by what the target said at every verified row."""

from typing import Any

import pytest
from core_driver import GREEDY, SAMPLED, CoreDriver
from harness import serving
from ngram_lm import NgramLM

from speculative.observed import Observed, OffPathRow, TopIds
from speculative.params import SamplingParams
from verifier_service.proposers.batched import DraftAsk, ProposedSession, SeenPass, SeenRound
from verifier_service.proposers.bigram import BigramProposer

PROMPT = (1, 2, 3)


def session(handle: int, ids: list[int], tenant: str = "", learn: bool = False) -> ProposedSession:
    return ProposedSession(handle, tenant, learn, ids, len(ids), 100, GREEDY, 0)


def teach(proposer: BigramProposer, handle: int, position: int, *, token: int, tops: tuple[int, ...]) -> None:
    off_path = (OffPathRow(0, 9, 8, (8, 7)),)
    said = Observed(len(tops), (TopIds(tops, (-0.1,) * len(tops)),), off_path)
    proposer.saw(SeenPass((SeenRound(handle, position, (token,), said, 0, ()),), None))


def drafted(proposer: BigramProposer, handle: int, node_limit: int = 8) -> list[tuple[int, ...]]:
    return [level.tokens for (level,) in proposer.draft([DraftAsk(handle, node_limit)]) if level]


def test_it_drafts_what_was_likely_after_a_token_whether_that_was_on_the_path_or_not() -> None:
    proposer = BigramProposer()
    ids = [5, 9]
    proposer.open(session(1, ids))
    teach(proposer, 1, position=1, token=9, tops=(9, 6))
    assert drafted(proposer, 1) == [(8, 7)], "what it learnt of 9, a node off the path"
    ids.append(5)
    assert drafted(proposer, 1)[:2] == [(9, 6), (8, 7)]
    assert sum(map(len, drafted(proposer, 1, node_limit=3))) == 3


@pytest.mark.parametrize(
    ("tenant", "learn", "known"),
    [("a", True, True), ("b", True, False), ("a", False, False)],
    ids=["of the tenant", "of another", "one that may not learn"],
)
def test_only_sessions_of_a_tenant_that_learn_share_a_table(tenant: str, learn: bool, known: bool) -> None:
    proposer = BigramProposer()
    proposer.open(session(1, [5, 9], "a", learn=True))
    teach(proposer, 1, position=1, token=9, tops=(9, 6))
    proposer.close(1)
    proposer.open(session(2, [9], tenant, learn))
    assert bool(drafted(proposer, 2)) == known


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ids_equal_plain_decoding_and_some_come_from_the_table(params: SamplingParams) -> None:
    plain = CoreDriver(NgramLM(6))
    expected = plain.open(PROMPT, 120, params)
    plain.run()
    driver = CoreDriver(NgramLM(6), {"bigram": BigramProposer()})
    found = driver.open(PROMPT, 120, params, sources=("bigram",))
    driver.run()
    assert driver.generated(found) == plain.generated(expected)
    assert driver.core.counts["bigram"].accepted > 10
    assert driver.core.totals.steps < plain.core.totals.steps - 10


async def test_a_request_selects_it_by_name_where_the_verifier_offers_it() -> None:
    asked = {"new": 120, "params": SAMPLED, "sources": [("bigram", ""), ("lookup", "")]}
    async with serving(NgramLM(6), proposers="bigram", node_limit=8, budget="fixed") as verifier:
        assert list(verifier.server._description.local_sources) == [
            "bigram",
            "grammar",
            "lookup",
            "prediction",
            "references",
        ]
        plain = await verifier.generate(PROMPT, new=120, params=SAMPLED)
        answer = await verifier.generate(PROMPT, **asked)
        assert verifier.metric("step_seconds_count", phase="proposing") > 0
        assert verifier.metric("proposers_muted", source="bigram") == 0
    assert answer.ids == plain.ids
    assert answer.usage.accepted_by_source["bigram"] > 0


async def test_a_session_from_a_verifier_that_offers_it_goes_on_at_one_that_does_not() -> None:
    asked: dict[str, Any] = {"params": SAMPLED, "new": 20}
    async with serving(NgramLM(6)) as verifier:
        plain = await verifier.generate(PROMPT, **asked)
        request = verifier.request(PROMPT, sources=[("bigram", ""), ("lookup", "")], **asked)
        assert list((await verifier.open(request)).source_names) == ["lookup"]
        assert (await verifier.read(request)).ids == plain.ids
