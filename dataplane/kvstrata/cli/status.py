"""`kvstrata status`: one node, asked at its socket, or the cluster, asked at the control plane."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec

from kvstrata import api
from kvstrata.cli.cluster import add_server, connect, show, size, table
from kvstrata.cli.flags import Parser
from kvstrata.client import Client
from kvstrata.config import run_dir
from kvstrata.errors import ConfigError
from kvstrata.wire import StatusReply

__all__ = ["main"]

# Nodes of one version that are named.
_NAMED = 10


def main(argv: list[str]) -> int:
    parser = Parser(
        "kvstrata status",
        "Show the cluster (--url) or one node (--socket); without either, this host's node.",
    )
    parser.add_argument(
        "--socket",
        type=Path,
        default=os.environ.get("KVSTRATA_NODE_SOCKET") or None,
        help="a node's socket [env: KVSTRATA_NODE_SOCKET]",
    )
    add_server(parser, default_url=None)
    options = parser.parse_args(argv)
    if options.socket is None and options.url is not None:
        return _cluster(options)
    return _node(Path(options.socket) if options.socket else _only_socket(), options.json)


def _only_socket() -> Path:
    found = sorted(run_dir().glob("*.sock"))
    if len(found) == 1:
        return found[0]
    which = ", ".join(str(path) for path in found) or f"none in {run_dir()}"
    raise ConfigError(f"name a node with --socket or the control plane with --url; nodes: {which}")


def _node(socket: Path, as_json: bool) -> int:
    with Client.connect(socket, engine="kvstrata-status", role="tool", timeout=5.0) as client:
        status = client.status()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(_named(status))).decode())
        return 0
    up = timedelta(seconds=int(status.uptime))
    tiers = table(
        f"node {status.node}, up {up}", "tier", ">used", ">capacity", ">chunks", "state", "counts"
    )
    reasons = []
    for tier in status.tiers:
        capacity = "" if tier.capacity_bytes is None else size(tier.capacity_bytes)
        state = "ok" if tier.healthy else "degraded"
        if tier.detail:
            reasons.append(f"{tier.name}: {state}: {tier.detail}")
        counts = _counts(tier.counters)
        tiers.add_row(tier.name, size(tier.used_bytes), capacity, str(tier.chunks), state, counts)
    tiers.caption = "\n".join(reasons)
    rest = table("", "what", "now")
    rest.add_row("counts", _counts(status.counters))
    rest.add_row("sessions", ", ".join(status.sessions) or "none")
    rest.add_row("namespaces", ", ".join(status.namespaces) or "none")
    for task, state in status.tasks.items():
        rest.add_row(f"task {task}", state)
    show(tiers, rest)
    return 0


def _named(status: StatusReply) -> dict[str, object]:
    """With names: on the wire the messages are arrays."""
    fields: dict[str, object] = {
        name: getattr(status, name) for name in status.__struct_fields__ if name != "seq"
    }
    fields["tiers"] = [
        {name: getattr(tier, name) for name in tier.__struct_fields__} for tier in status.tiers
    ]
    return fields


def _counts(counters: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counters.items() if count) or "-"


def _state(node: api.NodeInfo) -> str:
    return ", ".join(filter(None, (node.state, node.drain, "" if node.healthy else "unhealthy")))


def _of_other_versions(nodes: Sequence[api.NodeInfo], ours: str) -> list[str]:
    """Which nodes are of another version than the server, a line for each."""
    others = sorted(
        {n.version for n in nodes if n.version and n.state is api.NodeState.UP} - {ours}
    )
    lines = []
    for version in others:
        names = [n.id for n in nodes if n.version == version and n.state is api.NodeState.UP]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(f"of version {version}: {', '.join(names[:_NAMED])}{more}")
    return lines


def _cluster(options: argparse.Namespace) -> int:
    nodes: list[api.NodeInfo] = []
    with connect(options) as control:
        health = control.health()
        page = control.nodes()
        nodes += page.nodes
        while page.next is not None:
            page = control.nodes(after=page.next)
            nodes += page.nodes
    if options.json:
        listed = api.NodeList(nodes=nodes)
        print(listed.model_dump_json(indent=2))
        return 0
    rows = table(
        f"control plane {options.url}: {health.status}, version {health.version}",
        "node",
        "state",
        ">used",
        ">capacity",
        ">chunks",
        "stores",
        "peer port",
        ">heard",
    )
    for node in nodes:
        rows.add_row(
            node.id,
            _state(node),
            size(node.host.used_bytes),
            size(node.host.capacity_bytes),
            str(node.host.chunks),
            ", ".join(f"{s.tier}" for s in node.stores) or "-",
            node.peer_address or "-",
            f"{node.heartbeat_age:.1f} s ago",
        )
    # Below, since a column has room for a few words.
    below = [f"{n.id}: {n.detail}" for n in nodes if not n.healthy and n.detail]
    rows.caption = "\n".join(below + _of_other_versions(nodes, health.version))
    show(rows)
    return 0
