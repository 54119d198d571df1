"""How fast transfers lately were, and so how long another one may take.

Of each link, and of each target over all its sources, the bytes and the seconds of the latest
transfers are kept, old ones fading. What this server saw of it is all it knows: others that share
the database have numbers of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["Speeds"]

_MOST = 4096
# What the transfers before weigh, with each new one.
_KEPT = 0.8


@dataclass(slots=True)
class _Moved:
    nbytes: float = 0.0
    seconds: float = 0.0


class Speeds:
    """An empty source is one that isn't known, or the target's own tiers. Bounded: of links that
    carried nothing for longest nothing is known any more."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._moved: OrderedDict[tuple[str | None, str], _Moved] = OrderedDict()

    def saw(self, source: str, target: str, nbytes: int, seconds: float) -> None:
        """One transfer moved so much, in the time from when it was begun to its end."""
        if nbytes <= 0 or seconds <= 0:
            return
        for key in ((source, target), (None, target)):
            moved = self._moved.setdefault(key, _Moved())
            moved.nbytes = _KEPT * moved.nbytes + nbytes
            moved.seconds = _KEPT * moved.seconds + seconds
            self._moved.move_to_end(key)
        while len(self._moved) > self._most:
            self._moved.popitem(last=False)

    def knows(self, target: str) -> bool:
        """Whether there is an estimate for it."""
        return (None, target) in self._moved

    def estimate(
        self, source: str, target: str, nbytes: int, before: int, at_once: int
    ) -> float | None:
        """Seconds for `nbytes` over a link, after the `before` bytes that wait at the target, of
        whose transfers so many run at once. None: nothing is known of it."""
        whole = self._moved.get((None, target))
        if whole is None:
            return None
        link = self._moved.get((source, target), whole)
        waiting = before * whole.seconds / whole.nbytes / max(1, at_once)
        return waiting + nbytes * link.seconds / link.nbytes
