"""What readers of the change stream learn, and when they have lost some."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from server_kit import Running, host, join, keys, report, running, store

from kvstrata import api
from kvstrata.errors import Expired, Malformed
from kvstrata_server.access.roles import Role
from kvstrata_server.access.tokens import create, revoke
from kvstrata_server.placement.feed import Feed, NodeChange, Voided
from kvstrata_server.placement.index import HOST
from kvstrata_server.routes import sse


class Mirror:
    """An index of a reader's own: (node, location) -> keys."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], set[str]] = {}
        self.nodes: dict[str, Any] = {}
        self.cursor = ""

    def read(self, text: str) -> None:
        """Events as they came over the wire."""
        for block in text.split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
            if not fields:
                continue
            self.apply(fields["event"], json.loads(fields["data"]))
            self.cursor = fields.get("id", self.cursor)

    def apply(self, kind: str, data: Any) -> None:
        if kind == "node":
            self.nodes[data["node"]] = data["stores"]
        elif kind == "voided":
            self.held.pop((data["node"], data["location"]), None)
        elif kind == "placements":
            held = self.held.setdefault((data["node"], data["location"]), set())
            held.difference_update(data["removed"])
            held.update(data["added"])
        else:
            assert (kind, data) == ("start", {})

    def load(self, text: str) -> None:
        """A snapshot."""
        first, *lines, last = map(json.loads, text.splitlines())
        self.held, self.nodes, self.cursor = {}, {}, first["cursor"]
        assert last == {"end": True}
        for line in lines:
            if "stores" in line:
                self.nodes[line["node"]] = line["stores"]
            else:
                held = self.held.setdefault((line["node"], line["location"]), set())
                held.update(line["keys"])

    def known(self) -> dict[tuple[str, str], set[str]]:
        return {at: held for at, held in self.held.items() if held}


def truth(here: Running) -> dict[tuple[str, str], set[str]]:
    state = here.state
    held: dict[tuple[str, str], set[str]] = {}
    for location, part in state.index.dump():
        node, store_id = state.places.describe(location)
        held.setdefault((node, store_id or HOST), set()).update(key.hex() for key in part)
    return {at: found for at, found in held.items() if found}


