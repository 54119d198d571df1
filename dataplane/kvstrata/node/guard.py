"""One tier, as its node uses it: whatever the tier does, the node goes on.

A tier may be anybody's code, over a mount that hangs. So each call has a time at which the node
stops waiting: the deadline that the tier was told, and some grace. The call has failed then, but
it is not over: its memory stays the tier's until it returns, and what it took of the tier's
budget stays taken. That bounds the memory a stuck tier can hold, and each tier has a budget of
its own, so that none holds up another.

A tier with a call that is overdue is not asked any more (see `breaker`), until all such calls
have returned or a probe was answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvstrata.backoff import Backoff
from kvstrata.errors import LinkBroken
from kvstrata.keys import Key, make_key
from kvstrata.node.breaker import Breaker, Kind
from kvstrata.node.budget import Budget
from kvstrata.tiers.base import Item, Outcome, Tier, complete

__all__ = ["Guard", "Late"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

Late = Callable[[Sequence[Outcome]], object]
"""Told of a call that came to its end when nobody waited for it any more."""

GRACE = 2.0
LOOKUP_SECONDS = 2.0
_EVICT_SECONDS = 30.0
# A tier that answers at the very deadline it was told should still be heard.
_TOLD = 0.8
# One call of a tier that deletes file by file must not be overdue for being large.
_EVICT_KEYS = 4096
_FIRST_PROBE, _MOST_BETWEEN_PROBES = 1.0, 30.0


@dataclass(slots=True, eq=False)
class _Call(Generic[_T]):
    """`nbytes` of memory are the tier's while it runs. `left`: nobody waits for it any more;
    then `late` is told of its end."""

    what: str
    task: asyncio.Task[_T]
    nbytes: int
    timer: asyncio.TimerHandle | None = None
    overdue: bool = False
    left: bool = False
    late: Callable[[asyncio.Task[_T]], None] | None = None


class Guard:
    """Stands before `tier`. `kind` says what sort of tier it is where `tier.name` is a label of
    the user's. `grace` and `lookup_deadline` are seconds."""

    def __init__(
        self,
        tier: Tier,
        clock: Callable[[], float],
        *,
        kind: str = "",
        grace: float = GRACE,
        lookup_deadline: float = LOOKUP_SECONDS,
        on_error: Callable[[], None] = lambda: None,
        backoff: Backoff | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.tier = tier
        self.kind = kind or tier.name
        self.budget = Budget(1)
        self.breaker = Breaker(tier.name, wall, self._changed)
        self.overdue = 0
        self.loading = 0
        self.watchers: list[Callable[[], None]] = []
        """Called when the tier may take stores again, or has no more to load."""
        self._clock = clock
        self._grace = grace
        self._lookup_deadline = lookup_deadline
        self._on_error = on_error
        self._backoff = backoff or Backoff(_FIRST_PROBE, _MOST_BETWEEN_PROBES)
        self._sleep = sleep
        self._calls: set[_Call[Any]] = set()
        self._given_up: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closed = False
        self._probing: asyncio.Task[None] | None = None
        self._last_asked = make_key(bytes(16), 0, bytes(32))

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def store_id(self) -> str:
        return self.tier.store_id

    @property
    def stuck_calls(self) -> int:
        """How many calls run that nobody waits for."""
        return sum(call.left for call in self._calls)

    @property
    def stuck_bytes(self) -> int:
        """Of the region, and of no use until those calls return."""
        return sum(call.nbytes for call in self._calls if call.left)

    @property
    def room(self) -> int:
        """Bytes that can be loaded at a time: the budget without what is stuck of it."""
        if not self._calls:
            return self.budget.capacity
        stuck = sum(c.nbytes for c in self._calls if c.left and c.what == Kind.LOAD)
        return max(0, self.budget.capacity - stuck)

    def allows(self, kind: Kind) -> bool:
        """Whether a call would be made. Lookups that no load could follow are not."""
        if self._closed or not self.breaker.allows(kind):
            return False
        return kind is Kind.STORE or self.room > 0

    @property
    def trouble(self) -> str:
        """Why the node does not use it as it should, and since when; empty: it does."""
        told = self.breaker.trouble
        late = sum(call.overdue for call in self._calls)
        if late:
            told = f"{told or 'tried again'} (calls that have not returned: {late})"
        return told

    def keys(self) -> list[Key]:
        """What it holds; nothing, where it can't tell."""
        try:
            return self.tier.keys()
        except Exception:
            self._failed("keys")
            return []

    # ------------------------------------------------------------ calls

    async def lookup(self, keys: Sequence[Key], deadline: float) -> list[bool] | None:
        """Which keys it has; None if it did not say so by `deadline`, or is not asked at all."""
        if not self.allows(Kind.LOOKUP):
            return None
        now = self._clock()
        seconds = min(deadline - now, self._lookup_deadline)
        if seconds <= 0:
            return None  # it would be overdue for what another tier took
        self._last_asked = keys[-1]
        call = await self._call(
            Kind.LOOKUP,
            lambda: self.tier.lookup(keys, now + _TOLD * seconds),
            seconds,
            seconds + self._grace,
        )
        if call.left:
            if seconds >= self._lookup_deadline and not self._closed:
                self.breaker.failed(Kind.LOOKUP, f"no answer in {seconds:.3g} s")
            return None
        try:
            present = complete(_result(call.task), len(keys))
        except Exception as e:
            self._failed(Kind.LOOKUP)
            self.breaker.failed(Kind.LOOKUP, _reason(e))
            return None
        self.breaker.succeeded(Kind.LOOKUP)
        return list(present)

    async def load(
        self, batch: Sequence[Item], deadline: float, late: Late
    ) -> Sequence[Outcome] | None:
        """An outcome per item. None: the call is overdue, and the tier may go on writing to the
        items' memory until `late` is called."""
        self.loading += 1
        try:
            return await self._move(
                Kind.LOAD, lambda: self.tier.load(batch, deadline), batch, deadline, late
            )
        finally:
            self.loading -= 1
            if not self.loading:
                self._notify()

    async def store(
        self,
        batch: Sequence[Item],
        deadline: float,
        late: Late,
        kept: Callable[[list[Key]], None],
    ) -> Sequence[Outcome] | None:
        """An outcome per item. None: the call is overdue, and the tier may go on reading the
        items' memory until `late` is called.

        `kept` is told what the tier has in the very moment in which it says so: what it says next
        may be that it has dropped some of it.
        """

        async def work() -> Sequence[Outcome]:
            outcomes = complete(await self.tier.store(batch, deadline), len(batch))
            there = (Outcome.STORED, Outcome.PRESENT)
            kept([item.key for item, o in zip(batch, outcomes, strict=True) if o in there])
            return outcomes

        return await self._move(Kind.STORE, work, batch, deadline, late)

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each was there; of a tier that does not answer, none was."""
        gone: list[bool] = []
        for start in range(0, len(keys), _EVICT_KEYS):
            gone += await self._evict(keys[start : start + _EVICT_KEYS])
        return gone

    async def _evict(self, keys: Sequence[Key]) -> list[bool]:
        gone = [False] * len(keys)
        # A tier that takes no stores may well be in need of this.
        if self.allows(Kind.STORE) or self.allows(Kind.LOOKUP):
            seconds = _EVICT_SECONDS
            call = await self._call("evict", lambda: self.tier.evict(keys), seconds, seconds)
            if not call.left:
                try:
                    gone = list(complete(_result(call.task), len(keys)))
                except Exception:
                    self._failed("evict")
        return gone

    async def close(self, seconds: float) -> bool:
        """Close the tier. Whether nothing of it runs any more, after at most `seconds`; where
        something does, the items' memory must stay what it is. Idempotent."""
        self.give_up()
        if self._probing is not None:
            self._probing.cancel()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.tier.close())
        running: set[asyncio.Future[Any]] = {self._closing, *(c.task for c in self._calls)}
        await asyncio.wait(running, timeout=max(0.0, seconds))
        if self._closing.done():
            try:
                _result(self._closing)
            except Exception:
                _log.exception("tier %s did not close", self.name)
        return self._closing.done() and all(call.task.done() for call in self._calls)

    def give_up(self) -> None:
        """Wait for no call any more: those that run are as overdue ones, new ones are refused."""
        self._closed = True
        self.budget.close()
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(None)
        self._notify()

    # ------------------------------------------------------------ inside

    async def _move(
        self,
        kind: Kind,
        work: Callable[[], Awaitable[Sequence[Outcome]]],
        batch: Sequence[Item],
        deadline: float,
        late: Late,
    ) -> Sequence[Outcome] | None:
        if not self.allows(kind):
            return [Outcome.FAILED] * len(batch)

        def outcomes(task: asyncio.Task[Sequence[Outcome]]) -> Sequence[Outcome]:
            try:
                answers = complete(_result(task), len(batch))
            except Exception as e:
                self._failed(kind)
                self.breaker.failed(kind, _reason(e))
                return [Outcome.FAILED] * len(batch)
            if any(outcome is not Outcome.FAILED for outcome in answers):
                self.breaker.succeeded(kind)
            elif self._clock() < deadline:  # else it had no time, and that is not its fault
                self.breaker.failed(kind, "it said so of every chunk")
            return answers

        def ended(task: asyncio.Task[Sequence[Outcome]]) -> None:
            late(outcomes(task))

        seconds = deadline + self._grace - self._clock()
        nbytes = sum(len(item.view) for item in batch)
        call = await self._call(kind, work, seconds, seconds, nbytes, ended)
        return None if call.left else outcomes(call.task)

    async def _call(
        self,
        what: str,
        work: Callable[[], Awaitable[_T]],
        wait: float,
        due: float,
        nbytes: int = 0,
        late: Callable[[asyncio.Task[_T]], None] | None = None,
    ) -> _Call[_T]:
        """Call, and wait for its end at most `wait` seconds; after `due` seconds it is overdue."""
        loop = asyncio.get_running_loop()
        if self._given_up is None:
            self._given_up = loop.create_future()

        async def run() -> _T:
            return await work()

        call = _Call(what, loop.create_task(run()), nbytes, late=late)
        self._calls.add(call)
        call.timer = loop.call_later(max(0.0, due), self._is_overdue, call, due)
        call.task.add_done_callback(lambda _: self._returned(call))
        ends: set[asyncio.Future[Any]] = {call.task, self._given_up}
        try:
            await asyncio.wait(
                ends,
                timeout=max(0.0, wait),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            call.left = not call.task.done()
        return call

    def _is_overdue(self, call: _Call[Any], seconds: float) -> None:
        if call.task.done():
            return
        call.overdue = True
        self.overdue += 1
        self.breaker.overdue(f"a {call.what} has not returned after {seconds:.3g} s")

    def _returned(self, call: _Call[Any]) -> None:
        self._calls.discard(call)
        if call.timer is not None:
            call.timer.cancel()
        if call.left:
            if call.late is not None:
                call.late(call.task)
            elif not call.task.cancelled():
                call.task.exception()  # seen, though nobody cares
        if call.overdue and not any(other.overdue for other in self._calls):
            self.breaker.try_again()

    def _failed(self, what: str) -> None:
        _log.exception("tier %s: %s failed", self.name, what)
        self._on_error()

    # ------------------------------------------------------------ coming back

    def _changed(self) -> None:
        if self.breaker.closed:
            self._backoff.reset()
        if self.breaker.open and not self._closed and self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe())
        self._notify()

    def _notify(self) -> None:
        for watcher in self.watchers:
            watcher()

    async def _probe(self) -> None:
        """Ask now and then until it is used again. One question at a time: a tier that hangs
        should not have its threads filled up with them."""
        try:
            while self.breaker.open:
                await self._sleep(self._backoff.next())
                if self.breaker.open and not any(c.what == "probe" for c in self._calls):
                    await self._ask()
        finally:
            self._probing = None

    async def _ask(self) -> None:
        # As long as a lookup has: one that is slow but well must be able to come back.
        seconds = self._lookup_deadline
        until = self._clock() + _TOLD * seconds
        call = await self._call(
            "probe",
            lambda: self.tier.lookup([self._last_asked], until),
            seconds,
            seconds + self._grace,
        )
        if call.left:
            return
        try:
            complete(_result(call.task), 1)
        except Exception as e:
            _log.info("tier %s is still degraded: %s", self.name, _reason(e))
            return
        self.breaker.try_again()


def _result(task: asyncio.Task[_T]) -> _T:
    """Of a task that is done. One that somebody cancelled inside of the tier has failed."""
    if task.cancelled():
        raise LinkBroken("the tier cancelled the call")
    return task.result()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
