"""Nodes are drained and stopped, and every byte is where it was promised to be."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_kit import PAGE, TOKEN, Cluster, key, payload, read, started, stored, write

from kvstrata.api import DrainInfo, DrainRequest, DrainState, LeftReason, TransferRequest
from kvstrata.client import Client
from kvstrata.errors import PeerRefused
from kvstrata.host import NO_ROOM
from kvstrata.testing.waiting import eventually

SMALL = 16 * PAGE


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """`a` has a disk, to which nothing cascades by itself; `b` and `c`, which is small, have none,
    so that what they hold is in their host memory alone."""

    def change(cluster: Cluster) -> None:
        commands = cluster.commands
        for node in ("a", "b"):
            i = commands[node].index("--tiers")
            del commands[node][i : i + 2]
        disk = {"type": "fs", "root": str(tmp_path / "fs-a"), "cascade": "second_touch"}
        commands["a"] += ["--tiers", json.dumps([disk])]
        commands["c"] = [word.replace("/b.sock", "/c.sock") for word in commands["b"]]
        commands["c"][commands["c"].index("--id") + 1] = "c"
        commands["c"][commands["c"].index("--host.capacity") + 1] = str(SMALL)

    with started(tmp_path, change) as cluster:
        yield cluster


def drain(cluster: Cluster, *args: str) -> tuple[int, DrainInfo]:
    """By the command line, as an operator does."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvstrata", "drain", "--json", "--token", TOKEN),
            *("--url", f"http://127.0.0.1:{cluster.port}", *args),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout, done.stderr
    return done.returncode, DrainInfo.model_validate_json(done.stdout)


def stop(cluster: Cluster, node: str) -> None:
    child = cluster.children.pop(node)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0


def takes(client: Client, number: int) -> bool:
    (offset,) = client.reserve([key(number)])
    if offset >= 0:
        client.abort([key(number)])
    return bool(offset != NO_ROOM)


@pytest.mark.timeout(240)
def test_a_node_starts_again_and_then_goes_for_good(cluster: Cluster) -> None:
    everything = range(0, 24)
    with cluster.connect("a") as a:
        write(a, everything)
        read(a, range(0, 8))  # used again, so these are on the disk as well
        eventually(lambda: stored(a, 8))
        eventually(lambda: cluster.reported("a", everything))
        status, info = drain(cluster, "a", "--for", "restart", "--wait")
        assert (status, info.may_stop, info.moved) == (0, True, {}), info
        assert sum(info.stored.values()) == 16
    cluster.kill("a")  # not even time to say goodbye
    cluster.start("a")
    with cluster.connect("a") as a, cluster.connect("b") as b:
        eventually(lambda: cluster.reported("a", everything))
        assert read(a, everything) == [payload(n) for n in everything]
        assert takes(a, 99)
        assert cluster.control.node("a").drain is None
        assert cluster.control.drain_of("a").state is DrainState.DRAINED

        # What only its memory and disk have goes to others.
        write(b, range(20, 24))
        write(a, range(24, 32))
        a.drop(["host"], [key(n) for n in range(0, 12)])
        everything = range(0, 32)
        eventually(lambda: cluster.reported("a", everything))
        eventually(lambda: cluster.reported("b", range(20, 24)))
        status, info = drain(cluster, "a", "--wait")
        assert (status, info.state, info.may_stop) == (0, DrainState.DRAINED, True), info
        assert (sum(info.moved.values()), info.moved_bytes) == (28, 28 * PAGE)
        assert read(a, everything) == [payload(n) for n in everything]  # it serves until it ends
        assert not takes(a, 99)
        assert takes(b, 99)
        with pytest.raises(PeerRefused, match="'a' is drained"):
            cluster.control.create_transfer(
                TransferRequest(source="b", target="a", keys=[key(20).hex()])
            )
    stop(cluster, "a")
    # `c` has little room, so most of it went to `b`: what `b` lacks it gets from there.
    keys = [key(n).hex() for n in everything]
    moved = cluster.control.create_transfer(TransferRequest(target="b", keys=keys, deadline=30))
    eventually(lambda: cluster.control.get_transfer(moved.id).state.ended)
    with cluster.connect("b") as b:
        assert read(b, everything) == [payload(n) for n in everything]


@pytest.mark.timeout(240)
def test_no_room_anywhere_is_told_and_the_node_may_serve_again(cluster: Cluster) -> None:
    everything = range(0, 64)
    with cluster.connect("b") as b:
        write(b, everything)
        eventually(lambda: cluster.reported("b", everything))
        status, info = drain(cluster, "b", "--to", "c", "--wait")
        assert (status, info.state, info.may_stop) == (1, DrainState.PARTIAL, False), info
        assert 0 < info.moved["c"] <= SMALL // PAGE
        assert info.remaining.chunks == 64 - info.moved["c"]
        assert [(left.why, left.chunks) for left in info.left] == [
            (LeftReason.NO_ROOM, info.remaining.chunks)
        ]
        assert "attach a store" in info.left[0].detail
        assert not takes(b, 99)
        status, info = drain(cluster, "b", "--cancel")
        assert (status, info.in_force) == (0, False)
        eventually(lambda: takes(b, 99))
        # The server dies in the middle of another one, and goes on with it.
        cluster.control.drain("b", DrainRequest(for_="removal", deadline=60))
        cluster.kill("server")
        cluster.start("server")
        ended = eventually(
            lambda: (info := cluster.control.drain_of("b")).state.ended and info, seconds=40
        )
        assert ended.may_stop, ended
    stop(cluster, "b")
    with cluster.connect("a") as a, cluster.connect("c") as c:
        found = [
            {n: content for n in everything for content in read(client, range(n, n + 1))}
            for client in (a, c)
        ]
    assert found[0] | found[1] == {n: payload(n) for n in everything}
