"""Certificates for an hour: an authority, and what it signs. For benchmarks and tests; its key is never written."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from diloco.tls import TLS

DAY = timedelta(days=1)
HERE = ("localhost", "127.0.0.1")


class Authority:
    """Signs certificates; its own is `<folder>/<name>-ca.pem`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name = folder, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._build(self._name, self._key, (), (-DAY, DAY), authority=True)
        self.path = folder / f"{name}-ca.pem"
        self.path.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        names: Sequence[str] = HERE,
        valid: tuple[timedelta, timedelta] = (-DAY, DAY),
        key: Any = None,
    ) -> TLS:
        """Files of a certificate for hosts `names`, valid from and until so long after now, with its authority's."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate, cert, secret = self._build(subject, key, names, valid), self._folder / f"{name}.pem", f"{name}.key"
        cert.write_bytes(certificate.public_bytes(Encoding.PEM))
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (self._folder / secret).write_bytes(pem)
        return TLS(cert=str(cert), key=str(self._folder / secret), ca=str(self.path))

    def _build(
        self,
        subject: x509.Name,
        key: Any,
        names: Sequence[str],
        valid: tuple[timedelta, timedelta],
        *,
        authority: bool = False,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder(issuer_name=self._name, subject_name=subject, public_key=key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + valid[0])
            .not_valid_after(now + valid[1])
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general(n) for n in names]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
