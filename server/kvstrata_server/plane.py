"""The control plane's parts, put together; they live as long as the app's lifespan."""

from __future__ import annotations

import asyncio
import secrets
from importlib.metadata import version

from starlette.requests import Request

from kvstrata import api
from kvstrata.addresses import is_loopback, split_address
from kvstrata.config import ServerSettings
from kvstrata.errors import Busy, ConfigError
from kvstrata.node.supervisor import Supervisor
from kvstrata_server.access.audit import ForgetAudit
from kvstrata_server.access.rate_limit import RateLimit
from kvstrata_server.access.tokens import Tokens
from kvstrata_server.clock import Clock
from kvstrata_server.draining.drains import Drains
from kvstrata_server.lookups.compat import Instances
from kvstrata_server.lookups.dump import Dumps
from kvstrata_server.lookups.hot import HotPrefixes
from kvstrata_server.metrics import Metrics
from kvstrata_server.placement.cluster import Cluster
from kvstrata_server.placement.feed import Feed, WatchedPlaces
from kvstrata_server.placement.following import LOG_RETENTION, Follower
from kvstrata_server.placement.index import PlacementIndex
from kvstrata_server.placement.loading import load
from kvstrata_server.placement.namespaces import Namespaces
from kvstrata_server.placement.placement_writes import ForgetChunks
from kvstrata_server.placement.reports import Reports
from kvstrata_server.scheduling.evictions import Evictions
from kvstrata_server.scheduling.transfers import Scheduler
from kvstrata_server.scheduling.turns import Turns
from kvstrata_server.sql.changes import TrimLog
from kvstrata_server.sql.common_clock import CommonClock
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.writer import Writer
from kvstrata_server.tenancy.admission import Admission
from kvstrata_server.tenancy.quotas import Quotas
from kvstrata_server.tenancy.shedding import Shedding
from kvstrata_server.tenancy.tenants import Tenants
from kvstrata_server.tenancy.usage import Usage

__all__ = ["ControlState", "state_of"]

_SWEEP_INTERVAL = 0.25
_FORGET_INTERVAL = 60.0
_FLUSH_TIMEOUT = 10.0
_READ_SECONDS = 5.0
_NODE_RETENTION = 7 * 86400.0
"""Nodes away for longer are forgotten."""


