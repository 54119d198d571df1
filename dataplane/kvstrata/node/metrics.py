"""A node's Prometheus metrics, and its health, over HTTP.

Both are read from the node's own counts when asked for, and kept nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstrata.errors import ConfigError
from kvstrata.wire import StatusReply

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["NodeCollector", "serve"]


class NodeCollector(Collector):
    """`status()` is the node's status, as the CLI gets it."""

    def __init__(self, status: Callable[[], StatusReply]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        used = GaugeMetricFamily("kvstrata_tier_used_bytes", "Bytes held.", labels=["tier"])
        capacity = GaugeMetricFamily(
            "kvstrata_tier_capacity_bytes", "Most bytes it may hold.", labels=["tier"]
        )
        chunks = GaugeMetricFamily("kvstrata_tier_chunks", "Chunks held.", labels=["tier"])
        healthy = GaugeMetricFamily(
            "kvstrata_tier_healthy", "0 while the tier answers miss for trouble.", labels=["tier"]
        )
        events = CounterMetricFamily(
            "kvstrata_tier_events", "What happened in a tier.", labels=["tier", "event"]
        )
        for tier in status.tiers:
            used.add_metric([tier.name], tier.used_bytes)
            if tier.capacity_bytes is not None:
                capacity.add_metric([tier.name], tier.capacity_bytes)
            chunks.add_metric([tier.name], tier.chunks)
            healthy.add_metric([tier.name], tier.healthy)
            for name, count in tier.counters.items():
                events.add_metric([tier.name, name], count)
        yield from (used, capacity, chunks, healthy, events)
        counts = CounterMetricFamily("kvstrata_node_events", "Counts.", labels=["event"])
        for name, count in status.counters.items():
            counts.add_metric([name], count)
        yield counts
        sessions = GaugeMetricFamily("kvstrata_sessions", "Engine processes connected.")
        sessions.add_metric([], len(status.sessions))
        yield sessions


def serve(
    address: str, collectors: Sequence[Collector], health: Callable[[], tuple[bool, str]]
) -> tuple[WSGIServer, Thread]:
    """Serve `/metrics` and `/healthz` at `host:port` from a thread. Raises `ConfigError`.

    `/healthz` is 200 as long as the node answers, with `{"status": "ok" | "degraded", "detail"}`:
    a node with a tier in trouble serves the others, and a restart would only empty its memory.
    """
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host or "127.0.0.1", registry)
    except (OSError, ValueError) as e:
        raise ConfigError(f"metrics {address!r}: {e}; write host:port of a free port") from e
    metrics = server.get_app()
    if metrics is not None:
        server.set_app(_with_health(metrics, health))
    return server, thread


def _with_health(
    others: WSGIApplication, health: Callable[[], tuple[bool, str]]
) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/healthz":
            return others(environ, start_response)
        well, detail = health()
        start_response("200 OK", [("Content-Type", "application/json")])
        told = {"status": "ok" if well else "degraded", "detail": detail}
        return [json.dumps(told).encode()]

    return app
