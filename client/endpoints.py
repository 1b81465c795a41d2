"""Router addresses: checked once, tried in turn, and how a connection to one is set up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

MAX_MESSAGE_BYTES = 16 << 20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A restarted router is found again within a second, not after grpc's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A silent router (cut link, stopped process) is noticed while a request waits for it.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Routers are peers, not web sites: a proxy of the environment is not meant for them.
    ("grpc.enable_http_proxy", 0),
    # Two clients in one process do not share a connection: closing one leaves the other alone.
    ("grpc.use_local_subchannel_pool", 1),
)


class Endpoints:
    """Addresses of routers that share their state. Round robin over the start, the others as fallbacks.

    Args:
        addresses: "host:port", or several of them.

    Raises:
        TypeError: Not a string or a sequence of strings.
        ValueError: An address is not host:port, or there is none.
    """

    def __init__(self, addresses: str | Sequence[str]) -> None:
        if isinstance(addresses, str):
            addresses = (addresses,)
        self.addresses = tuple(_checked(a) for a in addresses)
        if not self.addresses:
            raise ValueError("no router address given; write e.g. Client('127.0.0.1:50051')")
        self._turn = itertools.count()

    def order(self) -> tuple[str, ...]:
        """All addresses, starting with the one whose turn it is. Thread-safe."""
        start = next(self._turn) % len(self.addresses)
        return self.addresses[start:] + self.addresses[:start]


def _checked(address: object) -> str:
    if not isinstance(address, str):
        raise TypeError(f"a router address must be str, not {type(address).__name__}")
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536 or "://" in address:
        raise ValueError(f"router address {address!r} is not host:port, e.g. 127.0.0.1:50051")
    return address
