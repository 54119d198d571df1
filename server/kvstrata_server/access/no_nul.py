"""No NUL in what text of a request may end up in: PostgreSQL takes none, in any text.

Messages say so in their schemas (`kvstrata.api.base.Text`); this is for what has no schema or is
decoded before it: paths, parameters, headers, the documents of namespaces.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from kvstrata.errors import Malformed
from kvstrata.keys import Namespace
from kvstrata_server.problems import problem

__all__ = ["NoNul", "namespace_of"]


class NoNul:
    """Middleware: there is nothing at a path with a NUL, and parameters and headers have none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            if "\0" in scope["path"]:
                app = problem(404, "there is nothing at a path with a NUL (%00) in it")
            elif b"%00" in scope["query_string"] or any(b"\0" in v for _, v in scope["headers"]):
                app = problem(422, "no parameter or header may hold a NUL", Malformed.code)
        await app(scope, receive, send)


def namespace_of(document: str) -> Namespace:
    """From a node's report. Raises `Malformed`; also for a NUL in any of its texts, since what
    shows namespaces in PostgreSQL would fail for all of them then."""
    namespace = Namespace.parse(document.encode())
    if "\\u0000" in namespace.document.decode().replace("\\\\", ""):
        raise Malformed("namespace document: no text in it may hold a NUL")
    return namespace
