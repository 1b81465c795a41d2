"""A GPU's part of an engine: finds it, holds the KV pages in its memory, and keeps them level with host memory where
other workers read and write pages.

Transports see host memory alone, page for page as many as the device has; a page that nobody moves is never backed
there. `PageStaging` copies a page out before `PagesReady` is told of it and in before `Activate` is handled:

    prefill:  step, device fence -> PagesReady -> copied out, complete -> told -> read by the transport
    decode:   Reserved -> written by the transport -> VALID -> Activate -> copied in -> step
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import LayerPages, PoolMemory, views_of
from pdserve.engine.step import (
    Activate,
    Command,
    Event,
    PageCopy,
    PageCopyKind,
    PagesReady,
    Reserved,
    SequenceAborted,
    SequenceFailed,
)


def find_device(name: str) -> torch.device:
    """The device that `--device` names.

    Args:
        name: "auto", "cpu" or "cuda"; the last one is also AMD's name in torch.

    Raises:
        ConfigError: There is no such device, or it cannot run our kernels.
    """
    if name != "cuda":
        return torch.device("cpu")
    if torch.version.cuda is None and torch.version.hip is None:
        raise ConfigError(f"--device is 'cuda', but torch {torch.__version__} is built for CPUs only; use --device cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device is 'cuda', but torch finds no GPU here (see nvidia-smi); use --device cpu")
    try:
        from pdserve.kernels.gpu import profile_of
    except ImportError as e:
        raise ConfigError(
            f"--device is 'cuda', whose kernels need Triton ({e}); install it, or use --device cpu"
        ) from e
    where = torch.device("cuda", torch.cuda.current_device())
    profile_of(where)
    return where


class DevicePool:
    """KV pages in device memory, zeroed.

    Args:
        layout: Layout of the pages.
        num_pages: Pages.
        where: The device.

    Raises:
        ConfigError: The device has no such memory to give.
    """

    def __init__(self, layout: KVLayout, num_pages: int, where: torch.device) -> None:
        self._layout = layout
        try:
            self._flat = torch.zeros(
                num_pages * layout.page_elements, dtype=getattr(torch, layout.dtype), device=where
            )  # fmt: skip
        except RuntimeError as e:  # torch's error for memory too
            size = num_pages * layout.page_bytes
            raise ConfigError(f"the device has no {size} bytes for KV pages; lower --kv-cache-memory-bytes") from e
        self.pages = self._flat.view(torch.uint8).view(num_pages, layout.page_bytes)
        """`[num_pages, page_bytes]` uint8, the same memory."""

    def staging(self, memory: PoolMemory) -> PageStaging:
        """Keeps as many pages of host memory level with these."""
        return PageStaging(self.pages, host_pages(self._layout, memory))

    def views(self) -> dict[int, LayerPages]:
        """Tensors of each layer's keys and values over the pages."""
        return views_of(self._layout, self._flat)


def host_pages(layout: KVLayout, memory: PoolMemory) -> Tensor:
    """`[num_pages, page_bytes]` uint8 over host memory."""
    return torch.frombuffer(memory.buffer, dtype=torch.uint8).view(-1, layout.page_bytes)


class DevicePageCopies:
    """`PageCopies` for pages in device memory, in the order of its stream.

    Args:
        pool: `[num_pages, page_bytes]` uint8.
        host: The same of the host pool for preempted sequences; None: nothing is swapped.
    """

    def __init__(self, pool: Tensor, host: Tensor | None = None) -> None:
        in_host = pool[:0] if host is None else host
        self._memories = {
            PageCopyKind.SWAP_OUT: (pool, in_host),
            PageCopyKind.SWAP_IN: (in_host, pool),
            PageCopyKind.COPY: (pool, pool),
        }

    def apply(self, copies: Iterable[PageCopy]) -> None:
        """Does the copies one after the other, each seeing the bytes that those before it left."""
        for copy in copies:
            source, target = self._memories[copy.kind]
            target[copy.target].copy_(source[copy.source])


class PageStaging:
    """Keeps host pages level with device pages at the two points where other workers meet them.

    Args:
        device: `[num_pages, page_bytes]` uint8, computed in.
        host: The same size, read and written by transports.
    """

    def __init__(self, device: Tensor, host: Tensor) -> None:
        assert device.shape == host.shape, (device.shape, host.shape)
        self._device, self._host = device, host
        self._arriving: dict[str, Sequence[int]] = {}

    def before(self, command: Command) -> None:
        """Called before a command is handled; whatever writes the host pages of an `Activate` has ended."""
        if isinstance(command, Activate):
            for page in self._arriving.pop(command.key, ()):
                self._device[page].copy_(self._host[page])

    def after(self, events: Iterable[Event]) -> None:
        """Called with events before anybody hears of them; their pages have their final KV on the device."""
        for event in events:
            match event:
                case PagesReady():
                    for ref in event.pages:
                        # A copy to memory that is not pinned is complete when the call returns.
                        self._host[ref.page_id].copy_(self._device[ref.page_id])
                case Reserved():
                    self._arriving[event.key] = [ref.page_id for ref in event.pages[event.num_cached_pages :]]
                case SequenceAborted() | SequenceFailed():
                    self._arriving.pop(event.key, None)
