"""Tiny models with random weights, saved as Hugging Face folders, for the tests of all packages."""

import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Kernels run on the CPU where Triton is installed; it reads this when transformers first imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")
# A compiler beside every process that a test starts would take the cores; some tests ask for it.
os.environ.setdefault("OUTRIDER_UP__PASSES", "eager")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Tests leave the user's cache alone; xdist's workers and all services share the folder of this process.
    os.environ["XDG_CACHE_HOME"] = (CACHE := tempfile.TemporaryDirectory(prefix="outrider-cache-")).name

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.in_time import TRIES, NotInTime

# How long an example takes, or its inputs, says how busy the machine is; pytest's timeout ends what hangs.
# Examples are the same each time: what new ones find is for `make fuzz-check`, and refuses no change.
settings.register_profile(
    "outrider",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("outrider")

_LATE = pytest.StashKey[list[bool]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Notes of each failure of a test whether something came too late."""
    if call.excinfo is not None:
        item.stash[_LATE].append(call.excinfo.errisinstance(NotInTime))
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Runs a test again in which something came too late, as on a machine that is busy with others."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for left in reversed(range(TRIES)):
        late = item.stash[_LATE] = []
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if not left or not late or not all(late):
            break
        item._initrequest()  # type: ignore[attr-defined]  # its fixtures are made anew
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_setup() -> None:
    """Random tensors are the same in every order of the tests."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of whole stacks first: they share processes, and one xdist worker gets all of them."""
    items.sort(key=lambda item: "integration" not in item.path.parts)


TINY_VOCABULARY = 96
LINES = [
    "def add(left, right):\n    return left + right\n",
    "for index, value in enumerate(values):\n    print(index, value)\n",
    "class Queue:\n    def __init__(self, size=8):\n        self.items = []\n        self.size = size\n",
    "import os\nfrom pathlib import Path\nif __name__ == '__main__':\n    main()\n",
    "The quick brown fox jumps over the lazy dog. 0123456789 [x * y - z / w]; {a: b}\n",
]


def tiny_tokenizer() -> Tokenizer:
    """A byte-level tokenizer of exactly TINY_VOCABULARY ids."""
    tokenizer = _trained_tokenizer(LINES, TINY_VOCABULARY, alphabet=[])
    assert tokenizer.get_vocab_size() == TINY_VOCABULARY
    return tokenizer


def writing_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with every byte, which can write any text."""
    lines = ['{"name": "Ada", "age": 36, "tags": ["a", "b"], "ok": true}\n']
    return _trained_tokenizer(lines, 280, alphabet=pre_tokenizers.ByteLevel.alphabet())


def _trained_tokenizer(lines: list[str], vocabulary: int, alphabet: list[str]) -> Tokenizer:
    """A byte-level tokenizer in which 0 is <pad> and 1 is <eos>, both special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines * 4, trainer)
    return tokenizer


def save_tiny_llama(
    path: Path, *, seed: int, tokenizer: Tokenizer | None, width: int = TINY_VOCABULARY
) -> Path:
    """Saves a two-layer Llama with random float32 weights, its generation config and a given tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=width,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(path)
    if tokenizer is not None:
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
        ).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny target: 96 ids, 256 positions, end-of-sequence id 1, with its tokenizer."""
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=0, tokenizer=tiny_tokenizer())


@pytest.fixture(scope="session")
def tiny_llama_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model like `tiny_llama` with other weights: a drafter that is often wrong."""
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-b", seed=1, tokenizer=tiny_tokenizer())


@pytest.fixture(scope="session")
def tiny_writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a target that can write any text; it has 320 ids, more than its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "writer"
    return save_tiny_llama(path, seed=0, tokenizer=writing_tokenizer(), width=320)


@pytest.fixture(scope="session")
def tiny_llama_bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny target's weights without a tokenizer."""
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "bare", seed=0, tokenizer=None)
