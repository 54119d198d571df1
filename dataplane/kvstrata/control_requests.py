"""How a call to the control plane becomes a request, and its answer a message or an error: what the
async and the other client share.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from kvstrata import api
from kvstrata.control_calls import Call
from kvstrata.control_trouble import hint
from kvstrata.errors import Busy, ConfigError, KVStrataError, LinkBroken, PeerRefused, from_code

if TYPE_CHECKING:
    import httpx

__all__ = ["Requests", "tries"]

_CONNECT_TIMEOUT = 3.0
# Errors may carry a list of what is wrong; nobody reads more of a stranger's text than this.
_MAX_TEXT = 500
_TOKEN = re.compile(r"([!-~]([ -~]*[!-~])?)?")
_SET_IT = "set it: KVSTRATA_TOKEN or --token; for a node KVSTRATA_NODE_CONTROL__TOKEN"

R = TypeVar("R", bound=BaseModel)


def _is_address(url: str) -> bool:
    import httpx

    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parts.scheme in ("http", "https") and bool(parts.host) and (parts.port or 0) < 1 << 16


def _trusting(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(
            f"certificates {ca} can't be used: {e}. Name a readable PEM file that holds the "
            "certificate, or its issuer's, of the control plane"
        ) from e


class Requests:
    """`url` may name several servers, with commas. Raises `ConfigError` on what can't be an
    address, a token, or certificates (`ca`)."""

    def __init__(self, url: str, token: str, timeout: float, ca: Path | None) -> None:
        self._urls = [part.strip().rstrip("/") for part in url.split(",")]
        for each in self._urls:
            if not _is_address(each):
                raise ConfigError(
                    f"control plane address {each!r} must be http:// or https://, a host and a "
                    "port, as in http://127.0.0.1:7800; several servers have commas between them"
                )
        if not _TOKEN.fullmatch(token):
            raise ConfigError(
                "the bearer token has characters that no header can carry: use printable ASCII, "
                "and no space at either end"
            )
        self._at = 0
        self._token = token
        self._timeout = timeout
        self._verify = True if ca is None else _trusting(ca)

    @property
    def url(self) -> str:
        """Of the server that is asked now."""
        return self._urls[self._at]

    @property
    def _base_headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _request(
        self, http: httpx.AsyncClient | httpx.Client, url: str, call: Call[R]
    ) -> httpx.Request:
        import httpx

        headers = dict(call.headers)
        content = None
        if call.body is not None:
            content = call.body.model_dump_json(exclude_defaults=True)
            headers["Content-Type"] = "application/json"
        timeout = httpx.Timeout(
            self._timeout + call.wait, connect=min(_CONNECT_TIMEOUT, self._timeout)
        )
        return http.build_request(
            call.method,
            url + call.path,
            content=content,
            params=call.query or None,
            headers=headers,
            timeout=timeout,
        )

    @staticmethod
    def _parse(call: Call[R], response: httpx.Response) -> R:
        if response.is_success:
            try:
                return call.answer.model_validate_json(response.content)
            except ValidationError as e:
                raise PeerRefused(
                    f"{response.request.url} does not answer like a kvstrata control plane: "
                    f"{str(e)[:_MAX_TEXT]}"
                ) from e
        raise _error_of(response)

    def _broken(self, url: str, error: Exception) -> LinkBroken:
        """The server there has failed: the next one is asked from now on."""
        if self.url == url:  # or somebody found that out before
            self._at = (self._at + 1) % len(self._urls)
        reason = str(error) or type(error).__name__
        return LinkBroken(f"control plane at {url}: {reason} ({hint(url, error)})")


def tries(urls: Sequence[str]) -> Iterator[bool]:
    """One for each, and whether it is the last. A request that no server got goes to the next at
    once; one that may have been carried out is the caller's to repeat."""
    for left in reversed(range(len(urls))):
        yield not left


def _error_of(response: httpx.Response) -> KVStrataError:
    try:
        problem = api.Problem.model_validate_json(response.content)
    except ValidationError:
        text = response.text[:_MAX_TEXT]
        message = f"{response.request.url} answered {response.status_code}: {text}"
        # Not ours: a proxy in between. Its 5xx (and 429) are the usual signs of "not now".
        busy = response.status_code >= 500 or response.status_code == 429
        return Busy(message) if busy else PeerRefused(message)
    message = problem.detail or problem.title
    if problem.errors:
        first = problem.errors[0]
        where = ".".join(str(part) for part in first.loc)
        message = f"{message}: {where}: {first.msg}"
    if problem.status == 401:
        message = f"{message} ({_SET_IT})"
    return from_code(problem.code, message)
