"""Whatever is lost, repeated or restarted: in the end the index says what the nodes hold.

Two nodes with the reporter's real outbox, the real cluster and a real SQLite file, joined by a
network that loses and repeats, with processes that die at any point between two transactions.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from functools import cache
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from server_kit import NAMESPACE, TurnedClock, database_url

from kvstrata import api
from kvstrata.config import ServerSettings
from kvstrata.errors import Expired, Missing
from kvstrata.keys import Key
from kvstrata.node.outbox import Outbox
from kvstrata.node.placements import PlacementChange, Placements
from kvstrata_server.database import Database
from kvstrata_server.plane import ControlState

NODES = ("a", "b")
SHARED = "mount"


@cache
def migrated() -> Path:
    """A database to copy: migrating one for every example would take most of the time."""
    path = Path(tempfile.mkdtemp())
    database = Database(database_url(path))

    async def make() -> None:
        await database.migrate()
        await database.close()

    asyncio.run(make())
    return path / "control.sqlite"


class NodeProcess:
    """One incarnation of a node: what it holds, what it has not reported, and its outbox."""

    def __init__(self, name: str, incarnation: int, stores: dict[str, set[Key]]) -> None:
        self.name = name
        self.incarnation = f"i{incarnation}"
        self.held: dict[str, set[Key]] = {"host": set(), **stores}
        self.placements = Placements()
        self.placements.enabled = True
        self.outbox = Outbox(self, batch_keys=2, pending_keys=6)
        self.registered = False

    def registration(self) -> api.NodeRegistration:
        return api.NodeRegistration(
            id=self.name,
            incarnation=self.incarnation,
            stores=[api.StoreRef(id=n, tier="fs") for n in self.held if n != "host"],
        )

    def take_changes(self) -> list[PlacementChange]:
        return self.placements.take()

    def snapshot(self) -> list[PlacementChange]:
        self.placements.take()
        return [PlacementChange(name, sorted(keys), []) for name, keys in self.held.items()]

    def namespace_documents(self) -> dict[bytes, bytes]:
        return {NAMESPACE.digest: NAMESPACE.document}


class Convergence(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.path = Path(tempfile.mkdtemp())
        shutil.copy(migrated(), self.path / "control.sqlite")
        self.clock = TurnedClock()
        self.nodes: dict[str, NodeProcess] = {}
        self.sent: list[tuple[str, api.Report]] = []

    @initialize()
    def begin(self) -> None:
        self.server = self.started_server()
        for name in NODES:
            self.nodes[name] = NodeProcess(name, 0, {f"s{name}": set(), SHARED: set()})

    def teardown(self) -> None:
        if self.nodes:
            self.settle()
            self.loop.run_until_complete(self.server.database.close())
        self.loop.close()
        shutil.rmtree(self.path)

    # ------------------------------------------------------------ what happens

    @rule(
        name=st.sampled_from(NODES),
        where=st.sampled_from(["host", "own", SHARED]),
        numbers=st.sets(st.integers(0, 5), min_size=1, max_size=4),
        appear=st.booleans(),
    )
    def change(self, name: str, where: str, numbers: set[int], appear: bool) -> None:
        node = self.nodes[name]
        location = f"s{name}" if where == "own" else where
        # Of a shared store each node writes and evicts its own part.
        keys = [NAMESPACE.key(0, f"{name}{n}".encode()) for n in sorted(numbers)]
        if appear:
            node.held[location].update(keys)
            node.placements.added(location, keys)
        else:
            node.held[location].difference_update(keys)
            node.placements.removed(location, keys)

    @rule(
        name=st.sampled_from(NODES),
        fate=st.sampled_from(["arrives", "request lost", "answer lost"]),
    )
    def send(self, name: str, fate: str) -> None:
        self.sends(name, fate)

    def sends(self, name: str, fate: str) -> bool:
        """Returns whether there was something to send."""
        node = self.nodes[name]
        if not node.registered:
            if fate != "arrives":
                return True
            reply = self.server.cluster.register(node.registration())
            node.outbox.registered(reply.next_seq)
            node.registered = True
        node.outbox.collect()
        report = node.outbox.next(node.incarnation)
        if report is None:
            return False
        self.sent.append((name, report))
        if fate == "request lost":
            return True
        try:
            answer = self.server.cluster.report(name, report)
        except (Missing, Expired):
            node.registered = False
            return True
        if fate == "arrives":
            node.outbox.answered(answer)
        return True

    @rule(which=st.integers(0, 30))
    def an_old_report_arrives_again(self, which: int) -> None:
        if self.sent:
            name, report = self.sent[-1 - which % len(self.sent)]
            try:
                self.server.cluster.report(name, report)
            except (Missing, Expired):
                return

    @rule(name=st.sampled_from(NODES))
    def beat(self, name: str) -> None:
        node = self.nodes[name]
        if not node.registered:
            return
        use = api.HostUse(used_bytes=0, capacity_bytes=0, chunks=0)
        beat = api.HeartbeatRequest(
            incarnation=node.incarnation, host=use, next_seq=node.outbox.next_seq
        )
        try:
            if self.server.cluster.heartbeat(name, beat).snapshot_wanted:
                node.outbox.want_snapshot()
        except (Missing, Expired):
            node.registered = False

    @rule(name=st.sampled_from(NODES))
    def a_node_restarts(self, name: str) -> None:
        old = self.nodes[name]
        stores = {store: keys for store, keys in old.held.items() if store != "host"}
        self.nodes[name] = NodeProcess(name, int(old.incarnation[1:]) + 1, stores)

    @rule(transactions=st.integers(1, 4))
    def sql_catches_up(self, transactions: int) -> None:
        for _ in range(transactions):
            if self.server.writer.unwritten_rows:
                self.loop.run_until_complete(self.server.writer.write_batch())

    @rule()
    def the_server_is_killed(self) -> None:
        self.loop.run_until_complete(self.server.database.close())
        self.server = self.started_server()

    # ------------------------------------------------------------ what must hold

    def settle(self) -> None:
        for name in NODES:
            self.beat(name)
            for _ in range(100):
                if not self.sends(name, "arrives"):
                    break
            else:
                raise AssertionError(f"{name} never stops reporting")
        self.check(self.server)
        while self.server.writer.unwritten_rows:
            self.loop.run_until_complete(self.server.writer.write_batch())
        self.the_server_is_killed()
        self.check(self.server)
        assert self.server.writer.dropped == 0

    def check(self, server: ControlState) -> None:
        reach = server.cluster.reach(server.cluster.nodes.values())
        for name, node in self.nodes.items():
            for location, keys in node.held.items():
                # What other nodes hold in a shared store is reached through this one, too.
                expected = set(keys)
                if location == SHARED:
                    expected = set().union(*(n.held[SHARED] for n in self.nodes.values()))
                found = {
                    key
                    for number, served in reach.items()
                    if server.places.describe(number)[1]
                    == (None if location == "host" else location)
                    and name in {n for n, _ in served}
                    for key in server.index.keys_at(number)
                }
                assert found == expected, (name, location)

    def started_server(self) -> ControlState:
        state = ControlState(ServerSettings(database=database_url(self.path)), self.clock)
        state.writer._batch_rows = 2
        self.loop.run_until_complete(state.load())
        return state


TestConvergence = Convergence.TestCase
TestConvergence.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
