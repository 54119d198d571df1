"""What wrappers share that store another form of the payload, in a frame.

Payloads are encoded into scratch memory and handed to the tier within; what that loads into
scratch memory is decoded straight into the slot. Encoding and decoding run in threads, each in
its own, so that a load never waits for a store. A batch that needs more scratch memory than
there is goes in parts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, ClassVar, NamedTuple

from pydantic import ByteSize, Field

from kvstrata.config import Seconds
from kvstrata.errors import Corrupt, Missing
from kvstrata.keys import Key
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage, complete
from kvstrata.tiers.calls import Call, Calls
from kvstrata.tiers.wrappers.base import Wrapper, WrapperOptions
from kvstrata.tiers.wrappers.frame import HEADER_BYTES
from kvstrata.tiers.wrappers.scratch import Scratch
from kvstrata.tiers.wrappers.shunned import Shunned

__all__ = ["Framed", "FramedOptions", "Unreadable"]

_log = logging.getLogger(__name__)


class Unreadable(Missing):
    """It may be whole and can't be read here: left where it is, and replaced by a store."""


class FramedOptions(WrapperOptions):
    """Options that all wrappers with frames have."""

    threads: Annotated[int, Field(ge=1, le=256)] = 2
    """For loads, and as many for stores."""
    scratch: Annotated[ByteSize, Field(ge=1 << 16)] = ByteSize(128 << 20)
    """Memory for encoded payloads, half of it for loads; a single chunk may exceed it."""
    deadline: Seconds = 30.0
    """How long a call may take that came without a deadline."""


class _Coded(NamedTuple):
    outcome: Outcome
    nbytes: int = 0
    error: str = ""
    unreadable: bool = False


_LATE = _Coded(Outcome.FAILED)


