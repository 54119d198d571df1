"""What engines told, remembered over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.keys import Key
from kvstrata.node import events_memory
from kvstrata.node.events_memory import EventMemory
from kvstrata.testing.chunks import a_namespace
from kvstrata.wire import Told

NAMESPACE = a_namespace()


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def told(n: int) -> Told:
    return Told(key(n), [n], bytes(64), n - 1 if n else None, "l", "s")


async def opened(path: Path, **kwargs: int) -> EventMemory:
    memory = EventMemory(path, {NAMESPACE.digest: NAMESPACE}.get, **kwargs)
    await memory.open()
    return memory


async def test_what_was_told_is_there_again_in_its_order(tmp_path: Path) -> None:
    memory = await opened(tmp_path / "m")
    memory.told([told(3), told(1)])
    await memory.flush()
    memory.told([told(2), told(1)])
    await memory.close()
    await memory.close()
    again = await opened(tmp_path / "m")
    namespaces, tells = await again.recall({key(1), key(2), key(3), key(9)})
    assert namespaces == [NAMESPACE]
    assert tells == [told(3), told(1), told(2)]
    assert (await again.recall({key(2)}))[1] == [told(2)]
    await again.close()


async def test_it_has_a_bound_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = await opened(tmp_path / "m", most_chunks=10)
    for n in range(30):
        memory.told([told(n)])
        await memory.flush()
    _, tells = await memory.recall({key(n) for n in range(30)})
    assert [t.blocks[0] for t in tells] == list(range(20, 30))
    monkeypatch.setattr(events_memory, "_MOST_PENDING", 5)
    memory.told([told(n) for n in range(40, 47)])
    assert memory.lost == 2
    await memory.close()


async def test_what_it_can_not_read_is_left_out(tmp_path: Path) -> None:
    memory = await opened(tmp_path / "m")
    memory.told([told(1)])
    await memory.flush()
    await memory._do(
        lambda: memory._database.execute(  # type: ignore[union-attr]
            "INSERT INTO told (key, told) VALUES (?, ?)", [key(2), b"\x90"]
        )
    )
    assert (await memory.recall({key(1), key(2)}))[1] == [told(1)]
    await memory.close()


@pytest.mark.parametrize("content", [b"no database" * 100, None])
async def test_a_file_that_can_not_be_used(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    memory = EventMemory(path, lambda digest: None)
    with pytest.raises(ConfigError, match="event_memory"):
        await memory.open()
    await memory.close()
