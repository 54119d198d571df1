"""Whose transfer is next: by priority, then fairly over tenants, and not too many at once.

Start-time fair queueing (Goyal, Vin, Cheng 1996) over tenants: a transfer starts, in virtual time,
where its tenant's one before ended, or now if that is later, and lasts as long as it has bytes. The
earliest start is next. So a tenant that asks for much waits behind itself and not before others,
and one that was silent has saved up nothing.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvstrata_server.clock import Clock

__all__ = ["Turn", "Turns"]

# Seconds. A node that waits for commands is looked at again every five.
_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A transfer that waits. `cost` is about its bytes; `age` sorts those of one tenant."""

    id: str
    tenant: str
    priority: int
    age: tuple[float, str]
    cost: int


class Turns:
    """Which are under way, and between which nodes.

    At most `per_node` run at one target, and `per_link` from one source to one target. Of servers
    that share a database each counts what it started, and what targets said elsewhere that they
    took. A target asks one server at a time, so both bounds hold, but for the moment after it went
    to another: that one may start as many again as were handed out and not taken yet.

    `limits(tenant)`: how many of its transfers may be under way, and of how many bytes; None: no
    bound. One that is larger than that by itself runs alone. Of these, several servers may hand
    out a few too many at a time when each has just begun others.

    A transfer too large for what its tenant has left keeps those behind it waiting, at all nodes,
    or small ones would go before it for ever. It does so while its target asks for it and no
    longer than `_PATIENCE` after that: a target that is silent must not stop the tenant.
    """

    def __init__(
        self,
        per_node: int,
        per_link: int,
        limits: Callable[[str], tuple[int | None, int | None]] = lambda tenant: (None, None),
        clock: Clock = time.monotonic,
    ) -> None:
        self.per_node = per_node
        """How many run at one target at once."""
        self._per_link = per_link
        self._limits = limits
        self._clock = clock
        self._first: dict[str, tuple[Turn, float]] = {}
        """By tenant: which waits until its bytes fit, and when its target asked for it last."""
        self._turns: dict[str, Turn] = {}
        self._of: dict[str, tuple[int, int]] = {}
        self._running: dict[str, tuple[str, str]] = {}
        self._at: Counter[str] = Counter()
        self._on: Counter[tuple[str, str]] = Counter()
        self._now = 0.0
        self._finish: dict[str, float] = {}

    def __contains__(self, transfer: str) -> bool:
        """Whether it is under way."""
        return transfer in self._running

    def has_room(self, target: str) -> bool:
        """Whether another one may start at this node."""
        return self._at[target] < self.per_node

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """How many of a tenant's transfers are under way, and of how many bytes together."""
        return self._of.get(tenant, (0, 0))

    def is_limited(self, tenant: str) -> bool:
        """Whether the tenant has a bound at all."""
        return self._limits(tenant) != (None, None)

    def allows(self, turn: Turn) -> bool:
        """Whether its tenant may have another one under way, and this is not behind one that
        waits for that. To be asked of those whose targets ask for work."""
        most, most_bytes = self._limits(turn.tenant)
        if most is None and most_bytes is None:
            return True
        count, nbytes = self.of_tenant(turn.tenant)
        fits = most_bytes is None or not count or nbytes + turn.cost <= most_bytes
        now = self._clock()
        first, asked = self._first.get(turn.tenant, (turn, now))
        if now - asked > _PATIENCE:
            first = turn
        if not fits and _rank(turn) <= _rank(first):
            self._first[turn.tenant] = turn, now
        behind = _rank(first) < _rank(turn)
        return fits and not behind and (most is None or count < most)

    def holds_up(self, turn: Turn) -> bool:
        """Whether others of its tenant wait behind it."""
        first = self._first.get(turn.tenant)
        return first is not None and first[0].id == turn.id

    def is_busy(self, source: str, target: str) -> bool:
        """Whether this link carries all it may. A source that isn't known (empty) is none."""
        return bool(source) and self._on[source, target] >= self._per_link

    def source(self, transfer: str) -> str:
        """Of the link that it is counted at; empty: not known, or not under way."""
        return self._running.get(transfer, ("", ""))[0]

    def in_order(self, waiting: Iterable[Turn]) -> Iterator[Turn]:
        """All of them, those first whose turn it is, as if each were started when it is given."""
        by_priority: dict[int, dict[str, deque[Turn]]] = {}
        for turn in sorted(waiting, key=lambda turn: turn.age):
            queues = by_priority.setdefault(turn.priority, {})
            queues.setdefault(turn.tenant, deque()).append(turn)
        now, finish = self._now, dict(self._finish)
        for priority in sorted(by_priority, reverse=True):
            queues = by_priority[priority]
            heap = [
                (max(now, finish.get(tenant, 0.0)), queue[0].age, tenant)
                for tenant, queue in queues.items()
            ]
            heapq.heapify(heap)
            while heap:
                start, _, tenant = heapq.heappop(heap)
                turn = queues[tenant].popleft()
                yield turn
                now, finish[tenant] = max(now, start), start + turn.cost
                if queues[tenant]:
                    heapq.heappush(heap, (finish[tenant], queues[tenant][0].age, tenant))

    def start(self, turn: Turn, source: str, target: str) -> bool:
        """Count it as under way; False if node, link or tenant have no room. Again is harmless."""
        if turn.id not in self and not (
            self.has_room(target) and not self.is_busy(source, target) and self.allows(turn)
        ):
            return False
        self.count(turn, source, target)
        return True

    def count(self, turn: Turn, source: str, target: str) -> None:
        """It is under way, room or not: another server started it, or this one before it ended.

        Again is harmless, and may say which link it is, if that was not known.
        """
        link = (source, target)
        known = self._running.get(turn.id)
        if known is not None:
            if source and not known[0]:
                self._running[turn.id] = link
                self._on[known] -= 1
                self._on[link] += 1
            return
        self._running[turn.id] = link
        self._turns[turn.id] = turn
        self._let_by(turn)
        before, nbytes = self.of_tenant(turn.tenant)
        self._of[turn.tenant] = before + 1, nbytes + turn.cost
        self._at[target] += 1
        self._on[link] += 1
        start = max(self._now, self._finish.get(turn.tenant, 0.0))
        self._now = max(self._now, start)
        # Those that ended before now are where a tenant that is new would start.
        self._finish = {t: f for t, f in self._finish.items() if f > self._now}
        self._finish[turn.tenant] = start + turn.cost

    def end(self, transfer: str) -> None:
        """It is over, or was never under way."""
        for first, _ in list(self._first.values()):
            if first.id == transfer:
                self._let_by(first)
        link = self._running.pop(transfer, None)
        if link is None:
            return
        turn = self._turns.pop(transfer)
        count, nbytes = self._of.pop(turn.tenant)
        if count > 1:
            self._of[turn.tenant] = count - 1, nbytes - turn.cost
        self._at[link[1]] -= 1
        self._on[link] -= 1
        # Counters keep what fell to nothing.
        self._at, self._on = +self._at, +self._on

    def _let_by(self, turn: Turn) -> None:
        """Nobody waits behind it any more."""
        if self.holds_up(turn):
            del self._first[turn.tenant]


def _rank(turn: Turn) -> tuple[int, tuple[float, str]]:
    return -turn.priority, turn.age
