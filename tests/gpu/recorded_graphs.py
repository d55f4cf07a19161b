"""A Capture that replays recorded operations over recorded addresses, as a CUDA graph does.

Everything that an operation makes while it is recorded lies at one address in all replays, in memory that all
graphs share. Before and after each replay that memory holds garbage: whoever keeps a tensor that was made
inside a capture, or reads what the replay has not written, gets NaN.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from outrider.lm.graphs.capture import Run

_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.equal", "aten.unique")
_UNWRITTEN = ("aten.empty", "aten.new_empty")


class RecordedGraphs:
    """Captures of one model; `captured` counts them."""

    def __init__(self) -> None:
        self.captured = 0
        self._made: list[torch.Tensor] = []

    def __call__(self, run: Run) -> Run:
        """Runs the step once, so that what it keeps for good exists, then records it."""
        run()
        recording = _Recording()
        with recording:
            run()
        self.captured += 1
        self._made += recording.made

        def replay() -> None:
            with torch.inference_mode():
                self._poison()
                for operation in recording.operations:
                    operation.repeat()
                self._poison()

        return replay

    def _poison(self) -> None:
        for each in self._made:
            each.fill_(torch.nan if each.is_floating_point() else 111)


class _Operation:
    """One recorded operation, its operands and what it made."""

    def __init__(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._found = found

    def repeat(self) -> None:
        """Runs the operation over the same addresses, and puts what it makes where it was made first."""
        again, _ = tree_flatten(self._func(*self._args, **self._kwargs))
        first, _ = tree_flatten(self._found)
        for new, old in zip(again, first, strict=True):
            if isinstance(old, torch.Tensor) and not _shares(new, old):
                old.copy_(new)


class _Recording(TorchDispatchMode):
    """Records operations. Tensors that an operation makes and that no argument shares are `made`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        assert not str(func).startswith(_READS), f"{func} reads a result on the host"
        found = func(*args, **kwargs)
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        for each in tree_flatten(found)[0]:
            if isinstance(each, torch.Tensor) and not any(_shares(each, other) for other in given):
                self.made.append(each)
        # Memory that nothing was written to holds garbage in every replay.
        if not str(func).startswith(_UNWRITTEN):
            self.operations.append(_Operation(func, args, kwargs, found))
        return found


def _shares(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
