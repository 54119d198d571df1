"""Client of the control plane's REST interface: `ControlPlane` (async), `SyncControlPlane`.

Every call has a timeout. What the server refuses comes back as the error it meant
(`kvstrata.errors`); a server that can't be reached, or is too slow, is `LinkBroken`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from pydantic import BaseModel, ValidationError

from kvstrata import api
from kvstrata.control_calls import Call, Calls
from kvstrata.control_trouble import hint
from kvstrata.errors import Busy, ConfigError, KVStrataError, LinkBroken, PeerRefused, from_code

if TYPE_CHECKING:
    import httpx

__all__ = ["DEFAULT_TIMEOUT", "ControlPlane", "SyncControlPlane"]

DEFAULT_TIMEOUT = 10.0
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


class _Client:
    """What both clients share: how a call becomes a request, and an answer a message."""

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


def _tries(urls: Sequence[str]) -> Iterator[bool]:
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


class ControlPlane(_Client):
    """Async client. `transport` replaces the network (httpx.ASGITransport in tests), `ca` the
    certificates of the system. `url` may name several servers of one database, with commas: one is
    asked as long as it answers, and then the next.

    Use it as a context manager, or call `close`. Raises `ConfigError` on an address that can't
    be one.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        timeout: float = DEFAULT_TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
        ca: Path | None = None,
    ) -> None:
        super().__init__(url, token, timeout, ca)
        import httpx

        self._http = httpx.AsyncClient(
            headers=self._base_headers,
            transport=transport,
            verify=self._verify,
        )

    async def _run(self, call: Call[R]) -> R:
        import httpx

        for last in _tries(self._urls):
            url = self.url
            try:
                response = await self._http.send(self._request(self._http, url, call))
            except httpx.TransportError as e:
                broken = self._broken(url, e)
                if last or not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout):
                    raise broken from e
            else:
                break
        return self._parse(call, response)

    async def register(self, node: api.NodeRegistration) -> api.RegistrationReply:
        return await self._run(Calls.register(node))

    async def deregister(self, node: str, incarnation: str | None = None) -> api.NodeInfo:
        """Take it out of service; with `incarnation`, only if it is still that one."""
        return await self._run(Calls.deregister(node, incarnation))

    async def heartbeat(self, node: str, beat: api.HeartbeatRequest) -> api.HeartbeatReply:
        return await self._run(Calls.heartbeat(node, beat))

    async def report(self, node: str, report: api.Report) -> api.ReportReply:
        return await self._run(Calls.report(node, report))

    async def commands(self, node: str, incarnation: str, wait: float = 0.0) -> api.CommandBatch:
        """Long poll: returns when there is a command, or after `wait` seconds without."""
        return await self._run(Calls.commands(node, incarnation, wait))

    async def progress(self, node: str, progress: api.Progress) -> api.ProgressReply:
        return await self._run(Calls.progress(node, progress))

    async def eviction_result(
        self, node: str, eviction: str, result: api.EvictionResult
    ) -> api.EvictionInfo:
        return await self._run(Calls.eviction_result(node, eviction, result))

    async def store_result(self, node: str, order: str, result: api.StoreResult) -> api.OrderReply:
        return await self._run(Calls.store_result(node, order, result))

    async def drain(self, node: str, request: api.DrainRequest) -> api.DrainInfo:
        return await self._run(Calls.drain(node, request))

    async def drain_of(self, node: str) -> api.DrainInfo:
        return await self._run(Calls.drain_of(node))

    async def cancel_drain(self, node: str) -> api.DrainInfo:
        """The node takes new chunks again, also if it was drained already."""
        return await self._run(Calls.cancel_drain(node))

    async def create_eviction(
        self, request: api.EvictionRequest, idempotency_key: str | None = None
    ) -> api.EvictionInfo:
        return await self._run(Calls.create_eviction(request, idempotency_key))

    async def eviction(self, eviction: str) -> api.EvictionInfo:
        return await self._run(Calls.eviction(eviction))

    async def node(self, node: str) -> api.NodeInfo:
        return await self._run(Calls.node(node))

    async def nodes(self, after: str | None = None, limit: int = 100) -> api.NodeList:
        return await self._run(Calls.nodes(after, limit))

    async def namespaces(self, after: str | None = None, limit: int = 100) -> api.NamespaceList:
        return await self._run(Calls.namespaces(after, limit))

    async def lookup(self, request: api.LookupRequest | api.TokenLookup) -> api.LookupReply:
        return await self._run(Calls.lookup(request))

    async def create_transfer(
        self,
        request: api.TransferRequest | api.TokenTransfer,
        idempotency_key: str | None = None,
    ) -> api.TransferInfo:
        return await self._run(Calls.create_transfer(request, idempotency_key))

    async def get_transfer(self, transfer: str) -> api.TransferInfo:
        return await self._run(Calls.transfer(transfer))

    async def transfers(self, after: str | None = None, limit: int = 100) -> api.TransferList:
        return await self._run(Calls.transfers(after, limit))

    async def cancel_transfer(self, transfer: str) -> api.TransferInfo:
        """Harmless if it has ended."""
        return await self._run(Calls.cancel_transfer(transfer))

    async def quotas(self, after: str | None = None, limit: int = 100) -> api.QuotaList:
        return await self._run(Calls.quotas(after, limit))

    async def quota(self, tenant: str) -> api.QuotaInfo:
        """`tenant` here and below: see `api.tenant_name`."""
        return await self._run(Calls.quota(tenant))

    async def put_quota(self, tenant: str, request: api.QuotaRequest) -> api.QuotaInfo:
        """Set all of its bounds."""
        return await self._run(Calls.put_quota(tenant, request))

    async def delete_quota(self, tenant: str) -> api.QuotaInfo:
        return await self._run(Calls.delete_quota(tenant))

    async def health(self) -> api.Health:
        return await self._run(Calls.health())

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class SyncControlPlane(_Client):
    """The same for programs without an event loop: the command line, scripts."""

    def __init__(
        self,
        url: str,
        token: str = "",
        timeout: float = DEFAULT_TIMEOUT,
        transport: httpx.BaseTransport | None = None,
        ca: Path | None = None,
    ) -> None:
        super().__init__(url, token, timeout, ca)
        import httpx

        self._http = httpx.Client(
            headers=self._base_headers,
            transport=transport,
            verify=self._verify,
        )

    def _run(self, call: Call[R]) -> R:
        import httpx

        for last in _tries(self._urls):
            url = self.url
            try:
                response = self._http.send(self._request(self._http, url, call))
            except httpx.TransportError as e:
                broken = self._broken(url, e)
                if last or not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout):
                    raise broken from e
            else:
                break
        return self._parse(call, response)

    def drain(self, node: str, request: api.DrainRequest) -> api.DrainInfo:
        return self._run(Calls.drain(node, request))

    def drain_of(self, node: str) -> api.DrainInfo:
        return self._run(Calls.drain_of(node))

    def cancel_drain(self, node: str) -> api.DrainInfo:
        return self._run(Calls.cancel_drain(node))

    def create_eviction(
        self, request: api.EvictionRequest, idempotency_key: str | None = None
    ) -> api.EvictionInfo:
        return self._run(Calls.create_eviction(request, idempotency_key))

    def eviction(self, eviction: str) -> api.EvictionInfo:
        return self._run(Calls.eviction(eviction))

    def node(self, node: str) -> api.NodeInfo:
        return self._run(Calls.node(node))

    def nodes(self, after: str | None = None, limit: int = 100) -> api.NodeList:
        return self._run(Calls.nodes(after, limit))

    def deregister(self, node: str) -> api.NodeInfo:
        return self._run(Calls.deregister(node, None))

    def namespaces(self, after: str | None = None, limit: int = 100) -> api.NamespaceList:
        return self._run(Calls.namespaces(after, limit))

    def lookup(self, request: api.LookupRequest | api.TokenLookup) -> api.LookupReply:
        return self._run(Calls.lookup(request))

    def create_transfer(
        self,
        request: api.TransferRequest | api.TokenTransfer,
        idempotency_key: str | None = None,
    ) -> api.TransferInfo:
        return self._run(Calls.create_transfer(request, idempotency_key))

    def get_transfer(self, transfer: str) -> api.TransferInfo:
        return self._run(Calls.transfer(transfer))

    def transfers(self, after: str | None = None, limit: int = 100) -> api.TransferList:
        return self._run(Calls.transfers(after, limit))

    def cancel_transfer(self, transfer: str) -> api.TransferInfo:
        return self._run(Calls.cancel_transfer(transfer))

    def quotas(self, after: str | None = None, limit: int = 100) -> api.QuotaList:
        return self._run(Calls.quotas(after, limit))

    def quota(self, tenant: str) -> api.QuotaInfo:
        return self._run(Calls.quota(tenant))

    def put_quota(self, tenant: str, request: api.QuotaRequest) -> api.QuotaInfo:
        return self._run(Calls.put_quota(tenant, request))

    def delete_quota(self, tenant: str) -> api.QuotaInfo:
        return self._run(Calls.delete_quota(tenant))

    def health(self) -> api.Health:
        return self._run(Calls.health())

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
