"""Certificates for tests of TLS: good members, and those that must be refused."""

from __future__ import annotations

import datetime
import os
import ssl
from pathlib import Path

import pytest

from pdserve.cli.authority import Authority
from pdserve.core import tls
from pdserve.core.tls import Tls, TlsConfig

NOW = datetime.datetime.now(datetime.UTC)
EXPIRED = {"begins": NOW - datetime.timedelta(days=2), "lifetime": datetime.timedelta(days=1)}


def member(directory: Path, authority: Authority, *, trusts: Authority | None = None, **issue: object) -> TlsConfig:
    """Writes, or replaces, the files of a member.

    Args:
        directory: Where.
        authority: Signs the certificate.
        trusts: Written as its authority; default: the same.
        issue: As for `Authority.issue`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "ca.crt").write_bytes((trusts or authority).pem)
    authority.issue(directory, **issue)  # type: ignore[arg-type]
    return member_files(directory)


def member_files(directory: Path) -> TlsConfig:
    """Those that `member` wrote."""
    return TlsConfig(
        tls_cert_file=str(directory / "tls.crt"),
        tls_key_file=str(directory / "tls.key"),
        tls_ca_file=str(directory / "ca.crt"),
    )


def flags(config: TlsConfig) -> list[str]:
    """The same as words of a command line."""
    return [
        *("--tls-cert-file", str(config.tls_cert_file), "--tls-key-file", str(config.tls_key_file)),
        *("--tls-ca-file", str(config.tls_ca_file)),
    ]


def unproven(monkeypatch: pytest.MonkeyPatch, config: TlsConfig) -> Tls:
    """A `Tls` of files that it would refuse: of a certificate that was good when the process started, or of a liar."""
    with monkeypatch.context() as patch:
        patch.setattr(tls, "_prove", lambda *_: "some day")
        return Tls(config)


def client_hello() -> bytes:
    """The first bytes of a TLS client that says nothing more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="pdserve").do_handshake()
    return outgoing.read()


def num_descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
