"""A publisher and its readers over real sockets; time comes from the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvstrata.config import EventSettings
from kvstrata.errors import ConfigError
from kvstrata.keys import Key
from kvstrata.node.events import EventPublisher
from kvstrata.testing.chunks import a_namespace
from kvstrata.wire import Told

NAMESPACE = a_namespace()
START = 1_800_000_000.0
FIRST = int(START * 1e6)
END = (1 << 64) - 1


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def told(n: int, parent: int | None = None, **kwargs: str) -> Told:
    tokens = b"".join(t.to_bytes(4, "little") for t in range(16 * n, 16 * n + 16))
    return Told(key(n), [1000 + n], tokens, parent, **kwargs)


class Publishing:
    def __init__(self, publisher: EventPublisher) -> None:
        self.publisher = publisher
        self.context = zmq.asyncio.Context()
        self.sub: Any = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(publisher.address)

    async def read(self) -> tuple[int, list[Any]]:
        topic, seq, payload = await self.sub.recv_multipart()
        assert topic == b"kv@here@m"
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert (ts, rank) == (START, 3)
        return int.from_bytes(seq, "big"), events

    async def subscribe(self) -> None:
        """A subscription takes a moment; whoever has one hears the next repetition."""
        self.publisher.flush()
        while not await self.sub.poll(10):
            self.publisher._repeat()
        while await self.sub.poll(0):
            await self.sub.recv_multipart()

    async def replay(self, start: int) -> list[tuple[int, list[Any]]]:
        """As a DEALER asks."""
        dealer: Any = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self.publisher.replay_address)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        batches = []
        while True:
            empty, _, number, payload = await dealer.recv_multipart()
            assert empty == b""
            seq = int.from_bytes(number, "big")
            if seq == END:
                assert payload == b""
                dealer.close()
                return batches
            batches.append((seq, msgspec.msgpack.decode(payload)[1]))


@asynccontextmanager
async def publishing(**kwargs: Any) -> AsyncIterator[Publishing]:
    settings = EventSettings(
        listen="tcp://127.0.0.1:0",
        replay="tcp://127.0.0.1:0",
        topic="kv@here@m",
        rank=3,
        repeat=3600,
        **kwargs,
    )
    publisher = EventPublisher(settings, {NAMESPACE.digest: NAMESPACE}.get, now=lambda: START)
    await publisher.start()
    here = Publishing(publisher)
    tasks = [asyncio.create_task(work()) for work in (publisher.run, publisher.serve_replays)]
    try:
        yield here
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        here.sub.close()
        await publisher.close()
        await publisher.close()
        here.context.destroy(linger=0)


async def test_batches_are_numbered_and_say_what_changed() -> None:
    async with publishing(interval=0.001) as here:
        await here.subscribe()
        here.publisher.told([told(0), told(1, 1000, lora="l", salt="s")])
        here.publisher.added("host", [key(0), key(1)])
        seq, events = await here.read()
        assert events == [
            {
                "type": "BlockStored",
                "block_hashes": [1000],
                "parent_block_hash": None,
                "token_ids": list(range(16)),
                "block_size": 16,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {
                "type": "BlockStored",
                "block_hashes": [1001],
                "parent_block_hash": 1000,
                "token_ids": list(range(16, 32)),
                "block_size": 16,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": "l",
                "extra_keys": [["l"]],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
                "cache_salt": "s",
            },
        ]
        here.publisher.removed("host", [key(1)])
        assert await here.read() == (
            seq + 1,
            [{"type": "BlockRemoved", "block_hashes": [1001], "medium": "CPU", "group_idx": 0}],
        )


async def test_older_readers_get_arrays() -> None:
    async with publishing(interval=0.001, format="array") as here:
        await here.subscribe()
        here.publisher.told([told(0, salt="s")])
        here.publisher.added("host", [key(0)])
        here.publisher.removed("host", [key(0)])
        _, events = await here.read()
        stored = ["BlockStored", [1000], None, list(range(16)), 16, None, "CPU", None, [["s"]]]
        assert events == [
            [*stored, 0, "full_attention", None],
            ["BlockRemoved", [1000], "CPU", 0],
        ]


async def test_what_was_lost_is_given_again() -> None:
    async with publishing() as here:
        here.publisher.flush()
        here.publisher.told([told(0), told(1, 1000), told(2, 1001)])
        for n in range(3):
            here.publisher.added("host", [key(n)])
            here.publisher.flush()
        batches = await here.replay(FIRST + 2)
        assert [seq for seq, _ in batches] == [FIRST + 2, FIRST + 3]
        assert [e["block_hashes"] for _, events in batches for e in events] == [[1001], [1002]]
        assert await here.replay(FIRST + 4) == []


@pytest.mark.parametrize("bound", [{"buffer_batches": 2}, {"buffer_bytes": 500}])
async def test_what_is_kept_no_longer_is_replaced_by_the_state(bound: dict[str, Any]) -> None:
    async with publishing(**bound) as here:
        here.publisher.flush()
        here.publisher.told([told(n) for n in range(9)])
        for n in range(9):
            here.publisher.added("host" if n % 2 else "fs", [key(n)])
            here.publisher.flush()
        here.publisher.removed("fs", [key(0)])
        for start in (0, FIRST + 3):
            [(seq, events)] = await here.replay(start)
            assert seq == FIRST + 10
            assert events[0] == {"type": "AllBlocksCleared"}
            assert [e["block_hashes"][0] for e in events[1:]] == list(range(1001, 1009))
        assert here.publisher.status["states"] == 2


async def test_a_large_state_is_told_in_parts_with_rising_numbers() -> None:
    async with publishing(buffer_batches=1) as here:
        tells = [told(n) for n in range(1500)]
        here.publisher.told(tells)
        here.publisher.added("host", [key(n) for n in range(1500)])
        batches = await here.replay(5)
        last = here.publisher._log.next_seq - 1
        assert [seq for seq, _ in batches] == [last - 2, last - 1, last]
        hashes = [h for _, events in batches for e in events for h in e.get("block_hashes", ())]
        assert sorted(hashes) == list(range(1000, 2500))
        # Within the numbers that a reader who lost little may be given, however few.
        [one] = await here.replay(last)
        assert len(one[1]) <= 512


async def test_a_reader_hears_of_a_start_and_of_an_end() -> None:
    async with publishing() as here:
        await here.subscribe()
        batches = await here.replay(FIRST)
        assert batches[0] == (FIRST, [{"type": "AllBlocksCleared"}])
        here.publisher.told([told(0)])
        here.publisher.added("host", [key(0)])
        await here.publisher.close()
        _, events = await here.read()
        assert [e["type"] for e in events] == ["BlockStored", "AllBlocksCleared"]


async def test_silence_repeats_a_number_and_uses_up_none() -> None:
    async with publishing() as here:
        await here.subscribe()
        here.publisher._repeat()
        first = await here.read()
        assert first[1] == []
        here.publisher._repeat()
        assert await here.read() == first


async def test_a_reader_that_asks_nonsense_gets_no_answer_and_harms_nobody() -> None:
    async with publishing() as here:
        dealer: Any = here.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(here.publisher.replay_address)
        for frames in ([b"x"], [b"", b"short"], [b"", b"12345678", b"more"]):
            await dealer.send_multipart(frames)
        assert len(await here.replay(0)) == 1
        assert not await dealer.poll(0)
        dealer.close()


async def test_a_reader_that_does_not_read_is_given_up() -> None:
    async with publishing() as here:
        for n in range(1000):
            here.publisher.told([Told(key(n), [n], b"\0" * 32_000)])
            here.publisher.added("host", [key(n)])
            here.publisher.flush()
        here.publisher._sleep = lambda seconds: asyncio.sleep(0)
        lazy: Any = here.context.socket(zmq.DEALER)
        lazy.setsockopt(zmq.LINGER, 0)
        lazy.setsockopt(zmq.RCVHWM, 1)
        lazy.connect(here.publisher.replay_address)
        await lazy.send_multipart([b"", FIRST.to_bytes(8, "big")])
        while not here.publisher.status["given_up"]:  # noqa: ASYNC110 - bounded by the test's time
            await asyncio.sleep(0)
        assert len(await here.replay(FIRST + 999)) == 1
        lazy.close()


async def test_a_bug_here_harms_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a bug")

    async with publishing() as here:
        monkeypatch.setattr(here.publisher._book, "added", fail)
        here.publisher.added("host", [key(0)])
        assert here.publisher.status["missed"] == 1


@pytest.mark.parametrize("name", ["listen", "replay"])
def test_strangers_are_kept_out_unless_one_insists(name: str) -> None:
    address = {"listen": "tcp://127.0.0.1:0", name: "tcp://0.0.0.0:0"}
    with pytest.raises(ConfigError, match="unprotected"):
        EventPublisher(EventSettings(**address), lambda digest: None)  # type: ignore[arg-type]
    EventPublisher(EventSettings(**address, unprotected=True), lambda digest: None)  # type: ignore[arg-type]


async def test_an_address_that_is_taken() -> None:
    async with publishing() as here:
        taken = EventPublisher(EventSettings(listen=here.publisher.address), lambda digest: None)
        with pytest.raises(ConfigError, match="can't publish"):
            await taken.start()
        await taken.close()
