"""A node: the region, the tiers and the ports of one host, put together and taken apart."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from kvstrata import __version__, wire
from kvstrata.api import NodeRegistration
from kvstrata.config import NodeSettings, run_dir
from kvstrata.errors import ConfigError
from kvstrata.keys import DIGEST_BYTES, Key, Namespace
from kvstrata.node.breaker import Kind
from kvstrata.node.controlled import Controlled
from kvstrata.node.ending import Ending
from kvstrata.node.engine_port import EnginePort
from kvstrata.node.events import EventPublisher
from kvstrata.node.events_memory import EventMemory
from kvstrata.node.grants import Grants
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.peer_port import PeerPort
from kvstrata.node.pulls import Pulls
from kvstrata.node.status import tier_statuses, tier_trouble
from kvstrata.node.store import Store
from kvstrata.node.supervisor import Supervisor
from kvstrata.peer_wire import parse_address
from kvstrata.region import Region, sweep
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.opening import open_tier
from kvstrata.tiers.peer import PeerTier
from kvstrata.tiers.peer_links import PeerLinks
from kvstrata.transports import Transport, start_transports

__all__ = ["Node"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_EXPIRY_INTERVAL = 0.25
_DRAIN_SECONDS = 5.0
_SCRAPE_SECONDS = 5.0
# Transports give up what is late themselves, after 2 s.
_PEER_GRACE = 5.0


class Node:
    """A running node. `await Node.start(settings)`, then `serve`, then `close`."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.incarnation = secrets.token_hex(8)
        self.namespaces = Namespaces()
        self.supervisor = Supervisor()
        self._clock = time.monotonic
        self._began = self._clock()
        self._ending = Ending(self._clock, settings.stop_deadline)
        self._links: PeerLinks | None = None
        self._peers: PeerPort | None = None
        self._transports: list[Transport] = []
        self.events: list[EventPublisher] = []
        self._memory: EventMemory | None = None

    @classmethod
    async def start(cls, settings: NodeSettings) -> Node:
        """Bring everything up, or nothing. Raises `ConfigError`."""
        node = cls(settings)
        await node.open()
        return node

    async def open(self) -> None:
        """Bring everything up, or nothing. Raises `ConfigError`."""
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Take everything down, the region last, in about `stop_deadline` seconds. Idempotent.

        What hangs is left behind and named in `stuck`; the region then stays mapped, without its
        file, because there may be a thread that writes to it.
        """
        await self._ending.close()

    @property
    def stuck(self) -> list[str]:
        """Parts that did not end when the node was closed, and may touch the region still."""
        return self._ending.stuck

    async def _close_store(self) -> None:
        # Less than is waited for it: it is to say itself what is stuck.
        stuck = await self.store.close(0.8 * self._ending.time_left)
        self._ending.stuck += [f"tier {name}" for name in stuck]

    def _close_region(self) -> None:
        if self.stuck:
            _log.error("the region stays mapped, since these still run: %s", ", ".join(self.stuck))
            self.region.abandon()
        else:
            self.region.close()

    # ------------------------------------------------------------ parts

    async def _open(self) -> None:
        settings, host = self.settings, self.settings.host
        socket = settings.socket_path
        lock = _lock(socket)
        self._ending.add_quick(lambda: os.close(lock))
        for name in await asyncio.to_thread(sweep, host.shm_dir):
            _log.warning("removed region %s of a node that died", name)
        region = Region.create(
            settings.id,
            self.incarnation,
            int(host.capacity),
            host.shm_dir,
            populate=False,
            huge_pages=host.huge_pages == "auto",
            numa_node=host.numa_node,
        )
        self.region = region
        self._ending.add_quick(self._close_region)
        if host.populate:
            # Closing the region ends it, should the start be cancelled.
            await asyncio.to_thread(region.populate)
        self.store = Store(region.view, host, self.namespaces, self._clock)
        self.store.placements.enabled = bool(settings.control.url)
        await self._open_events()
        self._ending.add("store", self._close_store)
        self.grants = Grants(self.store, settings.peers.lease_ttl)
        await self._open_peers()
        await self._open_tiers()
        self._ending.add("loops", self.supervisor.stop)
        if self._memory is not None:
            await self._recall_events(self._memory)
            self.supervisor.start("event memory", self._memory.run)
        for n, publisher in enumerate(self.events):
            self.supervisor.start(f"events {n}", publisher.run)
            self.supervisor.start(f"event replays {n}", publisher.serve_replays)
        self._ending.add("cascades", lambda: self.store.quiesce(self.settings.stop_deadline / 5))
        self.engines = EnginePort(socket, self.store, self._welcome, self.status)
        self._ending.add("engine port", self.engines.close)
        await self.engines.start()
        if settings.metrics:
            await self._open_metrics()
        self.supervisor.start("engine port", self.engines.run)
        self.supervisor.start("expiry", self._expire)
        for cascade in self.store.cascades:
            self.supervisor.start(f"cascade to {cascade.tier.name}", cascade.run)
        self._ending.add("drain", self._drain)
        if settings.control.url:
            await self._open_reporter()

    async def _open_events(self) -> None:
        """First of all that stores: publishers hear of everything from the beginning."""
        for settings in self.settings.events:
            publisher = EventPublisher(settings, self.namespaces.get)
            self._ending.add("events", publisher.close)
            await publisher.start()
            self.events.append(publisher)
        self.store.placements.watchers.extend(self.events)
        if self.settings.event_memory is not None and self.events:
            memory = EventMemory(self.settings.event_memory, self.namespaces, self._tell_publishers)
            self._ending.add("event memory", memory.close)
            await memory.open()
            self.store.placements.watchers.append(memory)
            self._memory = memory

    def _tell_publishers(self, tells: Sequence[wire.Told]) -> None:
        for publisher in self.events:
            publisher.told(tells)

    async def _recall_events(self, memory: EventMemory) -> None:
        """What stores brought along can be published by what was told of it before."""
        for tier in self.store.tiers:
            if tier.writable:
                await memory.recall(list(tier.keys()))

    async def _open_peers(self) -> None:
        peers = self.settings.peers
        if not (peers.listen or peers.static or self.settings.control.url):
            return
        listen_host = parse_address(peers.listen).host if peers.listen else ""
        self._transports = await start_transports(
            peers.transports,
            self.region.view,
            self.grants.authorize,
            listen_host,
            opened=lambda t: self._ending.add(f"transport {t.name}", t.close),
        )
        self._links = PeerLinks(peers, self.settings.id, self.incarnation, self._transports)
        self._ending.add("peer links", self._links.close)
        self.pulls = Pulls(self.store, self._links)
        self._ending.add("pulls", self.pulls.close)
        if peers.listen:
            port = PeerPort(
                peers, self.settings.id, self.incarnation, self.grants, self._transports
            )
            self._ending.add("peer port", port.close)
            await port.start()
            self._peers = port

    async def _open_tiers(self) -> None:
        for settings in self.settings.tiers:
            # A tier may drop chunks while it opens; its name is known only after.
            location: list[str] = []
            tier, kind = await open_tier(settings, self._context(location))
            location += [tier.name, tier.store_id]
            try:
                self.store.attach(
                    tier,
                    settings.cascade,
                    kind=kind,
                    grace=settings.grace,
                    lookup_deadline=settings.lookup_deadline,
                )
            except ConfigError:
                await tier.close()
                raise
            self.store.placements.added(tier.store_id, tier.keys())
        if self.settings.peers.static and self._links is not None:
            peers = PeerTier(self._links, self.settings.peers.static, self._context([]))
            self.store.attach(peers, grace=_PEER_GRACE)

    def _context(self, location: list[str]) -> TierContext:
        def removed(keys: Sequence[Key]) -> None:
            if location:
                name, store_id = location
                self.store.placements.removed(store_id, keys)
                self.store.lost(name, keys)

        def found(keys: Sequence[Key]) -> None:
            if location:
                self.store.placements.added(location[1], keys)
                if self._memory is not None:
                    self._memory.found(keys)

        return TierContext(self.settings.id, self._clock, self.namespaces.get, removed, found)

    async def _open_metrics(self) -> None:
        from kvstrata.node.metrics import NodeCollector, serve
        from kvstrata.tiers.wrappers.metered import TierMetrics

        loop = asyncio.get_running_loop()

        def on_loop(read: Callable[[], T]) -> T:
            # What it reads changes there. Scrapes come from threads.
            async def work() -> T:
                return read()

            return asyncio.run_coroutine_threadsafe(work(), loop).result(_SCRAPE_SECONDS)

        server, thread = serve(
            self.settings.metrics,
            [
                NodeCollector(lambda: on_loop(lambda: self.status(0))),
                TierMetrics(lambda: self.store.tiers),
            ],
            lambda: on_loop(self.health),
        )
        self.metrics_port = server.server_port

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._ending.add("metrics", lambda: asyncio.to_thread(stop))

    async def _open_reporter(self) -> None:
        from kvstrata.node.reporter import Reporter

        self.reporter = Reporter(self.settings.control, self.controlled())
        self.supervisor.start("reporter", self.reporter.run)
        self._ending.add("reporter", self.reporter.close)

    def controlled(self) -> Controlled:
        """As the control plane knows this node, which may have peers."""
        registered = NodeRegistration(
            id=self.settings.id,
            incarnation=self.incarnation,
            peer_address=self._peers.address if self._peers is not None else None,
            transports=[transport.name for transport in self._transports],
            capacity_bytes=self.region.size,
            events=[publisher.at for publisher in self.events],
            version=__version__,
        )
        return Controlled(registered, self.store, self.pulls, self.health)

    async def _expire(self) -> None:
        while True:
            self.store.host.expire()
            if self.namespaces.crowded:
                used = {key[:DIGEST_BYTES] for key in self.store.host.keys()}  # noqa: SIM118
                used |= {s.namespace.digest for s in self.engines.sessions.values() if s.namespace}
                self.namespaces.prune(used)
            await asyncio.sleep(_EXPIRY_INTERVAL)

    async def _drain(self) -> None:
        """What was offered to a tier should be in it before the region goes."""
        seconds = min(_DRAIN_SECONDS, self.settings.stop_deadline / 3)
        willing = [c for c in self.store.cascades if c.guard.allows(Kind.STORE)]
        for cascade in willing:
            cascade.flush()
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(cascade.drain() for cascade in willing))
        except TimeoutError:
            _log.warning("tiers did not take everything within %g s", seconds)

    def _welcome(self, namespace: Namespace | None) -> wire.Welcome:
        return wire.Welcome(
            self.settings.id,
            self.incarnation,
            str(self.region.path.parent),
            self.region.name,
            self.region.size,
            self.settings.host.lease_ttl,
            namespace,
            bool(self.events),
        )

    # ------------------------------------------------------------ state

    def status(self, seq: int) -> wire.StatusReply:
        return wire.StatusReply(
            seq,
            self.settings.id,
            self.incarnation,
            self._clock() - self._began,
            tier_statuses(self.store),
            [session.label for session in self.engines.sessions.values()],
            [namespace.digest.hex() for namespace in self.namespaces.all()],
            self._counters(),
            self.supervisor.states | self._peer_states(),
        )

    def _counters(self) -> dict[str, int]:
        counters: dict[str, int] = {
            name: value
            for name, value in asdict(self.store.counters).items()
            if isinstance(value, int)
        }
        counters |= {f"{tier}_hits": n for tier, n in self.store.counters.tier_hits.items()}
        counters["malformed"] = self.engines.malformed
        loops = [self.supervisor] + ([self._peers.loops] if self._peers is not None else [])
        counters["restarts"] = sum(loop.restarts for loop in loops)
        counters["lent"] = self.grants.lent
        for publisher in self.events:
            for name, n in publisher.status.items():
                counters[f"events_{name}"] = counters.get(f"events_{name}", 0) + n
        if self._links is not None:
            counters |= {"pulled": self.pulls.chunks, "pulled_bytes": self.pulls.bytes}
            counters |= {f"peer_{name}": n for name, n in self._links.counters.items()}
        if self._peers is not None:
            counters |= {f"peer_port_{name}": n for name, n in self._peers.counters.items()}
        return counters

    def _peer_states(self) -> dict[str, str]:
        states = {}
        if self._peers is not None:
            states["peer port"] = f"listening at {self._peers.address}"
        for n, publisher in enumerate(self.events):
            states[f"events {n} at"] = " ".join(
                filter(None, (publisher.address, publisher.replay_address))
            )
        if self._links is not None:
            states |= {f"peer {a}": reason for a, reason in self._links.reasons.items()}
        if self.settings.control.url:
            states["control plane"] = self.reporter.status
        if self.store.draining:
            states["drain"] = "takes no new chunks: the control plane has it drained"
        return states

    def health(self) -> tuple[bool, str]:
        """Whether the node is well, and if not, why."""
        failing = self.supervisor.failing
        if self._peers is not None:
            failing |= self._peers.loops.failing
        trouble = [f"{name}: {state}" for name, state in failing.items()]
        trouble += [
            f"{guard.name}: {told}" for guard in self.store.guards if (told := tier_trouble(guard))
        ]
        return not trouble, "; ".join(trouble)[:2000]


def _lock(socket: Path) -> int:
    """Make the socket this process's own for life. Raises `ConfigError` if another node has it."""
    _make_room(socket)
    fd = os.open(
        socket.with_name(socket.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(fd)
        raise ConfigError(
            f"another node serves {socket}: stop it, or give this one its own `id` or `socket`"
        ) from e
    return fd


def _make_room(socket: Path) -> None:
    """Make the socket's directory where there is none. What is above that has been misspelt, or is
    yet to be mounted, but for the place of sockets that are given none. Raises `ConfigError`."""
    folder = socket.parent
    if folder.is_dir():
        return
    missing = [above for above in folder.parents if not above.exists()]
    if missing and not folder.is_relative_to(run_dir()):
        raise ConfigError(
            f"`socket` {socket}: {missing[-1]} does not exist: make it, or choose another path"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _log.info("made %s for the socket, for this user alone", folder)
