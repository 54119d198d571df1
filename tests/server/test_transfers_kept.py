"""Nothing is said of a transfer that a server which dies now would not have kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from server_kit import Running, join, keys, running

from kvstrata import api
from kvstrata.api import TransferState
from kvstrata_server.scheduling.history import Wanted


@asynccontextmanager
async def slow_database(path: Path) -> AsyncIterator[tuple[Running, asyncio.Event]]:
    """A server with a node, and what lets its database take writes."""
    async with running(path) as r:
        await join(r.control, "a")
        open_ = asyncio.Event()
        open_.set()
        write_batch = r.state.writer.write_batch

        async def held() -> None:
            await open_.wait()
            await write_batch()

        r.state.writer.write_batch = held  # type: ignore[method-assign]
        yield r, open_
        open_.set()


async def until_held(*answers: asyncio.Task[api.TransferInfo]) -> None:
    for _ in range(50):
        await asyncio.sleep(0)
    assert not any(answer.done() for answer in answers)


ASKED = api.TransferRequest(target="a", keys=keys(0))


async def test_a_retry_is_accepted_no_sooner_than_what_it_repeats(tmp_path: Path) -> None:
    async with slow_database(tmp_path) as (r, open_):
        open_.clear()
        both = [asyncio.create_task(r.state.transfers.create(ASKED, "k")) for _ in range(2)]
        await until_held(*both)
        open_.set()
        first, again = await asyncio.gather(*both)
        assert first.id == again.id


async def test_an_end_is_told_once_sql_has_it(tmp_path: Path) -> None:
    async with slow_database(tmp_path) as (r, open_):
        made = await r.state.transfers.create(ASKED, "k")
        open_.clear()
        asking = [
            asyncio.create_task(ask)
            for ask in (
                r.state.transfers.cancel(made.id),
                r.state.transfers.cancel(made.id),
                r.state.transfers.get(made.id),
                r.state.transfers.create(ASKED, "k"),
            )
        ]
        progress = api.Progress(incarnation="i1", transfer=made.id, final=True)
        posted = asyncio.create_task(r.state.transfers.progress("a", progress))
        await until_held(*asking)
        assert not posted.done()
        (listed,) = (await r.state.transfers.page(None, 10, Wanted())).transfers
        assert listed.state is TransferState.QUEUED
        open_.set()
        assert {t.state for t in await asyncio.gather(*asking)} == {TransferState.CANCELLED}
        assert (await posted).state is TransferState.CANCELLED
