"""Who may call: a bearer token, and no listening beyond this machine without one."""

from __future__ import annotations

import hmac
import ipaddress
import socket

from weightwire.errors import Unauthorized


class BearerToken:
    """Compares the `Authorization` header of a request with a token, in constant time.

    Args:
        token: What callers have to send; None admits everybody.

    Raises:
        ValueError: An empty token, which anybody could send.
    """

    def __init__(self, token: str | None) -> None:
        if token is not None and not token.strip():
            raise ValueError("the token is empty: give one, or None to do without")
        self._expected = None if token is None else f"Bearer {token}".encode()

    def check(self, header: str | None) -> None:
        """Admit a caller.

        Args:
            header: Value of its `Authorization` header, if it sent one.

        Raises:
            Unauthorized: It is not the token.
        """
        if self._expected is None:
            return
        if header is None:
            raise Unauthorized("this server needs a token: send the header Authorization: Bearer <token>")
        if not hmac.compare_digest(header.encode("latin-1", "replace"), self._expected):
            raise Unauthorized("the token is not the one this server was started with")


def require_token_beyond_loopback(host: str, token: str | None) -> None:
    """Refuse to listen where other machines can call, unless callers need a token.

    Args:
        host: Address or name to listen on; every address it stands for counts.
        token: The token callers need, if they do.

    Raises:
        Unauthorized: `host` reaches beyond loopback and there is no token.
        OSError: `host` cannot be resolved.
    """
    if token is not None:
        return
    for *_, address in socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise Unauthorized(
                f"listening on {host or 'every address'} lets other machines replace the weights: pass a token, or "
                "listen on 127.0.0.1"
            )
