"""Transfers read from SQL while other servers write them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from server_kit import join, keys, running

from kvstrata import api
from kvstrata_server import history


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
