"""Who asks, may they, and how often: before a request's body is read or its route looked for.

`Gate` tells who it is by the bearer token; `authorize` compares what the route needs.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstrata_server.access.answered import Answered, subject_of
from kvstrata_server.access.audit import PutAudit
from kvstrata_server.access.roles import ANYONE, Identity, needs_of
from kvstrata_server.plane import ControlState, state_of
from kvstrata_server.problems import Forbidden, problem

__all__ = ["OPEN_PATHS", "Gate", "authorize", "identity_of", "standing_of"]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""What a load balancer asks: no token, and nothing in the answers that needs one."""

_IDENTITY = "kvstrata.identity"
_STANDING = "kvstrata.standing"


class Gate:
    """Middleware: 401 without a token in use, 429 for those who ask too often, except on
    `OPEN_PATHS`. Writes down acts that the audit log keeps."""

    def __init__(self, app: ASGIApp, state: ControlState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        client = _client_of(scope)
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else ""
        identity = self._state.tokens.identify(token)
        if identity is None:
            detail = "the bearer token is not one in use" if given else "this needs a bearer token"
            await problem(401, detail)(scope, receive, send)
            return
        name = client if identity is ANYONE else identity.name
        if wait := self._state.rate.wait(name):
            await _too_often(wait)(scope, receive, send)
            return
        scope[_IDENTITY] = identity
        scope[_STANDING] = lambda: self._state.tokens.identify(token) == identity
        await self._passed(identity, client, scope, receive, send)

    async def _passed(
        self, identity: Identity, client: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        answered = Answered(send)
        try:
            await self._app(scope, receive, answered)
        finally:
            operation = getattr(scope.get("route"), "name", "")
            audited = operation and needs_of(operation, scope["method"]).audited
            # Else nothing is done (see `authorize`): only refusals are not kept.
            if audited and self._state.writer.takes:
                self._state.writer.put(
                    PutAudit(
                        time=self._state.clock(),
                        actor=identity.name,
                        client=client,
                        operation=operation,
                        subject=subject_of(scope, answered),
                        status=answered.status,
                    )
                )


async def authorize(request: Request) -> None:
    """Dependency of every route. Raises `Forbidden`, naming what the token lacks, and `Busy` for
    an act that the audit log has no room for."""
    if request.url.path in OPEN_PATHS:
        return
    identity = identity_of(request)
    operation = getattr(request.scope.get("route"), "name", "")
    needs = needs_of(operation, request.method)
    if not identity.may(needs.role):
        raise Forbidden(
            f"token {identity.name!r} has the role {identity.role}, and {operation} needs "
            f"{needs.role}"
        )
    if identity.tenants is not None and not needs.by_tenant:
        raise Forbidden(
            f"token {identity.name!r} is limited to tenants, and {operation} shows all of them"
        )
    named = request.path_params.get("node_id")
    if identity.node is not None and named is not None and named != identity.node:
        raise Forbidden(f"token {identity.name!r} is for node {identity.node!r}, not {named!r}")
    if needs.audited:
        state_of(request).writer.require_room()


def identity_of(request: Request) -> Identity:
    """Who asks, as `Gate` found out."""
    identity = request.scope.get(_IDENTITY)
    if not isinstance(identity, Identity):
        raise TypeError("this app was not made by create_app")
    return identity


def standing_of(request: Request) -> Callable[[], bool]:
    """Whether they still may: to be asked now and then by what is answered for hours."""
    standing: Callable[[], bool] = request.scope[_STANDING]
    return standing


def _client_of(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _too_often(wait: float) -> Response:
    return problem(
        429,
        f"you ask more often than `rate_limit` allows: again in {wait:.2f} s",
        headers={"Retry-After": str(max(1, round(wait)))},
    )
