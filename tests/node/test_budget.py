"""Bytes in flight: in turns, within time, and given back."""

from __future__ import annotations

import asyncio

from tier_kit import now, timeless

from kvstrata.node.budget import Budget


@timeless
async def test_what_fits_is_taken_at_once_and_what_does_not_waits_its_turn() -> None:
    budget = Budget(10)
    assert await budget.take(6, 1) == 6
    big, small = (asyncio.create_task(budget.take(n, 5)) for n in (8, 2))
    await asyncio.sleep(0.1)
    assert not big.done()
    assert not small.done()  # it does not overtake
    budget.give(6)
    assert (await big, await small) == (8, 2)
    assert budget.taken == 10


@timeless
async def test_more_than_there_is_is_all_there_is() -> None:
    budget = Budget(10)
    assert await budget.take(50, 1) == 10
    budget.give(10)
    assert budget.taken == 0


@timeless
async def test_a_wait_that_ends_in_nothing_lets_those_behind_it_through() -> None:
    budget = Budget(10)
    await budget.take(6, 1)
    big, small = asyncio.create_task(budget.take(8, 1)), asyncio.create_task(budget.take(2, 9))
    assert await big == 0
    assert await small == 2
    assert now() == 1
    assert budget.taken == 8


@timeless
async def test_a_cancelled_wait_takes_nothing() -> None:
    budget = Budget(10)
    await budget.take(10, 1)
    waiting = asyncio.create_task(budget.take(5, 9))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    budget.give(10)
    assert budget.taken == 0

    await budget.take(10, 1)
    served = asyncio.create_task(budget.take(5, 9))
    await asyncio.sleep(0)
    budget.give(10)
    served.cancel()  # its turn has come, and it does not know yet
    await asyncio.wait({served})
    assert budget.taken == 0


@timeless
async def test_closing_ends_all_waits() -> None:
    budget = Budget(10)
    await budget.take(10, 1)
    waiting = asyncio.create_task(budget.take(5, 9))
    await asyncio.sleep(0)
    budget.close()
    assert await waiting == 0
    assert await budget.take(1, 9) == 0
    budget.give(10)
    assert budget.taken == 0
