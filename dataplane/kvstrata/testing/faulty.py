"""Faults on purpose: a wrapper that delays, hangs, fails, truncates, flips bits and drops answers.

    script = FaultScript(seed=7, rate=0.05)
    tier = Checked.wrap(Faulty(inner, script), {}, context)

or in a node's settings `wrap = [{type = "kvstrata.testing.faulty:Faulty", seed = 7}]`. The same
seed and the same order of calls give the same faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from kvstrata.keys import Key
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext
from kvstrata.tiers.wrappers.base import Wrapper, WrapperOptions

__all__ = ["HONEST", "Fault", "FaultScript", "Faulty"]

_log = logging.getLogger(__name__)


class Fault(enum.StrEnum):
    """What goes wrong: with a whole call, or with one chunk of it."""

    DELAY = "delay"  # the call takes long
    HANG = "hang"  # the call does not go on until `release`
    RAISE = "raise"  # it raises OSError, before or after its work
    FAIL = "fail"  # a chunk's outcome is `failed` (or False), and nothing is done
    DROP = "drop"  # it is done, and the outcome says that it was not
    TRUNCATE = "truncate"  # the second half of its bytes is lost, stored or loaded
    FLIP = "flip"  # one bit of its bytes changes, stored or loaded


_OF_CALLS = (Fault.DELAY, Fault.HANG, Fault.RAISE)
HONEST = (*_OF_CALLS, Fault.FAIL, Fault.DROP)
"""Faults that change no bytes: all that a tier with nothing verifying around it may be given."""


class FaultScript:
    """Which calls and which chunks go wrong, drawn from a seed. For one event loop.

    `rate` is the share of calls and, apart from that, of chunks with a fault, of `kinds`.
    `injected` counts them; `damaged` are chunks whose stored object a fault has changed.
    """

    def __init__(
        self,
        seed: int,
        rate: float = 0.05,
        kinds: Collection[Fault] = tuple(Fault),
        longest_delay: float = 2.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`longest_delay` is in seconds, and `sleep` how they pass."""
        self.seed = seed
        self.enabled = True
        self.injected: Counter[Fault] = Counter()
        self.damaged: set[Key] = set()
        self._rate = rate
        self._longest_delay = longest_delay
        self._sleep = sleep
        self._random = random.Random(seed)  # noqa: S311
        self._of_calls = [kind for kind in _OF_CALLS if kind in kinds]
        self._of_chunks = [kind for kind in Fault if kind in kinds and kind not in _OF_CALLS]
        self._go_on = asyncio.Event()
        self._hanging = asyncio.Event()

    def __repr__(self) -> str:
        return f"FaultScript(seed={self.seed}, injected={dict(self.injected)})"

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """No faults meanwhile."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    async def hanging(self) -> None:
        """Return when a call hangs."""
        await self._hanging.wait()

    def release(self) -> None:
        """Let all calls go on that hang."""
        self._hanging.clear()
        self._go_on.set()
        self._go_on = asyncio.Event()

    def for_chunk(self, *useless: Fault) -> Fault | None:
        """The fault of the next chunk; `useless` ones come as `FAIL`."""
        if not self.enabled or not self._of_chunks or self._random.random() >= self._rate:
            return None
        kind = self._random.choice(self._of_chunks)
        kind = Fault.FAIL if kind in useless else kind
        self.injected[kind] += 1
        return kind

    @contextlib.asynccontextmanager
    async def around_call(self) -> Any:
        """Around the work of a call."""
        kind = None
        if self.enabled and self._of_calls and self._random.random() < self._rate:
            kind = self._random.choice(self._of_calls)
            self.injected[kind] += 1
        after = kind is Fault.RAISE and self._random.random() < 0.5
        if kind is Fault.DELAY:
            await self._sleep(self._random.random() * self._longest_delay)
        elif kind is Fault.HANG:
            self._hanging.set()
            await self._go_on.wait()
        elif kind is Fault.RAISE and not after:
            raise OSError(errno.EIO, "injected fault")
        yield
        if after:
            raise OSError(errno.EIO, "injected fault, after the work was done")

    def flip(self, view: memoryview) -> None:
        """Change one bit of it."""
        at = self._random.randrange(max(view.nbytes, 1))
        view[at] ^= 1 << self._random.randrange(8)


class FaultyOptions(WrapperOptions):
    seed: int = 0
    """0: a new one, which is logged."""
    rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    kinds: tuple[Fault, ...] = HONEST


class Faulty(Wrapper):
    """Does to calls what `script` says."""

    def __init__(self, inner: Tier, script: FaultScript) -> None:
        super().__init__(inner)
        self.script = script

    @classmethod
    def wrap(cls, inner: Tier, options: dict[str, Any], context: TierContext) -> Faulty:
        parsed = FaultyOptions.parse("faulty", options)
        seed = parsed.seed or random.SystemRandom().getrandbits(32)
        _log.warning("tier %s gets faults: seed %d, rate %g", inner.name, seed, parsed.rate)
        return cls(inner, FaultScript(seed, parsed.rate, parsed.kinds))

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        async with self.script.around_call():
            found = await self.inner.lookup(keys, deadline)
            return [here and not self._chunk_fails() for here in found]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        script = self.script
        async with script.around_call():
            faults = [script.for_chunk() for _ in batch]
            sent = [i for i, fault in enumerate(faults) if fault is not Fault.FAIL]
            items = [self._changed(batch[i], faults[i]) for i in sent]
            outcomes = [Outcome.FAILED] * len(batch)
            for i, outcome in zip(sent, await self.inner.store(items, deadline), strict=True):
                if outcome is Outcome.STORED:
                    changed = faults[i] in (Fault.FLIP, Fault.TRUNCATE)
                    (script.damaged.add if changed else script.damaged.discard)(batch[i].key)
                outcomes[i] = Outcome.FAILED if faults[i] is Fault.DROP else outcome
            return outcomes

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        script = self.script
        async with script.around_call():
            faults = [script.for_chunk() for _ in batch]
            sent = [i for i, fault in enumerate(faults) if fault is not Fault.FAIL]
            outcomes = [Outcome.FAILED] * len(batch)
            loaded = await self.inner.load([batch[i] for i in sent], deadline)
            for i, outcome in zip(sent, loaded, strict=True):
                view = batch[i].view
                outcomes[i] = outcome
                if outcome is Outcome.LOADED and faults[i] is Fault.FLIP:
                    script.flip(view)
                elif outcome is Outcome.LOADED and faults[i] is Fault.TRUNCATE:
                    half = view.nbytes // 2
                    view[half:] = bytes(view.nbytes - half)
                elif faults[i] is Fault.DROP:
                    outcomes[i] = Outcome.FAILED
            return outcomes

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        async with self.script.around_call():
            faults = [self.script.for_chunk(Fault.FLIP, Fault.TRUNCATE) for _ in keys]
            sent = [i for i, fault in enumerate(faults) if fault is not Fault.FAIL]
            gone = [False] * len(keys)
            for i, was in zip(sent, await self.inner.evict([keys[i] for i in sent]), strict=True):
                gone[i] = was and faults[i] is None
            return gone

    async def close(self) -> None:
        self.script.release()
        await self.inner.close()

    def _chunk_fails(self) -> bool:
        return self.script.for_chunk(Fault.FLIP, Fault.TRUNCATE) is not None

    def _changed(self, item: Item, fault: Fault | None) -> Item:
        """What reaches the tier within, which can't know better."""
        if fault not in (Fault.FLIP, Fault.TRUNCATE):
            return item
        copy = memoryview(bytearray(item.view))
        if fault is Fault.FLIP:
            self.script.flip(copy)
        else:
            copy = copy[: max(copy.nbytes // 2, 1)]
        return replace(item, view=copy, offset=-1, checksum=None)
