"""Who waits for news of one thing, and is woken when there may be some."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Watchers"]


class Watchers:
    """`close` wakes all, for good."""

    def __init__(self) -> None:
        self.closed = False
        self._events: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def watching(self, name: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever there may be news. Whoever clears it looks after that."""
        event = asyncio.Event()
        events = self._events.setdefault(name, set())
        events.add(event)
        if self.closed:
            event.set()
        try:
            yield event
        finally:
            events.discard(event)
            if not events:
                self._events.pop(name, None)

    def wake(self, name: str) -> None:
        for event in self._events.get(name, ()):
            event.set()

    def close(self) -> None:
        self.closed = True
        for name in self._events:
            self.wake(name)
