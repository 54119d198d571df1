"""A tenant that holds too much, at nodes that obey and report when they please, some of them long
after they said what they did: it ends below its quota, and never loses more than was said."""

import asyncio
from random import Random
from types import SimpleNamespace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from server_kit import CHUNK_BYTES, NAMESPACE
from world_kit import NODES, World

from kvstrata import api
from kvstrata_server.metrics import Metrics
from kvstrata_server.scheduling.evictions import Shed
from kvstrata_server.tenancy.quotas import Quota
from kvstrata_server.tenancy.shedding import Shedding

ACME = replace(NAMESPACE, tenant="acme")


class Simulation:
    """Nodes that obey late and report late, and evictions that know of it when they answer."""

    def __init__(self, held, leased, most):
        self.world = World()
        self.held = {place: list(range(count)) for place, count in held.items()}
        self.leased, self.most = leased, most * CHUNK_BYTES
        for node in NODES:
            self.world.join(node)
        for (node, location), numbers in self.held.items():
            added = [ACME.key(0, n.to_bytes(8, "big")) for n in numbers]
            self.world.report(node, location, added, namespaces=(ACME,))
        quotas = SimpleNamespace(all=lambda: [Quota("acme", max_bytes=self.most)])
        self.running: dict[str, dict[str, Shed]] = {}
        self.ended: dict[str, int] = {}
        self.late: set[str] = set()
        self.asked = 0
        self.reports: list[tuple[float, tuple[str, str], list[int]]] = []
        self.keeper = Shedding(
            *(self.world.cluster, quotas, self.world.usage, self, Metrics()),
            *(self.world.clock, False),
        )

    @property
    def use(self):
        return sum(len(numbers) for numbers in self.held.values()) * CHUNK_BYTES

    async def shed(self, tenant, nodes, deadline):
        assert not self.running
        self.asked += 1
        self.running[f"e{self.asked}"] = dict(nodes)
        return SimpleNamespace(id=f"e{self.asked}")

    def shedding(self, tenant):
        return {node for nodes in self.running.values() for node in nodes}

    def sheds_of(self, tenant):
        return list(self.running)

    async def kept(self, eviction):
        dropped = {"host": self.ended[eviction]}
        answer = api.NodeEviction(node="any", dropped=dropped, reported=eviction not in self.late)
        return SimpleNamespace(state=api.EvictionState.DONE, nodes=[answer])

    def obey(self, chance):
        now = self.world.clock()
        for eviction, nodes in list(self.running.items()):
            for node in [node for node in nodes if chance.random() < 0.5]:
                for location, nbytes in nodes.pop(node).amounts.items():
                    late = 20 * chance.random() if chance.random() < 0.5 else 0
                    if late:
                        self.late.add(eviction)
                    self._drop(eviction, node, location, nbytes, now + late)
            if not nodes:
                del self.running[eviction]

    def _drop(self, eviction, node, location, nbytes, told):
        here, gone = self.held[node, location], []
        for number in list(here):
            if nbytes > 0 and (node, location, number) not in self.leased:
                gone.append(number)
                here.remove(number)
                nbytes -= CHUNK_BYTES
        self.ended[eviction] = self.ended.get(eviction, 0) + len(gone)
        self.reports.append((told, (node, location), gone))

    def report(self):
        due = [r for r in self.reports if r[0] <= self.world.clock()]
        self.reports = [r for r in self.reports if r[0] > self.world.clock()]
        for _, (node, location), gone in due:
            removed = [ACME.key(0, n.to_bytes(8, "big")) for n in gone]
            self.world.report(node, location, removed=removed)


_PLACES = [("a", "host"), ("b", "host"), ("c", "host"), ("a", "s2")]


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(st.sampled_from(_PLACES), st.integers(1, 60), min_size=1),
    st.sets(st.tuples(st.sampled_from(_PLACES), st.integers(0, 20)), max_size=60),
    st.integers(-5, 60),
    st.integers(0, 1 << 32),
)
@example(dict.fromkeys(_PLACES[:3], 1), {(_PLACES[0], 0), (_PLACES[1], 0)}, 0, 0)
@example(dict.fromkeys(_PLACES, 20), {(_PLACES[0], n) for n in range(20)}, 5, 1)
def test_it_ends_below_the_quota_and_takes_no_more_than_it_said(held, leased, more, seed):
    taken = {(*place, number) for place, number in leased if number < held.get(place, 0)}
    most = max(0, len(taken) + more)
    simulation, chance = Simulation(held, taken, most), Random(seed)
    least = min(simulation.use, 0.95 * simulation.most - CHUNK_BYTES)
    possible, calm = len(taken) <= most, 0

    async def run():
        nonlocal calm
        for _ in range(600 if possible else 20):
            simulation.world.clock.advance(1)
            for node in simulation.world.cluster.nodes.values():
                node.last_seen = simulation.world.clock()
            simulation.report()
            await simulation.world.usage.refresh()
            await simulation.keeper.look()
            simulation.obey(chance)
            assert simulation.use >= least
            calm += simulation.use <= simulation.most and not simulation.running
            if calm == 5:
                return

    asyncio.run(run())
    assert calm == 5 or not possible
