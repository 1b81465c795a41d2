"""Pages that are computed in one memory and met by other workers in another."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from pdserve.core.layout import KVLayout
from pdserve.engine.device import DevicePageCopies, PageStaging
from pdserve.engine.page_copies import PageCopies
from pdserve.engine.step import (
    Abort,
    Activate,
    Add,
    Command,
    Event,
    PageCopy,
    PageCopyKind,
    PageRef,
    PagesReady,
    ReleaseLease,
    Reserve,
    Reserved,
    SequenceFailed,
    TokensSampled,
)
from tests.engine.engines import Engine, Streams, request


def pages_of(events: Iterable[Event], kind: type[PagesReady] | type[Reserved]) -> list[PageRef]:
    return [page for event in events if isinstance(event, kind) for page in event.pages]


def test_pages_from_the_prefix_cache_are_staged_anew_and_cached_ones_are_not_overwritten() -> None:
    """What lies in host memory of a page says nothing once its lease has ended."""
    prefill, decode = Engine(16, staged=True), Engine(16, staged=True)
    for key in "ab":
        r = request(key, range(19), 6)
        (reservation,) = [e for e in decode.step(Reserve(r, 5.0)).events if isinstance(e, Reserved)]
        skipped = reservation.num_cached_pages
        assert skipped == (4 if key == "b" else 0)
        events = prefill.run(Add(r, handoff=True, reserved=True))
        sources = pages_of(events, PagesReady)
        decode.pull(prefill, sources[skipped:], reservation.pages[skipped:])
        prefill.step(ReleaseLease(key))
        prefill.memory[:] = b"\xa5" * len(prefill.memory)
        (first,) = Streams(events).tokens[key]
        streams = Streams(events)
        streams.read(decode.run(Activate(key, first)))
        streams.check([r])
        decode.memory[:] = b"\xa5" * len(decode.memory)
    assert prefill.pool.num_free == decode.pool.num_free == 16


def test_an_aborted_reservation_copies_nothing_in() -> None:
    staging = PageStaging(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 4, dtype=torch.uint8))
    engine = Engine(8, staged=True)
    events = engine.step(Reserve(request("a", range(9)), 5.0)).events
    staging.after(events)
    staging.after(engine.step(Abort("a")).events)
    staging.before(Activate("a", 1))
    assert not staging._device.any()


class Broken:
    """Staging whose copies fail."""

    def before(self, command: Command) -> None:
        pass

    def after(self, events: Iterable[Event]) -> None:
        if any(isinstance(event, PagesReady) for event in events):
            raise RuntimeError("the device is gone")


def test_pages_that_could_not_be_copied_are_never_told() -> None:
    engine = Engine(8)
    engine.core._staging = Broken()
    events = engine.step(Add(request("a", range(9)), handoff=True, reserved=True)).events
    assert not pages_of(events, PagesReady)
    assert "the device is gone" in str(engine.core.failure)
    assert any(isinstance(event, SequenceFailed | TokensSampled) for event in events)


@pytest.mark.parametrize("seed", range(3))
def test_copies_on_a_device_are_those_in_plain_memory(seed: int) -> None:
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, page_size=2, dtype="float32")
    rng = torch.Generator().manual_seed(seed)
    pool, host = (torch.randint(0, 256, (6, layout.page_bytes), generator=rng, dtype=torch.uint8) for _ in range(2))
    plain = [bytearray(m.numpy().tobytes()) for m in (pool, host)]
    kinds = list(PageCopyKind)
    copies = [PageCopy(*torch.randint(0, 6, (2,), generator=rng).tolist(), kinds[i % 3]) for i in range(12)]
    copies = [c for c in copies if c.kind is not PageCopyKind.COPY or c.source != c.target]
    DevicePageCopies(pool, host).apply(copies)
    PageCopies(layout.page_bytes, *map(memoryview, plain)).apply(copies)
    assert [m.numpy().tobytes() for m in (pool, host)] == [bytes(m) for m in plain]
