"""The two ways between host and device of a step: everything up in one copy, the logits down in another."""

import torch


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """``size`` bytes on the host from which the device copies by itself; the device's own for a CPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def upload(host: torch.Tensor, device: torch.Tensor, size: int) -> None:
    """Sends the first ``size`` bytes without waiting; nothing where host and device are one."""
    if host.data_ptr() != device.data_ptr():
        device[:size].copy_(host[:size], non_blocking=True)


def download(rows: torch.Tensor) -> torch.Tensor:
    """The rows on the host, waiting for everything that was asked of the device before."""
    if rows.device.type == "cpu":
        return rows
    found = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    found.copy_(rows, non_blocking=True)
    torch.cuda.current_stream(rows.device).synchronize()
    return found


def indices(values: list[list[int]], device: torch.device) -> torch.Tensor:
    """int64 of these lists on the device; without waiting for it where it is a GPU."""
    return sent(torch.tensor(values, dtype=torch.long), device)


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; without waiting for it where it is a GPU."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
