"""Client of the control plane's REST interface: `ControlPlane` (async), `SyncControlPlane`.

Every call has a timeout. What the server refuses comes back as the error it meant
(`kvstrata.errors`); a server that can't be reached, or is too slow, is `LinkBroken`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from pydantic import BaseModel

from kvstrata import api
from kvstrata.control_calls import Call, Calls
from kvstrata.control_requests import Requests, tries

if TYPE_CHECKING:
    import httpx

__all__ = ["DEFAULT_TIMEOUT", "ControlPlane", "SyncControlPlane"]

DEFAULT_TIMEOUT = 10.0

R = TypeVar("R", bound=BaseModel)


class ControlPlane(Requests):
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

        for last in tries(self._urls):
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

    async def transfers(
        self,
        after: str | None = None,
        limit: int = 100,
        states: Collection[api.TransferState] = (),
        target: str | None = None,
        tenant: str | None = None,
    ) -> api.TransferList:
        """Of those in one of `states`, to a node, of a tenant; each left out: of all."""
        return await self._run(Calls.transfers(after, limit, states, target, tenant))

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


class SyncControlPlane(Requests):
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

        for last in tries(self._urls):
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

    def transfers(
        self,
        after: str | None = None,
        limit: int = 100,
        states: Collection[api.TransferState] = (),
        target: str | None = None,
        tenant: str | None = None,
    ) -> api.TransferList:
        return self._run(Calls.transfers(after, limit, states, target, tenant))

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
