"""One connection to one source: the handshake, and requests with deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvstrata import peer_wire as wire
from kvstrata.errors import (
    Expired,
    KVStrataError,
    LinkBroken,
    Malformed,
    NamespaceMismatch,
    PeerRefused,
    from_code,
)
from kvstrata.keys import Key, Namespace
from kvstrata.peer_socket import post, tune

__all__ = ["PeerLink"]

log = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound="wire.FromSource")

_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class PeerLink:
    """An authenticated session with the source at `address`.

    Deadlines are in `time.monotonic` seconds. Once `broken` says why, every call raises
    `LinkBroken` and the link has to be replaced.
    """

    def __init__(self, context: Any, address: wire.Address) -> None:
        self.address = address
        self.node = ""
        self.incarnation = ""
        self.transports: dict[str, bytes] = {}
        self.failed_transports: set[str] = set()
        """Those that broke while this link itself was well."""
        self.broken = ""
        self.used = time.monotonic()
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[wire.FromSource]] = {}
        self._turns = asyncio.Semaphore(wire.MAX_OUTSTANDING // 2)
        self._opened: dict[bytes, bool | NamespaceMismatch] = {}
        self._socket = context.socket(zmq.DEALER)
        tune(self._socket, address.host)
        self._monitor = self._socket.get_monitor_socket(_GONE)
        self._socket.connect(address.url)
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch()),
        ]

    @classmethod
    async def connect(
        cls,
        context: Any,
        address: wire.Address,
        secret: str,
        node: str,
        incarnation: str,
        deadline: float,
    ) -> PeerLink:
        """Dial and shake hands, as `node`. Raises `LinkBroken`, `PeerRefused`, `Expired`, ..."""
        link = cls(context, address)
        try:
            await link._shake_hands(secret, node, incarnation, deadline)
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def idle(self) -> bool:
        return not self._asked

    async def open(self, namespace: Namespace, deadline: float) -> bool:
        """Whether the source knows the namespace. Raises `NamespaceMismatch` naming the field."""
        known = self._opened.get(namespace.digest)
        if isinstance(known, NamespaceMismatch):
            raise NamespaceMismatch(str(known), known.field)
        if not known:  # what it did not know it may have learnt since
            try:
                message = wire.Open(next(self._ids), namespace.document)
                known = (await self._ask(message, wire.Opened, deadline)).known
            except NamespaceMismatch as e:
                self._opened[namespace.digest] = e
                raise
            self._opened[namespace.digest] = known
        return known

    async def acquire(
        self, keys: Sequence[Key], ttl: float, wait: float, deadline: float
    ) -> wire.Granted:
        """At most `wire.MAX_KEYS` keys. Who gets a grant releases it."""
        message = wire.Acquire(next(self._ids), list(keys), ttl, wait)
        granted = await self._ask(message, wire.Granted, deadline)
        if len(granted.chunks) != len(keys):
            self.release(granted.lease)
            raise Malformed(f"{self.address} granted {len(granted.chunks)} of {len(keys)} keys")
        return granted

    def release(self, lease: bytes) -> None:
        """Never fails: on a broken link the source ends the lease by itself."""
        with contextlib.suppress(LinkBroken):
            self._post(wire.Release(lease))

    async def probe(self, keys: Sequence[Key], deadline: float) -> list[bool]:
        """At most `wire.MAX_KEYS` keys."""
        message = wire.Probe(next(self._ids), list(keys))
        probed = await self._ask(message, wire.Probed, deadline)
        if len(probed.here) != len(keys):
            raise Malformed(f"{self.address} answered {len(probed.here)} of {len(keys)} keys")
        return probed.here

    async def close(self) -> None:
        """Idempotent."""
        if not self.broken:
            with contextlib.suppress(LinkBroken):
                self._post(wire.Bye())
        self._break("closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)

    # ------------------------------------------------------------ inside

    async def _shake_hands(self, secret: str, node: str, incarnation: str, deadline: float) -> None:
        # Before the session, what the source says answers the request -1.
        hello = wire.Hello(wire.PROTOCOL, node, incarnation, secrets.token_bytes(wire.NONCE_BYTES))
        challenge = await self._ask(hello, wire.Challenge, deadline)
        prove = wire.Prove(wire.consumer_proof(secret, hello, challenge))
        welcome = await self._ask(prove, wire.Welcome, deadline)
        proof = wire.source_proof(
            secret, hello, challenge, welcome.node, welcome.incarnation, welcome.transports
        )
        if not hmac.compare_digest(proof, welcome.proof):
            raise PeerRefused(f"{self.address} does not know peers.secret")
        self.node = welcome.node
        self.incarnation = welcome.incarnation
        self.transports = welcome.transports

    async def _ask(self, message: wire.ToSource, expected: type[Reply], deadline: float) -> Reply:
        try:
            async with asyncio.timeout(deadline - time.monotonic()), self._turns:
                reply = await self._exchange(message)
        except TimeoutError as e:
            raise Expired(f"{self.address} did not answer in time") from e
        if isinstance(reply, wire.Failure):
            if reply.code == NamespaceMismatch.code:
                raise NamespaceMismatch(reply.message, reply.field)
            error = from_code(reply.code, f"{self.address}: {reply.message}")
            if isinstance(error, LinkBroken):
                self._break(str(error))
            raise error
        if not isinstance(reply, expected):
            self._break(f"{self.address} answered {type(message).__name__} with {reply!r:.80}")
            raise Malformed(self.broken)
        return reply

    async def _exchange(self, message: wire.ToSource) -> wire.FromSource:
        request = getattr(message, "id", -1)
        self._post(message)
        self.used = time.monotonic()
        future: asyncio.Future[wire.FromSource] = asyncio.get_running_loop().create_future()
        self._asked[request] = future
        try:
            return await future
        finally:
            self._asked.pop(request, None)

    def _post(self, message: wire.ToSource) -> None:
        if self.broken:
            raise LinkBroken(self.broken)
        try:
            post(self._socket, [wire.encode(message)])
        except zmq.Again as e:
            self._break(f"{self.address}: the connection is gone, or nobody reads from it")
            raise LinkBroken(self.broken) from e
        except zmq.ZMQError as e:
            self._break(f"{self.address}: {e.strerror}")
            raise LinkBroken(self.broken) from e

    async def _receive(self) -> None:
        try:
            while True:
                frames = await self._socket.recv_multipart()
                if len(frames) != 1:
                    raise Malformed(f"a message has 1 frame, this one has {len(frames)}")
                self._settle(wire.decode_from_source(frames[0]))
        except (KVStrataError, zmq.ZMQError) as e:
            self._break(f"{self.address}: {e}")
        except Exception as e:
            log.exception("peer link to %s failed", self.address)
            self._break(f"{self.address}: {e!r}")

    def _settle(self, message: wire.FromSource) -> None:
        if isinstance(message, wire.Beat):
            return
        request = getattr(message, "id", -1)
        future = self._asked.get(request)
        if future is not None and not future.done():
            future.set_result(message)
        elif isinstance(message, wire.Granted):
            self.release(message.lease)  # who asked has given up
        elif isinstance(message, wire.Failure) and request == -1:
            raise from_code(message.code, message.message)

    async def _watch(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            await recv_monitor_message(self._monitor)
            self._break(f"{self.address}: the connection is gone")

    def _break(self, reason: str) -> None:
        if self.broken:
            return
        self.broken = reason
        for future in self._asked.values():
            if not future.done():
                future.set_exception(LinkBroken(reason))
