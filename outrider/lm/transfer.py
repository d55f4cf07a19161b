"""Copies between host and device: a step's inputs go up in one copy, its digests come down in another."""

from contextlib import AbstractContextManager, nullcontext

import torch


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """A host buffer of ``size`` bytes, pinned for a GPU so that the device copies it by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the thread's current one while entered: Triton, streams and graphs take no other.

    Can be entered again and again, one time after another.
    """
    is_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.device(device) if is_gpu else nullcontext()


def device_side(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The buffer on the device for a buffer on the host: the same one where they share the memory."""
    return host if device.type == "cpu" else torch.empty_like(host, device=device)


def upload(host: torch.Tensor, device: torch.Tensor, size: int) -> None:
    """Sends the first ``size`` bytes without waiting; does nothing where host and device share the memory."""
    if host.data_ptr() != device.data_ptr():
        device[:size].copy_(host[:size], non_blocking=True)


def download(rows: torch.Tensor) -> torch.Tensor:
    """Copies the rows to the host, after all work that was launched on the device before."""
    if rows.device.type == "cpu":
        return rows
    found = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    found.copy_(rows, non_blocking=True)
    torch.cuda.current_stream(rows.device).synchronize()
    return found


def indices(values: list[list[int]], device: torch.device) -> torch.Tensor:
    """The lists as one int64 tensor on the device; does not wait for a GPU."""
    return sent(torch.tensor(values, dtype=torch.long), device)


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; does not wait for a GPU."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
