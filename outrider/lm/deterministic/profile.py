"""The deterministic profile: a row of logits is bit for bit a function of the weights and the ids before it.

The bits do not depend on the other rows of a pass, on the chunks of a prompt, on the slots that hold the
keys, or on whether the keys came from decoding, from a tree or from a prefill. Linear layers multiply in
tiles shown to be steady (`linear.py`), and attention adds by tiles of positions (`kernel.py`). Passes
are filled up to the width of the processor's vectors, so that the code for remainders computes no activation.
A model that multiplies elsewhere is refused, and so is a model that fails the check: random ids, packed in
two ways, have to give the same bits.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.lm.attention.interface import SlotCache
from outrider.lm.deterministic.attention import Kernels, TileCache
from outrider.lm.deterministic.kernel import TILE
from outrider.lm.deterministic.linear import TiledProducts, UnsteadyProduct, common_rows
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.kv.table import SlotTable
from outrider.lm.linear import PackedLinear, pack_linears
from outrider.lm.plan import PassPlan, SequenceRows
from outrider.lm.weight_only.packing import WeightDtype
from speculative.errors import InvalidRequest, ModelRefused

if TYPE_CHECKING:
    from outrider.lm.load.check import Trial
    from outrider.lm.runner import PackedLM

_LOOP_BYTES = 128
"""Number of bytes that the widest vector loop takes at a time: two vectors."""

_SINGLE = 12
"""Number of ids that the check computes one at a time."""

_CUTS = (1, 37, 130)
"""Numbers of rows in the prefill's first passes in the second packing; the other rows make one pass."""


@dataclass(slots=True)
class Deterministic:
    """The deterministic profile of one model. A Profile; see `outrider.lm.profile`."""

    multiple: int = 1
    """Number of rows of which every pass has a multiple; known once `pack` was called."""
    digest: str = ""
    """Digest of the logits that the check computed: equal where weights and arithmetic are; empty before."""
    _kernels: Kernels = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name of the arithmetic, with the digest of the logits that the check computed."""
        return f"deterministic {self.digest}"

    @property
    def weight_dtype(self) -> WeightDtype:
        """``auto``: weights are kept in the dtype of the passes."""
        return "auto"

    @property
    def compiles(self) -> bool:
        """False: a compiled pass adds in another order."""
        return False

    def check_settings(self, device: str, threads: int, ranks: int) -> None:
        """Raises InvalidRequest for several ranks, and for several threads on the CPU.

        Threads cut tensors into pieces by size, and the remainder of each piece is rounded otherwise.
        """
        if torch.device(device).type == "cpu" and threads != 1:
            raise InvalidRequest(
                f"threads = {threads}: the deterministic profile computes on one thread; give threads = 1"
            )
        if ranks > 1:
            raise InvalidRequest("the deterministic profile is of one process; serve without ranks")

    def prepare(self, model: PreTrainedModel) -> None:
        """Leaves the model as it is."""

    def layout(self, found: KVLayout) -> KVLayout:
        """The model's layout with keys and values in float32, where the model computes in less."""
        return replace(found, dtype=torch.float32) if found.dtype.itemsize < 4 else found

    def can_pack(self, model: PreTrainedModel, ranks: int) -> bool:
        """True: the profile does not hold without `pack`."""
        return True

    def pack(self, lm: "PackedLM") -> None:
        """Lays out every linear layer in tiles. Raises ModelRefused for a model that multiplies elsewhere."""
        _as_linears(lm.model)
        try:
            pack_linears(lm.model, lm.find_layout, TiledProducts())
        except UnsteadyProduct as error:
            raise _refusal(
                lm, "on this machine a row of a linear layer depends on the rows computed beside it"
            ) from error
        head = lm.model.get_output_embeddings()
        widths = []
        for module in lm.model.modules():
            if isinstance(module, PackedLinear):
                widths += (
                    [module.in_features] if module is head else [module.in_features, module.out_features]
                )
            elif not isinstance(module, nn.Embedding):
                _refuse_weights(lm, module)
        self.multiple = common_rows(widths, _LOOP_BYTES // lm.model.dtype.itemsize)

    def settle(self, lm: "PackedLM", trial: "Trial | None", ranks: int) -> None:
        """Verifies that every row keeps its bits; passes stay ragged. Raises ModelRefused."""
        self.verify(lm)

    def padding(self, row_count: int) -> int:
        """Number of rows that fill up a pass of ``row_count`` rows to a multiple of `multiple`."""
        return -row_count % self.multiple

    def cache(self, model_type: str, pool: SlotPool, plan: PassPlan) -> SlotCache:
        """The KV cache of the pass of ``plan``, which attends by tiles of positions."""
        return TileCache(model_type, pool, plan, self._kernels)

    def verify(self, lm: "PackedLM") -> None:
        """Packs random ids in two ways. Raises ModelRefused unless every row has the same bits."""
        calls, rows = lm.forward_calls, lm.rows
        ids, wrong, other = _draw(lm)
        plain = _plain(lm, ids)
        mixed = _mixed(lm, ids, wrong, other)
        lm.forward_calls, lm.rows = calls, rows
        differing = int((plain != mixed).any(-1).sum())
        if differing or not torch.isfinite(plain).all():
            raise _refusal(lm, f"{differing} of {len(plain)} rows depend on what they are computed with")
        self.digest = hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:16]


