"""Threads that a mount may keep: what is spread over them, given up and replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvstrata.testing import FakeClock
from kvstrata.testing.waiting import until
from kvstrata.tiers.calls import Call
from kvstrata.tiers.fs_threads import Workers

LATE = -1


class Gate:
    """Work that waits for its event, item by item."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.inside: list[int] = []

    def __call__(self, i: int) -> int:
        self.inside.append(i)
        self.open.wait(30)
        return i


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(0.0)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def call(clock: FakeClock, seconds: float = 60.0) -> Call:
    return Call(clock, clock() + seconds)


async def test_a_batch_is_spread_and_answered_in_order(clock: FakeClock, gate: Gate) -> None:
    workers = Workers("t", 3, clock)
    spread = asyncio.ensure_future(workers.spread(call(clock), gate, list(range(9)), LATE))
    await until(lambda: len(gate.inside) == 3)
    gate.open.set()
    assert await spread == list(range(9))
    assert await workers.spread(call(clock), gate, [], LATE) == []
    workers.close()


async def test_batches_take_turns(clock: FakeClock) -> None:
    done: list[str] = []
    gate = Gate()
    workers = Workers("t", 1, clock)

    def slow(i: int) -> None:
        gate(i)
        done.append(f"a{i}")

    long = asyncio.ensure_future(workers.spread(call(clock), slow, range(6), None))
    await until(lambda: gate.inside)
    short = asyncio.ensure_future(
        workers.spread(call(clock), lambda i: done.append(f"b{i}"), range(2), None)
    )
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(long, short)
    assert done.index("b1") < done.index("a5"), "a short batch waited for a long one"
    workers.close()


async def test_an_error_is_the_callers(clock: FakeClock) -> None:
    def fail(i: int) -> int:
        raise ValueError(f"{i} is bad")

    workers = Workers("t", 2, clock)
    with pytest.raises(ValueError, match="is bad"):
        await workers.spread(call(clock), fail, [1, 2, 3], LATE)
    workers.close()


@pytest.mark.parametrize("memory", [True, False])
async def test_past_the_deadline_nothing_is_begun(
    clock: FakeClock, gate: Gate, memory: bool
) -> None:
    workers = Workers("t", 2, clock)
    spread = asyncio.ensure_future(
        workers.spread(call(clock, 1), gate, list(range(5)), LATE, memory=memory)
    )
    await until(lambda: len(gate.inside) == 2)
    clock.advance(1)
    done, _ = await asyncio.wait([spread], timeout=0.3 if memory else 30)
    assert bool(done) != memory, "memory in work keeps its call, and only that"
    gate.open.set()
    assert await spread == ([0, 1] if memory else [LATE] * 2) + [LATE] * 3
    assert len(gate.inside) == 2
    workers.close()


async def test_lost_threads_are_replaced_up_to_a_bound(clock: FakeClock, gate: Gate) -> None:
    workers = Workers("t", 1, clock)
    stuck = []
    for i in range(6):
        stuck.append(asyncio.ensure_future(workers.spread(call(clock), gate, [i], LATE)))
        await asyncio.sleep(0)
        if i < 5:
            await until(lambda i=i: len(gate.inside) == i + 1)  # type: ignore[misc]
        clock.advance(5)
        assert workers.stuck(5.0) == 1
        workers.give_up(5.0)
        assert workers.stuck(5.0) == (0 if i < 4 else 1)
    assert len(gate.inside) == 5, "more threads were lost than may be"
    gate.open.set()
    assert [r for [r] in await asyncio.gather(*stuck)] == list(range(6))
    assert await workers.spread(call(clock), gate, [9], LATE) == [9]
    workers.close()


async def test_a_call_without_memory_leaves_lost_threads(clock: FakeClock, gate: Gate) -> None:
    workers = Workers("t", 1, clock)
    one = call(clock)
    spread = asyncio.ensure_future(workers.spread(one, gate, [1], LATE, memory=False))
    await until(lambda: gate.inside)
    clock.advance(5)
    workers.give_up(5.0)
    one.stopped = True
    assert await spread == [LATE]
    workers.close()


async def test_stores_let_loads_go_first(clock: FakeClock, gate: Gate) -> None:
    order: list[str] = []
    loads = Workers("load", 1, clock)
    stores = Workers("store", 1, clock, after=loads)
    first = asyncio.ensure_future(loads.spread(call(clock), gate, [0, 1], LATE))
    await until(lambda: gate.inside)

    def note(what: str) -> None:
        order.append(f"{what} after {len(gate.inside)} loads")

    store = asyncio.ensure_future(stores.spread(call(clock), note, ["store"], None))
    await asyncio.sleep(0.02)
    assert order == [], "a store began while a load waited"
    gate.open.set()
    await asyncio.gather(first, store)
    assert order == ["store after 2 loads"]
    for workers in (loads, stores):
        workers.close()


async def test_but_not_for_ever(clock: FakeClock, gate: Gate) -> None:
    loads = Workers("load", 1, clock)
    stores = Workers("store", 1, clock, after=loads)
    hanging = asyncio.ensure_future(loads.spread(call(clock), gate, [0, 1], LATE))
    await until(lambda: gate.inside)
    assert await stores.spread(call(clock), lambda i: i, [7], LATE) == [7]
    gate.open.set()
    await hanging
    for workers in (loads, stores):
        workers.close()
