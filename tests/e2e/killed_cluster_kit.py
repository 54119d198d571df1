"""A cluster whose processes are killed and started again, with a log of when and of what each
certainly holds. Sources `s1` (memory and disk) and `s2` (memory; an engine writes its chunks anew
after each start), targets `t1` (roomy, with a disk) and `t2` (small, memory only)."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from cluster_kit import TOKEN, Cluster

from kvstrata.api import LookupRequest, NodeState
from kvstrata.client import Client
from kvstrata.control import SyncControlPlane
from kvstrata.errors import KVStrataError
from kvstrata.keys import Key
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.waiting import eventually
from kvstrata.tiers.fs_format import path_of
from kvstrata.wire import State, StatusReply, TierStatus

T = TypeVar("T")

PAGE = 4096
NAMESPACE = a_namespace(PAGE, model="killed")

ONES, TWOS, BOTHS, NOBODYS, OWN = (range(n, n + 150) for n in range(0, 750, 150))
HELD = {"s1": [*ONES, *BOTHS], "s2": [*TWOS, *BOTHS], "t1": [*OWN]}
"""What engines wrote there. `s1` and `t1` have it on disk, too."""
ALL = range(750)
SOURCES, TARGETS = ("s1", "s2"), ("t1", "t2")
NODES = (*SOURCES, *TARGETS)
SMALL = 40
"""Chunks that `t2` has room for; the others have room for everything."""


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


NUMBERS = {key(n): n for n in ALL}


def content(n: int) -> bytes:
    """Of chunk `n`, and of no other."""
    return hashlib.blake2b(key(n), digest_size=64).digest() * (PAGE // 64)


@dataclass(slots=True)
class Outage:
    """Of a process, in seconds since the epoch: from its death until it did its work again."""

    name: str
    began: float
    ended: float = math.inf


@dataclass(frozen=True, slots=True)
class Reading:
    """What a target's engine found of a transfer's chunks: here, absent, or wrong bytes."""

    at: float
    here: frozenset[int]
    wrong: frozenset[int]


def seldom(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """`eventually` for a busy machine: what it waits for is not asked all the time."""
    last = 0.0

    def now_and_then() -> T | None:
        nonlocal last
        if time.monotonic() - last < 0.2:
            return None
        try:
            return condition()
        finally:
            last = time.monotonic()

    found = eventually(now_and_then, seconds)
    assert found
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class KilledCluster(Cluster):
    """`outages` has one entry a kill. `promised` are chunks of `t1` that were on its disk."""

    def __init__(self, folder: Path, database: str = "", servers: int = 1) -> None:
        """`database`: of a PostgreSQL, for more than one server; by default a file of SQLite."""
        super().__init__(folder)
        self.commands.clear()
        self.database = database or f"sqlite+aiosqlite:///{folder}/index.sqlite"
        self.urls = {"server": f"http://127.0.0.1:{self.port}"}
        for n in range(2, servers + 1):
            self.urls[f"server{n}"] = f"http://127.0.0.1:{_free_port()}"
        for server, url in self.urls.items():
            self.commands[server] = [
                *("server", "--listen", url.removeprefix("http://"), "--database", self.database),
                *("--transfers-per-node", "16", "--transfers-per-link", "8"),
            ]
        for i, node in enumerate(NODES):
            pages = SMALL if node == "t2" else 1024
            disk = f'{{"type": "fs", "root": "{folder}/fs-{node}"}}'
            urls = list(self.urls.values())
            first = i % len(urls)
            self.commands[node] = [
                *("node", "--id", node, "--socket", str(folder / f"{node}.sock")),
                *("--host.shm-dir", str(folder), "--host.capacity", str(pages * PAGE)),
                *("--tiers", f"[{disk if node in ('s1', 't1') else ''}]"),
                *("--peers.listen", "tcp://127.0.0.1:0", "--peers.transports", '["tcp"]'),
                *("--control.url", ",".join([*urls[first:], *urls[:first]])),
                *("--control.heartbeat-interval", "0.5"),
            ]
        self.control.close()
        self.control = SyncControlPlane(",".join(self.urls.values()), TOKEN)
        self.outages: list[Outage] = []
        self.promised: set[int] = set()

    def start(self, name: str) -> None:
        tokens = {"KVSTRATA_SERVER_TOKEN": TOKEN, "KVSTRATA_NODE_CONTROL__TOKEN": TOKEN}
        tokens["KVSTRATA_SERVER_HEARTBEAT_TTL"] = "3s"
        with (self.folder / f"{name}.log").open("a") as log:
            self.children[name] = subprocess.Popen(
                [sys.executable, "-m", "kvstrata", *self.commands[name]],
                env=os.environ | tokens,
                stdout=log,
                stderr=log,
            )

    def complaints(self) -> list[str]:
        """What is logged as an error: nothing that a neighbour's death may lead to."""
        return [
            f"{path.stem}: {line}"
            for path in self.folder.glob("*.log")
            for line in path.read_text().splitlines()
            if " ERROR " in line
        ]

    # ------------------------------------------------------------ dying and coming back

    def strike(self, name: str) -> Outage:
        """SIGKILL. What is on the disk of `t1` by then is there for good."""
        outage = Outage(name, time.time())
        if name == "t1":
            self.promised |= self.on_disk("t1")
        self.kill(name)
        self.outages.append(outage)
        return outage

    def come_back(self, outage: Outage) -> None:
        """Start it as it was, and return when it does its work."""
        self.start(outage.name)
        self.await_work(outage.name)
        outage.ended = time.time()

    def await_work(self, name: str) -> None:
        if name == "s2":
            self.write(name)
        if name in self.urls:
            seldom(lambda: self.ready(name))
            seldom(lambda: all(self.connected(n) for n in NODES if n in self.children))
        else:
            seldom(lambda: self.connected(name))
        if name in HELD:
            wanted = [key(n).hex() for n in HELD[name]]
            asked = LookupRequest(keys=wanted, nodes=[name])
            seldom(lambda: (f := self.control.lookup(asked).nodes) and f[0].prefix == len(wanted))

    def ready(self, server: str) -> bool:
        try:
            return httpx.get(f"{self.urls[server]}/readyz", timeout=2).is_success
        except httpx.TransportError:
            return False

    def knows_all(self, server: str) -> bool:
        """Where a node did not register, a server hears of it a moment later."""
        with closing(SyncControlPlane(self.urls[server], TOKEN)) as control:
            return all(control.node(node).state is NodeState.UP for node in NODES)

    def connected(self, node: str) -> bool:
        return self.status(node).tasks["control plane"] == "connected"

    def write(self, node: str) -> None:
        """As an engine that computed them; a disk behind them has them when this returns."""
        keys = [key(n) for n in HELD[node]]
        with seldom(lambda: self.session(node)) as client:
            for n, offset in zip(HELD[node], client.reserve(keys), strict=True):
                if offset >= 0:
                    client.region.view[offset : offset + PAGE] = content(n)
            assert client.commit(keys) == [True] * len(keys)
        if node != "s2":
            seldom(lambda: self.on_disk(node) >= set(HELD[node]))

    def on_disk(self, node: str) -> set[int]:
        root = self.folder / f"fs-{node}"
        return {n for n in ALL if (root / path_of(key(n))).exists()}

    def disturbed(self, names: Collection[str], began: float, ended: float) -> bool:
        """Whether one of them was killed or away at that time, or nearly so."""
        return any(
            o.name in names and o.began - 1 < ended and o.ended + 1 > began for o in self.outages
        )

    # ------------------------------------------------------------ looking at nodes

    def session(self, node: str) -> Client:
        path = self.folder / f"{node}.sock"
        return Client.connect(path, "tester", namespace=NAMESPACE, timeout=5)

    def status(self, node: str) -> StatusReply:
        with self.session(node) as client:
            return client.status()

    def host_of(self, node: str) -> TierStatus:
        return self.status(node).tiers[0]

    def stop(self) -> None:
        """As an operator does, nodes first."""
        for name in sorted(self.children, key=lambda name: name in self.urls):
            child = self.children.pop(name)
            child.send_signal(signal.SIGTERM)
            assert child.wait(20) == 0, f"{name} ended with {child.returncode}"

    def regions(self) -> list[Path]:
        """Shared memory that is left."""
        return list(self.folder.glob("kvstrata-*"))

    def metric(self, name: str) -> list[float]:
        """Its value, of each server."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        texts = [httpx.get(f"{url}/metrics", headers=headers).text for url in self.urls.values()]
        return [float(v) for text in texts for v in re.findall(rf"^{name} (\S+)$", text, re.M)]


class Engine:
    """At one target, for as long as that lives: reads what transfers brought."""

    def __init__(self, cluster: KilledCluster, node: str) -> None:
        self._cluster = cluster
        self._node = node
        self._client: Client | None = None
        self._turn = asyncio.Lock()

    async def read(self, numbers: Iterable[int], wait: float = 0.0) -> Reading | None:
        """None: the node is away."""
        async with self._turn:
            return await asyncio.to_thread(self._read, list(numbers), wait)

    def _read(self, numbers: list[int], wait: float) -> Reading | None:
        try:
            if self._client is None:
                self._client = self._cluster.session(self._node)
            found = self._client.lookup([key(n) for n in numbers], "all", wait)
            at, view = time.time(), self._client.region.view
            here = {
                n: bytes(view[offset : offset + PAGE])
                for n, state, offset in zip(numbers, found.states, found.offsets, strict=True)
                if state is State.HOST
            }
            self._client.release(found.lease)
        except KVStrataError:
            self.close()
            return None
        wrong = frozenset(n for n, bytes_ in here.items() if bytes_ != content(n))
        return Reading(at, frozenset(here), wrong)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


@contextmanager
def running(cluster: KilledCluster) -> Iterator[None]:
    """Everything is up and holds what it should; in the end whatever is left is killed."""
    try:
        for name in cluster.commands:
            cluster.start(name)
        for node in HELD:
            cluster.write(node)
        for name in cluster.commands:
            cluster.await_work(name)
        for server in cluster.urls:
            seldom(lambda server=server: cluster.knows_all(server))
        yield
    finally:
        cluster.control.close()
        for name in list(cluster.children):
            cluster.kill(name)
