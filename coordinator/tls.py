"""The coordinator's half of mutual TLS."""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from diloco.lane import ALPN
from diloco.tls import TLS, load

if TYPE_CHECKING:
    import grpc

log = logging.getLogger("diloco.coordinator")


class Secured(NamedTuple):
    """The server's side of mutual TLS: of gRPC, and of lanes."""

    grpc: grpc.ServerCredentials
    lanes: ssl.SSLContext


def server(tls: TLS | None) -> Secured | None:
    """Credentials with which a client must show a certificate that an authority of `tls.ca` has signed.

    Without `tls` there are none: everybody who reaches the port is let in, which is logged.

    Raises:
        InputError: the files are not what they should be.
    """
    import grpc

    if tls is None:
        log.warning("nothing is encrypted and nobody is authenticated: only your islands may reach this address")
        return None
    found = load(tls, lambda path: Path(path).read_bytes(), datetime.now(UTC))
    log.info("mutual TLS; the certificate %s is valid until %s", tls.cert, f"{found.until:%Y-%m-%d %H:%M} UTC")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(tls.cert, tls.key)
    context.load_verify_locations(tls.ca)
    context.set_alpn_protocols([ALPN])
    context.num_tickets = 0  # nobody takes a session up again; left unread they would have a closed lane reset
    pair = [(found.key, found.certificate)]
    return Secured(grpc.ssl_server_credentials(pair, found.authorities, require_client_auth=True), context)
