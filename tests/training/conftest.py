"""A tiny target, a small model of its tokenizer, and the options of a run that takes seconds."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.heads.recipe import DistilOptions
from training.target import next_token_loss

TEXTS = [f"def f{n}(x):\n    return x + {n}\n\n\nclass C{n}:\n    value = {n}\n" * 6 for n in range(24)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=288, initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=bpe).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=299,
    )
    taught(LlamaForCausalLM(config), bpe).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer that knows nothing, with the target's tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    config = LlamaConfig.from_pretrained(target)
    config.num_hidden_layers = 1
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(target).save_pretrained(folder)
    return folder


def taught(model: LlamaForCausalLM, bpe: Tokenizer) -> LlamaForCausalLM:
    """The model after a second of training: text of a target that knows nothing cannot be drafted."""
    ids = torch.tensor([one for text in TEXTS for one in bpe.encode(text).ids])
    rows = ids[: len(ids) // 48 * 48].reshape(-1, 48)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(80):
        batch = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(step))[:16]]
        next_token_loss(model, batch).backward()
        adam.step()
        adam.zero_grad()
    return model


@pytest.fixture
def options(target: Path, tmp_path: Path) -> DistilOptions:
    return DistilOptions(
        kind="eagle",
        target=str(target),
        out=tmp_path / "head",
        work=tmp_path / "work",
        text=(Path("text"),),
        tokens=2048,
        window=32,
        steps=6,
        batch=256,
        held_tokens=12,
    )


def quiet(stage: str, done: int, total: int, remark: str = "") -> None:
    """Shows nothing."""
