"""The database's file is taken from under a server that runs."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from server_kit import Running, database_url, join, keys, running

from kvstrata import api
from kvstrata.errors import Busy, ConfigError
from kvstrata_server.sql import writer
from kvstrata_server.sql.database import Database

NAME = "control.sqlite"


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LOOK_SECONDS", 0.02)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(40):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def readiness(r: Running) -> int:
    return (await r.http.get("/readyz")).status_code


def removed(folder: Path) -> None:
    for file in folder.glob(f"{NAME}*"):
        file.unlink()


def move(folder: Path, to: Path) -> None:
    to.mkdir(exist_ok=True)
    for file in folder.glob(f"{NAME}*"):
        file.rename(to / file.name)


def replaced(folder: Path) -> None:
    copy = folder / "copy"
    with sqlite3.connect(folder / NAME) as ours, sqlite3.connect(copy) as theirs:
        ours.backup(theirs)
    ours.close()
    theirs.close()
    os.replace(copy, folder / NAME)


@pytest.mark.parametrize("take", [removed, replaced])
async def test_it_is_noticed_and_nothing_is_acknowledged(
    tmp_path: Path, take: Callable[[Path], None]
) -> None:
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await r.state.writer.flushed(10)
        take(tmp_path)
        await until(lambda: r.state.writer.lost)
        health = api.Health.model_validate_json((await r.http.get("/readyz")).content)
        assert await readiness(r) == 503
        [told] = [task.detail for task in health.tasks if task.name == "database"]
        assert f"was {take.__name__}" in told
        assert "restart the server" in told
        refused = await r.http.put("/v1/quotas/x", json={"max_bytes": 1})
        assert refused.status_code == 503
        assert "restart the server" in refused.json()["detail"]
        with pytest.raises(Busy, match="put that very file back"):
            await r.control.create_transfer(api.TransferRequest(target="a", keys=keys(0)))


async def test_what_is_written_before_it_is_noticed_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LOOK_SECONDS", 3600.0)
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await r.state.writer.flushed(10)
        committed = r.state.writer.committed
        removed(tmp_path)
        await join(r.control, "b")
        await until(lambda: r.state.writer.lost)
        assert r.state.writer.committed == committed


async def test_put_back_it_is_used_again(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        move(tmp_path, tmp_path / "away")
        await until(lambda: r.state.writer.lost)
        move(tmp_path / "away", tmp_path)
        await until(lambda: not r.state.writer.lost)
        assert (await r.http.put("/v1/quotas/x", json={"max_bytes": 1})).status_code == 200
        assert await readiness(r) == 200


async def test_a_claim_that_was_removed_is_made_again(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        (tmp_path / f"{NAME}-lock").unlink()
        await until((tmp_path / f"{NAME}-lock").exists)
        second = Database(database_url(tmp_path))
        with pytest.raises(ConfigError, match="used by another control plane"):
            await second.migrate()
        await second.close()
        assert await readiness(r) == 200


async def test_a_claim_that_another_server_made_meanwhile_is_noticed(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        second = Database(database_url(tmp_path))
        (tmp_path / f"{NAME}-lock").unlink()
        await second.migrate()
        await until(lambda: r.state.writer.lost)
        assert "used by another control plane" in r.state.writer.problem
        await second.close()
        await until(lambda: not r.state.writer.lost)
