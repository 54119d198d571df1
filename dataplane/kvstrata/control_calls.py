"""What can be asked of the control plane, apart from how: both of its clients send these."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from kvstrata import api

__all__ = ["Call", "Calls"]

R = TypeVar("R", bound=BaseModel)
Query = dict[str, str | float | list[str]]


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One request, and the type of its answer. `wait`: seconds the server may hold it open."""

    method: str
    path: str
    answer: type[R]
    body: BaseModel | None = None
    query: Query = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    wait: float = 0.0


def _once(idempotency_key: str | None) -> dict[str, str]:
    return {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}


def _node(node: str, rest: str = "") -> str:
    return f"/v1/nodes/{quote(node, safe='')}{rest}"


def _quota(tenant: str) -> str:
    return f"/v1/quotas/{quote(tenant, safe='')}"


def _page(after: str | None, limit: int) -> Query:
    return _given(after=after, limit=limit)


def _given(**query: str | float | list[str] | None) -> Query:
    return {name: value for name, value in query.items() if value is not None}


class Calls:
    """Each method makes one request of the REST document."""

    @staticmethod
    def register(node: api.NodeRegistration) -> Call[api.RegistrationReply]:
        return Call("POST", "/v1/nodes", api.RegistrationReply, node)

    @staticmethod
    def node(node: str) -> Call[api.NodeInfo]:
        return Call("GET", _node(node), api.NodeInfo)

    @staticmethod
    def nodes(after: str | None, limit: int) -> Call[api.NodeList]:
        return Call("GET", "/v1/nodes", api.NodeList, query=_page(after, limit))

    @staticmethod
    def deregister(node: str, incarnation: str | None) -> Call[api.NodeInfo]:
        return Call("DELETE", _node(node), api.NodeInfo, query=_given(incarnation=incarnation))

    @staticmethod
    def heartbeat(node: str, beat: api.HeartbeatRequest) -> Call[api.HeartbeatReply]:
        return Call("PUT", _node(node, "/heartbeat"), api.HeartbeatReply, beat)

    @staticmethod
    def report(node: str, report: api.Report) -> Call[api.ReportReply]:
        return Call("POST", _node(node, "/reports"), api.ReportReply, report)

    @staticmethod
    def commands(node: str, incarnation: str, wait: float) -> Call[api.CommandBatch]:
        query = _given(incarnation=incarnation, wait=wait)
        return Call("GET", _node(node, "/commands"), api.CommandBatch, query=query, wait=wait)

    @staticmethod
    def progress(node: str, progress: api.Progress) -> Call[api.ProgressReply]:
        return Call("POST", _node(node, "/progress"), api.ProgressReply, progress)

    @staticmethod
    def eviction_result(
        node: str, eviction: str, result: api.EvictionResult
    ) -> Call[api.EvictionInfo]:
        path = _node(node, f"/evictions/{quote(eviction, safe='')}")
        return Call("POST", path, api.EvictionInfo, result)

    @staticmethod
    def store_result(node: str, order: str, result: api.StoreResult) -> Call[api.OrderReply]:
        path = _node(node, f"/orders/{quote(order, safe='')}")
        return Call("POST", path, api.OrderReply, result)

    @staticmethod
    def drain(node: str, request: api.DrainRequest) -> Call[api.DrainInfo]:
        return Call("POST", _node(node, "/drain"), api.DrainInfo, request)

    @staticmethod
    def drain_of(node: str) -> Call[api.DrainInfo]:
        return Call("GET", _node(node, "/drain"), api.DrainInfo)

    @staticmethod
    def cancel_drain(node: str) -> Call[api.DrainInfo]:
        return Call("DELETE", _node(node, "/drain"), api.DrainInfo)

    @staticmethod
    def create_eviction(
        request: api.EvictionRequest, idempotency_key: str | None
    ) -> Call[api.EvictionInfo]:
        return Call(
            "POST", "/v1/evictions", api.EvictionInfo, request, headers=_once(idempotency_key)
        )

    @staticmethod
    def eviction(eviction: str) -> Call[api.EvictionInfo]:
        return Call("GET", f"/v1/evictions/{quote(eviction, safe='')}", api.EvictionInfo)

    @staticmethod
    def namespaces(after: str | None, limit: int) -> Call[api.NamespaceList]:
        return Call("GET", "/v1/namespaces", api.NamespaceList, query=_page(after, limit))

    @staticmethod
    def lookup(request: api.LookupRequest | api.TokenLookup) -> Call[api.LookupReply]:
        return Call("POST", "/v1/placements:lookup", api.LookupReply, request)

    @staticmethod
    def create_transfer(
        request: api.TransferRequest | api.TokenTransfer, idempotency_key: str | None
    ) -> Call[api.TransferInfo]:
        return Call(
            "POST", "/v1/transfers", api.TransferInfo, request, headers=_once(idempotency_key)
        )

    @staticmethod
    def transfer(transfer: str) -> Call[api.TransferInfo]:
        return Call("GET", f"/v1/transfers/{quote(transfer, safe='')}", api.TransferInfo)

    @staticmethod
    def transfers(
        after: str | None,
        limit: int,
        states: Collection[api.TransferState],
        target: str | None,
        tenant: str | None,
    ) -> Call[api.TransferList]:
        state = [each.value for each in states] or None
        query = _given(after=after, limit=limit, state=state, target=target, tenant=tenant)
        return Call("GET", "/v1/transfers", api.TransferList, query=query)

    @staticmethod
    def quotas(after: str | None, limit: int) -> Call[api.QuotaList]:
        return Call("GET", "/v1/quotas", api.QuotaList, query=_page(after, limit))

    @staticmethod
    def quota(tenant: str) -> Call[api.QuotaInfo]:
        return Call("GET", _quota(tenant), api.QuotaInfo)

    @staticmethod
    def put_quota(tenant: str, request: api.QuotaRequest) -> Call[api.QuotaInfo]:
        return Call("PUT", _quota(tenant), api.QuotaInfo, request)

    @staticmethod
    def delete_quota(tenant: str) -> Call[api.QuotaInfo]:
        return Call("DELETE", _quota(tenant), api.QuotaInfo)

    @staticmethod
    def cancel_transfer(transfer: str) -> Call[api.TransferInfo]:
        return Call("DELETE", f"/v1/transfers/{quote(transfer, safe='')}", api.TransferInfo)

    @staticmethod
    def health() -> Call[api.Health]:
        return Call("GET", "/healthz", api.Health)
