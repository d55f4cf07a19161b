"""A policy over whole drafts: what it cuts, and what it hears of them."""

import pytest

from speculative.draft import Draft
from speculative.policies.book import PolicyBook
from speculative.policies.local import LocalDrafts
from speculative.policies.names import POLICIES
from speculative.policies.policy import DraftLimits, DraftPoint, DraftPolicy, SeenProgress

FREE = DraftLimits(255, 0.0, 255, 255)
#        10 ── 11 ── 12
#         └─── 21
#        30
TREE = Draft((10, 30, 11, 21, 12), (-1, -1, 0, 0, 2), (0.8, 0.2, 0.6, 0.1, 0.5))


class Noted(DraftPolicy):
    """Goes on below every node and keeps what it sees."""

    def __init__(self, limits: DraftLimits = FREE) -> None:
        super().__init__(limits, 0)
        self.seen: list[SeenProgress] = []

    def saw(self, progress: SeenProgress) -> None:
        self.seen.append(progress)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (FREE, (10, 30, 11, 21, 12)),
        (DraftLimits(1, 0.0, 255, 255), (10, 30)),
        (DraftLimits(2, 0.0, 255, 255), (10, 30, 11, 21)),
        (DraftLimits(255, 0.0, 3, 255), (10, 30, 11)),
        (DraftLimits(255, 0.15, 255, 255), (10, 30, 11, 12)),
        (DraftLimits(255, 0.0, 255, 1), (10, 11, 12)),
    ],
)
def test_limits_cut_a_draft(limits: DraftLimits, kept: tuple[int, ...]) -> None:
    cut = LocalDrafts(DraftPolicy(limits, 0)).cut(TREE)
    assert cut is not None
    assert cut.tokens == kept
    for node, parent in enumerate(cut.parents):
        before = TREE.parents[TREE.tokens.index(cut.tokens[node])]
        assert before == -1 or TREE.tokens[before] == cut.tokens[parent], "a path stays a path"


def test_nothing_is_left_of_a_draft_that_survives_too_rarely() -> None:
    assert LocalDrafts(DraftPolicy(DraftLimits(9, 0.9, 9, 9), 0)).cut(TREE) is None


def test_a_path_ends_behind_a_node_where_the_policy_stops() -> None:
    class Stops(DraftPolicy):
        def goes_on(self, point: DraftPoint) -> bool:
            return point.depth < 2

    cut = LocalDrafts(Stops(FREE, 0)).cut(TREE)
    assert cut is not None
    assert cut.tokens == (10, 30, 11, 21)


def test_the_policy_hears_which_places_were_right() -> None:
    policy = Noted()
    drafts = LocalDrafts(policy)
    drafts.cut(TREE)
    drafts.committed((10, 21, 5), 4.0)
    (seen,) = policy.seen
    assert (seen.tokens, seen.ms) == (3, 4.0)
    assert [trial.hit for trial in seen.trials] == [True, True], "nothing was drafted below 21"
    guessed = [(round(guess.probability, 3), guess.hit) for guess in seen.trials[1].guesses]
    assert guessed == [(0.75, False), (0.125, True)]
    assert seen.drafted_all
    drafts.committed((7,), 4.0)
    assert policy.seen[1].trials == (), "a draft counts once"


def test_a_miss_ends_what_is_heard() -> None:
    policy = Noted()
    drafts = LocalDrafts(policy)
    drafts.cut(TREE)
    drafts.committed((10, 99, 12), 0.0)
    assert [trial.hit for trial in policy.seen[0].trials] == [True, False]
    assert policy.seen[0].missed


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_leaves_a_valid_draft_or_none(name: str) -> None:
    drafts = LocalDrafts(PolicyBook(name, FREE).open())
    for _ in range(30):
        cut = drafts.cut(TREE)
        assert cut is None or set(cut.tokens) <= set(TREE.tokens)
        drafts.committed((10, 99), 3.0)
