"""Each family of models is either right through the packed pass or refused, by name."""

import random

import pytest
import torch
from transformers import PreTrainedModel

from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import ModelRefused
from tests.lm.families import VOCABULARY, WINDOW, check_pass, greedy_ids, logits_of, model_of, twin_of

RIGHT = ["llama", "qwen3", "mistral", "gemma3_text", "gpt_neox", "gpt_oss", "gemma2", "gpt2", "deepseek_v3"]
REFUSED = {
    "falcon": "does not attend through the attention interface",
    "jamba": "recurrent layers",
    "qwen3_next": "recurrent layers",
    "bloom": "does not attend through the attention interface",
    "bert": "differs from its own eager forward",
}
NEW = 24
"""Generated ids; with the prompt three windows long."""


def decode_with_trees(lm: PackedLM, prompts: list[list[int]], truths: list[list[int]]) -> list[list[int]]:
    """Greedy decoding of all prompts in one batch, with drafts.

    Every step drafts wrong branches and, by turns, some right ones.
    """
    dice = random.Random(0)
    tables = [lm.table() for _ in prompts]
    for table, prompt in zip(tables, prompts, strict=True):
        half = len(prompt) // 2
        for part in (prompt[:half], prompt[half:-1]):
            lm.forward([SequenceRows(table, part, range(-1, len(part) - 1), ())])
            table.commit(range(len(part)))
    made: list[list[int]] = [[] for _ in prompts]
    while live := [at for at, ids in enumerate(made) if len(ids) < NEW]:
        trees = [_drafted(prompts[at], made[at], truths[at], dice) for at in live]
        logits = logits_of(
            lm,
            [
                SequenceRows(tables[at], tokens, parents, range(len(tokens)))
                for at, (tokens, parents) in zip(live, trees, strict=True)
            ],
        )
        rows = logits.split([len(tokens) for tokens, _ in trees])
        for at, tree, own in zip(live, trees, rows, strict=True):
            made[at] += _accept(tables[at], tree, own)
    for table in tables:
        lm.release(table)
    return [ids[:NEW] for ids in made]


def _drafted(
    prompt: list[int], made: list[int], truth: list[int], dice: random.Random
) -> tuple[list[int], list[int]]:
    """The last id, and below it a tree of drafts.

    The tree has a wrong branch of two nodes, the right branch of up to two, and a wrong leaf under that.
    """
    tokens, parents = [(prompt + made)[-1]], [-1]
    tokens += [dice.randrange(VOCABULARY) for _ in range(2)]
    parents += [0, 1]
    right = truth[len(made) : len(made) + dice.randint(0, 2)]
    for depth, token in enumerate(right):
        parents.append(0 if depth == 0 else len(tokens) - 1)
        tokens.append(token)
    parents.append(len(tokens) - 1)
    tokens.append(dice.randrange(VOCABULARY))
    return tokens, parents


def _accept(table: SlotTable, tree: tuple[list[int], list[int]], logits: torch.Tensor) -> list[int]:
    tokens, parents = tree
    path, chosen = [0], [int(logits[0].argmax())]
    while True:
        below = [
            row for row in range(1, len(tokens)) if parents[row] == path[-1] and tokens[row] == chosen[-1]
        ]
        if not below:
            break
        path.append(below[0])
        chosen.append(int(logits[below[0]].argmax()))
    table.commit(path)
    table.drop_nodes()
    return chosen


@pytest.mark.parametrize("packed_weights", [False, True], ids=["own weights", "packed weights"])
@pytest.mark.parametrize("family", RIGHT)
def test_greedy_ids_through_trees_equal_generate(family: str, packed_weights: bool) -> None:
    model = model_of(family)
    twin = twin_of(model)
    prompts = [[(7 * at + 3) % VOCABULARY for at in range(2 * WINDOW + 3)], [5, 11, 23, 42, 2]]
    truths = [greedy_ids(twin, prompt, NEW) for prompt in prompts]
    assert any(len(set(truth)) > 3 for truth in truths), "a test on a constant would show nothing"

    lm = PackedLM(model)
    check_pass(lm)
    if packed_weights:
        lm.pack()
        check_pass(lm)

    assert decode_with_trees(lm, prompts, truths) == truths
    assert lm.pool.used_slots == 0


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_served_rightly_is_refused_by_its_type(family: str) -> None:
    with pytest.raises(ModelRefused, match=REFUSED[family]) as refused:
        check_pass(PackedLM(model_of(family)))

    assert refused.value.model_type == family
    assert family in str(refused.value)


def test_windows_are_those_of_the_layers_that_have_one() -> None:
    def windows(model: PreTrainedModel) -> tuple[int, ...]:
        return PackedLM(model).windows

    assert windows(model_of("mistral")) == windows(model_of("gemma3_text")) == (WINDOW,)
    assert windows(model_of("llama")) == ()


def test_bfloat16_is_served_within_its_own_rounding() -> None:
    check_pass(PackedLM(model_of("llama").bfloat16()))
