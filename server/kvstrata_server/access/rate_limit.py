"""How often somebody may ask: a token bucket each, so that one client can't starve the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["RateLimit"]

_MOST_CLIENTS = 10_000


@dataclass(slots=True)
class _Bucket:
    left: float
    filled: float


class RateLimit:
    """`rate` requests a second and client on average, `burst` at once; a rate of 0: no limit.

    Clients beyond the 10,000 heard from last start anew.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = max(1.0, burst)  # less than one request would be none, ever
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait(self, client: str) -> float:
        """Count a request: 0 if it may go on, else the seconds after which it may."""
        if self._rate <= 0:
            return 0.0
        bucket = self._filled(client)
        if bucket.left >= 1:
            bucket.left -= 1
            return 0.0
        return (1 - bucket.left) / self._rate

    def _filled(self, client: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault(client, _Bucket(self._burst, now))
        self._buckets.move_to_end(client)
        while len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        # A clock that was set back takes nothing away.
        passed = max(0.0, now - bucket.filled)
        bucket.left = min(self._burst, bucket.left + passed * self._rate)
        bucket.filled = now
        return bucket
