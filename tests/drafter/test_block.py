"""A drafter that writes a block in one pass: what its rows are, what it learns, and whom it refuses."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafter_service.block_session import BlockSession
from drafter_service.draft_tree import DraftNode, Growth
from drafter_service.drafters import load
from drafter_service.drafters.block import BlockDrafter
from drafter_service.settings import DrafterSettings
from outrider.lm.load.masks import note_masks
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.source.events import DecodingRequest, Follow
from outrider.source.followed import FollowedIds, SourceProfile
from outrider.wire.codec import SessionKey
from speculative.errors import ModelRefused
from speculative.hashing import prefix_hash
from speculative.survival_curve import SurvivalCurve
from tests.drafter.support.fake_drafter import report
from tests.drafter.test_causal_lm import PARAMS, PROMPT, plain_ids, request_of

MASKS = 3
GROWTH = Growth(children=2, scale=0.3, floor=0.0, depth=12)


def widened(model: Path, folder: Path, masks: int) -> Path:
    """The model with mask ids that it has not learnt; what it says of the next token stays as it was."""
    wide = AutoModelForCausalLM.from_pretrained(model)
    wide.resize_token_embeddings(wide.config.vocab_size + masks, mean_resizing=False)
    note_masks(wide.config, masks)
    wide.save_pretrained(folder)
    if (model / "tokenizer.json").exists():
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tiny_llama_bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widened(tiny_llama_bare, tmp_path_factory.mktemp("block"), MASKS)


@pytest.fixture(scope="module")
def drafter(folder: Path) -> BlockDrafter:
    found = load(DrafterSettings(model=str(folder), drafter="block", threads=1, passes="eager"))
    assert isinstance(found, BlockDrafter)
    return found


@pytest.fixture(scope="module")
def target(tiny_llama_bare: Path) -> PackedLM:
    return PackedLM.load(tiny_llama_bare, check=False)


def following(
    drafter: BlockDrafter, request: DecodingRequest, curves: Sequence[SurvivalCurve] = (), **growth: float
) -> BlockSession:
    """A session that the drafter follows from now on."""
    abilities = drafter.abilities
    profile = SourceProfile(
        "block", "block", readable_ids=abilities.width, max_length=abilities.max_length, noun="drafter"
    )
    return BlockSession(
        Follow(0, 1, SessionKey("t", "s"), request),
        FollowedIds(request.ids, request.vocabulary_size, profile),
        drafter.open(0),
        abilities,
        dataclasses.replace(GROWTH, **growth),  # type: ignore[arg-type]
        None,
        curves or [SurvivalCurve() for _ in range(1 + MASKS)],
    )


def depth_below(node: DraftNode) -> int:
    return (
        1 + max((depth_below(child) for child in node.children.values()), default=0) if node.children else 0
    )


@pytest.mark.parametrize("kind", PARAMS)
def test_the_first_token_of_each_block_is_the_models_own(
    drafter: BlockDrafter, target: PackedLM, one_pass: Callable[..., int], kind: str
) -> None:
    """Masks behind the last token change nothing for it, however many rounds there were."""
    truth = plain_ids(target, PARAMS[kind], 24)
    session = following(drafter, request_of(PROMPT, PARAMS[kind]))
    while len(session.ids) < len(truth) - 2:
        assert one_pass(drafter, session)
        root = session._tree.root
        assert root.children
        best = max(root.children.values(), key=lambda child: child.survival)
        assert best.token == truth[len(session.ids)]
        report(
            session,
            len(session.ids),
            truth[len(session.ids) :][:2],
            prefix_hash(truth[: len(session.ids) + 2]),
        )
    drafter.close(session.cache)


def test_one_pass_writes_as_many_levels_as_there_are_masks_and_one(
    drafter: BlockDrafter, one_pass: Callable[..., int]
) -> None:
    session = following(drafter, request_of(PROMPT, PARAMS["greedy"]))
    assert one_pass(drafter, session) == len(PROMPT) + MASKS
    assert depth_below(session._tree.root) == 1 + MASKS
    tokens = [token for fragment in session.take_fragments() for token in fragment.tokens]
    assert tokens
    assert max(tokens) < drafter.abilities.width, "a mask is no token"


def test_a_round_costs_one_pass_over_what_was_committed_and_the_masks(
    drafter: BlockDrafter, target: PackedLM, one_pass: Callable[..., int]
) -> None:
    truth = plain_ids(target, PARAMS["greedy"], 16)
    session = following(drafter, request_of(PROMPT, PARAMS["greedy"]))
    one_pass(drafter, session)
    report(session, len(PROMPT), truth[len(PROMPT) :][:3], prefix_hash(truth[: len(PROMPT) + 3]))
    assert one_pass(drafter, session) == 3 + MASKS
    assert session.cache.length == len(PROMPT) + 3


def test_it_rides_ahead_below_the_likeliest_leaf_given_the_tokens_that_lead_there(
    drafter: BlockDrafter, target: PackedLM, one_pass: Callable[..., int]
) -> None:
    session = following(drafter, request_of(PROMPT, PARAMS["greedy"]), children=1, depth=9)
    one_pass(drafter, session)
    session.take_fragments()
    assert one_pass(drafter, session) == 1 + MASKS + MASKS
    ids, node = list(PROMPT), session._tree.root
    for _ in range(2 * (1 + MASKS)):
        assert node.children
        (node,) = node.children.values()
        ids.append(node.token)
    table = target.table()
    given = ids[: len(PROMPT) + 1 + MASKS]
    logits = target.forward([SequenceRows(table, given, range(-1, len(given) - 1), [len(given) - 1])]).row(0)
    assert ids[len(given)] == int(np.argmax(logits))


def test_a_prompt_in_chunks_and_the_end_of_the_context_need_fewer_masks(
    drafter: BlockDrafter, one_pass: Callable[..., int]
) -> None:
    session = following(drafter, request_of(PROMPT, PARAMS["greedy"]))
    assert one_pass(drafter, session, chunk=5) == 5
    assert one_pass(drafter, session, chunk=5) == len(PROMPT) - 5 + MASKS
    short = dataclasses.replace(request_of(PROMPT, PARAMS["greedy"]), limit=len(PROMPT) + 3)
    session = following(drafter, short)
    assert one_pass(drafter, session) == len(PROMPT) + 1
    assert depth_below(session._tree.root) == 2


def test_each_place_of_a_block_learns_how_often_it_is_right(
    drafter: BlockDrafter, target: PackedLM, one_pass: Callable[..., int]
) -> None:
    """The first place is always right; the masks have learnt nothing, so later places hardly ever are."""
    truth = plain_ids(target, PARAMS["greedy"], 90)
    curves = [SurvivalCurve(strength=2.0) for _ in range(1 + MASKS)]
    session = following(drafter, request_of(PROMPT, PARAMS["greedy"]), curves, scale=0.05)
    before = [curve.worth(0.9) for curve in curves]
    while len(session.ids) < len(truth) - 2:
        one_pass(drafter, session)
        report(
            session,
            len(session.ids),
            truth[len(session.ids) :][:2],
            prefix_hash(truth[: len(session.ids) + 2]),
        )
    assert curves[0].worth(0.99) > 0.9
    assert curves[1].worth(0.9) < 0.5 * before[1]
    assert curves[3].worth(0.9) == before[3], "places that no walk reaches stay as they were"


def test_a_model_without_masks_is_refused_with_the_way_out(tiny_llama_bare: Path) -> None:
    with pytest.raises(ModelRefused, match=r"no mask ids.*distil --kind block"):
        load(DrafterSettings(model=str(tiny_llama_bare), drafter="block", threads=1, passes="eager"))


def test_a_model_with_masks_drafts_token_by_token_as_well(folder: Path, tiny_llama_bare: Path) -> None:
    plain, wide = (
        load(DrafterSettings(model=str(model), threads=1, passes="eager"))
        for model in (tiny_llama_bare, folder)
    )
    assert wide.abilities.width == plain.abilities.width + MASKS
    assert not wide.abilities.masks
