"""A transfer followed by server-sent events, from real servers."""

import asyncio
import json
import signal
from contextlib import asynccontextmanager

import httpx
import pytest
from process_kit import server
from replicas_kit import Process, two
from server_kit import host, join, keys, report, running

from kvstrata import api
from kvstrata.api import TransferState
from kvstrata.control import ControlPlane
from kvstrata_server.access.roles import Role
from kvstrata_server.access.tokens import create
from kvstrata_server.routes import sse
from kvstrata_server.routes import transfers as routes

S = TransferState


class Reader:
    def __init__(self, lines):
        self._lines = lines
        self.comments = 0

    async def next(self):
        """The next event as a summary; None: the stream has ended."""
        kind = None
        async for line in self._lines:
            self.comments += line.startswith(":")
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                assert kind == "transfer"
                return api.TransferSummary(**json.loads(line.removeprefix("data: ")))
        return None


@asynccontextmanager
async def watching(url, transfer):
    async with (
        httpx.AsyncClient(timeout=20) as client,
        client.stream("GET", f"{url}/v1/transfers/{transfer}/events") as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Reader(answer.aiter_lines())


async def ready(control, *numbers, **more):
    await join(control, "a")
    await join(control, "b")
    await control.report("a", report(0, host(keys(0, 1))))
    return (
        await control.create_transfer(
            api.TransferRequest(target="b", keys=keys(*numbers or (0, 1)), **more)
        )
    ).id


def progress(transfer, final=False, outcome=None, *numbers):
    said = dict.fromkeys(keys(*numbers), outcome)
    return api.Progress(incarnation="i1", transfer=transfer, final=final, outcomes=said)


async def test_each_change_is_told_until_the_end(tmp_path):
    with server(tmp_path) as process:
        async with ControlPlane(process.url) as control:
            transfer = await ready(control)
            async with watching(process.url, transfer) as reader:
                assert (await reader.next()).state is S.QUEUED
                await control.progress("b", progress(transfer, False, "stored", 0))
                told = await reader.next()
                assert (told.state, told.counts) == (S.RUNNING, {"stored": 1, "pending": 1})
                await control.progress("b", progress(transfer, True, "missing", 1))
                told = await reader.next()
                assert (told.state, told.counts) == (S.PARTIAL, {"stored": 1, "missing": 1})
                assert await reader.next() is None
            # Who comes late is told the end, and no more.
            async with watching(process.url, transfer) as reader:
                assert (await reader.next()) == told
                assert await reader.next() is None
            other = await ready(control)
            async with watching(process.url, other) as reader:
                assert (await reader.next()).state is S.QUEUED
                assert await asyncio.to_thread(process.end, signal.SIGTERM) == 0
                assert await reader.next() is None


async def test_one_server_tells_what_another_is_told(postgres_address):
    first, second = Process(postgres_address), Process(postgres_address)
    try:
        async with ControlPlane(first.url) as one:
            transfer = await ready(one, deadline=30)
            async with watching(second.url, transfer) as reader:
                assert (await reader.next()).state is S.QUEUED
                async with asyncio.timeout(8):
                    await one.progress("b", progress(transfer))
                    assert (await reader.next()).state is S.RUNNING
                async with asyncio.timeout(8):
                    await one.cancel_transfer(transfer)
                    assert (await reader.next()).state is S.CANCELLED
                assert await reader.next() is None
    finally:
        for process in (first, second):
            process.end()


async def test_silence_is_filled_and_the_deadline_is_news(tmp_path, monkeypatch):
    monkeypatch.setattr(routes, "SILENCE", 0.01)
    async with running(tmp_path) as r:
        transfer = await ready(r.control, deadline=10)
        told = routes._changes(transfer, r.state, lambda: True)
        assert '"state":"queued"' in await anext(told)
        for _ in range(3):
            assert await anext(told) == sse.NOTHING_NEW
        r.clock.advance(10)
        while (text := await anext(told)) == sse.NOTHING_NEW:
            pass
        assert '"state":"expired"' in text
        assert [text async for text in told] == []


async def test_other_tenants_can_not_watch_it(tmp_path):
    async with running(tmp_path, token="root") as r:
        transfer = await ready(r.control)
        token = await create(
            r.state.database, "theirs", Role.READ, r.clock(), tenants=["somebody else"]
        )
        await r.state.tokens.refresh()
        answer = await r.http.get(
            f"/v1/transfers/{transfer}/events", headers={"Authorization": f"Bearer {token}"}
        )
        assert answer.status_code == 404
        headers = {"Authorization": "Bearer root"}
        answer = await r.http.get("/v1/transfers/none/events", headers=headers)
        assert answer.status_code == 404


async def test_a_token_that_is_none_any_more_sees_no_further(tmp_path):
    async with running(tmp_path) as r:
        transfer = await ready(r.control)
        stands = True
        told = routes._changes(transfer, r.state, lambda: stands)
        await anext(told)
        stands = False
        await r.control.progress("b", progress(transfer))
        with pytest.raises(StopAsyncIteration):
            await anext(told)


async def test_a_reader_that_leaves_is_forgotten(postgres_address):
    async with two(postgres_address) as (first, _):
        transfer = await ready(first.control)
        told = routes._changes(transfer, first.state, lambda: True)
        await anext(told)
        assert first.state.transfers._watchers._events
        await told.aclose()
        assert not first.state.transfers._watchers._events
