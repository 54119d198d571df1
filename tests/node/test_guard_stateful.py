"""Whatever hangs, fails and comes back in whatever order: no wrong byte, nothing lost or leaked."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tier_kit import PAGE, TimelessLoop, TroubledTier, data, find, key, make_store, payload

from kvstrata.config import CascadeMode
from kvstrata.host import NO_ROOM, PRESENT
from kvstrata.keys import Key

PAGES = 16
KEYS = st.integers(0, 30)
CALLS = st.sampled_from(["lookup", "load", "store"])
MODES: list[CascadeMode] = ["write_through", "second_touch", "on_evict"]


class Troubles(RuleBasedStateMachine):
    """Two tiers of every cascade mode, an engine that writes, one that reads."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=TimelessLoop)
        self.runner.run(self._open())
        self.writing: dict[Key, int] = {}

    async def _open(self) -> None:
        self.tiers = [TroubledTier("a"), TroubledTier("b"), TroubledTier("c")]
        for n in range(24):
            self.tiers[n % 3].chunks[key(n)] = payload(key(n))
        self.store = make_store(pages=PAGES)
        for tier, mode in zip(self.tiers, MODES, strict=True):
            self.store.attach(tier, mode)
        self.loops = [asyncio.create_task(cascade.run()) for cascade in self.store.cascades]

    def teardown(self) -> None:
        self.runner.run(self._close())
        self.runner.close()

    async def _close(self) -> None:
        assert await self.store.close(5.0) == sorted(t.name for t in self.tiers if t.running)
        for tier in self.tiers:
            tier.release()
        await asyncio.sleep(0.1)
        self.what_is_ready_is_right()
        assert [tier.spoiled for tier in self.tiers] == [[], [], []]
        await asyncio.gather(*self.loops)
        assert await self.store.close(5.0) == []
        self.store.host.forget("engine")
        self.store.host.forget("reader")
        usage = self.store.host.usage()
        assert usage.writing == usage.quarantined == 0
        assert usage.used == usage.ready == len(self.store.host.keys()) * PAGE
        assert all(guard.budget.taken == 0 for guard in self.store.guards)
        assert all(cascade.pinned == 0 for cascade in self.store.cascades)

    @rule(which=st.integers(0, 2), call=CALLS)
    def hang(self, which: int, call: str) -> None:
        self.tiers[which].hangs.add(call)

    @rule(which=st.integers(0, 2))
    def strand(self, which: int) -> None:
        """Its next loads hang, and are given up."""

        async def work() -> None:
            self.store.host.drop()
            self.tiers[which].hangs.add("load")
            await find(self.store, *range(which, 24, 3), want="all", wait=1.0)
            self.store.host.release("reader", [1])
            await asyncio.sleep(3.0)

        self.runner.run(work())

    @rule(first=st.integers(100, 200))
    def strand_stores(self, first: int) -> None:
        """The next stores hang, are given up, and much is written after them."""

        async def work() -> None:
            self.tiers[0].hangs.add("store")
            for seconds, n in ((40.0, first), (0.01, first + PAGES)):
                batch = [(key(m), PAGE) for m in range(n, n + PAGES)]
                offsets = self.store.host.reserve("other", batch)
                for (k, _), offset in zip(batch, offsets, strict=True):
                    if offset >= 0:
                        self.store.region[offset : offset + PAGE] = payload(k)
                self.store.host.commit("other", [k for k, _ in batch])
                await asyncio.sleep(seconds)

        self.runner.run(work())

    @rule(which=st.integers(0, 2), call=CALLS, raises=st.booleans())
    def fail(self, which: int, call: str, raises: bool) -> None:
        (self.tiers[which].raises if raises else self.tiers[which].fails).add(call)

    @rule(which=st.integers(0, 2))
    def recover(self, which: int) -> None:
        tier = self.tiers[which]
        tier.raises.clear()
        tier.fails.clear()
        tier.release()

    @rule(numbers=st.lists(KEYS, min_size=1, max_size=12, unique=True))
    def reserve(self, numbers: list[int]) -> None:
        async def work() -> None:
            asked = [key(n) for n in numbers if key(n) not in self.writing]
            offsets = self.store.host.reserve("engine", [(k, PAGE) for k in asked])
            for k, offset in zip(asked, offsets, strict=True):
                if offset not in (NO_ROOM, PRESENT):
                    # Half of it now: another who writes there too would show at the end.
                    self.store.region[offset : offset + PAGE // 2] = payload(k)[: PAGE // 2]
                    self.writing[k] = offset

        self.runner.run(work())

    @precondition(lambda self: self.writing)
    @rule()
    def commit(self) -> None:
        async def work() -> None:
            for k, offset in self.writing.items():
                half = self.store.region[offset : offset + PAGE // 2]
                assert bytes(half) == payload(k)[: PAGE // 2]
                self.store.region[offset : offset + PAGE] = payload(k)
            self.store.host.commit("engine", list(self.writing))
            self.writing.clear()

        self.runner.run(work())

    @rule(
        numbers=st.lists(KEYS, min_size=1, max_size=8, unique=True), wait=st.sampled_from([0, 1, 9])
    )
    def read(self, numbers: list[int], wait: float) -> None:
        async def work() -> None:
            began = asyncio.get_running_loop().time()
            await find(self.store, *numbers, want="all", wait=wait)
            assert asyncio.get_running_loop().time() - began <= wait + 0.1
            self.store.host.release("reader", [1])

        self.runner.run(work())

    @rule(seconds=st.sampled_from([0.01, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))

    @rule()
    def drop(self) -> None:
        async def work() -> None:
            self.store.host.drop()

        self.runner.run(work())

    @invariant()
    def what_is_ready_is_right(self) -> None:
        held = self.store.host.keys()
        for k in held:
            chunk = self.store.host.get(k)
            assert chunk is not None
            assert data(self.store, chunk) == payload(k)

    @invariant()
    def what_is_held_is_bounded(self) -> None:
        held = sum(guard.stuck_bytes for guard in self.store.guards)
        # Half of the region for promotions, and two batches for each of three cascades.
        assert held <= PAGES * PAGE // 2 + 6 * PAGE


TestTroubles = Troubles.TestCase
TestTroubles.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
