"""What every proposer of the table keeps to; a new one is tested by its line in the table."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from speculative.grammar import ForcedToken
from verifier_service.proposers import PROPOSERS, Proposer, ProposerInit, make_proposer

PROMPT = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9)
OUTPUT = (5, 6, 7)


class Forcing:
    """A grammar that stands before the last of three repeats."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        raise AssertionError("a proposer asks for what is forced alone")

    def forced(self, most: int) -> list[ForcedToken]:
        return [ForcedToken(token, only=token < 8) for token in (8, 9, 5, 6, 7)][:most]

    def off_path_matcher(self) -> None:
        raise AssertionError("a proposer asks about no other text")

    def commit(self, tokens: Sequence[int]) -> None:
        raise AssertionError("the session moves the matcher")


@pytest.fixture(params=sorted(PROPOSERS))
def proposer(request: pytest.FixtureRequest) -> Proposer:
    text = (*OUTPUT, 8, 9, 5, 6, 7, 8, 9)
    return make_proposer(
        request.param, ProposerInit(len(PROMPT), prediction=text, references=(text,), grammar=Forcing())
    )


def test_it_proposes_at_most_as_many_nodes_as_it_may(proposer: Proposer) -> None:
    proposer.append(PROMPT)
    proposer.append(OUTPUT)
    drafts = [proposer.propose(limit) for limit in range(1, 5)]
    assert all(draft is not None for draft in drafts)
    assert all(len(draft.tokens) <= limit for limit, draft in enumerate(drafts, start=1) if draft)


def test_its_draft_is_a_tree_whose_survival_falls(proposer: Proposer) -> None:
    proposer.append((*PROMPT, *OUTPUT))
    draft = proposer.propose(8)
    assert draft is not None
    assert len(draft.tokens) == len(draft.parents) == len(draft.survival) > 0
    for node, parent in enumerate(draft.parents):
        assert -1 <= parent < node
        assert 0.0 < draft.survival[node] <= (1.0 if parent == -1 else draft.survival[parent])


def test_a_text_in_pieces_gives_the_same_draft_as_the_text_at_once(proposer: Proposer) -> None:
    for token in (*PROMPT, *OUTPUT):
        proposer.append((token,))
    draft = proposer.propose(8)
    assert draft is not None
    assert draft.tokens[:2] == (8, 9)
    assert proposer.propose(8) == draft, "asking changes nothing"


def test_a_name_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(KeyError, match="lookup"):
        make_proposer("nothing", ProposerInit(1))
