"""Certificates of members of a deployment and the authority that signs them, for development and tests."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdserve.core.errors import ConfigError

AUTHORITY_DAYS = 3650
BACKDATED = datetime.timedelta(minutes=5)  # clocks differ


@dataclass(frozen=True)
class Authority:
    """Signs certificates of members."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls, common_name: str = "pdserve development authority") -> Authority:
        """A new one, in memory."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _named(common_name)
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            _begin(name, name, key)
            .not_valid_before(now - BACKDATED)
            .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def in_directory(cls, directory: Path) -> Authority:
        """That of ca.crt and ca.key, made if neither exists.

        Raises:
            ConfigError: They cannot be used.
        """
        cert_path, key_path = directory / "ca.crt", directory / "ca.key"
        if not cert_path.exists() and not key_path.exists():
            made = cls.new()
            _write(key_path, _pem(made.key), 0o600)
            _write(cert_path, made.pem, 0o644)
            return made
        try:
            key = load_pem_private_key(key_path.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(cert_path.read_bytes())
        except (OSError, ValueError, TypeError) as e:
            raise ConfigError(f"the authority in {directory} cannot be used: {e}; remove ca.crt and ca.key") from e
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{key_path} is not the key of {cert_path}; remove both")
        return cls(certificate, key)

    @property
    def pem(self) -> bytes:
        """Its certificate, for --tls-ca-file."""
        return self.certificate.public_bytes(Encoding.PEM)

    def issue(
        self,
        directory: Path,
        *,
        name: str = "pdserve",
        also: Sequence[str] = (),
        lifetime: datetime.timedelta = datetime.timedelta(days=30),
        begins: datetime.datetime | None = None,
    ) -> None:
        """Writes tls.key and tls.crt of a new member, each replaced in one go.

        Args:
            directory: Where.
            name: DNS name in it.
            also: More of them.
            lifetime: How long it is valid.
            begins: From when; default: a few minutes ago.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        begins = begins or datetime.datetime.now(datetime.UTC) - BACKDATED
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _begin(_named(name), self.certificate.subject, key)
            .not_valid_before(begins)
            .not_valid_after(begins + lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in (name, *also)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(signer, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        _write(directory / "tls.key", _pem(key), 0o600)
        _write(directory / "tls.crt", certificate.public_bytes(Encoding.PEM), 0o644)


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _begin(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    serial = x509.random_serial_number()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replaces a file in one go; a key is never readable for others."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    Path(temporary).chmod(mode)
    Path(temporary).replace(path)