class Framed(Wrapper):
    """Subclass it with `encode` and `decode`, which are called in threads, many at once."""

    kind: ClassVar[str]
    """Its name in settings, log lines and thread names."""
    overhead: ClassVar[int] = HEADER_BYTES
    """Most bytes that `encode` adds to a payload."""

    def __init__(self, inner: Tier, options: FramedOptions, context: TierContext) -> None:
        """Use `wrap`."""
        super().__init__(inner)
        self._clock = context.clock
        self._patience = options.deadline
        self._threads = options.threads
        self._calls = Calls(f"{self.name} ({self.kind})", context.clock, options.deadline)
        self._encoders = ThreadPoolExecutor(options.threads, f"kvstrata-{self.kind}-store")
        self._decoders = ThreadPoolExecutor(options.threads, f"kvstrata-{self.kind}-load")
        self._outgoing = Scratch(int(options.scratch) // 2)
        self._incoming = Scratch(int(options.scratch) // 2)
        self._shunned = Shunned()
        self._counting = threading.Lock()
        self._counters = {"corrupt": 0, "errors": 0}

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter; from any thread."""
        with self._counting:
            self._counters[name] = self._counters.get(name, 0) + n

    @abstractmethod
    def encode(self, item: Item, into: memoryview) -> int:
        """Write the frame of the item's payload; its length, at most payload plus `overhead`.

        Raises `Corrupt` where the payload isn't what its checksum says, `Missing` where it must
        not be stored.
        """

    @abstractmethod
    def decode(self, item: Item, stored: memoryview) -> None:
        """Write the verified payload of a frame to the item's view.

        Raises `Corrupt`; `Missing` where it can't be read now, `Unreadable` where it never can.
        """

    # ------------------------------------------------------------ calls

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        with self._calls.running(deadline):
            found = complete(await self.inner.lookup(keys, deadline), len(keys))
            return [here and k not in self._shunned for k, here in zip(keys, found, strict=True)]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        with self._calls.running(deadline) as call:
            left = self._left(deadline)
            await self._shunned.make_way(self.inner, [item.key for item in batch], left)
            outcomes: list[Outcome] = []
            parts = list(self._parts(batch, self._outgoing))
            for part in parts:
                outcomes += await self._store_part(call, part, deadline)
            if len(parts) > 1:
                await self._look_again(batch, outcomes, deadline)
            return outcomes

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        with self._calls.running(deadline) as call:
            good = [item for item in batch if item.key not in self._shunned]
            loaded: list[Outcome] = []
            for part in self._parts(good, self._incoming):
                loaded += await self._load_part(call, part, deadline)
            if len(good) == len(batch):
                return loaded
            answers = iter(loaded)
            asked = set(map(id, good))
            return [next(answers) if id(i) in asked else Outcome.MISSING for i in batch]

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        with self._calls.running(None):
            gone = complete(await self.inner.evict(keys), len(keys))
            self._shunned.discard([k for k, was in zip(keys, gone, strict=True) if was])
            return list(gone)

    def keys(self) -> list[Key]:
        self._calls.check_open()
        held = self.inner.keys()
        return [key for key in held if key not in self._shunned]

    def usage(self) -> Usage:
        """That of the tier within, with what this wrapper found added to its counters."""
        self._calls.check_open()
        use = self.inner.usage()
        counters = dict(use.counters)
        for name, count in self._counters.items():
            counters[name] = counters.get(name, 0) + count
        detail = "; ".join(text for text in (use.detail, self.trouble()) if text)
        return replace(use, counters=counters, detail=detail)

    def trouble(self) -> str:
        """What an operator should know of this wrapper now; empty: nothing."""
        return ""

    async def drain(self, deadline: float | None = None) -> None:
        await self._calls.drain(deadline)
        await self.inner.drain(deadline)

    async def close(self) -> None:
        # At the same time: ours wait for calls within, which closing makes shorter.
        ended = await asyncio.gather(
            self._calls.close(), self.inner.close(), return_exceptions=True
        )
        await self._shunned.close()
        await asyncio.to_thread(self._shut)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    def _shut(self) -> None:
        self._encoders.shutdown()
        self._decoders.shutdown()

    # ------------------------------------------------------------ parts of a batch

    def _parts(self, batch: Sequence[Item], scratch: Scratch) -> Iterator[list[Item]]:
        """In order, each of at most half the scratch memory: two calls may overlap."""
        part: list[Item] = []
        size = 0
        for item in batch:
            nbytes = item.view.nbytes + self.overhead
            if part and size + nbytes > scratch.capacity // 2:
                yield part
                part, size = [], 0
            part.append(item)
            size += nbytes
        if part:
            yield part

    async def _take(
        self, scratch: Scratch, items: Sequence[Item], deadline: float | None
    ) -> list[memoryview] | None:
        sizes = [item.view.nbytes + self.overhead for item in items]
        return await scratch.take(sizes, self._left(deadline))

    def _left(self, deadline: float | None) -> float:
        """Seconds."""
        return self._patience if deadline is None else max(deadline - self._clock(), 0.0)

    async def _store_part(
        self, call: Call, items: list[Item], deadline: float | None
    ) -> list[Outcome]:
        if call.stopped:
            return [Outcome.FAILED] * len(items)
        memory = await self._take(self._outgoing, items, deadline)
        if memory is None:
            return [Outcome.FAILED] * len(items)
        try:
            coded = await self._calls.spread(
                call,
                self._encoders,
                self._threads,
                self._encode,
                list(zip(items, memory, strict=True)),
                _LATE,
            )
            self._report(coded)
            ready = [i for i, c in enumerate(coded) if c.nbytes]
            outcomes = [c.outcome for c in coded]
            if ready and not call.cancelled:
                frames = [
                    Item(items[i].key, memory[i][: coded[i].nbytes], parent=items[i].parent)
                    for i in ready
                ]
                stored = complete(await self.inner.store(frames, deadline), len(frames))
                for i, outcome in zip(ready, stored, strict=True):
                    outcomes[i] = self._stored(items[i].key, outcome)
            return outcomes
        finally:
            self._outgoing.give_back(memory)

    async def _look_again(
        self, batch: Sequence[Item], outcomes: list[Outcome], deadline: float | None
    ) -> None:
        """What went while later parts were stored has failed: its removal has been told already."""
        kept = [n for n, o in enumerate(outcomes) if o in (Outcome.STORED, Outcome.PRESENT)]
        keys = [batch[n].key for n in kept]
        found = complete(await self.inner.lookup(keys, deadline), len(keys))
        for n, here in zip(kept, found, strict=True):
            if not here:
                outcomes[n] = Outcome.FAILED

    def _stored(self, key: Key, outcome: Outcome) -> Outcome:
        if outcome is Outcome.PRESENT and key in self._shunned:
            return Outcome.FAILED  # the one there is no good and could not be removed
        if outcome is Outcome.STORED:
            self._shunned.discard([key])
        return outcome

    async def _load_part(
        self, call: Call, items: list[Item], deadline: float | None
    ) -> list[Outcome]:
        if call.stopped:
            return [Outcome.FAILED] * len(items)
        memory = await self._take(self._incoming, items, deadline)
        if memory is None:
            return [Outcome.FAILED] * len(items)
        try:
            frames = [
                Item(item.key, view, exact=False) for item, view in zip(items, memory, strict=True)
            ]
            outcomes = list(complete(await self.inner.load(frames, deadline), len(items)))
            loaded = [i for i, o in enumerate(outcomes) if o is Outcome.LOADED]
            coded = await self._calls.spread(
                call,
                self._decoders,
                self._threads,
                self._decode,
                [(items[i], memory[i]) for i in loaded],
                _LATE,
            )
        finally:
            self._incoming.give_back(memory)
        self._report(coded)
        bad: dict[Key, None] = {}
        for i, c in zip(loaded, coded, strict=True):
            outcomes[i] = c.outcome
            if c.outcome is Outcome.CORRUPT:
                bad[items[i].key] = None
            elif c.unreadable:
                self._shunned.add([items[i].key])
        self.count("corrupt", len(bad))
        if bad:  # missing from now on, and evicted within if it can be
            await self._shunned.retire(self.inner, list(bad), self._left(deadline))
        return outcomes

    # ------------------------------------------------------------ one chunk, in a thread

    def _encode(self, work: tuple[Item, memoryview]) -> _Coded:
        item, memory = work
        try:
            return _Coded(Outcome.FAILED, self.encode(item, memory))
        except (Corrupt, Missing) as e:
            return _Coded(Outcome.FAILED, error=str(e))

    def _decode(self, work: tuple[Item, memoryview]) -> _Coded:
        item, memory = work
        try:
            self.decode(item, memory)
        except Corrupt as e:
            return _Coded(Outcome.CORRUPT, error=str(e))
        except Missing as e:
            return _Coded(Outcome.MISSING, error=str(e), unreadable=isinstance(e, Unreadable))
        return _Coded(Outcome.LOADED)

    def _report(self, coded: Sequence[_Coded]) -> None:
        """Count errors, and log the first of a batch."""
        errors = [c for c in coded if c.error]
        if errors:
            self.count("errors", sum(c.outcome is Outcome.FAILED for c in errors))
            _log.warning(
                "%s tier, %s: %d chunks, first of them: %s",
                self.name,
                self.kind,
                len(errors),
                errors[0].error,
            )
