"""A proxy before an S3 server that does to requests what a test asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from obj_kit import S3

from kvstrata.keys import Key
from kvstrata.testing.faulty import Fault, FaultScript
from kvstrata.tiers.obj_format import Names


@dataclass
class Request:
    method: str
    target: str
    head: bytes  # with the empty line at its end
    body: bytes

    def header(self, name: str) -> str:
        return _header(self.head, name)


@dataclass
class Response:
    """`cut`: close the connection after so many bytes of it."""

    head: bytes
    body: bytes
    cut: int | None = None


Forward = Callable[[Request], Awaitable[Response]]
Fate = Callable[[Request, Forward], Awaitable[Response | None]]


def refusal(status: int, code: str) -> Response:
    """An error as S3 spells it."""
    body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\n"
    return Response(f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body)


async def honest(request: Request, forward: Forward) -> Response:
    return await forward(request)


@dataclass
class Proxy:
    """Answers each request with what `fate` makes of it; None: the connection is reset."""

    backend: S3
    fate: Fate = honest
    tls: ssl.SSLContext | None = None
    port: int = 0
    requests: list[Request] = field(default_factory=list)

    @property
    def s3(self) -> S3:
        """The same store, through here."""
        scheme = "http" if self.tls is None else "https"
        return self.backend._replace(endpoint=f"{scheme}://127.0.0.1:{self.port}", ca=None)

    async def __aenter__(self) -> Proxy:
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, after the first time where it did before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections, and drop those there are."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()
        await self._server.wait_closed()

    def count(self, method: str) -> int:
        return sum(request.method == method for request in self.requests)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # A peer that leaves is no error here.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._answer(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b" ", 2)
        body = await reader.readexactly(int(_header(head, "content-length") or 0))
        request = Request(method.decode(), target.decode(), head, body)
        self.requests.append(request)
        response = await self.fate(request, self._forward)
        if response is None:
            return False
        whole = response.head + (b"" if method == b"HEAD" else response.body)
        writer.write(whole if response.cut is None else whole[: response.cut])
        await writer.drain()
        return response.cut is None

    async def _forward(self, request: Request) -> Response:
        for _ in range(2):
            fresh = not self._idle
            where = urlsplit(self.backend.endpoint)
            reader, writer = (
                await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
                if fresh
                else self._idle.pop()
            )
            try:
                response = await _exchange(request, reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                writer.close()
                if fresh:
                    raise
                continue  # the server had closed it
            except BaseException:
                writer.close()
                raise
            if _header(response.head, "connection").lower() == "close" or response.head.startswith(
                b"HTTP/1.0"
            ):
                writer.close()
            else:
                self._idle.append((reader, writer))
            return response
        raise ConnectionError("the server closes every connection")


async def _exchange(
    request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Response:
    writer.write(request.head + request.body)
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ", 2)[1]
    if request.method == "HEAD" or status in (b"204", b"304"):
        return Response(head, b"")
    if _header(head, "transfer-encoding").lower() == "chunked":
        body = b""
        while True:
            line = await reader.readuntil(b"\r\n")
            chunk = await reader.readexactly(int(line, 16) + 2)
            body += line + chunk
            if int(line, 16) == 0:
                return Response(head, body)
    length = _header(head, "content-length")
    return Response(head, await (reader.readexactly(int(length)) if length else reader.read()))


def _header(head: bytes, name: str) -> str:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.decode().lower() == name.lower():
            return value.strip().decode()
    return ""


def by_script(script: FaultScript, prefix: str, bucket: str) -> Fate:
    """One fault a request at most, as the script says; chunks stored damaged are noted there."""
    names = Names(prefix)

    def key_of(request: Request) -> Key | None:
        path = unquote(urlsplit(request.target).path)
        return names.key(path.removeprefix(f"/{bucket}/"))

    async def fate(request: Request, forward: Forward) -> Response | None:
        kind = script.for_chunk()
        key = key_of(request)
        flipped = bytearray(request.body)
        match kind:
            case Fault.FAIL:
                choice = script.injected[Fault.FAIL] % 3
                if choice == 0:
                    return None
                return refusal(503, "SlowDown") if choice == 1 else refusal(500, "InternalError")
            case Fault.FLIP if request.method == "PUT" and key is not None and flipped:
                script.flip(memoryview(flipped))
                request.body = bytes(flipped)
                response = await forward(request)
                if response.head.startswith(b"HTTP/1.1 200"):
                    script.damaged.add(key)
                return response
        response = await forward(request)
        body = bytearray(response.body)
        match kind:
            case Fault.DROP:
                return None
            case Fault.TRUNCATE:
                response.cut = len(response.head) + len(response.body) // 2
            case Fault.FLIP if request.method == "GET" and key is not None and body:
                script.flip(memoryview(body))
                response.body = bytes(body)
        return response

    return fate


@contextlib.asynccontextmanager
async def proxied(backend: S3, fate: Fate = honest) -> AsyncIterator[Proxy]:
    async with Proxy(backend, fate) as proxy:
        yield proxy
