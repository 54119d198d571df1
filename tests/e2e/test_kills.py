"""SIGKILL of each kind of process: the others go on serving, and it comes back to its place.

One control plane, two nodes, one engine on each, all real processes on loopback.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_kit import NAMESPACE, PAGE, Cluster, key, payload, read, started, stored, write

from kvstrata.api import LookupRequest, NodeState
from kvstrata.testing.waiting import eventually

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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with started(tmp_path) as cluster:
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
