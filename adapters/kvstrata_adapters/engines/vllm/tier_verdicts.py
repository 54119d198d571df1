"""What is known of chunks that requests have asked for, on the scheduler's thread.

    unknown -> asked -> there | missing         one question per chunk, whoever asks
    there -> missing                            a load of it failed
    missing -> unknown                          a request asks that did not know the verdict

A verdict holds while some request refers to it, so that a request waits for no chunk twice: one
that could not be loaded stays missing for those that know it, and is asked for anew by the next.
A question without an answer at its deadline is answered with missing; from then until something
answers again nobody waits: what is asked is missing at once, and an empty question sees whether
anybody is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstrata_adapters.engines.vllm.tier_shelves import Found

__all__ = ["MISSING", "Verdicts"]

MISSING = -1


@dataclass(slots=True)
class _Entry:
    batch: int | None = None
    tier: int | None = None
    """Index of a tier that has it, or `MISSING`; None: not known yet."""
    requests: set[str] = field(default_factory=set)


class Verdicts:
    """`ask(batch, keys)` starts a question; `answers` gets its `Found`, from another thread."""

    def __init__(
        self,
        ask: Callable[[int, list[bytes]], None],
        answers: deque[Found],
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self.timeouts = 0
        self._ask = ask
        self._answers = answers
        self._deadline = deadline
        self._clock = clock
        self._entries: dict[bytes, _Entry] = {}
        self._keys_of: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []
        self._asked: dict[int, tuple[float, list[bytes]]] = {}
        self._batch = 0
        self._deaf = False

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: bytes, request: str) -> int | None:
        """The first tier that has it, or `MISSING`, or None: ask again later."""
        if self._answers:
            self._settle()
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry()
            self._new.append(key)
        if request not in entry.requests:
            entry.requests.add(request)
            self._keys_of.setdefault(request, set()).add(key)
            if entry.tier == MISSING:
                # Somebody else may have stored it since.
                entry.tier = entry.batch = None
                self._new.append(key)
        return entry.tier

    def tier_of(self, key: bytes) -> int:
        """Where to begin loading it."""
        entry = self._entries.get(key)
        return max(entry.tier or 0, 0) if entry else 0

    def flush(self) -> None:
        """Ask for what is new, and give up on what has no answer in time. Once a step."""
        self._settle()
        now = self._clock()
        while self._asked:
            batch, (asked, keys) = next(iter(self._asked.items()))
            if now - asked < self._deadline:
                break
            del self._asked[batch]
            self._decide(batch, keys, [MISSING] * len(keys))
            self.timeouts += len(keys)
            self._deaf = True
        new, self._new = [key for key in self._new if key in self._entries], []
        if self._deaf:
            for key in new:
                self._entries[key].tier = MISSING
            new = []
        if new or (self._deaf and not self._asked):
            self._batch += 1
            for key in new:
                self._entries[key].batch = self._batch
            self._asked[self._batch] = (now, new)
            self._ask(self._batch, new)

    def missing(self, keys: Iterable[bytes]) -> None:
        """They could not be loaded."""
        for key in keys:
            if entry := self._entries.get(key):
                entry.tier = MISSING

    def forget(self, request: str) -> None:
        """The request has ended. Questions under way are left to the next that asks the same."""
        for key in self._keys_of.pop(request, ()):
            entry = self._entries[key]
            entry.requests.discard(request)
            if not entry.requests and (entry.batch is None or entry.tier is not None):
                del self._entries[key]

    def _settle(self) -> None:
        while self._answers:
            batch, tiers = self._answers.popleft()
            self._deaf = False
            _, keys = self._asked.pop(batch, (0.0, []))
            self._decide(batch, keys, tiers)

    def _decide(self, batch: int, keys: Sequence[bytes], tiers: Sequence[int]) -> None:
        for key, tier in zip(keys, tiers, strict=False):
            entry = self._entries.get(key)
            if entry is None or entry.batch != batch or entry.tier is not None:
                continue
            if entry.requests:
                entry.tier = tier
            else:
                del self._entries[key]
