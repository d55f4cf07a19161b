"""Reads and writes heads in the layouts in which they are published, and refuses a head that does not fit."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.lm.heads.config import HeadConfig, HeadNeeds
from outrider.lm.heads.target_parts import TargetParts, TargetShape
from outrider.lm.load.source import first_line
from speculative.errors import InvalidRequest
from speculative.implementations import load_implementation

HEADS = {
    "medusa": "outrider.lm.heads.medusa:MedusaHeads",
    "hydra": "outrider.lm.heads.hydra:HydraHeads",
    "pass": "outrider.lm.heads.look_ahead:LookAheadEmbeddings",
    "eagle3": "outrider.lm.heads.eagle3:Eagle3Head",
    "mtp": "outrider.lm.heads.mtp:PredictionModule",
    "eagle": "outrider.lm.heads.eagle:EagleHead",
}
"""Kind of head to "module:class" of a `Head`. A config.json is of the first kind that recognises it."""

_WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)


_NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Head(Protocol):
    """The class of one kind of head, a torch module."""

    kind: str
    """Name of the kind; also the name of a source that drafts with such a head."""
    weights_file: str
    """Name of the file that `write_head` writes."""
    left_out: tuple[str, ...]
    """Weights that checkpoints may have and that are not loaded, such as copies of the target's."""

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""

    @classmethod
    def recognises(cls, config: HeadConfig) -> bool:
        """Whether a config.json belongs to this kind of head."""

    @classmethod
    def needs(cls, config: HeadConfig, shape: TargetShape) -> HeadNeeds:
        """What the head needs of its target. Raises OutriderError for a head that does not fit."""

    @classmethod
    def renames(cls, config: HeadConfig | None) -> tuple[tuple[str, str], ...]:
        """Published prefixes of weights, with the module's prefixes; None: `write_head` uses the same
        names."""

    @classmethod
    def of(cls, config: HeadConfig, target: TargetParts, weights: Mapping[str, Tensor]) -> Self:
        """The module of a checkpoint without its weights, which these are, renamed.

        Raises ModelRefused for a head that does not fit.
        """


def head_class(config: HeadConfig) -> type[Head]:
    """The kind of a checkpoint's head. Raises InvalidRequest if no kind recognises the config."""
    for kind in HEADS:
        found: type[Head] = load_implementation(HEADS, kind)
        with config.describing():
            if found.recognises(config):
                return found
    raise InvalidRequest(
        f"{config.text!r} is not a head that Outrider knows: its config.json fits none of {', '.join(HEADS)}"
    )


def load_head(config: HeadConfig, target: TargetParts) -> nn.Module:
    """Loads a head for a target: on the target's device, in the target's dtype, without gradients.

    Raises InvalidRequest for an incomplete checkpoint, ModelRefused for a head that does not fit the
    target or holds NaN.
    """
    kind = head_class(config)
    with config.describing():
        kind.needs(config, target.shape)
    weights = _renamed(_read_weights(config), kind.renames(config))
    for name in kind.left_out:
        weights.pop(name, None)
    with config.describing(), torch.device("meta"):
        head = kind.of(config, target, weights)
    assert isinstance(head, nn.Module)
    _check(config, kind.kind, head, weights)
    head.load_state_dict(weights, assign=True)
    return head.to(target.device, target.dtype).eval().requires_grad_(False)


def write_head(head: nn.Module, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a head's config.json and weights, in `dtype`, into a folder, in its kind's published layout."""
    folder.mkdir(parents=True, exist_ok=True)
    kind: Any = head
    renames = [(own, published) for published, own in kind.renames(None)]
    weights = _renamed({name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}, renames)
    stored = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().clone()
        for name, tensor in weights.items()
    }
    save_file(stored, folder / kind.weights_file, {"format": "pt"})
    text = json.dumps(kind.config(), indent=2, sort_keys=True, default=str)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _read_weights(config: HeadConfig) -> dict[str, Tensor]:
    files = [config.folder / name for name in _WEIGHTS if (config.folder / name).is_file()]
    if not files:
        raise InvalidRequest(f"head {config.text!r} has no weights: none of {', '.join(_WEIGHTS)}")
    try:
        if files[0].suffix == ".safetensors":
            return load_file(files[0])
        found = torch.load(files[0], map_location="cpu", weights_only=True)
    except Exception as error:  # of either library, for a truncated file or another kind of file
        raise InvalidRequest(
            f"head {config.text!r}: {files[0].name} cannot be read: {first_line(error)}; download it again"
        ) from error
    if not isinstance(found, dict):
        raise InvalidRequest(
            f"head {config.text!r}: {files[0].name} holds a {type(found).__name__}, not weights by name"
        )
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}


def _renamed(weights: Mapping[str, Tensor], renames: Collection[tuple[str, str]]) -> dict[str, Tensor]:
    """The weights under other names: the first prefix that a name begins with is replaced."""
    return {
        next((new + name.removeprefix(old) for old, new in renames if name.startswith(old)), name): tensor
        for name, tensor in weights.items()
    }


def _check(config: HeadConfig, kind: str, head: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises ModelRefused unless the weights are those of the module, and numbers all of them."""
    wanted = head.state_dict()
    if missing := sorted(wanted.keys() - weights.keys()):
        raise config.refusal(kind, f"it lacks {len(missing)} of its weights: {missing[0]} …")
    if others := sorted(weights.keys() - wanted.keys()):
        raise config.refusal(kind, f"it has {len(others)} weights that no {kind} head has: {others[0]} …")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise config.refusal(
                kind,
                f"{name} has the shape {list(tensor.shape)}; a head for this target has "
                f"{list(wanted[name].shape)}",
            )
        if wanted[name].is_floating_point() and tensor.dtype not in _NUMBERS:
            formats = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NUMBERS)
            raise config.refusal(kind, f"{name} is {tensor.dtype}; weights of heads may be {formats}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise config.refusal(kind, f"{name} holds NaN or infinity")
