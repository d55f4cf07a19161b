"""Tokens that are sampled for many rows at once are those of the rule on each whole row."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.acceptance.path_match import path_match
from speculative.batch_choice import RowChoice, sample_rows
from speculative.digest import HostDigest
from speculative.history import History
from speculative.noise import NoiseRows, leads
from speculative.params import SamplingParams
from speculative.target_sampler import TargetSampler, sample_together
from speculative.tree import TokenTree
from tests.speculative.choosing import Case, cases
from tests.speculative.test_choice import REQUESTS, ROWS


def sampled(found: list[Case]) -> list[int | None]:
    """The tokens of several cases, sampled together."""
    return sample_rows(
        [RowChoice(HostDigest(case.row), case.params, case.history, case.noise) for case in found]
    )


@settings(max_examples=300)
@given(st.lists(cases().filter(lambda case: not case.params.greedy and case.allowed is None), max_size=5))
def test_rows_of_any_kind_give_the_rules_tokens_or_none(found: list[Case]) -> None:
    thrice = found * 3  # rows that are alone in their width would be left to the rule
    for case, token in zip(thrice, sampled(thrice), strict=True):
        assert token is None or token == case.by_the_rule()


@pytest.mark.parametrize("request_", [name for name in REQUESTS if "greedy" not in name])
@pytest.mark.parametrize("shape", ROWS)
def test_tokens_of_usual_requests_are_known_where_no_cut_drops_the_winner(shape: str, request_: str) -> None:
    params = SamplingParams(**REQUESTS[request_])
    history = History.of([*range(0, 200, 3), 5, 5], 20)
    made = [
        Case(
            ROWS[shape](np.random.default_rng(position)).astype(np.float32),
            params,
            history,
            11,
            position,
            None,
        )
        for position in range(60)
    ]
    uncut = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    for case, token in zip(made, sampled(made), strict=True):
        chosen = case.by_the_rule()
        without_cuts = replace(case, params=uncut).by_the_rule()
        assert token == chosen or (token is None and params.has_cuts)
        assert token is not None or chosen != without_cuts or (params.top_k and params.top_p < 1)


def test_equal_scores_go_to_the_lowest_id_as_by_the_rule() -> None:
    """Equal logits and a temperature so high that noise alone decides, then one at which only ids do."""
    row = np.zeros(4096, dtype=np.float32)
    fields: list[dict[str, Any]] = [{"temperature": 100.0}, {"temperature": 0.01}]
    made = [
        Case(row, SamplingParams(**of), History.of([], 0), seed, seed, None)
        for of in fields
        for seed in range(40)
    ]
    assert sampled(made) == [case.by_the_rule() for case in made]


def test_ids_of_the_highest_lead_are_placed_exactly() -> None:
    """Their noise is bounded from below alone: a row in which such an id cannot win keeps few candidates."""
    size = 5000
    position = next(t for t in range(400) if (leads(3, t, size) == 65535).sum() > 1)
    row = np.random.default_rng(0).normal(size=size).astype(np.float32)
    for drop in (0.0, 2.0, 5.0, 30.0):
        lowered = row.copy()
        lowered[leads(3, position, size) == 65535] -= drop
        case = Case(lowered, SamplingParams(), History.of([], 0), 3, position, None)
        assert sampled([case] * 4) == [case.by_the_rule()] * 4


def test_threads_that_draw_at_the_same_time_get_their_own_noise() -> None:
    alone = [leads(seed, 5, 40_000).copy() for seed in range(4)]
    wrong: list[int] = []

    def draw(seed: int) -> None:
        wrong.extend(seed for _ in range(40) if not np.array_equal(leads(seed, 5, 40_000), alone[seed]))

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def walk(session: int, drafted: tuple[int, ...]) -> tuple[TargetSampler, TokenTree]:
    """A session's sampler and a chain of drafts; its rows differ by session and node."""

    def digest(node: int) -> HostDigest:
        rng = np.random.default_rng((session, node + 1))
        return HostDigest((rng.normal(size=600) * 2).astype(np.float32))

    requests = [request for name, request in REQUESTS.items() if "greedy" not in name]
    params = SamplingParams(**requests[session % len(requests)])
    noise = NoiseRows(session, 600)
    sampler = TargetSampler(params, History.of([1, 2, 3, 9], 2), noise, 4, digest)
    count = len(drafted)
    return sampler, TokenTree(drafted, tuple(range(-1, count - 1)), (1.0,) * count, (1,) * count)


def test_trees_that_are_walked_together_give_the_tokens_that_each_gives_alone() -> None:
    drafts: dict[int, tuple[int, ...]] = {session: () for session in range(24)}
    for _ in range(4):  # each round drafts what the last one chose, so that all trees are followed to the end
        alone = {session: path_match(tree, one) for session, (one, tree) in walks(drafts).items()}
        together = walks(drafts)
        sample_together(list(together.values()))
        assert {session: path_match(tree, one) for session, (one, tree) in together.items()} == alone
        drafts = {session: match.tokens for session, match in alone.items()}
    assert all(len(tokens) == 4 for tokens in drafts.values())


def walks(drafts: dict[int, tuple[int, ...]]) -> dict[int, tuple[TargetSampler, TokenTree]]:
    """A sampler and a tree for each session and its drafted chain."""
    return {session: walk(session, drafted) for session, drafted in drafts.items()}
