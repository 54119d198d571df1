"""A long random walk over a tier with faults, against a model of what it has acknowledged.

    report = await Soak(open_tier, script, clock, capacity=...).run()

It checks after every operation that no wrong byte was returned, that nothing acknowledged is
missing unless the tier said that it dropped it or that it is not healthy, that only that or faults
explain failures, and that usage stays within capacity plus one batch. At the end, with faults off
and the tier opened again, all that was acknowledged and not damaged must be served. What does not
hold is an `AssertionError` with the seed and the number of the operation.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstrata.keys import Key, Namespace
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.clock import FakeClock
from kvstrata.testing.faulty import FaultScript
from kvstrata.testing.tier_hooks import PAGE, payload
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext

__all__ = ["Soak", "SoakReport", "new_seed"]

_BATCH = 6
_MOST_BYTES = 8192
_DEADLINE = 30.0
_WEIGHTS = {"store": 34, "load": 34, "lookup": 12, "evict": 4, "cancel": 3, "together": 10}


def new_seed() -> int:
    return random.SystemRandom().getrandbits(32)


@dataclass
class SoakReport:
    """What was done: operations by kind, outcomes of chunks, faults by kind; `unhealthy` counts
    operations during which the tier said that it was."""

    seed: int
    operations: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    unhealthy: int = 0
    served_at_the_end: int = 0


class Soak:
    """`open_tier(context, script)` opens the tier with everything around it, also again.

    `damage(tier, key, rng)`, where there is one, damages the stored object of a key behind the
    tier's back (and returns whether it could). `durable` tiers are closed and opened on the way
    and at the end. `misses`: after faults the tier may answer miss for a while, as one does that
    lets its medium cool off. `capacity`, in bytes, is what the tier was opened with.
    """

    def __init__(
        self,
        open_tier: Callable[[TierContext, FaultScript], Awaitable[Tier]],
        script: FaultScript,
        clock: FakeClock,
        *,
        capacity: int | None = None,
        durable: bool = True,
        misses: bool = False,
        damage: Callable[[Tier, Key, random.Random], bool] | None = None,
        namespace: Namespace | None = None,
        operations: int = 10_000,
        chunks: int = 150,
    ) -> None:
        self._open_tier = open_tier
        self._script = script
        self._clock = clock
        self._capacity = capacity
        self._durable = durable
        self._misses = misses
        self._ill = False  # it says that it answers miss for now
        self._damage = damage
        self._operations = operations
        self._random = random.Random(f"soak {script.seed}")  # noqa: S311
        ns = a_namespace() if namespace is None else namespace
        self._keys = [ns.key(0, i.to_bytes(4, "big")) for i in range(chunks)]
        self._size = {k: 1 + (i * 997) % _MOST_BYTES for i, k in enumerate(self._keys)}
        self._bytes = {key: payload(key, size) for key, size in self._size.items()}
        self._held: set[Key] = set()  # acknowledged, and not said to be gone since
        self._harmed: set[Key] = set()  # damaged behind the tier's back
        self._removed: set[Key] = set()  # announced during the operation under way
        self._context = TierContext("soak", clock, {ns.digest: ns}.get, self._on_removed)
        self.report = SoakReport(script.seed)
        self._at = 0

    async def run(self) -> SoakReport:
        print(f"soak: seed {self._script.seed}, {self._operations} operations")
        with self._script.quiet():
            self._tier = await self._open_tier(self._context, self._script)
        try:
            for at in range(self._operations):
                self._at = at
                await self._step()
            await self._finish()
        finally:
            self._script.enabled = False
            await self._tier.close()
        self.report.faults = Counter({k.value: n for k, n in self._script.injected.items()})
        return self.report

    # ------------------------------------------------------------ operations

    async def _step(self) -> None:
        draw = self._random.random()
        if self._durable and draw < 0.002:
            await self._reopen()
            kind = "reopen"
        elif self._damage is not None and draw < 0.02:
            self._harm()
            kind = "damage"
        else:
            kind = self._random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
            await self._call(kind)
        self.report.operations[kind] += 1
        await self._check_usage()

    async def _call(self, kind: str) -> None:
        self._removed.clear()
        self._ill = self._misses or not self._tier.usage().healthy
        faults = self._script.injected.total()
        kinds = [kind]
        if kind == "together":
            kinds = self._random.choices(["store", "load", "lookup", "evict"], k=3)
        if kind == "cancel":
            kinds = [self._random.choice(["store", "load"])]
        calls = [self._calls[k](self) for k in kinds]
        late = await self._carry_out([call for call, _ in calls], cancel=kind == "cancel")
        self._ill = self._ill or not self._tier.usage().healthy
        self.report.unhealthy += self._ill and not self._misses
        explained = late or self._ill or self._script.injected.total() > faults
        for _, settle in calls:
            settle(explained)

    async def _carry_out(self, calls: Sequence[Coroutine[Any, Any, None]], cancel: bool) -> bool:
        """Whether a hang made them late: their own, or one that a cancelled call left behind."""
        late = False
        tasks = {asyncio.ensure_future(call) for call in calls}
        if cancel:
            for _ in range(self._random.randrange(4)):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
        left = set(tasks)
        while left:
            hang = asyncio.ensure_future(self._script.hanging())
            await asyncio.wait({*left, hang}, return_when=asyncio.FIRST_COMPLETED)
            hang.cancel()
            left = {task for task in left if not task.done()}
            if left and hang.done():
                # What hangs passes its deadline, and holds up nothing else.
                with self._script.quiet():
                    await self._tier.lookup(self._keys[:3])
                self._clock.advance(_DEADLINE + 1)
                self._script.release()
                late = True
        for task in tasks:
            if not task.cancelled():
                task.result()
        return late

    def _some(self) -> list[Key]:
        return self._random.choices(self._keys, k=self._random.randint(1, _BATCH))

    def _store(self) -> tuple[Coroutine[Any, Any, None], Callable[[bool], None]]:
        keys = self._some()
        items = [Item(key, self._memory(key, self._bytes[key])) for key in keys]
        if self._random.random() < 0.5:
            items[1:] = [
                Item(item.key, item.view, parent=before)
                for before, item in zip(keys, items[1:], strict=False)
            ]
        harmed = (self._harmed | self._script.damaged) & set(keys)
        answers: list[Outcome] = []

        async def call() -> None:
            try:
                answers.extend(await self._tier.store(items, self._clock() + _DEADLINE))
            except OSError:
                self.report.outcomes["store raised"] += 1
            # At once: what is said to be gone from now on is, and what was before is there anew.
            kept = (Outcome.STORED, Outcome.PRESENT)
            self._held |= {k for k, o in zip(keys, answers, strict=False) if o in kept}

        def settle(explained: bool) -> None:
            self._check_answers(answers, keys)
            for key, outcome in zip(keys, answers, strict=False):
                self.report.outcomes[outcome] += 1
                if outcome is Outcome.STORED:
                    if key not in self._script.damaged:
                        self._harmed.discard(key)
                elif outcome is Outcome.FAILED:
                    # It may have been removed again while it was stored.
                    excused = explained or key in harmed or key in self._removed
                    self._check(excused, f"{key.hex()} failed to store")
                elif outcome is not Outcome.PRESENT:
                    self._check(outcome is Outcome.NO_ROOM, f"a store said {outcome}")
                    self._check(self._capacity is not None, "no room, and there is no bound")

        return call(), settle

    def _load(self) -> tuple[Coroutine[Any, Any, None], Callable[[bool], None]]:
        keys = self._some()
        held = self._held & set(keys)
        harmed = (self._harmed | self._script.damaged) & set(keys)
        items = [Item(key, self._memory(key, b"\xaa" * self._size[key])) for key in keys]
        answers: list[Outcome] = []

        async def call() -> None:
            try:
                answers.extend(await self._tier.load(items, self._clock() + _DEADLINE))
            except OSError:
                self.report.outcomes["load raised"] += 1

        def settle(explained: bool) -> None:
            self._check_answers(answers, keys)
            if not answers:  # raised or cancelled: what it found out is not known
                self._held -= set(keys) if explained else harmed
            for item, outcome in zip(items, answers, strict=False):
                key = item.key
                self.report.outcomes[outcome] += 1
                bad = key in harmed or key in self._script.damaged
                if outcome is Outcome.LOADED:
                    self._check(item.view == self._bytes[key], f"WRONG BYTES for {key.hex()}")
                elif outcome is Outcome.CORRUPT:
                    self._check(explained or bad, f"{key.hex()} is corrupt without a cause")
                    self._held.discard(key)  # and still harmed, if its eviction failed too
                elif outcome is Outcome.MISSING:
                    gone = key not in held or key in self._removed or keys.count(key) > 1
                    self._check(gone or bad or self._ill, f"{key.hex()} is lost")
                    if bad:
                        self._held.discard(key)
                else:
                    self._check(outcome is Outcome.FAILED, f"a load said {outcome}")
                    self._check(explained, f"{key.hex()} failed to load without a cause")

        return call(), settle

    def _lookup(self) -> tuple[Coroutine[Any, Any, None], Callable[[bool], None]]:
        keys = self._some()
        held = self._held & set(keys)
        answers: list[bool] = []

        async def call() -> None:
            try:
                answers.extend(await self._tier.lookup(keys, self._clock() + _DEADLINE))
            except OSError:
                self.report.outcomes["lookup raised"] += 1

        def settle(explained: bool) -> None:
            self._check_answers(answers, keys)
            for key, here in zip(keys, answers, strict=False):
                certain = key in held and key not in self._removed and key not in self._harmed
                excused = explained or key in self._script.damaged
                self._check(here or not certain or excused, f"{key.hex()} is not offered")

        return call(), settle

    def _evict(self) -> tuple[Coroutine[Any, Any, None], Callable[[bool], None]]:
        keys = list(dict.fromkeys(self._some()))[:2]
        answers: list[bool] = []

        async def call() -> None:
            try:
                answers.extend(await self._tier.evict(keys))
            except OSError:
                self.report.outcomes["evict raised"] += 1

        def settle(explained: bool) -> None:
            self._check_answers(answers, keys)
            for key, gone in zip(keys, answers, strict=False):
                if gone:
                    self._check(key in self._removed, f"{key.hex()} was evicted without a word")

        return call(), settle

    _calls = {"store": _store, "load": _load, "lookup": _lookup, "evict": _evict}  # noqa: RUF012

    def _harm(self) -> None:
        damage, candidates = self._damage, sorted(self._held - self._harmed)
        if damage is not None and candidates:
            key = self._random.choice(candidates)
            if damage(self._tier, key, self._random):
                self._harmed.add(key)

    async def _reopen(self) -> None:
        with self._script.quiet():
            await self._tier.drain()
            await self._tier.close()
            self._tier = await self._open_tier(self._context, self._script)
        gone = await self._gone(self._held)
        lost = gone - self._harmed - self._script.damaged
        self._check(not lost, f"{[key.hex() for key in lost]} are not there after opening again")
        self._held -= gone

    async def _finish(self) -> None:
        self._script.enabled = False
        self._clock.advance(3600)  # whatever cooled off is cool
        self._misses = False
        if self._durable:
            await self._reopen()
        self._removed.clear()
        for key in sorted(self._held):
            harmed = key in self._harmed or key in self._script.damaged
            item = Item(key, self._memory(key, b"\xaa" * self._size[key]))
            [outcome] = await self._tier.load([item])
            if outcome is Outcome.LOADED:
                self._check(item.view == self._bytes[key], f"WRONG BYTES for {key.hex()}")
                self.report.served_at_the_end += 1
            else:
                self._check(harmed, f"{key.hex()} was acknowledged and is {outcome} at the end")
        await self._tier.drain()

    # ------------------------------------------------------------ the model

    def _on_removed(self, keys: Sequence[Key]) -> None:
        # Harmed they stay, until they are stored anew: the medium may still have the damaged one.
        self._held -= set(keys)
        self._removed |= set(keys)

    def _memory(self, key: Key, content: bytes) -> memoryview:
        return memoryview(bytearray(content))

    def _check_answers(self, answers: Sequence[object], keys: Sequence[Key]) -> None:
        """None of them is the answer of a call that raised or was cancelled."""
        if answers:
            self._check(len(answers) == len(keys), "not one answer for each key")

    async def _check_usage(self) -> None:
        use = self._tier.usage()
        if self._capacity is not None:
            most = self._capacity + _BATCH * (_MOST_BYTES + 3 * PAGE)
            self._check(use.used_bytes <= most, f"uses {use.used_bytes} of {self._capacity}")
        if self._at % 50 == 0 and not self._misses and use.healthy:
            sure = self._held - self._harmed - self._script.damaged
            gone = await self._gone(sure)
            self._check(not gone, f"{[key.hex() for key in gone]} are lost")

    async def _gone(self, keys: set[Key]) -> set[Key]:
        """Which of them are not there: neither known, nor found. A tier may have lost sight of one
        on a medium that others use too, or not have recovered it yet."""
        lacking = sorted(keys - set(self._tier.keys()))
        with self._script.quiet():
            found = await self._tier.lookup(lacking)
        return {key for key, here in zip(lacking, found, strict=True) if not here}

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise AssertionError(
                f"seed {self._script.seed}, operation {self._at}: {what}; {self._script}"
            )
