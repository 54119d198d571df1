"""How fast and how often the obj tier asks: bytes a second, and tries of one request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvstrata.tiers.calls import Call
from kvstrata.tiers.obj_conditions import Condition, Fault, meaning

__all__ = ["Retry", "TokenBucket"]

T = TypeVar("T")

_BURST = 0.1  # seconds


class TokenBucket:
    """Of one direction: `rate` bytes a second, None for no bound. For one event loop."""

    def __init__(
        self,
        rate: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()

    async def take(self, nbytes: int) -> None:
        """Return when that many may pass, in the order of the calls."""
        if self._rate is None:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now - _BURST) + nbytes / self._rate
        if self._free_at > now:
            await self._sleep(self._free_at - now)


class Retry:
    """Tries a request again while that may help: up to `attempts` times, and never past the
    deadline of its call.

    Waits have full jitter: any time up to `base` seconds doubled with each failure, at most `cap`.
    """

    def __init__(
        self,
        attempts: int,
        base: float = 0.05,
        cap: float = 5.0,
        rand: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._attempts = attempts
        self._base, self._cap = base, cap
        self._rand, self._sleep = rand, sleep
        self.retries = 0
        """How often a request was tried again."""

    async def run(self, call: Call, request: Callable[[], Awaitable[T]]) -> T:
        """What it returns. Raises what its error means: see `obj_conditions`."""
        for failures in range(self._attempts):
            try:
                return await request()
            except Exception as e:
                error = meaning(e)
                if not (isinstance(error, Fault) and error.again and failures + 1 < self._attempts):
                    raise error from e
                wait = self._rand() * min(self._cap, self._base * 2.0**failures)
                if call.stopped or call.left() <= wait:
                    # It says less of the store than if every try had failed.
                    told = f"no time to try again after {error}"
                    raise Fault(Condition.TIMEOUT, told) from e
            self.retries += 1
            await self._sleep(wait)
        raise AssertionError("attempts is at least 1")
