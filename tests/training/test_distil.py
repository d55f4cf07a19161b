"""What the drafter learns from: the teacher's distribution, and text the teacher wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from training import continued, distil, model
from training.distil import Taught
from training.model import LlamaShape

SHAPE = LlamaShape(
    layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, inner=32, vocabulary=96, context=128
)
IDS = np.random.default_rng(0).integers(96, size=(6, 24)).astype(np.uint16)


@pytest.fixture(scope="module")
def teacher() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    made = model.build(SHAPE, eos=95, seed=0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0)  # far from uniform
    return made


def test_a_drafter_equal_to_its_teacher_has_nothing_to_learn(teacher: LlamaForCausalLM) -> None:
    loss = distil.divergence(teacher, Taught(teacher, IDS, batch=2, seed=0).at(0))
    assert 0.0 <= loss.item() < 0.01


def test_a_drafter_unlike_its_teacher_has(teacher: LlamaForCausalLM) -> None:
    other = model.build(SHAPE, eos=95, seed=1)
    assert distil.divergence(other, Taught(teacher, IDS, batch=2, seed=0).at(0)).item() > 0.05


def test_a_lesson_is_the_same_when_it_comes_up_again(teacher: LlamaForCausalLM) -> None:
    taught = Taught(teacher, IDS, batch=6, seed=0)
    first, second = taught.at(0), Taught(teacher, IDS, batch=6, seed=0).at(0)
    for one, other in zip(first, taught.at(0), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(first.tokens, second.tokens)


def test_the_teacher_is_asked_about_a_row_once(teacher: LlamaForCausalLM) -> None:
    asked: list[int] = []
    hook = teacher.register_forward_hook(lambda *_: asked.append(1))
    taught = Taught(teacher, IDS, batch=2, seed=0)
    for step in range(9):
        taught.at(step)
    hook.remove()
    assert len(asked) < 9


def test_kept_probabilities_are_the_largest(teacher: LlamaForCausalLM) -> None:
    lesson = Taught(teacher, IDS, batch=2, seed=0).at(0)
    exact = teacher(input_ids=lesson.ids).logits.softmax(-1).topk(64).values
    assert torch.allclose(lesson.wanted, exact, atol=1e-3)


def test_even_rows_are_continued_greedily_and_prompts_are_left_as_they_are(teacher: LlamaForCausalLM) -> None:
    text = continued.continue_(teacher, IDS[:, :4], window=12)
    assert text.shape == (6, 12)
    assert (text[:, :4] == IDS[:, :4]).all()
    logits = teacher(input_ids=torch.from_numpy(text.astype(np.int64))).logits
    greedy = logits.argmax(-1).numpy()[::2, 3:-1]
    assert (greedy == text[::2, 4:]).all()


def test_continuations_are_generated_once(teacher: LlamaForCausalLM, tmp_path: Path) -> None:
    path = tmp_path / "kept.npy"
    first = continued.kept(teacher, IDS[:, :4], 12, path)
    written = path.stat().st_mtime_ns
    assert (continued.kept(teacher, IDS[:, :4], 12, path) == first).all()
    assert path.stat().st_mtime_ns == written
