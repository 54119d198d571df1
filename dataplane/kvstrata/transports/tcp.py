"""The `tcp` transport: plain sockets whose bytes land in the region; needs no library.

The format is in `tcp_wire`, the serving side in `tcp_source`. The bytes go from one region to
the other with no copy of ours between.

Nothing here is encrypted or signed. A lease is 16 random bytes that the source gave to an
authenticated peer, which keeps out who can't listen in; run it on a network you trust.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import msgspec

from kvstrata.errors import LinkBroken, Malformed, PeerRefused
from kvstrata.transports import tcp_wire as wire
from kvstrata.transports.base import Authorize, Read, Transport
from kvstrata.transports.tcp_source import TcpSource
from kvstrata.transports.waiting import until_settled

__all__ = ["TcpTransport"]

_MAX_PULLS = 8
_CONNECT_SECONDS = 5.0


class _Remote(msgspec.Struct, frozen=True, array_like=True):
    """What `describe` packs. `host` is empty where the source is bound to every interface."""

    host: str
    port: int


class TcpTransport(Transport):
    """Raw sockets. One connection per pull in flight, kept for the next one."""

    name: ClassVar[str] = "tcp"

    def __init__(self, memory: memoryview, authorize: Authorize, listen_host: str = "") -> None:
        super().__init__(memory, authorize, listen_host)
        self._source: TcpSource | None = None
        self._links = _Connections()
        self._pulls: set[_Pull] = set()
        self._workers = ThreadPoolExecutor(_MAX_PULLS, thread_name_prefix="kvstrata-tcp-pull")
        self._closed = False

    async def start(self) -> None:
        if self._listen_host:
            self._source = TcpSource(self._memory, self._authorize, self._listen_host)

    def describe(self) -> bytes:
        if self._source is None:
            return b""
        host, port = self._source.address
        return msgspec.msgpack.encode(_Remote("" if _is_wildcard(host) else host, port))

    def seen_from(self, remote: bytes, host: str) -> bytes:
        return msgspec.msgpack.encode(_Remote(host, _parse(remote, host).port))

    async def pull(
        self, remote: bytes, lease: bytes, reads: Sequence[Read], deadline: float
    ) -> list[bool]:
        if self._closed:
            raise LinkBroken("the tcp transport is closed")
        if len(lease) != wire.LEASE_BYTES:
            raise Malformed(f"a lease has {wire.LEASE_BYTES} bytes, this one has {len(lease)}")
        at = _parse(remote)
        for read in reads:
            if not 0 <= read.local_offset <= read.local_offset + read.nbytes <= len(self._memory):
                raise ValueError(f"{read} is outside the region")
        if not reads:
            return []
        pull = _Pull(self._memory, self._links, at, lease, reads, deadline)
        self._pulls.add(pull)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._workers, pull.run)
            return await until_settled(work, pull.abort)
        finally:
            self._pulls.discard(pull)

    async def close(self) -> None:
        self._closed = True
        for pull in tuple(self._pulls):
            pull.abort()
        self._links.close()
        if self._source is not None:
            await asyncio.to_thread(self._source.close)
        await asyncio.to_thread(self._workers.shutdown)


def _parse(remote: bytes, host: str = "") -> _Remote:
    try:
        at = msgspec.msgpack.decode(remote, type=_Remote)
    except msgspec.MsgspecError as e:
        raise Malformed(f"tcp description of a source: {e}") from e
    if not 0 < at.port < 1 << 16 or not (at.host or host) or len(at.host) > 255:
        raise Malformed(f"tcp description of a source: {at.host[:80]!r} port {at.port}")
    return at


def _is_wildcard(host: str) -> bool:
    return ipaddress.ip_address(host).is_unspecified


# ---------------------------------------------------------------- consumer


class _Connections:
    """Idle connections by source, kept a while for the next pull."""

    def __init__(self) -> None:
        self._idle: dict[_Remote, list[tuple[float, socket.socket]]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, at: _Remote) -> socket.socket | None:
        self._drop_old()
        with self._lock:
            idle = self._idle.get(at)
            return idle.pop()[1] if idle else None

    def give(self, at: _Remote, sock: socket.socket) -> None:
        self._drop_old()
        with self._lock:
            if not self._closed:
                self._idle.setdefault(at, []).append((time.monotonic(), sock))
                return
        sock.close()

    def forget(self, at: _Remote) -> None:
        with self._lock:
            idle = self._idle.pop(at, [])
        for _, sock in idle:
            sock.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sources = list(self._idle)
        for at in sources:
            self.forget(at)

    def _drop_old(self) -> None:
        # Well before the source's own patience ends.
        oldest = time.monotonic() - wire.IDLE_SECONDS / 2
        old = []
        with self._lock:
            for at, idle in list(self._idle.items()):
                old += [sock for since, sock in idle if since < oldest]
                idle[:] = [entry for entry in idle if entry[0] >= oldest]
                if not idle:
                    del self._idle[at]
        for sock in old:
            sock.close()


class _Stale(Exception):  # noqa: N818
    """A kept connection was closed by the source before it answered: dial again."""


class _Pull:
    """One pull, blocking, on a worker thread. `abort` ends it from any other thread."""

    def __init__(
        self,
        memory: memoryview,
        links: _Connections,
        at: _Remote,
        lease: bytes,
        reads: Sequence[Read],
        deadline: float,
    ) -> None:
        self._memory = memory
        self._links = links
        self._at = at
        self._lease = lease
        self._reads = reads
        self._deadline = deadline
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._aborted = False

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            if self._sock is not None:
                # Wakes a blocked recv; the worker closes the socket.
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> list[bool]:
        arrived = [False] * len(self._reads)
        for start in range(0, len(self._reads), wire.MAX_RANGES):
            reads = self._reads[start : start + wire.MAX_RANGES]
            try:
                for i, came in enumerate(self._request(reads), start):
                    arrived[i] = came
            except TimeoutError:
                # The socket is closed: what did not arrive by now never will.
                break
        return arrived

    def _request(self, reads: Sequence[Read]) -> Iterator[bool]:
        kept = self._links.take(self._at)
        if kept is not None:
            try:
                yield from self._exchange(kept, reads, kept=True)
                return
            except _Stale:
                # Its siblings are as old.
                self._links.forget(self._at)
        yield from self._exchange(self._dial(), reads, kept=False)

    def _dial(self) -> socket.socket:
        seconds = self._remaining()
        try:
            sock = socket.create_connection(
                (self._at.host, self._at.port), min(seconds, _CONNECT_SECONDS)
            )
        except (OSError, UnicodeError) as e:
            self._remaining()
            raise LinkBroken(f"tcp {self._at.host}:{self._at.port}: {e}") from e
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _exchange(self, sock: socket.socket, reads: Sequence[Read], kept: bool) -> Iterator[bool]:
        """Per read whether it arrived. Leaves the socket closed, or idle after a whole answer."""
        with self._lock:
            self._sock = sock
        whole = False
        try:
            self._check_aborted()
            request = bytearray(
                wire.REQUEST.pack(wire.REQUEST_MAGIC, wire.VERSION, len(reads), self._lease)
            )
            for read in reads:
                request += wire.RANGE.pack(read.remote_offset, read.nbytes)
            answer = bytearray(wire.ANSWER.size)
            try:
                sock.settimeout(self._remaining())
                sock.sendall(request)
                self._fill(sock, memoryview(answer))
            except TimeoutError:
                raise
            except (OSError, EOFError) as e:
                self._check_aborted()
                raise (_Stale() if kept else LinkBroken(self._said("went away", e))) from e
            self._check_answer(answer)
            flag = bytearray(1)
            known = False
            for i, read in enumerate(reads, 1):
                if not known:
                    self._fill(sock, memoryview(flag))
                granted = flag == wire.GRANTED
                known = False
                if granted:
                    view = self._memory[read.local_offset : read.local_offset + read.nbytes]
                    # Its bytes, and with them what the next range begins with.
                    known = self._fill(sock, view, flag if i < len(reads) else None)
                yield granted
            whole = True
        except TimeoutError:
            raise
        except struct.error as e:
            raise Malformed(f"a read can't be asked for: {e}") from e
        except (OSError, EOFError) as e:
            self._check_aborted()
            raise LinkBroken(self._said("broke off", e)) from e
        finally:
            with self._lock:
                self._sock = None
            if whole and not self._aborted:
                self._links.give(self._at, sock)
            else:
                sock.close()

    def _check_answer(self, answer: bytearray) -> None:
        magic, version, status = wire.ANSWER.unpack(answer)
        if magic != wire.ANSWER_MAGIC or version != wire.VERSION:
            raise Malformed(self._said("does not speak this version of the tcp transport"))
        if status == wire.Status.DENIED:
            raise PeerRefused(self._said("denied the lease for one of the ranges"))
        if status == wire.Status.BUSY:
            raise PeerRefused(self._said("has no connection to spare"))
        if status != wire.Status.OK:
            raise Malformed(self._said(f"answered with status {status}"))

    def _fill(self, sock: socket.socket, view: memoryview, more: bytearray | None = None) -> bool:
        """Receive exactly `len(view)` bytes, and `more` if that comes too: whether it did.

        `more` is one byte. Raises TimeoutError, EOFError, OSError.
        """
        got = 0
        while got < len(view):
            sock.settimeout(self._remaining())
            n = sock.recvmsg_into([view[got:], more])[0] if more else sock.recv_into(view[got:])
            if n == 0:
                raise EOFError("connection closed")
            got += n
        return got > len(view)

    def _remaining(self) -> float:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds

    def _check_aborted(self) -> None:
        if self._aborted:
            raise LinkBroken("the tcp transport was closed during a pull")

    def _said(self, what: str, cause: Exception | None = None) -> str:
        because = f": {cause}" if cause is not None else ""
        return f"tcp source {self._at.host}:{self._at.port} {what}{because}"
