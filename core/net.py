"""Ports and addresses."""

from __future__ import annotations

import errno
import socket

from pdserve.core.errors import ConfigError


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_port_free(host: str, port: int, flag: str = "--port") -> None:
    """Says in one sentence why a port cannot be listened on.

    Args:
        host: Address or name to listen on.
        port: 0 is always free.
        flag: The option that sets the port, for the message.

    Raises:
        ConfigError: The port is in use, or the host is not an address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
            s.listen(1)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            message = f"port {port} is in use; choose another with {flag} (0 picks a free one)"
            raise ConfigError(message, reason="PORT_IN_USE") from e
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror}; see --host and {flag}") from e


def advertised_address(host: str, port: int) -> str:
    """What others reach a listener at, as far as it can be guessed: the host name when it listens on all interfaces."""
    return format_address(socket.gethostname() if host in ("0.0.0.0", "::", "") else host, port)


def check_address(address: str, flag: str) -> None:
    """Checks what others are told to connect to; a wrong one would fail each of them, later and elsewhere.

    Args:
        address: Of the configuration.
        flag: The option that sets it, for the message.

    Raises:
        ConfigError: It is not host:port.
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    known_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65535
    if not known_port or not host.strip("[]") or (":" in host and not bracketed):
        raise ConfigError(f"{flag} is {address!r:.80}; it must be host:port, as in 10.0.0.7:9000 or [fd00::7]:9000")
