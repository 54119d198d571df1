"""Parts are taken down last first, within the time there is."""

from __future__ import annotations

import asyncio

import pytest
from tier_kit import now, timeless

from kvstrata.node.ending import Ending


@timeless
async def test_the_last_part_goes_first_and_what_hangs_is_left_behind() -> None:
    gone: list[str] = []
    ending = Ending(asyncio.get_running_loop().time, 4.0)

    async def part(name: str, seconds: float = 0.0) -> None:
        await asyncio.sleep(seconds)
        gone.append(name)

    ending.add_quick(lambda: gone.append("first"))
    ending.add("late", lambda: part("late", 0.4))
    ending.add("stuck", lambda: part("stuck", 100))
    ending.add("slow", lambda: part("slow", 3))
    ending.add("last", lambda: part("last"))
    await ending.close()
    assert gone == ["last", "slow", "late", "first"]
    assert ending.stuck == ["stuck"]
    assert now() == pytest.approx(4.4)
    await ending.close()
    assert gone[-1] == "first"


@timeless
async def test_a_part_that_fails_is_told_after_the_others_are_down() -> None:
    gone: list[str] = []
    ending = Ending(asyncio.get_running_loop().time, 4.0)

    async def fail() -> None:
        raise OSError("broken")

    ending.add_quick(lambda: gone.append("first"))
    ending.add("broken", fail)
    with pytest.raises(OSError, match="broken"):
        await ending.close()
    assert gone == ["first"]
    assert ending.stuck == []
