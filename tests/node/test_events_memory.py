"""What engines told, remembered over a restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import ConfigError
from kvstrata.keys import Key
from kvstrata.node import events_memory
from kvstrata.node.events_memory import EventMemory
from kvstrata.node.namespaces import Namespaces
from kvstrata.testing.chunks import a_namespace
from kvstrata.wire import Told

NAMESPACE = a_namespace()


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def told(n: int) -> Told:
    return Told(key(n), [n], bytes(64), n - 1 if n else None, "l", "s")


class Remembering:
    """A memory, and what it tells."""

    def __init__(self, path: Path, known: bool = True, **kwargs: int) -> None:
        self.namespaces = Namespaces()
        if known:
            self.namespaces.add(NAMESPACE)
        self.told: list[Told] = []
        self.memory = EventMemory(path, self.namespaces, self.told.extend, **kwargs)

    async def recall(self, *numbers: int) -> list[int]:
        """Numbers of the chunks it tells of."""
        self.told.clear()
        await self.memory.recall([key(n) for n in numbers])
        return [told.blocks[0] for told in self.told]


@asynccontextmanager
async def remembering(path: Path, **kwargs: Any) -> AsyncIterator[Remembering]:
    here = Remembering(path, **kwargs)
    await here.memory.open()
    yield here
    await here.memory.close()
    await here.memory.close()


async def test_an_opening_that_is_cancelled_leaves_no_database_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Remembering(tmp_path / "m").memory
    begun, go_on, opens = threading.Event(), threading.Event(), memory._open

    def late() -> None:
        begun.set()
        assert go_on.wait(20)
        opens()

    monkeypatch.setattr(memory, "_open", late)
    opening = asyncio.create_task(memory.open())
    assert await asyncio.to_thread(begun.wait, 20)
    opening.cancel()
    await asyncio.wait([opening])
    closing = asyncio.create_task(memory.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    await asyncio.to_thread(memory._thread.shutdown)
    assert memory._database is None


async def test_what_was_told_is_there_again_in_its_order(tmp_path: Path) -> None:
    async with remembering(tmp_path / "m") as here:
        here.memory.told([told(3), told(1)])
        await here.memory.flush()
        here.memory.told([told(2), told(1)])
    async with remembering(tmp_path / "m", known=False) as here:
        assert await here.recall(1, 2, 3, 9) == [3, 1, 2]
        assert here.told == [told(3), told(1), told(2)]
        assert here.namespaces.all() == [NAMESPACE]
        assert await here.recall(2) == [2]
        assert await here.recall() == []
        here.told.clear()
        here.memory.found([key(1)])
        here.memory.found([key(3)])
        await here.memory.recall_found()
        await here.memory.recall_found()
        assert here.told == [told(3), told(1)]


async def test_it_has_a_bound_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with remembering(tmp_path / "m", most_chunks=10) as here:
        for n in range(30):
            here.memory.told([told(n)])
            await here.memory.flush()
        assert await here.recall(*range(30)) == list(range(20, 30))
        monkeypatch.setattr(events_memory, "_MOST_PENDING", 5)
        here.memory.told([told(n) for n in range(40, 47)])
        assert here.memory.lost == 2


async def test_many_at_once(tmp_path: Path) -> None:
    async with remembering(tmp_path / "m") as here:
        here.memory.told([told(n) for n in range(3000)])
        await here.memory.flush()
        assert await here.recall(*reversed(range(3000))) == list(range(3000))


async def test_what_it_can_not_read_is_left_out(tmp_path: Path) -> None:
    async with remembering(tmp_path / "m") as here:
        here.memory.told([told(1)])
        await here.memory.flush()
        await here.memory._do(
            lambda: here.memory._database.execute(  # type: ignore[union-attr]
                "INSERT INTO told (key, told) VALUES (?, ?)", [key(2), b"\x90"]
            )
        )
        assert await here.recall(1, 2) == [1]


@pytest.mark.parametrize("content", [b"no database" * 100, None])
async def test_a_file_that_can_not_be_used(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    memory = Remembering(path).memory
    with pytest.raises(ConfigError, match="event_memory"):
        await memory.open()
    await memory.close()