def _as_linears(model: nn.Module) -> None:
    """Replaces GPT-2's linear layers, which store their weights transposed, by plain ones."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Conv1D):
                layer = nn.Linear(child.nx, child.nf, device="meta")
                layer.weight = nn.Parameter(child.weight.t(), requires_grad=False)
                layer.bias = nn.Parameter(child.bias, requires_grad=False)
                setattr(module, name, layer)


def _refuse_weights(lm: "PackedLM", module: nn.Module) -> None:
    for name, weight in module.named_parameters(recurse=False):
        if weight.dim() > 1:
            raise _refusal(lm, f"{type(module).__name__} multiplies by its `{name}` outside linear layers")


def _draw(lm: "PackedLM") -> tuple[list[int], list[int], list[int]]:
    """Draws ids of a session longer than any window and a tile, wrong guesses, and ids of another session."""
    longest = max([TILE + 40, *(window + 6 for window in lm.windows if window < lm.max_length)])
    count = min(lm.max_length - 2, longest + _SINGLE)
    generator = torch.Generator().manual_seed(4)

    def draw(size: int) -> list[int]:
        return torch.randint(lm.vocabulary_size, (size,), generator=generator).tolist()

    return draw(count), draw(2 * _SINGLE), draw(max(1, min(29, lm.max_length - 2 - _SINGLE)))


def _plain(lm: "PackedLM", ids: Sequence[int]) -> torch.Tensor:
    """Logits after every id: a prefill in one pass, then one id after another."""
    table = lm.table()
    try:
        start = max(0, len(ids) - _SINGLE)
        rows = [_chain(lm, table, ids[:start])] if start else []
        rows += [_chain(lm, table, [token]) for token in ids[start:]]
    finally:
        lm.release(table)
    return torch.cat(rows)


def _mixed(lm: "PackedLM", ids: Sequence[int], wrong: Sequence[int], other: Sequence[int]) -> torch.Tensor:
    """Logits after every id: a prefill in pieces, then trees with wrong branches, beside another session."""
    table, mate = lm.table(), lm.table()
    try:
        start = max(0, len(ids) - _SINGLE)
        rows = []
        low = 0
        for size in (*_CUTS, start):
            if part := ids[low : min(low + size, start)]:
                rows.append(_chain(lm, table, part))
                low += len(part)
        _chain(lm, mate, other)
        for low in range(start, len(ids), 3):
            right = ids[low : low + 3]
            sequence, path = _branching(table, right, wrong)
            beside = SequenceRows(mate, [other[0], other[-1]], [-1, -1], [0])
            rows.append(torch.from_numpy(lm.forward([beside, sequence]).rows()[1:]))
            table.keep(path)
            mate.keep([1])
    finally:
        lm.release(table)
        lm.release(mate)
    return torch.cat(rows)


def _branching(
    table: SlotTable, right: Sequence[int], wrong: Sequence[int]
) -> tuple[SequenceRows, list[int]]:
    """A tree in which two wrong guesses precede each right id; logits of the right ones are wanted."""
    tokens, parents, path = [], [], []
    above = -1
    for at, token in enumerate(right):
        tokens += [wrong[2 * at], wrong[2 * at + 1], token]
        parents += [above, above if above < 0 else above - 1, above]
        above = len(tokens) - 1
        path.append(above)
    return SequenceRows(table, tokens, parents, path), path


def _chain(lm: "PackedLM", table: SlotTable, ids: Sequence[int]) -> torch.Tensor:
    count = len(ids)
    outcome = lm.forward([SequenceRows(table, ids, range(-1, count - 1), range(count))])
    table.commit(range(count))
    return torch.from_numpy(outcome.rows())


def _refusal(lm: "PackedLM", why: str) -> ModelRefused:
    return ModelRefused(
        f"{lm.model_type} is not served under the deterministic profile: {why}", lm.model_type
    )
