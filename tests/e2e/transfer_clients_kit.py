"""Orchestrators that ask for transfers, whatever happens to those they ask, and what they saw."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from cluster_kit import TOKEN
from killed_cluster_kit import (
    ALL,
    BOTHS,
    NOBODYS,
    NUMBERS,
    ONES,
    OWN,
    PAGE,
    TARGETS,
    TWOS,
    Engine,
    Reading,
    key,
)

from kvstrata.api import TransferInfo, TransferRequest
from kvstrata.control import ControlPlane
from kvstrata.errors import Busy, LinkBroken
from kvstrata.keys import Key

__all__ = ["Asked", "Orchestrators", "Plan", "planned"]

T = TypeVar("T")

DEADLINE = 20.0
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One transfer. `leaves_after` is when its client drops its first request, `cancels_after`
    when it thinks better of it, in seconds; `follows`: it is told of changes, else it asks now and
    then; `releases`: it ends the hold once it has read."""

    name: str
    request: TransferRequest
    leaves_after: float | None
    cancels_after: float | None
    follows: bool
    releases: bool

    @property
    def numbers(self) -> list[int]:
        return [NUMBERS[Key(bytes.fromhex(text))] for text in self.request.keys]


@dataclass(slots=True)
class Asked:
    """What became of it, as its client saw it. Times are seconds since the epoch."""

    plan: Plan
    began: float
    id: str = ""
    cancelled: bool = False
    seen: TransferInfo | None = None
    readings: list[Reading] = field(default_factory=list)


def planned(name: str, rng: random.Random) -> Plan:
    target = rng.choice(TARGETS)
    among: Sequence[int] = rng.choice([ONES, TWOS, BOTHS, BOTHS, NOBODYS, OWN, ALL, ALL, ALL])
    numbers = rng.sample(among, rng.randint(1, 6))
    source = rng.choices(
        ["any", "s1", "s2", "own", "t1" if target == "t2" else "t2"], [9, 4, 4, 2, 1]
    )
    short = rng.random() < 0.08
    pages = rng.randint(1, len(numbers))
    request = TransferRequest(
        target=target,
        keys=[key(n).hex() for n in numbers],
        source=source[0],
        priority=rng.randint(0, 9),
        deadline=rng.uniform(0.005, 0.3) if short else DEADLINE,
        hold=rng.choice([0.0, 1.5, 4.0]),
        byte_budget=pages * PAGE + rng.choice([0, 1]) if rng.random() < 0.2 else None,
    )
    return Plan(
        name,
        request,
        leaves_after=rng.uniform(0.001, 0.05) if rng.random() < 0.1 else None,
        cancels_after=rng.uniform(0, 0.3) if rng.random() < 0.08 else None,
        follows=rng.random() < 0.5,
        releases=rng.random() < 0.6,
    )


class Orchestrators:
    """Clients of the control planes at `urls`. A request that fails is sent again, to the next."""

    def __init__(self, urls: Sequence[str], engines: Mapping[str, Engine]) -> None:
        self._controls = [ControlPlane(url, TOKEN, timeout=5) for url in urls]
        self._streams = [
            httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=5)
            for url in urls
        ]
        self._engines = engines
        self._next = 0
        self._late: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for client in self._controls:
            await client.close()
        for stream in self._streams:
            await stream.aclose()

    async def call(self, ask: Callable[[ControlPlane], Awaitable[T]]) -> T:
        """Until it is answered. What is no sign of a server that dies is raised."""
        until = time.monotonic() + _PATIENCE
        while True:
            self._next += 1
            try:
                return await ask(self._controls[self._next % len(self._controls)])
            except (LinkBroken, Busy) as e:
                if time.monotonic() > until:
                    raise AssertionError(f"nobody answered in {_PATIENCE:g} s: {e}") from e
                await asyncio.sleep(random.uniform(0.3, 0.8))

    async def create(self, plan: Plan) -> TransferInfo:
        return await self.call(lambda c: c.create_transfer(plan.request, plan.name))

    async def run(self, asked: Asked) -> None:
        """Ask for it, watch it to its end, and read at its target what it brought."""
        plan = asked.plan
        if plan.leaves_after is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(plan.leaves_after):
                    await self.create(plan)
        asked.id = (await self.create(plan)).id
        if plan.cancels_after is not None:
            await asyncio.sleep(plan.cancels_after)
            asked.cancelled = True
            await self.call(lambda c: c.cancel_transfer(asked.id))
        asked.seen = await self._ended(asked)
        await self._read(asked)
        if plan.releases:
            await self.call(lambda c: c.cancel_transfer(asked.id))
        else:
            late = asyncio.create_task(self._read(asked, 0.7 * plan.request.hold))
            self._late.add(late)
            late.add_done_callback(self._late.discard)

    async def _read(self, asked: Asked, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        reading = await self._engines[asked.plan.request.target].read(asked.plan.numbers)
        if reading is not None:
            asked.readings.append(reading)

    async def all_read(self) -> None:
        """What is held is read once more before its time is over."""
        await asyncio.gather(*self._late)

    async def _ended(self, asked: Asked) -> TransferInfo | None:
        pause = 0.3
        until = time.time() + asked.plan.request.deadline + _PATIENCE
        while time.time() < until:
            if asked.plan.follows:
                await self._follow(asked.id)
            info = await self.call(lambda c: c.get_transfer(asked.id))
            if info.state.ended:
                return info
            await asyncio.sleep(pause)
            pause = min(0.8, pause * 1.5)
        return None

    async def _follow(self, transfer: str) -> None:
        """Until its end, or that of the server."""
        self._next += 1
        stream = self._streams[self._next % len(self._streams)]
        with contextlib.suppress(httpx.TransportError):
            async with stream.stream("GET", f"/v1/transfers/{transfer}/events") as events:
                async for _ in events.aiter_bytes():
                    pass
