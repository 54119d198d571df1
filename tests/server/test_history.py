"""Transfers read from SQL while other servers write them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from server_kit import join, keys, running

from kvstrata import api
from kvstrata_server.scheduling import history


async def test_a_transfer_that_ends_while_it_is_read_keeps_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as r:
        await join(r.control, "a")
        asked = api.TransferRequest(target="a", keys=keys(0, 1))
        made = [await r.control.create_transfer(asked) for _ in range(3)]
        monkeypatch.setattr(history, "_IDS", 2)
        database = r.state.database
        read: Callable[..., Awaitable[Sequence[Any]]] = database.rows

        async def meanwhile(*statement: Any) -> Sequence[Any]:
            monkeypatch.setattr(database, "rows", read)
            rows = await read(*statement)
            await r.control.cancel_transfer(made[1].id)
            return rows

        monkeypatch.setattr(database, "rows", meanwhile)
        found = await history.unended(database)
        assert [t.id for t in found] == [t.id for t in made]
        assert [[key.hex() for key in t.keys] for t in found] == [keys(0, 1)] * 3


@pytest.mark.parametrize("sizes", [(5, 5), (1, 13, 0), (7,), (6, 1, 1, 1, 1, 1, 1, 1, 1, 12)])
async def test_all_keys_are_read_in_order_however_many_in_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(history, "_CHUNKS", 5)
    monkeypatch.setattr(history, "_IDS", 7)
    async with running(tmp_path) as r:
        await join(r.control, "a")
        wanted = {}
        for size in sizes:
            asked = api.TransferRequest(target="a", keys=keys(*range(size + 1)))
            wanted[(await r.control.create_transfer(asked)).id] = asked.keys
        found = await history.unended(r.state.database)
        assert {t.id: [key.hex() for key in t.keys] for t in found} == wanted


async def test_a_key_costs_the_same_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in steps of SQLite, which are the same on every machine."""
    monkeypatch.setattr(history, "_CHUNKS", 100)
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    async def per_key(size: int) -> float:
        nonlocal steps
        (tmp_path / str(size)).mkdir()
        async with running(tmp_path / str(size)) as r:
            await join(r.control, "a")
            asked = api.TransferRequest(target="a", keys=keys(*range(size)))
            for _ in range(4):
                await r.control.create_transfer(asked)
            database = r.state.database
            async with database.engine.connect() as connection:
                driver = (await connection.get_raw_connection()).driver_connection
                assert driver is not None
                await driver.set_progress_handler(step, 10)
            steps = 0
            assert sum(len(t.keys) for t in await history.unended(database)) == 4 * size
            return steps / size

    small, large = await per_key(200), await per_key(2000)
    assert 0 < large < 1.5 * small
