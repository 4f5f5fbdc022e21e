"""The island's half of mutual TLS, and why a connection could not be made."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import grpc

from diloco.errors import Unreachable, Untrusted
from diloco.tls import TLS, load

LOOK_S = 2.0
"""How long a look at what the other end speaks may take."""
_SPEAKS = (
    "the coordinator at {address} speaks TLS: name your files in [tls] of the island file, or with --tls-cert, "
    "--tls-key and --tls-ca"
)
_SPEAKS_NOT = (
    "the coordinator at {address} does not speak TLS: start it with --tls-cert, --tls-key and --tls-ca, or name no "
    "TLS files here"
)
_ANOTHER_NAME = (
    "the certificate of the coordinator at {address} is for another name than {name}: make one with that in its "
    "subjectAltName, or set tls.server_name (--tls-server-name) to the name it has"
)
_THEIRS_EXPIRED = (
    "the certificate of the coordinator at {address}, or of its authority, has expired: make a new one, and start the "
    "coordinator again with it"
)
_THEIRS_UNKNOWN = (
    "no authority in {ca} has signed the certificate of the coordinator at {address} ({details}): name the one that "
    "has, or look who answers there"
)
_OURS_REFUSED = (
    "the coordinator at {address} does not accept the certificate {cert}: use one that an authority in the "
    "coordinator's --tls-ca has signed, and that has not expired"
)


def channel(address: str, tls: TLS | None, options: Sequence[tuple[str, object]]) -> grpc.Channel:
    """A gRPC channel to HOST:PORT.

    Raises:
        InputError: the files are not what they should be.
    """
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    found = load(tls, lambda path: Path(path).read_bytes(), datetime.now(UTC))
    credentials = grpc.ssl_channel_credentials(found.authorities, found.key, found.certificate)
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.secure_channel(address, credentials, options=[*options, *named])


def unreachable(address: str, tls: TLS | None, details: str) -> Unreachable:
    """The error that a connection which could not be made stands for.

    Args:
        address: HOST:PORT.
        tls: what this side speaks.
        details: gRPC's words on it. They tell everything but why the other end has closed the connection.
    """
    telling = details.partition("OPENSSL_internal:")[2].removesuffix(": OK") or short(details)
    if "WRONG_VERSION_NUMBER" in details:
        reason = _SPEAKS_NOT
    elif "Hostname Verification" in details:
        reason = _ANOTHER_NAME
    elif "certificate has expired" in details:
        reason = _THEIRS_EXPIRED
    elif "CERTIFICATE_VERIFY_FAILED" in details:
        reason = _THEIRS_UNKNOWN
    else:
        closed = details.startswith("failed to connect") and "closed" in details.lower()
        reason = _look(address, tls) if closed else ""
    if not reason:
        return Unreachable(f"no coordinator answers at {address} ({short(details)})")
    host, names = address.rpartition(":")[0], tls or TLS(cert="", key="", ca="")
    name = names.server_name or host
    return Untrusted(reason.format(address=address, name=name, ca=names.ca, cert=names.cert, details=telling))


def short(details: str | None) -> str:
    """The last and telling part of gRPC's nested connection errors."""
    return (details or "no details").rpartition(": ")[2].strip("] ") or "no details"


def _look(address: str, tls: TLS | None) -> str:
    """Shakes hands by itself; returns what is wrong, or nothing where that is not TLS."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        if tls:
            context.load_cert_chain(tls.cert, tls.key)
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_S) as line,
            context.wrap_socket(line, server_hostname=host) as shaken,
        ):
            if tls is None:
                return _SPEAKS
            # With TLS 1.3 the other end judges a certificate after the handshake, and HTTP/2 begins with its settings.
            return "" if shaken.recv(1) else _OURS_REFUSED
    except OSError:  # it does not speak TLS, or is gone by now, or says nothing
        return ""
