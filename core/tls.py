"""Mutual TLS among the routers and workers of a deployment: who is a member, and certificates that change meanwhile.

A member has a certificate that an authority of `--tls-ca-file` signed, that is valid now, and that names
`--tls-peer-name` (a DNS subjectAltName). Both ends of each connection ask for all three. Members are not known by host
names: workers are addressed by pod IP.

The files are looked at when a connection begins. A changed set is taken as a whole, once a peer with the same set would
accept it; until then the one before stays. Connections that exist go on with what they have. No session is resumed:
each connection shows its certificate.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc

from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError

RETRY_S = 1.0
"""A changed set that could not be taken is tried again after this time: it may become valid later."""

_FILES = ("tls_cert_file", "tls_key_file", "tls_ca_file")
_HOSTNAME_MISMATCH = 62  # X509_V_ERR_HOSTNAME_MISMATCH of OpenSSL
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Mutual TLS between routers and workers; the three files turn it on. Clients speak to routers without it."""

    tls_cert_file: str | None = option(None, "PEM certificate that this process shows to its peers, with its chain")
    tls_key_file: str | None = option(None, "PEM key of --tls-cert-file, without a passphrase")
    tls_ca_file: str | None = option(None, "PEM certificates of the authorities whose certificates peers may show")
    tls_peer_name: str = option("pdserve", "DNS name that the certificate of every router and worker must carry")
    require_tls: bool = option(
        False, "refuse to start without the files above, or with a KV data plane that cannot encrypt"
    )

    def __post_init__(self) -> None:
        check(self)
        missing = [f"--{name.replace('_', '-')}" for name in _FILES if not getattr(self, name)]
        if self.require_tls and missing:
            raise ConfigError(f"--require-tls needs {', '.join(missing)}")
        if 0 < len(missing) < len(_FILES):
            raise ConfigError(f"TLS needs all of its files; not set: {', '.join(missing)}")
        check_peer_name(self.tls_peer_name)

    @property
    def enabled(self) -> bool:
        """The files are given."""
        return self.tls_cert_file is not None


@dataclass(frozen=True, eq=False)
class _Identity:
    """One set of files, read and proven."""

    cert: bytes
    key: bytes
    ca: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext
    ends: str


class Tls:
    """This process's certificate, and what it asks of its peers'. Safe to use from any thread.

    Args:
        config: With the three files.

    Raises:
        ConfigError: A file cannot be read or used, or peers would refuse the certificate; names flag and file.

    Attributes:
        peer_name: Name in the certificate of every member.
        required: Nothing may leave this host in the clear.
    """

    def __init__(self, config: TlsConfig) -> None:
        self.peer_name, self.required = config.tls_peer_name, config.require_tls
        self._config = config
        self._lock = threading.Lock()
        self._stamp = _stamp(config)
        self._retry_at_s = float("inf")
        self._identity = _load(config)
        _log.info("TLS is on; the certificate of this process is valid until %s", self._identity.ends)

    # ---- sockets ----------------------------------------------------------------------------------------------------

    def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        """Wraps the server's end of a connection; the handshake is the caller's. `sock` must not be used any more."""
        return self._current().server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def connect(self, sock: socket.socket) -> ssl.SSLSocket:
        """Wraps the client's end, before it is connected; the handshake is the caller's."""
        return self._current().client.wrap_socket(sock, do_handshake_on_connect=False, server_hostname=self.peer_name)

    def ask(self, sock: socket.socket) -> ssl.SSLSocket:
        """As `connect`, of a connected socket, in the words of a gRPC client."""
        now = self._current()
        context = _context(ssl.PROTOCOL_TLS_CLIENT, now.cert, now.key, now.ca, self._config)
        context.set_alpn_protocols(["h2"])
        return context.wrap_socket(sock, do_handshake_on_connect=False, server_hostname=self.peer_name)

    def is_member(self, sock: ssl.SSLSocket) -> bool:
        """True when the certificate that the peer showed has the members' name; after the handshake."""
        return self.peer_name in _dns_names(sock)

    # ---- gRPC -------------------------------------------------------------------------------------------------------

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one new channel, which must override the target's name with `peer_name`."""
        identity = self._current()
        return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server; each new connection is shown the certificate of its time."""
        given = self._current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given  # gRPC asks one at a time
            if (now := self._current()) is given:
                return None
            given = now
            return _server_configuration(now)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(given),
            changed,  # type: ignore[arg-type]  # None is allowed, which the stubs do not know
            require_client_authentication=True,
        )

    # ---- rotation ---------------------------------------------------------------------------------------------------

    def _current(self) -> _Identity:
        """The identity of the files as they are, or the last one that was whole."""
        with self._lock:
            stamp, now_s = _stamp(self._config), time.monotonic()
            if stamp == self._stamp and now_s < self._retry_at_s:
                return self._identity
            again, self._stamp = stamp == self._stamp, stamp
            try:
                self._identity = _load(self._config)
            except ConfigError as e:
                self._retry_at_s = now_s + RETRY_S
                if not again:
                    _log.error("changed TLS files are not taken, the ones before stay: %s", e.message)
            else:
                self._retry_at_s = float("inf")
                _log.info("TLS files changed: new connections use the new ones, valid until %s", self._identity.ends)
            return self._identity


def load_tls(config: TlsConfig) -> Tls | None:
    """The process's TLS, or None when it is not configured.

    Raises:
        ConfigError: As `Tls`.
    """
    return Tls(config) if config.enabled else None


def check_peer_name(name: str) -> None:
    """Refuses a name of members for which a certificate with another name would do.

    Clients, gRPC and OpenSSL, take `*.example` for `pdserve.example`, and gRPC cannot be told not to. No wildcard
    stands for a name without a dot.

    Args:
        name: As `--tls-peer-name`.

    Raises:
        ConfigError: Says which to take.
    """
    if not name:
        raise ConfigError("--tls-peer-name is empty")
    if "*" in name or "." in name:
        raise ConfigError(
            f"--tls-peer-name {name!r}: whoever has a wildcard certificate could pass; take a name without "
            "a dot, as pdserve, which certificates may have beside others (docs/operations.md, TLS)"
        )


def _server_configuration(identity: _Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.ca)


def _stamp(config: TlsConfig) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when a file changes, also when a link on its path is replaced."""

    def of(path: str) -> tuple[int, int, int] | None:
        try:
            found = Path(path).stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    return tuple(of(getattr(config, name)) for name in _FILES)


