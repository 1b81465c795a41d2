"""Why a gRPC server of ours ended a connection before its first word, where TLS is the reason: gRPC does not say.

Under TLS 1.3 a server looks at our certificate when our side of the handshake is over, so that a refusal looks like any
other end. A second connection, without gRPC, tells: a server that takes us speaks first (its HTTP/2 settings).
"""

from __future__ import annotations

import socket
import ssl

from pdserve.core.tls import Tls

ASK_TIMEOUT_S = 2.0


def refusal(address: str, tls: Tls | None, timeout_s: float = ASK_TIMEOUT_S) -> str | None:
    """Asks a gRPC server whether it takes connections of this process; blocks.

    Args:
        address: host:port.
        tls: What this process shows; None: it connects in the clear.
        timeout_s: Limit of each wait, seconds.

    Returns:
        Why it does not; None: it does, or cannot be reached, or it is this process that refuses, which gRPC tells.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as sock:
            return _wants_tls(sock) if tls is None else _turns_away(sock, tls)
    except (OSError, ValueError):
        return None


def _wants_tls(sock: socket.socket) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with context.wrap_socket(sock, do_handshake_on_connect=False) as end:
        end.do_handshake()
    return "it takes no connection without TLS, and this process has none (--tls-cert-file)"


def _turns_away(sock: socket.socket, tls: Tls) -> str | None:
    with tls.ask(sock) as end:
        end.do_handshake()
        try:
            word, why = end.recv(1), "it closed the connection"
        except (ssl.SSLError, ConnectionError) as e:
            word, why = b"", getattr(e, "reason", None) or str(e)
    if word:
        return None
    check = "see that it has not expired, and that its authority is in --tls-ca-file there"
    return f"it refuses the certificate of this process (--tls-cert-file): {why}; {check}"
