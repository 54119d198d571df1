"""A cluster's worth of nodes and everything that goes wrong, in simulated time.

Real outboxes, the real cluster, writer and SQL; the network between them loses one report in
twenty, tenths of the nodes are cut off for a while, nodes restart, and the server is killed.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from nodes_kit import SHARED, NodeProcess
from server_kit import NAMESPACE, TurnedClock, database_url, lay_out

from kvstrata import api
from kvstrata.config import ServerSettings
from kvstrata.errors import Busy, Expired, Missing
from kvstrata.keys import Key
from kvstrata_server.plane import ControlState

STEP = 1.0
"""Simulated seconds between two reports of a node, as `report_interval` is by default."""
BEAT = 3
"""Steps between two heartbeats."""
USE = api.HostUse(used_bytes=0, capacity_bytes=0, chunks=0)


class Simulation:
    def __init__(self, address: str, nodes: int, chunks: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = TurnedClock()
        self.address = address
        self.chunks = chunks
        self.step = 0
        self.made = 0
        self.reported = 0
        self.cut_off: set[str] = set()
        self.nodes = {f"n{i}": self.started(f"n{i}", 0, {SHARED: set()}) for i in range(nodes)}

    @staticmethod
    def started(name: str, incarnation: int, stores: dict[str, set[Key]]) -> NodeProcess:
        return NodeProcess(name, incarnation, stores, batch_keys=4096, pending_keys=200_000)

    async def start_server(self) -> None:
        self.server = ControlState(ServerSettings(database=self.address), self.clock)
        await self.server.load()

    async def kill_server(self) -> None:
        await self.server.database.close()
        await self.start_server()

    # ------------------------------------------------------------ what happens

    def offload(self, node: NodeProcess, count: int) -> None:
        """New chunks in host memory, of which one in four goes to the shared mount, too."""
        keys = [NAMESPACE.key(0, (self.made + i).to_bytes(8, "big") * 4) for i in range(count)]
        self.made += count
        for location, some in (("host", keys), (SHARED, keys[::4])):
            node.held[location].update(some)
            node.placements.added(location, some)

    def evict(self, node: NodeProcess, count: int) -> None:
        for location in node.held:
            held = node.held[location]
            gone = [held.pop() for _ in range(min(count, len(held)))]
            node.placements.removed(location, gone)

    def restart(self, name: str) -> None:
        old = self.nodes[name]
        stores = {store: keys for store, keys in old.held.items() if store != "host"}
        self.nodes[name] = self.started(name, int(old.incarnation[1:]) + 1, stores)

    async def pass_time(self, loss: float) -> None:
        """One step: every node that isn't cut off sends what is due."""
        self.step += 1
        self.clock.advance(STEP)
        for number, (name, node) in enumerate(self.nodes.items()):
            if name in self.cut_off:
                node.outbox.collect()
                continue
            self.send(node, loss)
            if (self.step + number) % BEAT == 0:
                self.beat(node, loss)
        while self.server.writer.unwritten_rows:
            await self.server.writer.write_batch()

    def send(self, node: NodeProcess, loss: float) -> None:
        if not node.registered:
            reply = self.server.cluster.register(node.registration())
            node.outbox.registered(reply.next_seq)
            node.registered = True
        node.outbox.collect()
        while (report := node.outbox.next(node.incarnation)) is not None:
            fate = self.chance.random()
            if fate < loss / 2:
                return  # the request is lost
            try:
                answer = self.server.reports.report(node.name, report)
            except (Missing, Expired):
                node.registered = False
                return
            except Busy:
                return
            self.reported += sum(len(c.added) for c in report.changes)
            if fate < loss:
                return  # the answer is
            node.outbox.answered(answer)
            if not answer.applied:
                return

    def beat(self, node: NodeProcess, loss: float) -> None:
        if not node.registered or self.chance.random() < loss:
            return
        beat = api.HeartbeatRequest(
            incarnation=node.incarnation, host=USE, next_seq=node.outbox.next_seq
        )
        try:
            if self.server.reports.heartbeat(node.name, beat).snapshot_wanted:
                node.outbox.want_snapshot()
        except (Missing, Expired):
            node.registered = False

    # ------------------------------------------------------------ what must hold

    def wrong(self) -> str:
        """The first placement that differs from the nodes' truth, in words; empty: none."""
        server = self.server
        shared: set[Key] = set().union(*(n.held[SHARED] for n in self.nodes.values()))
        offered: set[Key] = set()
        up = {node.id for node in server.cluster.up()}
        for name, node in self.nodes.items():
            if name not in up:
                return f"{name} is not up"
            for location in ("host", SHARED):
                number = server.places.location(name, None if location == "host" else location)
                found = set(server.index.keys_at(number))
                if location == SHARED:
                    offered |= found
                elif found != node.held["host"]:
                    missing, extra = node.held["host"] - found, found - node.held["host"]
                    return f"{name}: {len(missing)} missing, {len(extra)} that aren't there"
        if offered != shared:
            return f"mount: {len(shared - offered)} missing, {len(offered - shared)} too many"
        return ""


@pytest.mark.parametrize(
    ("nodes", "chunks"),
    [(60, 200), pytest.param(1000, 1000, marks=pytest.mark.timeout(900))],
    ids=["small", "full"],
)
async def test_it_converges_to_what_the_nodes_hold(tmp_path: Path, nodes: int, chunks: int) -> None:
    await asyncio.to_thread(lay_out, tmp_path)
    it = Simulation(database_url(tmp_path), nodes, chunks, seed=1)
    await it.start_server()
    names = list(it.nodes)
    rounds = 12
    for n in range(rounds):
        if n % 4 == 0:
            it.cut_off = set(it.chance.sample(names, nodes // 10))
        for name in it.chance.sample(names, nodes // 50 + 1):
            it.restart(name)
        for node in it.nodes.values():
            it.offload(node, chunks // 10)
            it.evict(node, chunks // 40)
        await it.pass_time(loss=0.05)
        if n == rounds // 2:
            await it.kill_server()
    assert it.reported >= nodes * chunks
    it.cut_off = set()
    quiet = 0.0
    while problem := it.wrong():
        assert quiet < 30, problem
        await it.pass_time(loss=0.0)
        quiet += STEP
    # And SQL says the same: nobody speaks before this is checked, but to say that they are there.
    await it.kill_server()
    for node in it.nodes.values():
        it.beat(node, 0.0)
        assert not node.outbox._snapshot_wanted
    assert it.wrong() == ""
    assert it.server.writer.dropped == 0
    await asyncio.gather(it.server.database.close())
