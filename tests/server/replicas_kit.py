"""Several servers on one PostgreSQL: two in this process, or each a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from server_kit import Running, TurnedClock, running

from kvstrata import api

USE = api.HostUse(used_bytes=5, capacity_bytes=10, chunks=1)
PROGRAM = "import sys; from kvstrata_server.app import main; sys.exit(main(sys.argv[1:]))"


def beat(incarnation: str = "i1", **more: object) -> api.HeartbeatRequest:
    return api.HeartbeatRequest(incarnation=incarnation, host=USE, **more)


@asynccontextmanager
async def two(address: str, **settings: object) -> AsyncIterator[tuple[Running, Running]]:
    clock = TurnedClock()
    async with (
        running(address, clock, **settings) as first,
        running(address, clock, **settings) as second,
    ):
        yield first, second


async def told(*servers: Running) -> None:
    """Until each has written what it knows and read what the others wrote."""
    for server in servers:
        server.state.follower.tell()
        await server.state.writer.flushed(10)
    for server in servers:
        while await server.state.follower.read():
            pass


class Process:
    def __init__(self, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--listen", "127.0.0.1:0", "--database", address],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "KVSTRATA_SERVER_HEARTBEAT_TTL": "60"},
            text=True,
        )
        found = re.search(r"http://\S+", self.process.stdout.readline())
        assert found, "the server did not start"
        self.url = found[0]

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait(20)
        self.process.stdout.close()


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> float:
    """Seconds it took."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    return loop.time() - started
