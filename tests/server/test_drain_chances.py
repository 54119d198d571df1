"""Drains among whatever happens: what they say is so whenever they say it, and each ends."""

from __future__ import annotations

import random

import pytest
from drain_kit import Node, by_hand, cluster
from server_kit import CHUNK_BYTES, TTL, TurnedClock, host, keys, running, store

from kvstrata import api
from kvstrata.api import DrainState, Outcome
from kvstrata.errors import Missing, PeerRefused

__all__ = ["by_hand"]

MISHAPS = [Outcome.NO_ROOM, Outcome.FAILED, Outcome.MISSING, Outcome.CORRUPT]


class World:
    """Three nodes and what each really holds; `a` is the one to be drained."""

    def __init__(self, seed: int, nodes: list[Node]) -> None:
        self.chance = random.Random(seed)
        self.nodes = {node.name: node for node in nodes}
        self.held: dict[str, dict[str, set[str]]] = {
            node.name: {"host": set(), **{s: set() for s in node.stores}} for node in nodes
        }
        self.heard = dict.fromkeys(self.nodes, 0.0)
        self.ailing: dict[str, list[str]] = {name: [] for name in self.nodes}
        """As last told."""
        self.made = 0
        self.ended: dict[str, api.DrainInfo] = {}

    async def change(self, name: str, location: str, added: set[str], removed: set[str]) -> None:
        at = self.held[name][location]
        added, removed = added - at, removed & at
        at |= added
        at -= removed
        change = host if location == "host" else lambda a, r: store(location, a, r)
        if location != "host":  # what one removes from a store is gone for all
            for others in self.held.values():
                others.get(location, set()).difference_update(removed)
        await self.nodes[name].report(change(sorted(added), sorted(removed)))
        self.heard[name] = self.nodes[name].r.clock()

    async def compute(self) -> None:
        a = self.nodes["a"]
        if not a.draining:
            new = set(keys(*range(self.made, self.made + 3)))
            self.made += 3
            await self.change("a", "host", new, set())

    async def evict(self) -> None:
        name = self.chance.choice([*self.nodes])
        location = self.chance.choice([*self.held[name]])
        at = sorted(self.held[name][location])
        await self.change(name, location, set(), set(self.chance.sample(at, len(at) // 4)))

    async def beat(self) -> None:
        for name, node in self.nodes.items():
            if self.chance.random() < 0.8:
                node.used = len(self.held[name]["host"]) * CHUNK_BYTES
                self.ailing[name] = [s for s in node.stores if self.chance.random() < 0.1]
                await node.beat(
                    settled=node.draining and self.chance.random() < 0.8, ailing=self.ailing[name]
                )
                self.heard[name] = node.r.clock()

    async def pull(self) -> None:
        node = self.nodes[self.chance.choice(["b", "c"])]
        outcome = self.chance.choice([Outcome.STORED] * 4 + MISHAPS)
        pulled = await node.pull(outcome, reports=False)
        if outcome is Outcome.STORED:
            here = set(pulled) & set().union(*self.held["a"].values())
            await self.change(node.name, "host", here, set())

    async def write_back(self) -> None:
        for order in await self.nodes["a"].told("store"):
            outcome = self.chance.choice([Outcome.STORED] * 3 + MISHAPS)
            result = api.StoreResult(
                incarnation=self.nodes["a"].incarnation,
                outcomes=dict.fromkeys(order.keys, outcome),
                stores=dict.fromkeys(order.keys, order.stores[0]),
            )
            await self.nodes["a"].r.control.store_result("a", order.transfer, result)
            if outcome is Outcome.STORED:
                here = set(order.keys) & set().union(*self.held["a"].values())
                await self.change("a", order.stores[0], here, set())

    async def ask(self) -> None:
        control = self.nodes["a"].r.control
        try:
            if self.chance.random() < 0.2:
                await control.cancel_drain("a")
            else:
                purpose = self.chance.choice(["removal", "restart"])
                await control.drain("a", api.DrainRequest(for_=purpose, deadline=40))
        except (Missing, PeerRefused):  # there is none, or one for another purpose
            return

    async def join(self, node: Node) -> None:
        await node.join()
        self.ailing[node.name], self.heard[node.name] = [], node.r.clock()

    async def start_anew(self) -> None:
        if self.chance.random() < 0.2:
            a = self.nodes["a"]
            a.incarnation, a.seq, a.draining = f"{a.incarnation}.", 0, False
            self.held["a"]["host"].clear()
            await self.join(a)

    async def wait(self) -> None:
        self.nodes["a"].r.clock.advance(self.chance.choice([0.5, 1, 3, 6]))

    async def check(self) -> None:
        """What is said is so."""
        r = self.nodes["a"].r
        await r.state.drains.advance()
        try:
            info = await r.control.drain_of("a")
        except Missing:
            return
        if info.state.ended:
            before = self.ended.setdefault(info.id, info)
            assert (info.state, info.ended) == (before.state, before.ended)
        else:
            assert info.in_force
            assert r.clock() < info.deadline
        if info.may_stop:
            up = [n for n in ("b", "c") if r.clock() - self.heard[n] <= TTL]
            safe = set().union(*(self.held[n]["host"] for n in up))
            if "b" in up and not self.ailing["b"]:
                safe |= self.held["a"]["nfs"] | self.held["b"]["nfs"]
            if info.for_ == "restart":
                well = {"nfs", "sa"}.difference(self.ailing["a"])
                safe |= set().union(*(self.held["a"][store] for store in well))
                assert self.held["a"]["host"] <= safe
            else:
                assert set().union(*self.held["a"].values()) <= safe
        elif info.in_force:
            assert info.state is not DrainState.CANCELLED


@pytest.mark.parametrize("seed", range(4))
async def test_what_a_drain_says_is_so_whatever_happens(tmp_path, seed):
    clock = TurnedClock()
    shape = (
        ("a", {"stores": ("sa", "nfs")}),
        ("b", {"stores": ("nfs",), "capacity": 12 * CHUNK_BYTES}),
        ("c", {"capacity": 12 * CHUNK_BYTES}),
    )
    async with cluster(tmp_path, *shape, clock=clock) as (_, *nodes):
        world = World(seed, nodes)
        world.heard = dict.fromkeys(world.heard, clock())
        await act(world, 60)
    async with running(tmp_path, clock) as r:
        for node in world.nodes.values():
            node.r = r
            await world.join(node)
        await act(world, 60)
        clock.advance(41)
        await world.check()
        if world.ended:
            assert (await r.control.drain_of("a")).state.ended
    assert world.ended


async def act(world: World, steps: int) -> None:
    deeds = [world.compute, world.evict, world.ask, world.start_anew]
    deeds += [world.beat, world.pull, world.write_back, world.wait] * 3
    for _ in range(steps):
        await world.chance.choice(deeds)()
        await world.check()
