"""What is wrong with the mount, what that stops, and when to try again.

    errno, or what was seen                          condition   stops          cools off
    ENOSPC EDQUOT                                    full        stores         1 s .. 30 s
    EROFS EACCES EPERM                               read_only   stores         2 s .. 30 s
    EMFILE ENFILE ENOMEM                             exhausted   both, after 4  1 s .. 15 s
    EIO EREMOTEIO                                    io_error    both, after 4  2 s .. 30 s
    ESTALE ENOTCONN ESHUTDOWN EHOSTDOWN ENODEV ENXIO stale       both, after 4  1 s .. 15 s
    ETIMEDOUT                                        timed_out   both, after 4  1 s .. 15 s
    root missing or another's (`RootGone`)           gone        both           1 s .. 15 s
    threads don't come back                          hung        both           1 s .. 15 s

"After 4" are errors in a row: one bad sector is its chunk's own trouble. What begins a condition
cools off, then a probe in a thread of its own tries the mount: it ends the condition or doubles
the wait. Other errors are their chunk's alone.
"""

from __future__ import annotations

import enum
import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstrata.backoff import Backoff
from kvstrata.tiers.fs_root import RootGone

__all__ = ["CONDITION_OF", "Condition", "Health", "condition_of"]

_log = logging.getLogger(__name__)


class Condition(enum.StrEnum):
    FULL = "full"
    READ_ONLY = "read_only"
    EXHAUSTED = "exhausted"
    IO_ERROR = "io_error"
    STALE = "stale"
    TIMED_OUT = "timed_out"
    GONE = "gone"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class _Rule:
    stops_loads: bool
    after: int  # errors in a row
    first: float  # seconds to the first probe
    longest: float


_RULES = {
    Condition.FULL: _Rule(False, 1, 1.0, 30.0),
    Condition.READ_ONLY: _Rule(False, 1, 2.0, 30.0),
    Condition.EXHAUSTED: _Rule(True, 4, 1.0, 15.0),
    Condition.IO_ERROR: _Rule(True, 4, 2.0, 30.0),
    Condition.STALE: _Rule(True, 4, 1.0, 15.0),
    Condition.TIMED_OUT: _Rule(True, 4, 1.0, 15.0),
    Condition.GONE: _Rule(True, 1, 1.0, 15.0),
    Condition.HUNG: _Rule(True, 1, 1.0, 15.0),
}

_ERRNOS = {
    Condition.FULL: (errno.ENOSPC, errno.EDQUOT),
    Condition.READ_ONLY: (errno.EROFS, errno.EACCES, errno.EPERM),
    Condition.EXHAUSTED: (errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    Condition.IO_ERROR: (errno.EIO, errno.EREMOTEIO),
    Condition.STALE: (
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.ENODEV,
        errno.ENXIO,
    ),
    Condition.TIMED_OUT: (errno.ETIMEDOUT,),
}

CONDITION_OF = {number: condition for condition, numbers in _ERRNOS.items() for number in numbers}
"""What an errno tells of the mount; others tell of their file alone."""


def condition_of(error: OSError) -> Condition | None:
    if isinstance(error, RootGone):
        return Condition.GONE
    return CONDITION_OF.get(error.errno or 0)


@dataclass(slots=True)
class _Trouble:
    why: str
    since: float  # wall clock, for people
    probe_at: float
    backoff: Backoff = field(repr=False)


class Health:
    """Used on the event loop alone. `clock` drives the probes; `wall` is what people read."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float], where: str) -> None:
        self._clock, self._wall, self._where = clock, wall, where
        self._troubles: dict[Condition, _Trouble] = {}
        self._in_a_row: dict[Condition, int] = {}

    @property
    def stops_loads(self) -> bool:
        """And lookups, and everything else."""
        return any(_RULES[condition].stops_loads for condition in self._troubles)

    @property
    def stops_stores(self) -> bool:
        return bool(self._troubles)

    @property
    def only_full(self) -> bool:
        return self._troubles.keys() == {Condition.FULL}

    def has(self, condition: Condition) -> bool:
        return condition in self._troubles

    @property
    def detail(self) -> str:
        """What is wrong and since when, and what goes on in spite of it; empty: nothing is."""
        parts = []
        for condition, trouble in self._troubles.items():
            since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(trouble.since))
            stops = "answers miss" if _RULES[condition].stops_loads else "stores stopped"
            parts.append(f"{condition} since {since}, {stops}: {trouble.why}")
        return "; ".join(parts)

    def failed(self, condition: Condition, why: str) -> None:
        """One operation failed that way. The first of enough in a row begins the condition."""
        self._in_a_row[condition] = self._in_a_row.get(condition, 0) + 1
        if self._in_a_row[condition] >= _RULES[condition].after:
            self.begin(condition, why)

    def worked(self) -> None:
        """A load or a store worked: what is counted in a row starts anew."""
        if self._in_a_row:
            self._in_a_row.clear()

    def begin(self, condition: Condition, why: str) -> None:
        if condition in self._troubles:
            return
        rule = _RULES[condition]
        backoff = Backoff(rule.first, rule.longest)
        self._troubles[condition] = _Trouble(
            why, self._wall(), self._clock() + backoff.next(), backoff
        )
        _log.error("fs tier at %s: %s: %s", self._where, condition, why)

    def end(self, condition: Condition) -> None:
        self._in_a_row.pop(condition, None)
        if self._troubles.pop(condition, None) is not None:
            _log.warning("fs tier at %s: no longer %s", self._where, condition)

    @property
    def due(self) -> bool:
        """Whether it is time to probe."""
        now = self._clock()
        return any(trouble.probe_at <= now for trouble in self._troubles.values())

    def probed(self, found: Condition | None, why: str = "") -> None:
        """What a probe says: nothing is wrong any more, or what is. A mount that can be read
        again ends what stopped loads, and the other way round nothing."""
        if found is None:
            for condition in list(self._troubles):
                self.end(condition)
            return
        if not _RULES[found].stops_loads:
            for condition in [c for c in self._troubles if _RULES[c].stops_loads]:
                self.end(condition)
        known = self._troubles.get(found)
        if known is not None:
            known.why = why
        elif _RULES[found].stops_loads and not self.stops_loads:
            self.failed(found, why)  # a probe of stores that fails in another way
        else:
            self.begin(found, why)
        for trouble in self._troubles.values():
            if trouble.probe_at <= self._clock():
                trouble.probe_at = self._clock() + trouble.backoff.next()
