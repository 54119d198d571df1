"""SIGKILL of each kind of process: the others go on serving, and it comes back to its place.

One control plane, two nodes, one engine on each, all real processes on loopback.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstrata.api import LookupRequest, NodeState, TransferRequest, TransferState
from kvstrata.client import Client
from kvstrata.control import SyncControlPlane
from kvstrata.keys import Key
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.waiting import eventually

PAGE = 16384
TOKEN = "of the tests"
NAMESPACE = a_namespace(PAGE)
ENGINE = """
import sys, time
from kvstrata.client import Client
from kvstrata.keys import Namespace
namespace = Namespace.parse(sys.argv[2].encode())
client = Client.connect(sys.argv[1], "victim", namespace=namespace)
client.reserve([namespace.key(0, bytes([0, 0, 1, n])) for n in range(8)])
print("writing", flush=True)
time.sleep(120)
"""


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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    with ExitStack() as stack:
        stack.callback(cluster.control.close)
        stack.callback(lambda: [cluster.kill(name) for name in list(cluster.children)])
        for name in cluster.commands:
            cluster.start(name)
        eventually(
            lambda: cluster.node_is("a", NodeState.UP) and cluster.node_is("b", NodeState.UP)
        )
        yield cluster


@pytest.mark.timeout(180)
def test_each_may_be_killed_and_the_others_go_on(cluster: Cluster) -> None:
    with cluster.connect("a") as a:
        write(a, range(0, 8))
        eventually(lambda: stored(a, 8))
    eventually(lambda: cluster.reported("a", range(0, 8)))
    cluster.transfer("a", "b", range(0, 4))

    # The control plane dies: engines and nodes don't notice, and what they do meanwhile is known
    # when it is back.
    cluster.kill("server")
    with cluster.connect("a") as a, cluster.connect("b") as b:
        write(a, range(8, 16))
        eventually(lambda: stored(a, 16))
        assert read(a, range(0, 16)) == [payload(n) for n in range(0, 16)]
        assert read(b, range(0, 4)) == [payload(n) for n in range(0, 4)]
    cluster.start("server")
    eventually(lambda: cluster.reported("a", range(0, 16)))
    eventually(lambda: cluster.reported("b", range(0, 4)))
    cluster.transfer("any", "b", range(4, 12))

    # An engine dies in the middle of a store: its node takes the slots back, the other engines
    # of the node are served.
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(cluster.folder / "a.sock"), NAMESPACE.document.decode()],
        stdout=subprocess.PIPE,
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == b"writing\n"
    with cluster.connect("a") as a:
        used = a.status().tiers[0].used_bytes
        engine.kill()
        engine.wait()
        engine.stdout.close()
        eventually(lambda: a.status().tiers[0].used_bytes == used - 8 * PAGE)
        assert read(a, range(0, 16)) == [payload(n) for n in range(0, 16)]

    # A node dies: what it alone held in memory is no longer offered, the other one serves, and
    # started again it finds its disk.
    cluster.kill("a")
    eventually(lambda: cluster.node_is("a", NodeState.SILENT))
    answer = cluster.control.lookup(LookupRequest(keys=[key(15).hex()]))
    assert [n.node for n in answer.nodes if n.prefix] == []
    with cluster.connect("b") as b:
        assert read(b, range(0, 12)) == [payload(n) for n in range(0, 12)]
        write(b, range(16, 20))
    cluster.start("a")
    with cluster.connect("a") as a:
        assert read(a, range(0, 16)) == [payload(n) for n in range(0, 16)]
    eventually(lambda: cluster.reported("a", range(0, 16)))
    cluster.transfer("a", "b", range(12, 16))
    assert len(list(cluster.folder.glob("kvstrata-*"))) == 2  # one region a node, no orphan
