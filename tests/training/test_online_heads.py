"""Heads that learn online: they come nearer to their target, and their chains are counted right."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from training.heads import untrained
from training.heads.frozen import FrozenTarget
from training.online_heads import DEPTH, HeadSchool, OnlineHead

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Text:
    ids: Ids
    places: int


def texts(count: int, length: int = 40, places: int = 32, seed: int = 0) -> list[Text]:
    drawn = np.random.default_rng(seed)
    return [Text(drawn.integers(2, 96, length).astype(np.uint32), places) for _ in range(count)]


KINDS: dict[str, Callable[[FrozenTarget], OnlineHead]] = {
    "medusa": lambda target: untrained.medusa(target, 3),
    "blockwise": lambda target: untrained.blockwise(target, 3),
    "hydra": lambda target: untrained.hydra(target, 3),
    "eagle": untrained.eagle,
    "eagle3": lambda target: untrained.eagle3(target, torch.arange(96)),
    "mtp": untrained.mtp,
}


@pytest.fixture(scope="module")
def school(tiny_llama: Path) -> HeadSchool:
    return HeadSchool(str(tiny_llama))


def begun(school: HeadSchool, kind: str, folder: Path) -> OnlineHead:
    """A head of a kind as it is served first: written to a folder and read again."""
    torch.manual_seed(0)
    school.write(KINDS[kind](school._target), folder)
    return school.load(str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_every_kind_comes_nearer_to_its_target_and_is_read_back_as_it_was_written(
    kind: str, school: HeadSchool, tmp_path: Path
) -> None:
    head = begun(school, kind, tmp_path / "0")
    norms = {name: one.clone() for name, one in head.named_parameters() if one.ndim < 2}
    lessons = texts(16)
    before = sum(school.accepted({0: head}, lessons)[0])
    # Heads that share the target's LM head have few parameters, so each has to move farther.
    steps, rate = (120, 3e-2) if kind == "blockwise" else (40, 1e-2)
    losses = school.learn(head, lessons, steps, rate, seed=1)
    after = school.accepted({1: head}, lessons)[1]
    assert losses[-1] < 0.9 * losses[0]
    assert sum(after) > 1.2 * before
    school.write(head, tmp_path / "1")
    assert school.accepted({1: school.load(str(tmp_path / "1"))}, lessons)[1] == after
    assert all(torch.equal(one, norms[name]) for name, one in head.named_parameters() if name in norms)


def chains_by_hand(school: HeadSchool, head: Any, text: Text, depth: int) -> list[int]:
    """The counts of `right_tokens` for one text, place by place, from the definition."""
    target = school._target
    ids = torch.from_numpy(text.ids.astype(np.int64))
    features = target.features(ids[None])
    said = target.parts.lm_head(features)[0].argmax(-1).tolist()
    counts = []
    for place in range(len(ids) - text.places, len(ids)):
        right = 0
        while (
            right < min(depth, len(ids) - place)
            and place >= 2
            and int(head.logits(right, features[0, place - 2]).argmax()) == said[place + right - 1]
        ):
            right += 1
        counts.append(right)
    return counts


def test_right_tokens_of_chains_are_counted_from_every_place_to_the_passages_end(
    school: HeadSchool, tmp_path: Path
) -> None:
    head = begun(school, "medusa", tmp_path / "0")
    mixed = [*texts(3, 40, 32), *texts(2, 12, 11, seed=4), *texts(1, 3, 1, seed=5), *texts(3, 25, 9, seed=6)]
    school.learn(head, mixed, 150, 3e-2, seed=1)
    found = [counts.tolist() for counts in school.right_tokens({7: head}, mixed)[7]]
    assert found == [chains_by_hand(school, head, one, DEPTH) for one in mixed]
    assert school.accepted({7: head}, mixed) == {7: [sum(counts) for counts in found]}
    assert sum(map(sum, found)) > 1.5 * sum(one.places for one in mixed), "chains are longer than a token"


def test_several_heads_are_scored_as_each_alone_is(school: HeadSchool, tmp_path: Path) -> None:
    first, second = (begun(school, "eagle", tmp_path / name) for name in "01")
    school.learn(second, texts(16), 10, 3e-3, seed=2)
    exams = texts(9, 30, 20, seed=3)
    both = school.accepted({0: first, 1: second}, exams)
    assert both == school.accepted({0: first}, exams) | school.accepted({1: second}, exams)
    assert both[0] != both[1]


def test_a_head_learns_the_last_place_of_a_passage_and_nothing_from_the_context(
    school: HeadSchool, tmp_path: Path
) -> None:
    head = begun(school, "medusa", tmp_path / "0")
    lessons = texts(6, 20, 1)
    whole = [Text(one.ids, 18) for one in lessons]
    school.learn(head, lessons, 100, 3e-2, seed=0)
    assert school.accepted({0: head}, lessons)[0] == [1] * 6
    assert sum(school.accepted({0: head}, whole)[0]) < 0.5 * 6 * 18


def test_passages_shorter_than_a_chain_can_be_learnt_from(school: HeadSchool, tmp_path: Path) -> None:
    head = begun(school, "eagle", tmp_path / "0")
    losses = school.learn(head, texts(2, 2, 1), 3, 1e-3, seed=0)
    assert all(np.isfinite(losses))
