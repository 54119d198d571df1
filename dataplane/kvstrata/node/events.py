"""KV events for routers: what this node holds, as vLLM would say it of its own cache.

Three frames on a PUB socket (topic, number as 8 bytes big-endian, msgpack payload), and a ROUTER
socket that gives batches again:

    reader asks, by REQ or DEALER with an empty frame    the number to start from, 8 bytes
    is kept                                              the batches from there on
    is no longer kept, or of an earlier start            all is void, then all that is announced now
    then                                                 number -1, empty payload

So no reader has to be told of everything from the beginning, however late it joins. Each answer is
[empty, topic, number, payload]. A publisher with nothing to say repeats its last number now and
then: a reader that has lost the last batch would otherwise not know.

Nothing here waits for a reader: PUB drops what a slow one can't take, which it notices by the
number and asks for; a replay is given up when its reader does not read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import zmq
import zmq.asyncio

from kvstrata import wire
from kvstrata.addresses import is_loopback
from kvstrata.api import EventsAt
from kvstrata.config import EventSettings
from kvstrata.errors import ConfigError
from kvstrata.keys import Key, Namespace
from kvstrata.node.events_book import EventBook
from kvstrata.node.events_format import CLEARED, Event, encode_batch
from kvstrata.node.events_log import SEQ_BYTES, Batch, EventLog
from kvstrata.peer_socket import post
from kvstrata.peer_wire import parse_address

__all__ = ["EventPublisher"]

_log = logging.getLogger(__name__)

_END = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
_MOST_EVENTS = 512
# Of one replay, between which others on the loop have a turn.
_TURN = 16
_STALL_SECONDS = 2.0
_STALL_STEP = 0.005
_MOST_REQUEST_BYTES = 64
_SEND_QUEUE = 1024
_REPLAY_QUEUE = 64


class EventPublisher:
    """One publisher: what one router, or one worker of a router, subscribes to.

    `now` gives seconds since the epoch. `namespace` gives the document behind a digest. Raises
    `ConfigError` for addresses that strangers could reach without `unprotected`.
    """

    def __init__(
        self,
        settings: EventSettings,
        namespace: Callable[[bytes], Namespace | None],
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        for address in filter(None, (settings.listen, settings.replay)):
            if not settings.unprotected and not is_loopback(parse_address(address).host):
                raise ConfigError(
                    f"events at {address}: they tell the tokens of every prompt to whoever "
                    "connects. Listen on 127.0.0.1, or set `unprotected` on a network you trust"
                )
        self.counters = {"batches": 0, "events": 0, "replays": 0, "states": 0}
        self.counters |= {"given_up": 0, "missed": 0}
        self.address = ""
        self.replay_address = ""
        self._settings = settings
        self._now = now
        self._sleep = sleep
        self._book = EventBook(namespace, self._emit, settings.model)
        self._log = EventLog(int(now() * 1e6), settings.buffer_batches, int(settings.buffer_bytes))
        self._pending: list[Event] = [CLEARED]
        self._wake = asyncio.Event()
        self._wake.set()
        self._idle_batch: Batch | None = None
        self._context: zmq.asyncio.Context | None = None
        self._pub: Any = None
        self._router: Any = None

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Bind. Raises `ConfigError`."""
        self._context = zmq.asyncio.Context()
        self._pub, self.address = self._bind(self._context, zmq.PUB, self._settings.listen)
        if self._settings.replay:
            self._router, self.replay_address = self._bind(
                self._context, zmq.ROUTER, self._settings.replay
            )

    async def run(self) -> None:
        """Publish what changes, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._settings.repeat):
                    await self._wake.wait()
            except TimeoutError:
                self._repeat()
                continue
            await self._sleep(self._settings.interval)
            self.flush()

    async def serve_replays(self) -> None:
        """Answer readers that lost something, one after the other, until cancelled."""
        while self._router is not None:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != SEQ_BYTES:
                continue
            self.counters["replays"] += 1
            await self._replay(frames[0], int.from_bytes(frames[2], "big"))

    async def close(self) -> None:
        """Say that nothing is here any more, and hang up. Idempotent."""
        if self._pub is not None:
            self._pending.append(CLEARED)
            self.flush()
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0 if socket is self._router else 200)
        self._pub = self._router = None
        if self._context is not None:
            await asyncio.to_thread(self._context.term)

    # ------------------------------------------------------------ what the node tells

    def added(self, location: str, keys: Sequence[Key]) -> None:
        self._note(self._book.added, location, keys)

    def removed(self, location: str, keys: Sequence[Key]) -> None:
        self._note(self._book.removed, location, keys)

    def told(self, tells: Iterable[wire.Told]) -> None:
        self._note(self._book.tell, tells)

    def _note(self, note: Callable[..., None], *what: object) -> None:
        # Whoever tells us is in the middle of its own work, which is worth more than ours.
        try:
            note(*what)
        except Exception:
            _log.exception("a change is missing from the KV events at %s", self.address)
            self.counters["missed"] += 1

    @property
    def at(self) -> EventsAt:
        """Where readers find it."""
        settings = self._settings
        return EventsAt(
            endpoint=settings.advertise or self.address,
            replay=settings.advertise_replay or self.replay_address,
            topic=settings.topic,
            model=settings.model,
            rank=settings.rank,
        )

    @property
    def status(self) -> dict[str, int]:
        return self.counters | {"untold": self._book.untold, "told": len(self._book)}

    def flush(self) -> None:
        """Publish what is pending now."""
        self._wake.clear()
        if not self._pending:
            return
        events, self._pending = self._pending, []
        self._idle_batch = None
        self.counters["events"] += len(events)
        self._publish(events)

    # ------------------------------------------------------------ inside

    def _emit(self, event: Event) -> None:
        self._pending.append(event)
        self._wake.set()
        if len(self._pending) >= _MOST_EVENTS and self._pub is not None:
            self.flush()

    def _publish(self, events: Sequence[Event]) -> Batch:
        batch = self._log.append(self._encode(events))
        self.counters["batches"] += 1
        self._send(batch)
        return batch

    def _send(self, batch: Batch) -> None:
        if self._pub is not None:
            post(self._pub, self._frames(batch))

    def _repeat(self) -> None:
        if self._idle_batch is None:
            # An empty one: what was said last may be large.
            self._idle_batch = self._publish([])
        else:
            self._send(self._idle_batch)

    async def _replay(self, reader: bytes, start: int) -> None:
        self.flush()
        batches = self._log.since(start)
        if start < self._log.oldest:
            self.counters["states"] += 1
            batches = self._state(start)
        for n, batch in enumerate(batches):
            if not await self._give(reader, self._frames(batch)):
                return
            if n % _TURN == _TURN - 1:
                await self._sleep(0)
        await self._give(reader, [b"", _END, b""])

    async def _give(self, reader: bytes, frames: Sequence[bytes]) -> bool:
        """Whether the reader could take it in time."""
        for _ in range(int(_STALL_SECONDS / _STALL_STEP)):
            try:
                post(self._router, [reader, b"", *frames])
            except zmq.Again:
                await self._sleep(_STALL_STEP)
            except zmq.ZMQError:
                break  # it has gone
            else:
                return True
        self.counters["given_up"] += 1
        _log.warning("a reader of KV events did not read the replay it asked for")
        return False

    def _state(self, start: int) -> Iterator[Batch]:
        """All that is announced now, in batches whose numbers end with the last one published."""
        events = list(chain([CLEARED], self._book.state()))
        room = self._log.next_seq - start
        size = max(_MOST_EVENTS, -(-len(events) // room))
        count = -(-len(events) // size)
        rest = iter(events)
        for seq in range(self._log.next_seq - count, self._log.next_seq):
            yield Batch(seq, self._encode(list(islice(rest, size))))

    def _encode(self, events: Sequence[Event]) -> bytes:
        return encode_batch(self._now(), events, self._settings.rank, self._settings.format)

    def _frames(self, batch: Batch) -> list[bytes]:
        topic = self._settings.topic.encode()
        return [topic, batch.seq.to_bytes(SEQ_BYTES, "big"), batch.payload]

    @staticmethod
    def _bind(context: zmq.asyncio.Context, kind: int, address: str) -> tuple[Any, str]:
        host = parse_address(address).host
        socket: Any = context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, int(":" in host)),
            (zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES),
            (zmq.SNDHWM, _SEND_QUEUE if kind == zmq.PUB else _REPLAY_QUEUE),
        ):
            socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            socket.close()
            raise ConfigError(
                f"can't publish KV events at {address}: {e.strerror}. Choose another address"
            ) from e
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
