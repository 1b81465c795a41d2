"""Files of TLS: what is refused at start, and how they change under a running process."""

from __future__ import annotations

import datetime
import errno
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from pdserve.cli import __main__ as cli
from pdserve.cli.authority import Authority
from pdserve.core import tls
from pdserve.core.config import load
from pdserve.core.errors import ConfigError
from pdserve.core.tls import Tls, TlsConfig, load_tls
from tests.support.certificates import EXPIRED, NOW, member

AUTHORITY, OTHER = Authority.new(), Authority.new("another authority")


def serial_of(server: Tls, client: Tls) -> int:
    """The serial number that a server shows to a client, over a real connection."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)
    serving = server.accept(theirs)
    thread = threading.Thread(target=serving.do_handshake)
    thread.start()
    # `connect` wraps what is not connected yet: this one is, which makes no difference to the handshake
    with client.connect(ours) as end:
        end.do_handshake()
        shown = end.getpeercert()
        assert shown is not None
    thread.join(10)
    assert server.is_member(serving)
    serving.close()
    return int(str(shown["serialNumber"]), 16)


def test_without_files_there_is_no_tls() -> None:
    assert load_tls(TlsConfig()) is None
    assert not TlsConfig().enabled


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--require-tls"], ["--require-tls", "--tls-cert-file", "--tls-key-file", "--tls-ca-file"]),
        (["--tls-cert-file", "c"], ["--tls-key-file", "--tls-ca-file"]),
        (["--tls-ca-file", "c", "--tls-key-file", "k"], ["--tls-cert-file"]),
        (["--tls-peer-name", ""], ["--tls-peer-name"]),
        (["--tls-peer-name", "*"], ["--tls-peer-name", "as pdserve"]),
        (["--tls-peer-name", "pdserve.internal"], ["--tls-peer-name", "as pdserve"]),
    ],
)
def test_half_a_configuration_is_refused_by_name(words: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        load("test", "", {"TLS": TlsConfig}, words, {})
    for name in named:
        assert name in e.value.message


def no_file(files: TlsConfig) -> None:
    Path(str(files.tls_ca_file)).unlink()


def garbage(files: TlsConfig) -> None:
    Path(str(files.tls_cert_file)).write_text("-----BEGIN CERTIFICATE-----\nxyz\n-----END CERTIFICATE-----\n")


def empty_key(files: TlsConfig) -> None:
    Path(str(files.tls_key_file)).write_bytes(b"")


def bad_ca(files: TlsConfig) -> None:
    Path(str(files.tls_ca_file)).write_text("-----BEGIN CERTIFICATE-----\nxyz\n-----END CERTIFICATE-----\n")


def key_of_another(files: TlsConfig) -> None:
    key = Path(str(files.tls_key_file))
    member(key.parent / "other", AUTHORITY)
    key.write_bytes((key.parent / "other" / "tls.key").read_bytes())


def encrypted_key(files: TlsConfig) -> None:
    path = Path(str(files.tls_key_file))
    key = load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


def ca_of_others(files: TlsConfig) -> None:
    Path(str(files.tls_ca_file)).write_bytes(OTHER.pem)


def expired(files: TlsConfig) -> None:
    AUTHORITY.issue(Path(str(files.tls_cert_file)).parent, **EXPIRED)  # type: ignore[arg-type]


def not_yet(files: TlsConfig) -> None:
    AUTHORITY.issue(Path(str(files.tls_cert_file)).parent, begins=NOW + datetime.timedelta(days=1))


def other_name(files: TlsConfig) -> None:
    AUTHORITY.issue(Path(str(files.tls_cert_file)).parent, name="web")


SPOILED = [
    (no_file, ["--tls-ca-file", "ca.crt", "No such file"]),
    (garbage, ["--tls-cert-file", "tls.crt"]),
    (empty_key, ["--tls-key-file", "tls.key", "PRIVATE KEY"]),
    (bad_ca, ["--tls-ca-file", "ca.crt"]),
    (key_of_another, ["--tls-key-file", "tls.key", "tls.crt", "not the key"]),
    (encrypted_key, ["--tls-key-file", "tls.key", "passphrase"]),
    (ca_of_others, ["--tls-cert-file", "tls.crt", "issuer", "ca.crt"]),
    (expired, ["--tls-cert-file", "tls.crt", "expired"]),
    (not_yet, ["--tls-cert-file", "tls.crt", "not yet valid"]),
    (other_name, ["--tls-cert-file", "tls.crt", "--tls-peer-name", "does not name 'pdserve'"]),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILED, ids=lambda v: getattr(v, "__name__", ""))
def test_files_that_peers_would_refuse_are_refused_at_start(
    tmp_path: Path, spoil: Callable[[TlsConfig], None], words: list[str]
) -> None:
    files = member(tmp_path, AUTHORITY)
    Tls(files)
    spoil(files)
    with pytest.raises(ConfigError) as e:
        Tls(files)
    for word in words:
        assert word in e.value.message, e.value.message


@pytest.mark.parametrize(("spoil", "words"), SPOILED, ids=lambda v: getattr(v, "__name__", ""))
def test_a_running_process_keeps_what_it_has_until_the_files_are_whole_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[TlsConfig], None],
    words: list[str],
) -> None:
    monkeypatch.setattr(tls, "RETRY_S", 0.0)
    files = member(tmp_path, AUTHORITY)
    peer, running = Tls(member(tmp_path / "peer", AUTHORITY)), Tls(files)
    before = serial_of(running, peer)
    spoil(files)
    with caplog.at_level(logging.ERROR):
        assert [serial_of(running, peer) for _ in range(3)] == [before] * 3
    assert len(caplog.records) == 1, "said once"
    assert all(word in caplog.text for word in words)
    member(tmp_path, AUTHORITY)
    assert serial_of(running, peer) != before


def test_a_set_that_is_valid_a_little_later_is_taken_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changes any more on the disk, so the files alone would not say so."""
    monkeypatch.setattr(tls, "RETRY_S", 0.0)
    running, peer = Tls(member(tmp_path, AUTHORITY)), Tls(member(tmp_path / "peer", AUTHORITY))
    before = serial_of(running, peer)
    member(tmp_path, AUTHORITY, begins=datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2))
    assert serial_of(running, peer) == before
    deadline = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=10)
    while serial_of(running, peer) == before:
        assert datetime.datetime.now(datetime.UTC) < deadline


