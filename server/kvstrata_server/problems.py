"""Every error as an RFC 9457 problem document, and how the document of the API says so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from kvstrata.api import HTTP_STATUS, Problem, WrongPart
from kvstrata.api.prompts import is_tag
from kvstrata.errors import Malformed, PeerRefused

__all__ = ["MEDIA_TYPE", "Conflict", "Forbidden", "install", "problem", "responses"]

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_MAX_ERRORS = 20

_TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Refused",
    404: "Not here",
    405: "Method not allowed",
    409: "Conflict",
    410: "Expired",
    413: "Request too large",
    422: "Malformed request",
    429: "Asked too often",
    500: "Internal error",
    502: "Broken behind this server",
    503: "Busy",
    507: "No space",
}
# Not `missing`: that would tell a node to register again at a server that is none of ours.
_CODES = {
    401: "unauthenticated",
    404: "no_route",
    405: "method_not_allowed",
    413: "too_large",
    429: "busy",
}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}


class Conflict(PeerRefused):
    """The request contradicts an earlier one. Clients see `PeerRefused`."""

    code = "conflict"


class Forbidden(PeerRefused):
    """The token is good, and doesn't allow this. Clients see `PeerRefused`."""

    code = "forbidden"


_STATUS = HTTP_STATUS | {Conflict.code: 409, Forbidden.code: 403}


def problem(
    status: int,
    detail: str,
    code: str = "",
    errors: list[WrongPart] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """One error as a response."""
    document = Problem(
        title=_TITLES.get(status, "Error"),
        status=status,
        detail=detail,
        code=code or _CODES.get(status, "error"),
        retryable=status == 429 or (status >= 500 and status not in (500, 507)),
        errors=errors or [],
    )
    return Response(
        document.model_dump_json(),
        status,
        headers={**_HEADERS.get(status, {}), **(headers or {})},
        media_type=MEDIA_TYPE,
    )


def install(app: FastAPI) -> None:
    """Answer every error of this app with a problem document."""

    async def ours(request: Request, error: Any) -> Response:
        return problem(_STATUS.get(error.code, 500), str(error), error.code)

    async def http(request: Request, error: Any) -> Response:
        detail = str(error.detail)
        if error.status_code == 400:  # FastAPI's, of a body that it could not decode
            return _not_json(_fault(error.__cause__))
        if error.status_code == 404:
            detail = f"there is nothing at {request.url.path}: see /openapi.json"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            allowed = headers["Allow"] = ", ".join(_allowed(app, request))
            detail = f"{request.method} is not possible at {request.url.path}, but {allowed}"
        return problem(error.status_code, detail, headers=headers)

    async def invalid(request: Request, error: Any) -> Response:
        found = error.errors()
        if found[0]["type"] == "json_invalid":
            position = found[0]["loc"][-1]
            return _not_json(f"{found[0]['ctx']['error']}, at character {position}")
        if isinstance(error.body, bytes):  # as it came
            return _not_json("its Content-Type is not application/json")
        wrong = [
            WrongPart(loc=_location(each, error.body), msg=each["msg"], type=each["type"])
            for each in found[:_MAX_ERRORS]
        ]
        return problem(422, "the request does not follow its schema", Malformed.code, wrong)

    async def unexpected(request: Request, error: Exception) -> Response:
        # The server's log has the trace; a stranger is told nothing about our insides.
        return problem(500, "this is a defect of the server; its log says more")

    from kvstrata.errors import KVStrataError

    app.add_exception_handler(KVStrataError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unexpected)


def _not_json(fault: str) -> Response:
    return problem(422, f"the body is not JSON: {fault}", Malformed.code)


def _fault(cause: BaseException | None) -> str:
    """Of a body, what its decoder stumbled over."""
    if isinstance(cause, UnicodeDecodeError):
        return f"it is not UTF-8, from byte {cause.start} on"
    if isinstance(cause, RecursionError):
        return "it is nested too deeply"
    if isinstance(cause, ValueError):
        return "a number in it has too many digits"
    return "it can't be read"


def _location(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """Of one of pydantic's errors, without what is no part of the request: which message of several
    it took the body for, and which type of several a value."""
    place, *path = error["loc"]
    if place != "body":
        return [place, *path]
    shown, value = [place], body
    for part in path:
        if isinstance(value, dict) and not is_tag(part):
            if part in value or error["type"] == "missing":
                shown.append(part)
                value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            shown.append(part)
            value = value[part]
    return shown


def _allowed(app: FastAPI, request: Request) -> list[str]:
    """What may be done at this path: a route by itself knows only its own method."""
    return [
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in app.router.routes
        )
    ]


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route may answer besides success, for its entry in the API's document."""
    return {
        status: {
            "description": _TITLES[status],
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted({400, 401, 403, 413, 422, 429, *statuses, 500})
    }
