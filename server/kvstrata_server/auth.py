"""Who may ask: one bearer token for now; roles come with tokens of their own.

Authentication happens before a request's body is read or its route looked for.
"""

from __future__ import annotations

from secrets import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstrata.addresses import is_loopback, split_address
from kvstrata.config import ServerSettings
from kvstrata.errors import ConfigError
from kvstrata_server.problems import problem

__all__ = ["OPEN_PATHS", "BearerToken", "check_exposure"]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""What a load balancer asks: no token, and nothing in the answers that needs one."""


def check_exposure(settings: ServerSettings) -> None:
    """Raises `ConfigError` if anybody on the network could use the server without a token."""
    host, _ = split_address(settings.listen)
    if not settings.token and not is_loopback(host):
        raise ConfigError(
            f"server.listen is {settings.listen!r} and server.token is empty, so anyone who "
            "reaches this host could use it: set KVSTRATA_SERVER_TOKEN, or listen on 127.0.0.1"
        )


class BearerToken:
    """Middleware: 401 without the right token, except on `OPEN_PATHS`. No token set: no check."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._token or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and compare_digest(given.strip().encode(), self._token):
            await self._app(scope, receive, send)
            return
        detail = "the bearer token is wrong" if given else "this needs a bearer token"
        await problem(401, detail)(scope, receive, send)