class ControlState:
    """Everything the routes need. `open` loads it from SQL, `close` writes what is left."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics()
        self.database = Database(settings.database)
        self.tokens = Tokens(self.database, clock, settings.token)
        self.rate = RateLimit(settings.rate_limit, 2 * settings.rate_limit, clock)
        self.writer = Writer(self.database)
        self.time = CommonClock(self.database, clock)
        name = secrets.token_hex(8)
        log_as = name if self.database.shared else ""
        self.index = PlacementIndex(shared_ids=self.database.shared)
        self.feed = Feed()
        self.places = WatchedPlaces(self.index, self.feed)
        self.namespaces = Namespaces()
        self.cluster = Cluster(
            self.places,
            self.namespaces,
            self.writer,
            clock,
            settings.heartbeat_ttl,
            log_as=log_as,
        )
        self.reports = Reports(self.cluster, self.writer, self.metrics, clock)
        self.hot = HotPrefixes(self.writer, clock)
        self.evictions = Evictions(
            self.cluster,
            self.database,
            self.writer,
            clock,
            settings.transfer_retention,
            lambda node: self.transfers.wake(node),
            log_as,
        )
        self.instances = Instances(self.cluster)
        self.dumps = Dumps(self.instances)
        self.quotas = Quotas(self.database, self.writer, clock)
        self.usage = Usage(self.cluster, clock)
        self.shedding = Shedding(
            self.cluster,
            self.quotas,
            self.usage,
            self.evictions,
            self.metrics,
            clock,
            self.database.shared,
            lambda: self.follower.current_since if self.database.shared else 0.0,
        )
        self.turns = Turns(
            settings.transfers_per_node,
            settings.transfers_per_link,
            self.quotas.of_transfers,
            clock,
        )
        self.tenants = Tenants(self.quotas, self.usage, self.turns, self.evictions)
        self.transfers = Scheduler(
            self.cluster,
            self.database,
            self.writer,
            self.metrics,
            clock,
            settings.transfer_retention,
            self.turns,
            lambda node: [*self.evictions.commands(node), *self.drains.commands(node)],
            log_as,
        )
        self.follower = Follower(
            self.cluster,
            self.reports,
            self.database,
            self.writer,
            clock,
            name,
            self._reload,
            (self.transfers, self.evictions),
        )
        self.drains = Drains(
            self.cluster,
            self.database,
            self.writer,
            clock,
            settings.transfer_retention,
            self.transfers,
        )
        self.admission = Admission(
            self.quotas, self.usage, self.cluster, clock, lambda id_: id_ in self.transfers
        )
        self.usage.before = self.admission.arrivals
        self.ready = False
        self._tasks = Supervisor()
        self._version = version("kvstrata")

    async def open(self) -> None:
        """Raises `ConfigError` if the database can't be used, or anybody could use this server."""
        try:
            await self.database.migrate()
            await self.time.begin()
            await self.tokens.refresh()
            self._check_exposure()
            await self.quotas.load()
            await self.load()
        except BaseException as e:
            await self.database.close()
            if isinstance(e, Busy):
                raise ConfigError(f"server.database {self.database.shown}: {e}") from e
            raise
        self.database.read_seconds = _READ_SECONDS
        self._tasks.start("writer", self.writer.run)
        self._tasks.start("sweep", self._sweep)
        self._tasks.start("tokens", self.tokens.run)
        self._tasks.start("drains", self.drains.run)
        self._tasks.start("usage", self.usage.run)
        self._tasks.start("quotas", self.quotas.run)
        self._tasks.start("shedding", self.shedding.run)
        if self.database.shared:
            self._tasks.start("follower", self.follower.run)
            self._tasks.start("clock", self.time.run)
        self.ready = True

    def end_waits(self) -> None:
        """Answer those who wait for something to happen: the server ends."""
        self.transfers.close()
        self.feed.close()

    async def close(self) -> None:
        self.ready = False
        self.end_waits()
        await self.writer.drain(_FLUSH_TIMEOUT)
        await self._tasks.stop()
        await self.database.close()

    def _check_exposure(self) -> None:
        host, _ = split_address(self.settings.listen)
        if not self.tokens.required and not is_loopback(host):
            raise ConfigError(
                f"server.listen is {self.settings.listen!r} and there is no token, so anyone who "
                "reaches this host could use it: make one (`kvstrata token create`), set "
                "KVSTRATA_SERVER_TOKEN, or listen on 127.0.0.1"
            )

    def health(self) -> api.Health:
        tasks = [
            api.TaskHealth(name=name, healthy=state == "running", detail=state)
            for name, state in self._tasks.states.items()
        ]
        if problem := self.writer.problem or self.follower.problem:
            tasks.append(api.TaskHealth(name="database", healthy=False, detail=problem))
        if self.time.problem:
            tasks.append(api.TaskHealth(name="time", healthy=False, detail=self.time.problem))
        well = all(task.healthy for task in tasks)
        return api.Health(
            status="ok" if well else "degraded",
            version=self._version,
            tasks=tasks,
            restarts=self._tasks.restarts,
            unwritten_rows=self.writer.unwritten_rows,
        )

    def measure(self) -> bytes:
        """Metrics as Prometheus text."""
        for state in api.NodeState:
            count = sum(self.cluster.state(n) is state for n in self.cluster.nodes.values())
            self.metrics.nodes.labels(state.value).set(count)
        self.metrics.chunks.set(len(self.index))
        self.metrics.placements.set(self.index.placements)
        self.metrics.active_transfers.set(self.transfers.active)
        self.tenants.measure(self.metrics)
        self.metrics.unwritten_rows.set(self.writer.unwritten_rows)
        self.metrics.dropped_writes.set(self.writer.dropped)
        return self.metrics.text()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        forgotten = loop.time() - _FORGET_INTERVAL
        while True:
            self.transfers.expire()
            self.evictions.expire()
            self.evictions.settle()
            self.transfers.sweep()
            self.follower.tell()
            self.hot.flush()
            if loop.time() - forgotten >= _FORGET_INTERVAL:
                forgotten = loop.time()
                self.transfers.forget_old()
                self.evictions.forget_old()
                self.drains.forget_old()
                self.writer.put(ForgetAudit(self.clock() - self.settings.audit_retention))
                self.cluster.forget_old(_NODE_RETENTION)
                if self.database.shared:
                    self.writer.put(TrimLog(LOG_RETENTION), ForgetChunks())
            await asyncio.sleep(_SWEEP_INTERVAL)

    async def load(self) -> None:
        """What SQL knows."""
        await self.follower.begin()
        await load(self.cluster, self.database)
        await self.transfers.load()
        await self.evictions.load()
        await self.drains.load()

    async def _reload(self) -> None:
        self.ready = False
        self.cluster.clear()
        await self.follower.begin()
        await load(self.cluster, self.database)
        await self.transfers.load()
        await self.evictions.load()
        await self.drains.load()
        self.ready = True


def state_of(request: Request) -> ControlState:
    """The parts, for a route."""
    state = request.app.state.control
    if not isinstance(state, ControlState):
        raise TypeError("this app was not made by create_app")
    return state
