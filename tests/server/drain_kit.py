"""What tests of drains share: nodes that say only what the test has them say, and their drains."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from server_kit import CHUNK_BYTES, Running, TurnedClock, host, join, report, running, store

from kvstrata import api
from kvstrata.api import Outcome
from kvstrata_server.draining.drains import Drains

__all__ = ["PLAIN", "SHARING", "Node", "begin", "by_hand", "cluster", "draining", "settle", "step"]

ROOM = 64 * CHUNK_BYTES

# Nodes of a `cluster`: their names, and how they are made.
PLAIN = (("a", {}), ("b", {}))
SHARING = (("a", {"stores": ("sa", "nfs")}), ("b", {"stores": ("nfs",)}))


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are taken when the test says so."""

    async def run(self: Drains) -> None:
        return

    monkeypatch.setattr(Drains, "run", run)


class Node:
    """A node that reports and beats on demand."""

    def __init__(self, r, name, stores=(), capacity=ROOM, peers=True, incarnation="i1") -> None:
        self.r, self.name, self.stores, self.peers = r, name, stores, peers
        self.capacity, self.used, self.seq, self.incarnation = capacity, 0, 0, incarnation
        self.draining = False

    async def join(self):
        await join(self.r.control, self.name, self.incarnation, self.stores, self.peers)
        await self.beat()
        return self

    async def report(self, *changes, **more):
        reply = await self.r.control.report(
            self.name, report(self.seq, *changes, incarnation=self.incarnation, **more)
        )
        assert reply.applied
        self.seq += 1

    async def beat(self, settled=None, **more):
        use = api.HostUse(used_bytes=self.used, capacity_bytes=self.capacity, chunks=0)
        beat = {"next_seq": self.seq, "settled": self.draining if settled is None else settled}
        reply = await self.r.control.heartbeat(
            self.name,
            api.HeartbeatRequest(incarnation=self.incarnation, host=use, **(beat | more)),
        )
        self.draining = reply.draining

    async def told(self, kind):
        commands = (await self.r.control.commands(self.name, self.incarnation)).commands
        return [command for command in commands if command.kind == kind]

    async def pull(self, outcome=Outcome.STORED, reports=True):
        """Execute the transfers that wait."""
        pulled = []
        for command in await self.told("pull"):
            pulled += command.keys
            await self.r.control.progress(
                self.name,
                api.Progress(
                    incarnation=self.incarnation,
                    transfer=command.transfer,
                    final=True,
                    outcomes=dict.fromkeys(command.keys, outcome),
                    bytes=len(command.keys) * CHUNK_BYTES,
                ),
            )
            assert command.free_only
        if pulled and reports:
            await self.report(host(pulled))
        return pulled

    async def store(self, outcome=Outcome.STORED, reports=True):
        """Execute the order that waits, into its first store."""
        (order,) = await self.told("store")
        result = api.StoreResult(
            incarnation=self.incarnation,
            outcomes=dict.fromkeys(order.keys, outcome),
            stores=dict.fromkeys(order.keys, order.stores[0]),
        )
        await self.r.control.store_result(self.name, order.transfer, result)
        if reports and outcome is Outcome.STORED:
            await self.report(store(order.stores[0], order.keys))
        return order


@asynccontextmanager
async def cluster(
    place: Path | str, *nodes: tuple[str, dict], clock: TurnedClock | None = None, **settings
) -> AsyncIterator[tuple]:
    """The app, and these nodes."""
    async with running(place, clock, **settings) as r:
        made = [await Node(r, name, **more).join() for name, more in nodes]
        yield r, *made


@asynccontextmanager
async def draining(
    place: Path | str, nodes: tuple[tuple[str, dict], ...], *held: api.Change, **asked
) -> AsyncIterator[tuple]:
    """The app and these nodes, the first of which holds that and is being drained: it has settled,
    and one step is done."""
    async with cluster(place, *nodes) as (r, first, *others):
        await first.report(*held)
        await begin(r, first.name, **asked)
        await settle(first)
        await step(r, first.name)
        yield r, first, *others


async def begin(r: Running, node: str = "a", **more) -> api.DrainInfo:
    return await r.control.drain(node, api.DrainRequest(**more))


async def step(r: Running, node: str = "a") -> api.DrainInfo:
    await r.state.drains.advance()
    return await r.control.drain_of(node)


async def settle(*nodes: Node) -> None:
    """They hear of their drains, and say that they take nothing new."""
    for node in nodes:
        await node.beat()
        await node.beat()
