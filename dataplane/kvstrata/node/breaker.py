"""Whether a node still asks a tier, call by kind of call.

Each kind has a circuit of its own, since a tier that can't write may well read:

    closed  --overdue call of any kind, or 3 failed ones of this kind in a row-->  open
    open    --a probe was answered, or what was overdue has returned-->            trial
    trial   --a call of this kind worked-->                                        closed
    trial   --one failed-->                                                        open

Calls are refused while the circuit is open, and only then.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

__all__ = ["Breaker", "Kind"]

_log = logging.getLogger(__name__)

_MOST_FAILURES = 3


class Kind(enum.StrEnum):
    """Of a call that may be refused."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


class _State(enum.Enum):
    CLOSED = 0
    OPEN = 1
    TRIAL = 2


@dataclass(slots=True)
class _Circuit:
    state: _State = _State.CLOSED
    failures: int = 0
    why: str = ""
    since: float = 0.0


class Breaker:
    """Of the tier `name`. `wall` gives seconds since the epoch, for people; `on_change` is called
    after a circuit opened or ceased to be open."""

    def __init__(self, name: str, wall: Callable[[], float], on_change: Callable[[], None]) -> None:
        self.trips = 0
        self._name = name
        self._wall = wall
        self._on_change = on_change
        self._circuits = {kind: _Circuit() for kind in Kind}

    def allows(self, kind: Kind) -> bool:
        """A lookup is refused where the load it is for would be, too."""
        if kind is Kind.LOOKUP and self._circuits[Kind.LOAD].state is _State.OPEN:
            return False
        return self._circuits[kind].state is not _State.OPEN

    @property
    def open(self) -> bool:
        """Whether calls of any kind are refused."""
        return any(c.state is _State.OPEN for c in self._circuits.values())

    @property
    def closed(self) -> bool:
        """Whether all is well: nothing refused, nothing on trial."""
        return all(c.state is _State.CLOSED for c in self._circuits.values())

    @property
    def trouble(self) -> str:
        """Which calls are refused, since when and why; empty: none."""
        refused: dict[tuple[str, float], list[str]] = {}
        for kind, circuit in self._circuits.items():
            if circuit.state is _State.OPEN:
                refused.setdefault((circuit.why, circuit.since), []).append(kind)
        return "; ".join(
            f"no {' or '.join(kinds)} since {_date(since)}: {why}"
            for (why, since), kinds in refused.items()
        )

    def succeeded(self, kind: Kind) -> None:
        circuit = self._circuits[kind]
        circuit.failures = 0
        if circuit.state is _State.TRIAL:
            circuit.state = _State.CLOSED
            _log.info("tier %s works again: %s", self._name, kind)
            self._on_change()

    def failed(self, kind: Kind, why: str) -> None:
        circuit = self._circuits[kind]
        circuit.failures += 1
        if circuit.state is _State.TRIAL or circuit.failures >= _MOST_FAILURES:
            told = f"{kind} failed" if circuit.failures == 1 else f"{circuit.failures} times {kind}"
            self._open([kind], f"{told}, last: {why}" if circuit.failures > 1 else f"{told}: {why}")

    def overdue(self, why: str) -> None:
        """A call does not return: whatever it waits for, others would wait for it too."""
        self._open(list(Kind), why)

    def try_again(self) -> None:
        """There is reason to believe that it works again."""
        for circuit in self._circuits.values():
            if circuit.state is _State.OPEN:
                circuit.state = _State.TRIAL
        self._on_change()

    def _open(self, kinds: list[Kind], why: str) -> None:
        now = self._wall()
        fresh = [k for k in kinds if self._circuits[k].state is not _State.OPEN]
        for kind in fresh:
            circuit = self._circuits[kind]
            # On trial it has not been well in between.
            if circuit.state is _State.CLOSED:
                circuit.since = now
            circuit.state, circuit.why = _State.OPEN, why
        if fresh:
            self.trips += 1
            _log.warning("tier %s is degraded, no %s: %s", self._name, " or ".join(fresh), why)
            self._on_change()


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
