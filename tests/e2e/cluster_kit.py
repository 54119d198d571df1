"""A control plane and two nodes, all real processes on loopback, and chunks to move about."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvstrata.api import LookupRequest, NodeState, TransferRequest, TransferState
from kvstrata.client import Client
from kvstrata.control import SyncControlPlane
from kvstrata.keys import Key
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.waiting import eventually

PAGE = 16384
TOKEN = "of the tests"
NAMESPACE = a_namespace(PAGE)


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def payload(n: int) -> bytes:
    return bytes([n % 251]) * PAGE


class Cluster:
    """Processes by name; each may be killed and started again as it was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.commands: dict[str, list[str]] = {
            "server": ["server", "--listen", f"127.0.0.1:{self.port}"]
        }
        self.commands["server"] += ["--database", f"sqlite+aiosqlite:///{folder}/index.sqlite"]
        for node in ("a", "b"):
            self.commands[node] = [
                *("node", "--id", node, "--socket", str(folder / f"{node}.sock")),
                *("--host.shm-dir", str(folder), "--host.capacity", "4MiB"),
                *("--tiers", f'[{{"type": "fs", "root": "{folder}/fs-{node}"}}]'),
                *("--peers.listen", "tcp://127.0.0.1:0", "--peers.transports", '["tcp"]'),
                *("--control.url", f"http://127.0.0.1:{self.port}"),
                *("--control.heartbeat-interval", "0.5"),
            ]
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.control = SyncControlPlane(f"http://127.0.0.1:{self.port}", TOKEN)

    def start(self, name: str) -> None:
        tokens = {"KVSTRATA_SERVER_TOKEN": TOKEN, "KVSTRATA_NODE_CONTROL__TOKEN": TOKEN}
        tokens["KVSTRATA_SERVER_HEARTBEAT_TTL"] = "3s"
        self.children[name] = subprocess.Popen(
            [sys.executable, "-m", "kvstrata", *self.commands[name]], env=os.environ | tokens
        )

    def kill(self, name: str) -> None:
        child = self.children.pop(name)
        child.send_signal(signal.SIGKILL)
        child.wait()

    def connect(self, node: str) -> Client:
        path = self.folder / f"{node}.sock"
        client: Client = eventually(lambda: Client.connect(path, "e", namespace=NAMESPACE))
        return client

    def node_is(self, name: str, state: NodeState) -> bool:
        return self.control.node(name).state is state

    def reported(self, node: str, numbers: range) -> bool:
        """Whether the control plane knows that `node` can serve these."""
        keys = [key(n).hex() for n in numbers]
        answer = self.control.lookup(LookupRequest(keys=keys, nodes=[node]))
        return bool(answer.nodes) and answer.nodes[0].prefix == len(keys)

    def transfer(self, source: str, target: str, numbers: range) -> None:
        """Move by REST, and read at the target what arrived."""
        keys = [key(n).hex() for n in numbers]
        request = TransferRequest(source=source, target=target, keys=keys, deadline=30)
        transfer = self.control.create_transfer(request)
        ended = eventually(lambda: (t := self.control.get_transfer(transfer.id)).state.ended and t)
        assert ended.state is TransferState.DONE, ended
        assert {k.outcome for k in ended.keys} <= {"stored", "present"}
        with self.connect(target) as client:
            assert read(client, numbers) == [payload(n) for n in numbers]


def write(client: Client, numbers: range) -> None:
    keys = [key(n) for n in numbers]
    for n, offset in zip(numbers, client.reserve(keys), strict=True):
        client.region.view[offset : offset + PAGE] = payload(n)
    assert client.commit(keys) == [True] * len(keys)


def read(client: Client, numbers: range) -> list[bytes]:
    found = client.lookup([key(n) for n in numbers])
    view = client.region.view
    content = [bytes(view[offset : offset + PAGE]) for offset in found.offsets[: found.prefix]]
    client.release(found.lease)
    return content


def stored(client: Client, chunks: int) -> bool:
    (fs,) = (t for t in client.status().tiers if t.name == "fs")
    return bool(fs.chunks >= chunks)


@contextmanager
def started(
    path: Path, change: Callable[[Cluster], None] = lambda cluster: None
) -> Iterator[Cluster]:
    """Everything is up, and ended at the end. `change` is made to the commands before."""
    cluster = Cluster(path)
    change(cluster)
    with ExitStack() as stack:
        stack.callback(cluster.control.close)
        stack.callback(lambda: [cluster.kill(name) for name in list(cluster.children)])
        for name in cluster.commands:
            cluster.start(name)
        nodes = [name for name in cluster.commands if name != "server"]
        eventually(lambda: all(cluster.node_is(node, NodeState.UP) for node in nodes))
        yield cluster
