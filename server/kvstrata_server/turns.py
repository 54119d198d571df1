"""Whose transfer is next: by priority, then fairly over tenants, and not too many at once.

Start-time fair queueing (Goyal, Vin, Cheng 1996) over tenants: a transfer starts, in virtual time,
where its tenant's one before ended, or now if that is later, and lasts as long as it has bytes. The
earliest start is next. So a tenant that asks for much waits behind itself and not before others,
and one that was silent has saved up nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Turn", "Turns"]


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

    At most `per_node` run at one target, and `per_link` from one source to one target.
    """

    def __init__(self, per_node: int, per_link: int) -> None:
        self._per_node = per_node
        self._per_link = per_link
        self._running: dict[str, tuple[str, str]] = {}
        self._at: Counter[str] = Counter()
        self._on: Counter[tuple[str, str]] = Counter()
        self._now = 0.0
        self._finish: dict[str, float] = {}

    def has_room(self, target: str) -> bool:
        """Whether another one may start at this node."""
        return self._at[target] < self._per_node

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
        """Count it as under way; False if node or link have no room. Again is harmless."""
        if turn.id in self._running:
            return True
        link = (source, target)
        if not self.has_room(target) or (source and self._on[link] >= self._per_link):
            return False
        self._running[turn.id] = link
        self._at[target] += 1
        self._on[link] += 1
        start = max(self._now, self._finish.get(turn.tenant, 0.0))
        self._now = max(self._now, start)
        # Those that ended before now are where a tenant that is new would start.
        self._finish = {t: f for t, f in self._finish.items() if f > self._now}
        self._finish[turn.tenant] = start + turn.cost
        return True

    def end(self, transfer: str) -> None:
        """It is over, or was never under way."""
        link = self._running.pop(transfer, None)
        if link is None:
            return
        self._at[link[1]] -= 1
        self._on[link] -= 1
        # Counters keep what fell to nothing.
        self._at, self._on = +self._at, +self._on
