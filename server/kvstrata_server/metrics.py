"""What the control plane counts. One registry an app, so that two apps in a process are apart."""

from __future__ import annotations

from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstrata_server.access.answered import Answered

__all__ = ["Metrics", "Timing"]


class Metrics:
    """Counters are bumped where things happen; gauges are set when somebody reads them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Histogram(
            "kvstrata_http_request_seconds",
            "Time to answer, by route; long polls include their wait",
            ["method", "route", "status"],
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0),
        )
        self.reports = Counter(
            "kvstrata_reports_total",
            "Placement reports: applied, repeated, or refused for a gap",
            ["result"],
            registry=self.registry,
        )
        self.lookup_keys = Counter(
            "kvstrata_lookup_keys_total", "Keys asked for", registry=self.registry
        )
        self.lookup_hits = Counter(
            "kvstrata_lookup_prefix_keys_total",
            "Of the keys asked for, those in the best node's prefix",
            registry=self.registry,
        )
        self.transfers = Counter(
            "kvstrata_transfers_total",
            "Transfers by the state they ended in",
            ["state"],
            registry=self.registry,
        )
        self.moved_bytes = Counter(
            "kvstrata_transfer_bytes_total", "Bytes moved by transfers", registry=self.registry
        )
        self.nodes = Gauge("kvstrata_nodes", "Nodes by state", ["state"], registry=self.registry)
        self.chunks = Gauge("kvstrata_index_chunks", "Chunks held anywhere", registry=self.registry)
        self.placements = Gauge(
            "kvstrata_index_placements", "Chunks times locations", registry=self.registry
        )
        self.active_transfers = Gauge(
            "kvstrata_active_transfers", "Queued or running", registry=self.registry
        )
        self.unwritten_rows = Gauge(
            "kvstrata_unwritten_rows", "Rows SQL doesn't have yet", registry=self.registry
        )
        self.dropped_writes = Gauge(
            "kvstrata_dropped_writes", "Writes the database refused", registry=self.registry
        )

        self.tenant_bytes = Gauge(
            "kvstrata_tenant_bytes",
            "Held by the tenants that have a quota, and the largest of the others",
            ["tenant"],
            registry=self.registry,
        )
        self.tenant_quota = Gauge(
            "kvstrata_tenant_quota_bytes",
            "That a tenant's quota allows it to hold",
            ["tenant"],
            registry=self.registry,
        )
        self.shed_requests = Counter(
            "kvstrata_quota_evictions_total",
            "Evictions for tenants that held more than their quotas",
            registry=self.registry,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Timing:
    """Middleware: how long each route takes. A path that is no route counts as `none`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._requests = metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = perf_counter()
        answered = Answered(send)
        try:
            await self._app(scope, receive, answered)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._requests.labels(scope["method"], route, str(answered.status)).observe(
                perf_counter() - started
            )
