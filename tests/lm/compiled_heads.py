"""The compiled kernel of heads, built once in a process, and heads of every layout that it computes."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from outrider.compiling.toolchain import find_compiler
from outrider.lm.compiled.head_kernel import HEAD_LIBRARY, CompiledHead, HeadKernel
from outrider.lm.heads.eagle import EagleHead
from outrider.lm.heads.eagle3 import Eagle3Head, Eagle3Options
from outrider.lm.heads.layer import LayerOptions
from outrider.lm.heads.mtp import PredictionModule
from outrider.lm.heads.pair_head import PairHead
from outrider.lm.heads.target_parts import TargetParts
from tests.lm.families import VOCABULARY
from tests.lm.random_heads import LAYER, shaken

WHOLE = LayerOptions(attention_bias=True, output_bias=True, mlp_bias=True, query_norm=True, input_norm=True)
"""A layer with every optional part."""
WITHOUT_INPUT_NORM = WHOLE._replace(input_norm=False)


@cache
def kernel_folder() -> Path:
    """A cache folder with the kernel; skips the test where there is no compiler."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    folder = tempfile.TemporaryDirectory(prefix="outrider-head-kernel-")
    _FOLDERS.append(folder)
    HEAD_LIBRARY.find(Path(folder.name), lambda: False, compiles=True)
    return Path(folder.name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@cache
def head_kernel() -> HeadKernel:
    """The kernel."""
    library = HEAD_LIBRARY.find(kernel_folder(), lambda: False, compiles=False)
    assert library is not None
    return HeadKernel(library)


def compiled(head: PairHead) -> CompiledHead:
    """The head's compiled passes."""
    return CompiledHead(head_kernel(), head, VOCABULARY)


def eagle(target: TargetParts) -> PairHead:
    return EagleHead(target, LAYER)


def eagle_of_speculators(target: TargetParts) -> PairHead:
    return EagleHead(target, LAYER, bias=False, normed=True, options=WHOLE)


def eagle3(target: TargetParts) -> PairHead:
    """Drafts every other id."""
    head = Eagle3Head(target, LAYER, (1, 1, 0), VOCABULARY // 2, reduced=True)
    head.d2t = torch.arange(VOCABULARY // 2)
    return head


def whole_eagle3(target: TargetParts) -> PairHead:
    """An EAGLE-3 head with every optional part."""
    options = Eagle3Options(True, True, True, True, WITHOUT_INPUT_NORM)
    return Eagle3Head(target, LAYER, (1,), VOCABULARY, reduced=False, options=options)


def mtp(target: TargetParts) -> PairHead:
    return PredictionModule(target, LAYER, WHOLE)


LAYOUTS: dict[str, Callable[[TargetParts], PairHead]] = {
    "eagle": eagle,
    "eagle of speculators": eagle_of_speculators,
    "eagle3": eagle3,
    "whole eagle3": whole_eagle3,
    "mtp": mtp,
}


def random_head(layout: str, target: TargetParts, seed: int = 0) -> PairHead:
    """A head of this layout with random weights."""
    head: PairHead = shaken(LAYOUTS[layout](target), seed).requires_grad_(False)
    return head
