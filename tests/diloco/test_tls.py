"""TLS files are checked before they are used, and what is wrong with them is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from cryptography.x509 import load_pem_x509_certificate

from benchmarks.certificates import DAY, Authority
from diloco.errors import InputError
from diloco.tls import TLS, Credentials, load

NOW = datetime.now(UTC)


def read(tls: TLS, now: datetime = NOW) -> Credentials:
    return load(tls, lambda path: Path(path).read_bytes(), now)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_good_files_are_read_as_they_are(authority: Authority) -> None:
    tls = authority.issue("island")
    found = read(tls)
    assert [found.certificate, found.key, found.authorities] == [
        Path(path).read_bytes() for path in (tls.cert, tls.key, tls.ca)
    ]
    assert found.until == load_pem_x509_certificate(found.certificate).not_valid_after_utc


@pytest.mark.parametrize("key", [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())])
def test_keys_that_grpc_takes_are_taken(key: object, authority: Authority) -> None:
    assert read(authority.issue("island", key=key))


def other_key(authority: Authority, tls: TLS) -> TLS:
    return replace(tls, key=authority.issue("other").key)


def no_pem(name: str) -> Callable[[Authority, TLS], TLS]:
    def spoil(_: Authority, tls: TLS) -> TLS:
        Path(getattr(tls, name)).write_bytes(b"no PEM \xff")
        return tls

    return spoil


def passphrase(_: Authority, tls: TLS) -> TLS:
    secret = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    Path(tls.key).write_bytes(secret)
    return tls


FAULTS: dict[str, Callable[[Authority, TLS], TLS]] = {
    r"cannot read /nowhere\.pem, which TLS needs: No such file": lambda _, tls: replace(tls, cert="/nowhere.pem"),
    r"cannot read /, which TLS needs: Is a directory": lambda _, tls: replace(tls, ca="/"),
    r"island\.pem holds no certificate in PEM: name": no_pem("cert"),
    r"authority-ca\.pem holds no certificate in PEM: name": no_pem("ca"),
    r"island\.key holds no private key in PEM: name": no_pem("key"),
    r"island\.pem holds no private key in PEM": lambda _, tls: replace(tls, key=tls.cert),
    r"island\.key has a passphrase: write it without one": passphrase,
    r"other\.key is not that of the certificate \S*island\.pem: name two": other_key,
    r"old\.pem expired at .* UTC: make a new one": lambda a, _: a.issue("old", valid=(-2 * DAY, -DAY)),
    r"new\.pem is valid from .*set this machine's clock": lambda a, _: a.issue("new", valid=(DAY, 2 * DAY)),
    r"cannot use the kind of key in \S*ed\.key: make an RSA, P-256 or P-384 one": lambda a, _: a.issue(
        "ed", key=ed25519.Ed25519PrivateKey.generate()
    ),
    r"cannot use the kind of key in \S*k\.key": lambda a, _: a.issue("k", key=ec.generate_private_key(ec.SECP256K1())),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_is_named(message: str, authority: Authority) -> None:
    tls = FAULTS[message](authority, authority.issue("island"))
    with pytest.raises(InputError, match=message):
        read(tls)


def test_an_authority_that_has_expired_is_named(authority: Authority) -> None:
    tls = authority.issue("island", valid=(-DAY, 9 * DAY))
    with pytest.raises(InputError, match=r"authority-ca\.pem expired"):
        read(tls, NOW + 2 * DAY)
