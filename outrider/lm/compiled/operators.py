"""The two operators of a compiled pass, as `torch.export` and Inductor see them: their shapes and C shims.

A process that compiles imports this module; a process that serves never does. `kernels.cpp` computes them.
"""

import torch

_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_LIBRARY.define(
    "panel_linear(Tensor rows, Tensor panels, Tensor? bias, Tensor? scales, int outputs) -> Tensor"
)
_LIBRARY.define(
    "attend_slots(Tensor query, Tensor keys, Tensor values, Tensor block, Tensor? sinks, int layer, "
    "float scale, int window, float softcap) -> Tensor"
)

C_SHIMS = {
    torch.ops.outrider.panel_linear.default: [
        "AOTITorchError aoti_torch_cpu_panel_linear("
        "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, AtenTensorHandle*, int64_t, "
        "AtenTensorHandle*)"
    ],
    torch.ops.outrider.attend_slots.default: [
        "AOTITorchError aoti_torch_cpu_attend_slots(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, "
        "AtenTensorHandle, AtenTensorHandle*, int64_t, double, int64_t, double, AtenTensorHandle*)"
    ],
}
"""Declaration of the C function that computes an operator, for Inductor's ``custom_ops_to_c_shims``."""


def _panel_linear(
    rows: torch.Tensor,
    panels: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    outputs: int,
) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], outputs)


def _attend_slots(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])


torch.library.register_fake("outrider::panel_linear", _panel_linear, lib=_LIBRARY)
torch.library.register_fake("outrider::attend_slots", _attend_slots, lib=_LIBRARY)