def test_a_rotation_that_met_a_process_without_descriptors_is_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "RETRY_S", 0.0)
    running, peer = Tls(member(tmp_path, AUTHORITY)), Tls(member(tmp_path / "peer", AUTHORITY))
    before = serial_of(running, peer)
    member(tmp_path, AUTHORITY)

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", none_left)
        assert serial_of(running, peer) == before
    assert "--tls-cert-file" in caplog.text and "Too many open files" in caplog.text
    assert serial_of(running, peer) != before


def test_a_directory_of_links_is_swapped_as_kubernetes_does(tmp_path: Path) -> None:
    for generation in ("one", "two"):
        member(tmp_path / generation, AUTHORITY)
    (tmp_path / "data").symlink_to("one")
    links = [str(tmp_path / "data" / name) for name in ("tls.crt", "tls.key", "ca.crt")]
    running = Tls(TlsConfig(tls_cert_file=links[0], tls_key_file=links[1], tls_ca_file=links[2]))
    peer = Tls(member(tmp_path / "peer", AUTHORITY))
    before = serial_of(running, peer)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(tmp_path / "data")
    assert serial_of(running, peer) != before


def test_sessions_are_not_resumed(tmp_path: Path) -> None:
    """A ticket would let a peer in whose certificate has expired since."""
    running, peer = Tls(member(tmp_path, AUTHORITY)), Tls(member(tmp_path / "peer", AUTHORITY))
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(10)
    serving = running.accept(theirs)
    thread = threading.Thread(target=lambda: (serving.do_handshake(), serving.send(b"x")))
    thread.start()
    with peer.connect(ours) as end:
        end.do_handshake()
        assert end.version() == "TLSv1.3" and end.recv(1) == b"x"
        assert end.session is None or not end.session.has_ticket
    thread.join(10)
    serving.close()


def test_certs_command_makes_what_the_flags_take_and_keeps_its_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "new" / "certs"
    assert cli.main(["certs", str(directory)]) == 0
    assert str(directory / "tls.key") in capsys.readouterr().out
    config = TlsConfig(
        tls_cert_file=str(directory / "tls.crt"),
        tls_key_file=str(directory / "tls.key"),
        tls_ca_file=str(directory / "ca.crt"),
    )
    assert (directory / "tls.key").stat().st_mode & 0o777 == 0o600
    assert (directory / "ca.key").stat().st_mode & 0o777 == 0o600
    running, authority = Tls(config), (directory / "ca.crt").read_bytes()
    before = serial_of(running, running)
    assert cli.main(["certs", str(directory), "--days", "2"]) == 0
    assert (directory / "ca.crt").read_bytes() == authority
    assert serial_of(running, running) != before
    (directory / "ca.key").write_bytes((directory / "tls.key").read_bytes())
    assert cli.main(["certs", str(directory)]) == 2
    assert "ca.key" in capsys.readouterr().err
    assert cli.main(["certs", str(directory), "--days", "0"]) == 2
    assert cli.main(["certs", str(directory), "--tls-peer-name", "pdserve.corp.example"]) == 2
    assert "--tls-peer-name" in capsys.readouterr().err


def test_certs_keeps_its_keys_out_of_repositories_and_ignores_nothing_else(tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "README").touch()
    for directory in (tmp_path / "new", used):
        assert cli.main(["certs", str(directory)]) == 0
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"
    assert not (used / ".gitignore").exists()


def test_old_protocols_are_not_spoken(tmp_path: Path) -> None:
    running = Tls(member(tmp_path, AUTHORITY))
    ours, theirs = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    serving = running.accept(theirs)
    serving.setblocking(False)
    ours.setblocking(False)
    with context.wrap_socket(ours, do_handshake_on_connect=False) as end, serving:
        with pytest.raises(ssl.SSLWantReadError):
            end.do_handshake()
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
            serving.do_handshake()
