"""Mutual TLS: the files of one side, and what they must be: checked before a handshake fails without a word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from diloco.errors import InputError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

CURVES = ("secp256r1", "secp384r1")
"""Curves whose keys gRPC takes, besides RSA."""


@dataclass(frozen=True, kw_only=True)
class TLS:
    """PEM files that one side speaks mutual TLS with."""

    cert: str
    """Certificate of this side, and after it the certificates between it and its authority, if there are any."""
    key: str
    """Private key of `cert`, without a passphrase."""
    ca: str
    """Certificates of the authorities, one of which has signed the other side's certificate."""
    server_name: str = ""
    """Name that the coordinator's certificate is for, where that is not the host it is reached at."""


class Credentials(NamedTuple):
    """What the files hold (PEM), and until when the certificate is valid."""

    certificate: bytes
    key: bytes
    authorities: bytes
    until: datetime


def load(tls: TLS, read: Callable[[str], bytes], now: datetime) -> Credentials:
    """Reads the files and checks them.

    Args:
        tls: their paths.
        read: returns what is in a file, or raises `OSError`.
        now: the time, with its zone.

    Raises:
        InputError: a file cannot be read or is not what it should be, the key is another certificate's, or a
            certificate is not valid now.
    """
    certificate, key, authorities = (_read(path, read) for path in (tls.cert, tls.key, tls.ca))
    [own, *_], known = _certificates(tls.cert, certificate), _certificates(tls.ca, authorities)
    _check_key(tls, key, own)
    _check_time(tls.cert, own, now)
    for authority in known:
        _check_time(tls.ca, authority, now)
    return Credentials(certificate, key, authorities, own.not_valid_after_utc)


def _read(path: str, read: Callable[[str], bytes]) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise InputError(f"cannot read {path}, which TLS needs: {error.strerror or error}") from error


def _certificates(path: str, data: bytes) -> list[Certificate]:
    """At least one."""
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(data)
    except ValueError as error:
        raise InputError(
            f"{path} holds no certificate in PEM: name the file that begins with -----BEGIN CERTIFICATE-----"
        ) from error


def _check_key(tls: TLS, data: bytes, own: Certificate) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(data, None)
    except TypeError as error:
        raise InputError(
            f"{tls.key} has a passphrase: write it without one (openssl pkey -in {tls.key} -out NEW.key), readable by "
            "its owner alone"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"{tls.key} holds no private key in PEM: name the file that has -----BEGIN PRIVATE KEY-----"
        ) from error
    if not isinstance(key, RSAPrivateKey) and not (
        isinstance(key, EllipticCurvePrivateKey) and key.curve.name in CURVES
    ):
        raise InputError(f"gRPC cannot use the kind of key in {tls.key}: make an RSA, P-256 or P-384 one")
    if key.public_key() != own.public_key():
        raise InputError(f"the key {tls.key} is not that of the certificate {tls.cert}: name two that belong together")


def _check_time(path: str, certificate: Certificate, now: datetime) -> None:
    if now > certificate.not_valid_after_utc:
        raise InputError(
            f"the certificate {path} expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: make a new one"
        )
    if now < certificate.not_valid_before_utc:
        raise InputError(
            f"the certificate {path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on: "
            f"wait until then, or set this machine's clock, which says {now:%Y-%m-%d %H:%M}"
        )
