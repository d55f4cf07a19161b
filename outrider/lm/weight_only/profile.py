"""The profile of a model whose linear layers have weights in bfloat16 or int8."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.lm.deterministic.profile import Deterministic
from outrider.lm.kv.pool import KVLayout
from outrider.lm.large_pages import LargePages
from outrider.lm.linear import pack_linears
from outrider.lm.norm import fuse_norms
from outrider.lm.profile import FastProfile, Profile
from outrider.lm.weight_only.kernel import WeightOnlyKernel, load_kernel
from outrider.lm.weight_only.packing import WeightDtype
from outrider.lm.weight_only.product import WeightOnlyProduct, round_linears, share_in_linear_layers
from speculative.errors import InvalidRequest

if TYPE_CHECKING:
    from outrider.lm.runner import PackedLM

_LEAST_SHARE = 0.5
"""Least share of the weights that linear layers must hold: rounding the others is not built."""


def profile_of(deterministic: bool, weight_dtype: WeightDtype, cache_dir: Path | None) -> Profile:
    """The profile of one model. Raises InvalidRequest for settings that no profile serves together."""
    if weight_dtype == "auto":
        return Deterministic() if deterministic else FastProfile(cache_dir)
    if deterministic:
        raise InvalidRequest(
            f"weight_dtype = {weight_dtype} beside deterministic: the deterministic profile multiplies "
            "by the weights in the dtype of its passes; leave one of them out"
        )
    return WeightOnly(cache_dir, weight_dtype)


@dataclass(frozen=True, slots=True)
class WeightOnly(FastProfile):
    """Passes in float32 over weights of linear layers in bfloat16 or int8. A Profile.

    The weights are rounded before the model is checked, so the check at load compares with the forward of the
    model that is served, within the bounds of float32.
    """

    @property
    def label(self) -> str:
        """The weights' format, such as ``int8-weights``: they are a numerics class of their own."""
        return f"{self.weight_dtype}-weights"

    @property
    def _setting(self) -> str:
        return f"weight_dtype = {self.weight_dtype}"

    def check_settings(self, device: str, threads: int, ranks: int) -> None:
        """Raises InvalidRequest on a device other than the CPU, over ranks, and where there is no kernel."""
        if torch.device(device).type != "cpu":
            raise InvalidRequest(
                f"{self._setting} on {device}: such weights are multiplied on CPUs alone; leave weight_dtype "
                "out, or give device = cpu"
            )
        if ranks > 1:
            raise InvalidRequest(f"{self._setting} beside ranks = {ranks}: one rank alone; leave one out")
        self._kernel()

    def prepare(self, model: PreTrainedModel) -> None:
        """Rounds the model's linear layers. Raises InvalidRequest for a model that has none to round."""
        if model.dtype is not torch.float32:
            dtype = str(model.dtype).removeprefix("torch.")
            raise InvalidRequest(
                f"{self._setting} beside dtype = {dtype}: passes over such weights compute in float32; leave "
                "one of them out"
            )
        share = share_in_linear_layers(model)
        if getattr(model, "hf_quantizer", None) is not None or share < _LEAST_SHARE:
            kind = model.config.model_type
            why = (
                f"linear layers hold {share:.0%} of the weights of {kind}"
                if getattr(model, "hf_quantizer", None) is None
                else f"the weights of this {kind} are quantised already"
            )
            raise InvalidRequest(f"{self._setting}: {why}; leave weight_dtype out")
        round_linears(model, self.weight_dtype)

    def layout(self, found: KVLayout) -> KVLayout:
        """The model's own layout, whose blocks are named by the weights' format."""
        return replace(found, weights=self.label)

    def can_pack(self, model: PreTrainedModel, ranks: int) -> bool:
        """True: the weights are kept in their format by `pack` alone."""
        return True

    def pack(self, lm: "PackedLM") -> None:
        """Keeps linear layers as panels in the format, and fuses norms."""
        kernel, memory = self._kernel(), LargePages()

        def product_of(layers: list[nn.Linear]) -> WeightOnlyProduct:
            return WeightOnlyProduct(layers, self.weight_dtype, kernel, memory)

        fuse_norms(lm.model)
        pack_linears(lm.model, lm.find_layout, product_of)

    def _kernel(self) -> WeightOnlyKernel:
        return load_kernel(self._setting, self.cache_dir)
