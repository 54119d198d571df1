"""The demo's cluster: a control plane and two nodes on loopback, in a folder of its own."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.api import NodeState
from kvstrata.client import Client
from kvstrata.control import SyncControlPlane
from kvstrata.errors import LinkBroken
from kvstrata.wire import StatusReply
from kvstrata_adapters.demo.children import Child, until

__all__ = ["Cluster", "DemoNode", "open_cluster"]

_START = 30.0


@dataclass(frozen=True, slots=True)
class DemoNode:
    """One node; `tool` is a session with it that only asks for its status."""

    id: str
    socket: Path
    child: Child
    tool: Client

    @property
    def region(self) -> Path:
        """The file of its shared memory."""
        return Path(self.tool.welcome.shm_dir) / self.tool.welcome.region

    def status(self) -> StatusReply:
        return self.tool.status()

    def settle(self) -> None:
        """Until everything offered to its tiers has been written."""

        def written() -> bool | None:
            tiers = self.status().tiers
            return True if not any(t.counters.get("cascade_waiting") for t in tiers) else None

        until(f"{self.id} to write its chunks", written, _START, self.child)


@dataclass(slots=True)
class Cluster:
    """`exits` holds the exit status of each process once the cluster is closed."""

    control: SyncControlPlane
    a: DemoNode
    b: DemoNode
    children: list[Child]
    exits: dict[str, int] = field(default_factory=dict)


@contextmanager
def open_cluster(folder: Path, capacity: dict[str, int]) -> Iterator[Cluster]:
    """Start it, and end every process with the block. `capacity`: bytes of host tier by node.

    Each node has a file system store of its own: what B gets, it gets from A.
    """
    token, secret = secrets.token_hex(16), secrets.token_hex(16)
    with ExitStack() as stack:
        server = stack.enter_context(
            Child(
                "control plane",
                [
                    "server",
                    "--listen=127.0.0.1:0",
                    f"--database=sqlite+aiosqlite:///{folder}/index.sqlite",
                    "--exit-with-stdin",
                ],
                folder / "server.log",
                {"KVSTRATA_SERVER_TOKEN": token},
            )
        )
        url = until("the control plane", lambda: _address(server), _START, server)
        control = stack.enter_context(SyncControlPlane(url, token))
        started = {
            id_: stack.enter_context(_start_node(folder, id_, size, url, token, secret))
            for id_, size in capacity.items()
        }
        nodes = {
            id_: DemoNode(
                id_,
                folder / f"{id_}.sock",
                child,
                stack.enter_context(_tool(folder / f"{id_}.sock", child)),
            )
            for id_, child in started.items()
        }

        def registered() -> bool | None:
            up = {n.id for n in control.nodes().nodes if n.state is NodeState.UP}
            return True if up >= set(started) else None

        until("both nodes to register", registered, _START, server, *started.values())
        cluster = Cluster(control, nodes["node-a"], nodes["node-b"], [*started.values(), server])
        yield cluster
        cluster.exits = {child.name: child.stop() for child in cluster.children}


def _start_node(folder: Path, id_: str, size: int, url: str, token: str, secret: str) -> Child:
    store = {"type": "fs", "root": str(folder / f"{id_}-chunks"), "capacity": "1GiB"}
    return Child(
        id_,
        [
            "node",
            f"--id={id_}",
            f"--socket={folder / id_}.sock",
            f"--host.capacity={size}",
            f"--tiers={json.dumps([store])}",
            "--peers.listen=tcp://127.0.0.1:0",
            f"--control.url={url}",
            "--exit-with-stdin",
        ],
        folder / f"{id_}.log",
        # Secrets go by the environment: command lines can be read by everyone on the host.
        {"KVSTRATA_NODE_CONTROL__TOKEN": token, "KVSTRATA_NODE_PEERS__SECRET": secret},
    )


def _tool(socket: Path, child: Child) -> Client:
    def connect() -> Client | None:
        try:
            return Client.connect(socket, engine="kvstrata-demo", role="tool")
        except LinkBroken:  # not yet
            return None

    return until(f"{child.name} to listen", connect, _START, child)


def _address(server: Child) -> str | None:
    found = re.search(r"listening on (http://\S+)", server.said())
    return found[1] if found else None
