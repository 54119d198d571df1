from __future__ import annotations

import asyncio

from kvstrata.node.supervisor import Supervisor
from kvstrata.testing.waiting import until


class Pauses:
    """A sleep that a test reads, and that takes no time."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        await asyncio.sleep(0)


async def test_a_loop_that_fails_is_started_again_with_growing_pauses() -> None:
    pauses, runs = Pauses(), 0

    async def loop() -> None:
        nonlocal runs
        runs += 1
        if runs < 6:
            raise RuntimeError("no luck")
        await asyncio.Event().wait()

    supervisor = Supervisor(pauses, first_delay=1.0, most=4.0)
    supervisor.start("luck", loop)
    await until(lambda: runs == 6 and not supervisor.failing)
    assert pauses.taken == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert supervisor.restarts == 5
    assert supervisor.states == {"luck": "running"}
    await supervisor.stop()


async def test_a_failure_shows_until_the_loop_runs_again() -> None:
    again = asyncio.Event()

    async def wait(seconds: float) -> None:
        await again.wait()

    async def loop() -> None:
        if not again.is_set():
            raise OSError(28, "No space left on device")
        await asyncio.Event().wait()

    supervisor = Supervisor(wait)
    supervisor.start("disk", loop)
    await until(lambda: supervisor.failing)
    assert supervisor.failing == {"disk": "restarting: OSError: [Errno 28] No space left on device"}
    again.set()
    await until(lambda: not supervisor.failing)
    await supervisor.stop()


async def test_a_loop_that_takes_long_to_fail_is_not_well_in_between() -> None:
    now, begun, shown = asyncio.get_running_loop().time, [], []

    async def loop() -> None:
        begun.append(now())
        shown.append(dict(supervisor.failing))
        if len(begun) == 1:
            await asyncio.sleep(0.1)
            raise OSError(110, "Connection timed out")
        await asyncio.Event().wait()

    supervisor = Supervisor(Pauses(), most=60.0)
    supervisor.start("far", loop)
    await until(lambda: len(begun) == 2 and not supervisor.failing)
    assert now() - begun[1] >= 0.2
    assert "timed out" in shown[1]["far"]
    await supervisor.stop()


async def test_a_loop_that_returns_has_ended() -> None:
    async def loop() -> None:
        return

    supervisor = Supervisor(Pauses())
    supervisor.start("short", loop)
    await until(lambda: supervisor.states["short"] == "ended")
    assert supervisor.restarts == 0
    await supervisor.stop()


async def test_stop_cancels_and_waits() -> None:
    ended = asyncio.Event()

    async def loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    supervisor = Supervisor()
    supervisor.start("long", loop)
    await asyncio.sleep(0)
    await supervisor.stop()
    assert ended.is_set()
    await supervisor.stop()
