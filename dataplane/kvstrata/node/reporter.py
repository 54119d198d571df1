"""Keeps the control plane informed, and carries out what it asks.

    register ──▶ report · heartbeat · poll for commands      side by side, until the server says
       ▲                          │                          that it doesn't know us
       └──────────────────────────┘

Nothing here holds up the node: a server that is away, slow or wrong is tried again with
back-off, and `status` says so. What changes meanwhile is kept, one word per key, until that
would be more than a snapshot.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable

from kvstrata import api
from kvstrata.backoff import Backoff
from kvstrata.config import ControlSettings
from kvstrata.control import ControlPlane
from kvstrata.errors import Expired, KVStrataError, LinkBroken, Malformed, Missing
from kvstrata.node.evicting import Evicting
from kvstrata.node.outbox import Outbox
from kvstrata.node.pulling import Puller
from kvstrata.node.reported import Reported
from kvstrata.node.storing import Storing

__all__ = ["Reporter"]

_log = logging.getLogger(__name__)

_POLL_WAIT = 20.0
_GOODBYE_TIMEOUT = 2.0
_UNREACHABLE = "unreachable"

Sleep = Callable[[float], Awaitable[None]]


class Reporter:
    """Runs beside a node; `status` tells how it stands with the server.

    `clock` is monotonic and the one that deadlines of pulls are given in. `control` is by
    default a client made from the settings. Raises `ConfigError` on an impossible address.
    """

    def __init__(
        self,
        settings: ControlSettings,
        reported: Reported,
        *,
        control: ControlPlane | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        new_backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self.registered = False
        self._phase = "not started"
        self._troubles: dict[str, str] = {}
        self._back = asyncio.Event()
        self._reported = reported
        self._control = control or ControlPlane(settings.url, settings.token, ca=settings.ca)
        self._report_interval = settings.report_interval
        self._heartbeat_interval = settings.heartbeat_interval
        self._sleep = sleep
        self._new_backoff = new_backoff
        self._outbox = Outbox(reported)
        self._puller = Puller(reported, self._post, clock=clock, sleep=sleep)
        self._evicting = Evicting(reported, self._post_eviction, self._all_reported)
        self._storing = Storing(reported, self._post_stored)
        self._node = ""
        self._incarnation = ""
        self._events: list[api.EventsAt] = []
        self._version = ""
        self._beats = itertools.count()
        self._last_beat = -1
        """Number of the latest heartbeat that was answered."""
        self._settled_at: int | None = None
        """Since the node takes no new chunks: the outbox's mark of what it held then."""
        self._closed = False
        self._running: asyncio.Task[None] | None = None

    @property
    def status(self) -> str:
        """`connected`, or what stands in the way of that, in words."""
        return (
            self._phase if not self.registered else next(iter(self._troubles.values()), "connected")
        )

    async def run(self) -> None:
        """Report until cancelled, or closed. Runs once at a time; may be run again."""
        if self._closed:
            return
        self._running = asyncio.create_task(self._run(), name="reporting")
        try:
            await asyncio.wait([self._running])
        finally:
            self._running.cancel()
            await asyncio.wait([self._running])
        if not self._running.cancelled():
            self._running.result()

    async def _run(self) -> None:
        try:
            while True:
                await self._register()
                try:
                    await self._serve()
                except _Unknown as e:
                    self.registered = False
                    self._phase = f"registering again: {e}"
                    _log.log(e.level, "%s", self._phase)
                    await self._sleep(e.delay)
        finally:
            self.registered = False
            await self._puller.close()
            await self._evicting.close()
            await self._storing.close()

    async def close(self) -> None:
        """Stop, tell the server that this node leaves if it can be told quickly, and hang up."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        if self._node:
            try:
                async with asyncio.timeout(_GOODBYE_TIMEOUT):
                    await self._control.deregister(self._node, self._incarnation)
            except (KVStrataError, TimeoutError) as e:
                _log.info("left without a goodbye to the control plane: %s", e)
        self._phase = "closed"
        await self._control.close()

    # ------------------------------------------------------------ registration

    async def _register(self) -> None:
        backoff = self._new_backoff()
        if not self._phase.startswith("registering"):
            self._phase = "registering"
        while True:
            registration = self._reported.registration()
            try:
                reply = await self._control.register(registration)
            except KVStrataError as e:
                versions = await self._versions(e, registration.version)
                self._phase = self._noted(self._phase, e, versions)
                self._outbox.collect()  # what piles up at the node has no bound, here it has
                await self._sleep(backoff.next())
                continue
            self._node, self._incarnation = registration.id, registration.incarnation
            self._events, self._version = registration.events, registration.version
            self._outbox.registered(reply.next_seq)
            self._heartbeat_interval = min(self._heartbeat_interval, reply.heartbeat_ttl / 3)
            self._troubles.clear()
            self.registered = True
            return

    async def _serve(self) -> None:
        """The three loops. Raises `_Unknown` once one of them learns that we aren't known."""
        loops = (self._report, self._beat, self._poll)
        tasks = [asyncio.create_task(self._keep(loop.__name__, loop)) for loop in loops]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str, once: Callable[[], Awaitable[None]]) -> None:
        """Do it again and again; after a failure with back-off."""
        backoff = self._new_backoff()
        while True:
            try:
                await once()
            except Missing as e:
                raise _Unknown(str(e), 0.0, logging.INFO) from e
            except Expired as e:
                # Two nodes with one id would take it from each other in turns: slowly, then.
                delay = 5 * self._heartbeat_interval
                raise _Unknown(str(e), delay, logging.WARNING) from e
            except KVStrataError as e:
                versions = await self._versions(e, self._version)
                self._troubles[name] = self._noted(self._troubles.get(name, ""), e, versions)
                await self._rest(backoff.next(), e)
            except Exception as e:
                _log.exception("reporting failed; it starts again")
                self._troubles[name] = f"failing: {type(e).__name__}: {e}"
                await self._sleep(backoff.next())
            else:
                self._troubles.pop(name, None)
                backoff.reset()

    def _answered(self) -> None:
        """The server is there: loops that found it away try again at once, and are in no trouble
        until they fail. One of them may then wait long for its answer, as it should."""
        away = [name for name, t in self._troubles.items() if t.startswith(_UNREACHABLE)]
        for name in away:
            del self._troubles[name]
        if away:
            self._back.set()

    async def _rest(self, seconds: float, error: KVStrataError) -> None:
        """Before the next try: so long, or until the server is known to be back."""
        waits = [asyncio.ensure_future(self._sleep(seconds))]
        if isinstance(error, LinkBroken):
            self._back.clear()
            waits.append(asyncio.ensure_future(self._until_back()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _until_back(self) -> None:
        await self._back.wait()

    async def _versions(self, error: KVStrataError, ours: str) -> str:
        """What a message that the server finds malformed may be for: it is of another version."""
        if not isinstance(error, Malformed):
            return ""
        try:
            theirs = (await self._control.health()).version
        except KVStrataError:
            theirs = "unknown"
        if theirs == ours:
            return ""
        return (
            f" (this node's version is {ours}, the server's {theirs}: "
            "servers are to be upgraded before nodes)"
        )

    @staticmethod
    def _noted(before: str, error: KVStrataError, hint: str) -> str:
        """What is wrong, in words; logged where that is news."""
        status = f"{_UNREACHABLE if isinstance(error, LinkBroken) else 'refused'}: {error}{hint}"
        if status != before:
            _log.warning("control plane %s", status)
        return status

    # ------------------------------------------------------------ the loops

    async def _report(self) -> None:
        self._outbox.collect()
        report = self._outbox.next(self._incarnation)
        if report is None:
            await self._sleep(self._report_interval)
            return
        try:
            reply = await self._control.report(self._node, report)
        except (LinkBroken, Missing, Expired):
            raise
        except KVStrataError as e:
            self._outbox.refused(e)
            raise
        self._answered()
        self._outbox.answered(reply)
        if not reply.applied:
            await self._sleep(self._report_interval)

    async def _beat(self) -> None:
        await self._heartbeat()
        await self._sleep(self._heartbeat_interval)

    async def _heartbeat(self) -> None:
        number = next(self._beats)
        self._outbox.collect()
        healthy, detail = self._reported.health()
        reply = await self._control.heartbeat(
            self._node,
            api.HeartbeatRequest(
                incarnation=self._incarnation,
                host=self._reported.host_use(),
                healthy=healthy,
                detail=detail[:2000],
                ailing=list(self._reported.ailing()),
                next_seq=self._outbox.next_seq,
                events=self._events,
                version=self._version,
                settled=self._settled_at is not None
                and self._outbox.has_reported(self._settled_at),
            ),
        )
        self._answered()
        if number > self._last_beat:  # two may be under way, and the later one answered first
            self._last_beat = number
            self._obey(reply.draining)
        if reply.snapshot_wanted:
            self._outbox.want_snapshot()

    def _obey(self, draining: bool) -> None:
        """What comes and goes later, by loads and evictions, need not be reported to settle: there
        is always some of it."""
        self._reported.draining = draining
        if not draining:
            self._settled_at = None
        elif self._settled_at is None:
            self._outbox.collect()
            self._settled_at = self._outbox.mark()

    async def _poll(self) -> None:
        batch = await self._control.commands(self._node, self._incarnation, _POLL_WAIT)
        self._answered()
        if not batch.commands:
            # A server that is about to end answers at once: no reason to ask it all the time.
            await self._sleep(self._report_interval)
        # A server of a later version may ask for what this one doesn't know.
        self._evicting.handle([c for c in batch.commands if c.kind in ("evict", "shed")])
        self._storing.handle([c for c in batch.commands if c.kind == "store"])
        if any(c.kind == "beat" for c in batch.commands):
            await self._heartbeat()
        await self._puller.handle([c for c in batch.commands if c.kind in ("pull", "cancel")])

    async def _post(self, progress: api.Progress) -> api.ProgressReply:
        return await self._control.progress(self._node, progress)

    async def _all_reported(self) -> None:
        """Wait until what has changed by now is reported."""
        self._outbox.collect()
        mark = self._outbox.mark()
        while not self._outbox.has_reported(mark):
            await self._sleep(self._report_interval)

    async def _post_eviction(self, eviction: str, result: api.EvictionResult) -> None:
        await self._control.eviction_result(self._node, eviction, result)

    async def _post_stored(self, order: str, result: api.StoreResult) -> None:
        await self._control.store_result(self._node, order, result)


class _Unknown(Exception):  # noqa: N818 - a turn of events, seen by nobody else
    """The server doesn't know this incarnation of the node."""

    def __init__(self, why: str, delay: float, level: int) -> None:
        super().__init__(why)
        self.delay = delay
        self.level = level