@asynccontextmanager
async def reading(
    here: Running, cursor: str | None = None, token: str = ""
) -> AsyncIterator[list[str]]:
    """A reader of the stream, without a network; its list grows by what is sent."""
    sent: list[str] = []
    begun, asked = asyncio.Event(), False
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"].decode())
            begun.set()

    headers = [] if cursor is None else [(b"last-event-id", cursor.encode())]
    if token:
        headers.append((b"authorization", f"Bearer {token}".encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "path": "/v1/events",
        "raw_path": b"/v1/events",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    stream = asyncio.create_task(here.app(scope, receive, send))  # type: ignore[arg-type]
    await begun.wait()
    try:
        yield sent
    finally:
        left.set()
        await stream


async def settle(here: Running, mirror: Mirror, sent: list[str]) -> None:
    """Until the reader has what there is."""
    while mirror.cursor != here.state.feed.cursor:
        await asyncio.sleep(0)
        text, sent[:] = "".join(sent), []
        mirror.read(text)


async def test_a_reader_follows_every_kind_of_change(tmp_path: Path) -> None:
    async with running(tmp_path) as here, reading(here) as sent:
        mirror = Mirror()
        await join(here.control, "a", stores=("shared", "own"))
        await join(here.control, "b", stores=("shared",))
        await here.control.report("a", report(0, host(keys(1, 2)), store("shared", keys(1, 2, 3))))
        await here.control.report("b", report(0, store("shared", keys(3, 4))))
        await settle(here, mirror, sent)
        assert mirror.known() == truth(here)
        assert mirror.nodes == {"a": {"shared": "fs", "own": "fs"}, "b": {"shared": "fs"}}

        # What one removes from a shared store is gone for all that share it.
        await here.control.report("b", report(1, store("shared", [], keys(3))))
        await here.control.report("a", report(1, host(keys(5), keys(1))))
        await settle(here, mirror, sent)
        assert mirror.known() == truth(here)
        assert mirror.known()["a", "shared"] == set(keys(1, 2))

        await here.control.report("a", report(2, host(keys(7)), snapshot="only"))
        await settle(here, mirror, sent)
        assert (
            mirror.known()
            == truth(here)
            == {
                ("a", "host"): set(keys(7)),
                ("b", "shared"): set(keys(4)),
            }
        )

        await join(here.control, "a", incarnation="i2", stores=("own",))
        await here.control.deregister("b", None)
        await settle(here, mirror, sent)
        assert mirror.known() == truth(here)
        assert mirror.nodes == {"a": {"own": "fs"}, "b": None}


async def test_a_reader_that_comes_back_misses_nothing(tmp_path: Path) -> None:
    choice = random.Random(3)
    async with running(tmp_path) as here:
        mirror = Mirror()
        await join(here.control, "a", stores=("s",))
        mirror.load((await here.http.get("/v1/snapshot")).text)
        seq = 0
        for _ in range(20):
            for _ in range(choice.randrange(4)):
                changed = [
                    make(keys(*choice.sample(range(30), 5)), keys(*choice.sample(range(30), 5)))
                    for make in (host, lambda added, removed: store("s", added, removed))
                ]
                await here.control.report("a", report(seq, *changed))
                seq += 1
            async with reading(here, mirror.cursor) as sent:
                await settle(here, mirror, sent)
            assert mirror.known() == truth(here)


async def test_a_snapshot_of_more_than_one_part(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await join(here.control, "a", stores=("s",))
        await here.control.report("a", report(0, host(keys(*range(12_000)))))
        mirror = Mirror()
        mirror.load((await here.http.get("/v1/snapshot")).text)
        assert mirror.known() == truth(here)
        assert mirror.nodes == {"a": {"s": "fs"}}
        assert mirror.cursor == here.state.feed.cursor
        async with reading(here, mirror.cursor) as sent:
            await here.control.report("a", report(1, host([], keys(*range(11_000)))))
            await settle(here, mirror, sent)
        assert mirror.known() == truth(here)


@pytest.mark.parametrize("how", ["header", "query"])
async def test_what_is_too_long_ago_is_410_and_nonsense_422(tmp_path: Path, how: str) -> None:
    async def ask(here: Running, cursor: str) -> int:
        kwargs: dict[str, Any] = (
            {"headers": {"Last-Event-ID": cursor}}
            if how == "header"
            else {"params": {"since": cursor}}
        )
        answer = await here.http.get("/v1/events", **kwargs)
        if answer.status_code == 410:
            assert "/v1/snapshot" in answer.json()["detail"]
        return answer.status_code

    async with running(tmp_path) as here:
        await join(here.control, "a")
        epoch = here.state.feed.cursor.split(":")[0]
        assert await ask(here, "0123456789abcdef:1") == 410
        assert await ask(here, f"{epoch}:99") == 410
        assert await ask(here, "yesterday") == 422
        assert await ask(here, f"{epoch}:x") == 422
        old = here.state.feed.cursor
        here.state.feed.restart()
        assert await ask(here, old) == 410


async def test_the_end_of_the_server_ends_the_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as here, reading(here) as sent:
        here.state.end_waits()
        while sent[-1] != "":  # noqa: ASYNC110 - as long as the test may take
            await asyncio.sleep(0)
        assert sent[0].startswith("id: ")


async def test_a_token_that_is_revoked_reads_no_further(tmp_path: Path) -> None:
    async with running(tmp_path, token="root") as here:
        tokens = here.state.tokens
        token = await create(here.state.database, "mirror", Role.READ, here.clock())
        await tokens.refresh()
        async with reading(here, token=token) as sent:
            await join(here.control, "a")
            while "event: node" not in "".join(sent):  # noqa: ASYNC110 - as long as the test may take
                await asyncio.sleep(0)
            await revoke(here.state.database, "mirror", here.clock())
            await tokens.refresh()
            await here.control.report("a", report(0, host(keys(1))))
            while sent[-1] != "":  # noqa: ASYNC110 - as long as the test may take
                await asyncio.sleep(0)
            assert keys(1)[0] not in "".join(sent)


async def test_a_reader_that_does_not_read_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "_STALL", 0.01)
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[str]:
        try:
            while True:
                yield sse.NOTHING_NEW
        finally:
            closed.set()

    response = sse.EventStream(events())

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    await response({}, receive, send)
    assert closed.is_set()


# ---------------------------------------------------------------- the feed itself


def after(feed: Feed, cursor: str) -> Iterable[str]:
    while (found := feed.after(cursor)) is not None:
        number, change = found
        cursor = feed.cursor_at(number)
        yield change.node


def test_the_latest_changes_are_kept() -> None:
    feed = Feed(most_changes=3)
    begin = feed.cursor
    for n in range(3):
        feed.publish(NodeChange(str(n), {}))
    assert list(after(feed, begin)) == ["0", "1", "2"]
    feed.publish(Voided("3", "host"))
    with pytest.raises(Expired, match="snapshot"):
        feed.after(begin)
    first = begin.replace(":0", ":1")
    assert list(after(feed, first)) == ["1", "2", "3"]
    assert list(after(feed, feed.cursor)) == []


def test_changes_weigh_what_they_hold() -> None:
    feed = Feed(most_keys=2)
    begin = feed.cursor
    feed.publish(NodeChange("0", {}))
    feed.publish(NodeChange("1", {}))
    assert list(after(feed, begin)) == ["0", "1"]
    feed.publish(NodeChange("2", {}))
    assert list(after(feed, begin.replace(":0", ":1"))) == ["1", "2"]


@pytest.mark.parametrize("cursor", ["", ":", "1", "e:", "e:-1", "e:1.0", "e:" + "9" * 30])
def test_what_is_no_cursor(cursor: str) -> None:
    with pytest.raises(Malformed):
        Feed().number_of(cursor)
    assert api.HTTP_STATUS["malformed"] == 422
