"""Where the cases run: on the CPU in the interpreter, or compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.configs import Profile

_device = torch.device("cpu")


def use(device: torch.device) -> None:
    """Makes `launch` run kernels there."""
    global _device
    _device = device


def where() -> torch.device:
    """The device."""
    return _device


def is_gpu() -> bool:
    """False in the interpreter."""
    return _device.type == "cuda"


def profile() -> Profile:
    """The device's launch configurations; in the interpreter those of a small sm_90."""
    if not is_gpu():
        return Profile("sm_90", 2)
    from pdserve.kernels.gpu import profile_of

    return profile_of(_device)


def launch(kernel: Callable[..., Any], *args: object, **options: object) -> Any:
    """Calls launch code with tensors of the CPU. For a GPU all of their memory moves there, and back afterwards."""
    if not is_gpu():
        return kernel(*args, **options)
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def move(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        host = value.untyped_storage()
        _, there = moved.setdefault(host.data_ptr(), (host, host.to(device=_device)))
        empty = torch.empty(0, dtype=value.dtype, device=_device)
        return empty.set_(there, value.storage_offset(), value.shape, value.stride())

    result = kernel(*map(move, args), **{name: move(value) for name, value in options.items()})
    for host, there in moved.values():
        host.copy_(there, non_blocking=False)
    return result.cpu() if isinstance(result, Tensor) else result