def _load(config: TlsConfig) -> _Identity:
    """Reads the files once and proves that they belong together: everything below is made of the same bytes."""
    cert = _read("--tls-cert-file", config.tls_cert_file, b"-----BEGIN CERTIFICATE-----")
    key = _read("--tls-key-file", config.tls_key_file, b"PRIVATE KEY-----")
    ca = _read("--tls-ca-file", config.tls_ca_file, b"-----BEGIN CERTIFICATE-----")
    server, client = (_context(p, cert, key, ca, config) for p in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    server.num_tickets = 0  # no resumption
    return _Identity(cert, key, ca, server, client, _prove(server, client, config))


def _context(protocol: int, cert: bytes, key: bytes, ca: bytes, config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.hostname_checks_common_name = False
    _use_ca(context, ca, config)
    _use_own(context, cert, key, config)
    return context


def _read(flag: str, path: str | None, mark: bytes) -> bytes:
    assert path is not None
    try:
        content = Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"{flag} {path}: {e.strerror}") from e
    if mark not in content:
        raise ConfigError(f"{flag} {path}: there is no {mark.decode().strip('-').removeprefix('BEGIN ')} in it")
    return content


def _use_ca(context: ssl.SSLContext, ca: bytes, config: TlsConfig) -> None:
    try:
        context.load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as e:
        raise ConfigError(f"--tls-ca-file {config.tls_ca_file}: not PEM certificates: {e}") from e


def _use_own(context: ssl.SSLContext, cert: bytes, key: bytes, config: TlsConfig) -> None:
    def no_passphrase() -> NoReturn:
        raise ConfigError(f"--tls-key-file {config.tls_key_file} is encrypted; give one without a passphrase")

    try:
        with _as_file(cert) as cert_path, _as_file(key) as key_path:
            context.load_cert_chain(cert_path, key_path, no_passphrase)
    except ssl.SSLError as e:
        if e.reason == "KEY_VALUES_MISMATCH":
            message = f"--tls-key-file {config.tls_key_file} is not the key of --tls-cert-file {config.tls_cert_file}"
        else:
            message = (
                f"--tls-cert-file {config.tls_cert_file} with --tls-key-file {config.tls_key_file}: "
                f"{e.reason or 'not a certificate and a key in PEM'}"
            )
        raise ConfigError(message) from e
    except OSError as e:  # no descriptor is left, or no /proc is here
        raise ConfigError(f"--tls-cert-file {config.tls_cert_file}: the system cannot hand it to OpenSSL: {e}") from e


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path to bytes that were read already: `ssl` takes a certificate from files only."""
    with os.fdopen(os.memfd_create("pdserve-tls"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _prove(server: ssl.SSLContext, client: ssl.SSLContext, config: TlsConfig) -> str:
    """A handshake in memory with a peer of the same files: what it refuses, peers would refuse.

    Returns:
        When the certificate ends.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    there = server.wrap_bio(to_server, to_client, server_side=True)
    here = client.wrap_bio(to_client, to_server, server_hostname=config.tls_peer_name)
    where = f"--tls-cert-file {config.tls_cert_file}: peers would refuse this certificate"
    nameless = f"{where}: it does not name {config.tls_peer_name!r} (--tls-peer-name)"
    try:
        for end in (here, there, here, there):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as e:
        if e.verify_code == _HOSTNAME_MISMATCH:
            raise ConfigError(nameless) from e
        raise ConfigError(f"{where}: {e.verify_message} (--tls-ca-file {config.tls_ca_file})") from e
    except ssl.SSLError as e:
        raise ConfigError(f"{where}: {e.reason}") from e
    if config.tls_peer_name not in _dns_names(there):
        raise ConfigError(nameless)
    return str((there.getpeercert() or {}).get("notAfter"))


def _dns_names(end: ssl.SSLSocket | ssl.SSLObject) -> set[str]:
    shown = end.getpeercert() or {}
    names: object = shown.get("subjectAltName", ())
    assert isinstance(names, tuple)
    return {value for kind, value in names if kind == "DNS"}
