"""Scouts: rows behind the tree that teach what the target says there, and never change an id."""

from collections.abc import Iterator, Sequence

import pytest
from core_driver import GREEDY, SAMPLED, CoreDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.lm.kv.blocks import BLOCK
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from speculative.tree import TokenTree
from verifier_service.engine.step import Scouts, scouts_behind
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.proposers.batched import (
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerNeeds,
    ScoutAsk,
    SeenPass,
)

WIDTH = 24
NEW = 12
Shape = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens and parents."""


@st.composite
def shapes(draw: st.DrawFn, most: int = 12) -> Shape:
    count = draw(st.integers(1, most))
    tokens = tuple(draw(st.integers(0, WIDTH - 1)) for _ in range(count))
    return tokens, tuple(draw(st.integers(-1, node - 1)) for node in range(count))


class Scouting:
    """A batched proposer that drafts a given tree and asks for given scouts in every step."""

    needs = ProposerNeeds(tops=3)

    def __init__(self, scouts: Sequence[Shape], draft: Shape | None = None, worth: float = 1.0) -> None:
        self.seen: list[SeenPass] = []
        self._scouts = scouts
        self._draft = draft or ((), ())
        self._worth = worth
        self._asked = 0

    def open(self, session: ProposedSession) -> None:
        pass

    def close(self, handle: int) -> None:
        pass

    def saw(self, seen: SeenPass) -> None:
        self.seen.append(seen)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        tokens, parents = self._scouts[self._asked % len(self._scouts)]
        self._asked += 1
        ask = ScoutAsk(tokens, parents, (self._worth,) * len(tokens))
        survival = tuple(0.5 for _ in self._draft[0])
        yield [DraftLevel(*self._draft, survival, ask) for _ in asks]


def decoded(proposer: Scouting | None, params: SamplingParams, **asked: int) -> tuple[list[int], CoreDriver]:
    driver = CoreDriver(proposers={"bigram": proposer} if proposer else {})
    sources = ("bigram",) if proposer else ()
    session = driver.open((1, 2, 3), NEW, params, seed=5, sources=sources, **asked)
    driver.run()
    return driver.generated(session), driver


PLAIN = {params: decoded(None, params)[0] for params in (GREEDY, SAMPLED)}


@settings(deadline=None, max_examples=120)
@given(
    scouts=st.lists(shapes(), min_size=1, max_size=4), draft=shapes(4), params=st.sampled_from(list(PLAIN))
)
def test_scouts_of_any_shape_change_no_id(scouts: list[Shape], draft: Shape, params: SamplingParams) -> None:
    proposer = Scouting(scouts, draft)
    ids, driver = decoded(proposer, params)
    assert ids == PLAIN[params]
    assert not driver.core.proposers.muted
    for begun in driver.passes:
        for (_, step_rows), sequence in zip(begun.parts, begun.sequences, strict=True):
            scouts_there = len(step_rows.scouts.tokens)
            assert len(step_rows.tree) + scouts_there <= 8, "the node limit holds for both"
            assert len(sequence.want) == 1 + len(step_rows.tree) + scouts_there
            pairs = list(zip(sequence.parents, sequence.tokens, strict=True))
            assert len(set(pairs)) == len(pairs), "no row is computed twice"


def test_what_the_target_says_at_a_scout_is_shown_to_its_proposer() -> None:
    proposer = Scouting([((9, 8), (-1, 0))])
    _, driver = decoded(proposer, GREEDY)
    (first,) = proposer.seen[0].rounds
    assert first.said is not None
    assert [row.last for row in first.said.off_path] == [9, 8]
    ids = [1, 2, 3, 9, 8]
    assert first.said.off_path[1].prefix_hash == prefix_hash(ids)
    assert first.said.off_path[1].token == int(driver.target.logits(ids).argmax())
    assert driver.core.totals.scouts == 2 * (NEW - 2) + 1, "none lies past the last token that can be drafted"


def test_a_scout_that_is_a_drafted_node_is_one_row() -> None:
    tree = TokenTree((5, 6), (-1, 0), (0.9, 0.8), (1, 1))
    assert scouts_behind(tree, (5, 6, 7, 5), (-1, 0, 1, 2), 9, 9) == Scouts((7, 5), (1, 2))
    assert scouts_behind(tree, (5, 7, 7), (-1, 0, 0), 9, 9) == Scouts((7,), (0,))
    assert scouts_behind(tree, (7, 8, 9), (-1, 0, 1), 9, 2) == Scouts((7, 8), (-1, 2)), "not too deep"
    assert scouts_behind(tree, (7, 8, 9), (-1, -1, 1), 1, 9) == Scouts((7,), (-1,))


@pytest.mark.parametrize(("worth", "computed"), [(0.001, 0), (0.9, 1)])
def test_a_scout_is_computed_only_where_it_is_worth_its_row(worth: float, computed: int) -> None:
    proposer = Scouting([((9,), (-1,))], worth=worth)
    costs = StepCostModel({1: 20.0, 2: 22.0, 64: 200.0})
    driver = CoreDriver(proposers={"bigram": proposer}, costs=costs, adaptive=True)
    driver.open((1, 2, 3), NEW, sources=("bigram",))
    driver.step()
    driver.step()
    assert len(driver.passes[1].parts[0][1].scouts.tokens) == computed


def test_where_memory_is_short_there_are_no_scouts_and_the_ids_are_the_same() -> None:
    proposer = Scouting([(tuple(range(8)), (-1,) * 8)])
    driver = CoreDriver(_small(), proposers={"bigram": proposer})
    sessions = [driver.open((1, 2, 3), NEW, GREEDY, seed=5, sources=("bigram",)) for _ in range(3)]
    driver.run()
    assert [driver.generated(session) for session in sessions] == [PLAIN[GREEDY]] * 3
    assert driver.core.totals.scouts > 0


def _small() -> object:
    from ngram_lm import NgramLM

    return NgramLM(WIDTH, slots=4 * BLOCK)


@pytest.mark.parametrize(
    "ask",
    [
        ScoutAsk((WIDTH,), (-1,), (1.0,)),
        ScoutAsk((1,), (0,), (1.0,)),
        ScoutAsk((1,), (-1,), (float("nan"),)),
        ScoutAsk((1,), (-1, -1), (1.0,)),
    ],
    ids=["no id", "a parent behind", "worth NaN", "too many parents"],
)
def test_scouts_that_are_none_mute_their_proposer_and_change_no_id(ask: ScoutAsk) -> None:
    class Wrong(Scouting):
        def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
            yield [DraftLevel((), (), (), ask) for _ in asks]

    ids, driver = decoded(Wrong([]), GREEDY)
    assert ids == PLAIN[GREEDY]
    assert driver.core.proposers.muted
