"""Sources to read from: in this process, or in one of their own that can be killed."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvstrata.config import PeerSettings
from kvstrata.keys import Key, Namespace
from kvstrata.node.peer_port import PeerPort
from kvstrata.node.peer_source import Grant, GrantedChunk
from kvstrata.slots import Slots
from kvstrata.testing.chunks import a_namespace
from kvstrata.tiers.base import checksum
from kvstrata.transports import Transport, open_transport, start_transports

__all__ = ["MemorySource", "SourceProcess", "demo_keys", "demo_namespace", "pattern"]


def pattern(nbytes: int, seed: int) -> bytes:
    """Bytes that differ at every offset and for every seed, so that a shift shows."""
    block = b"".join(
        ((i * 0x9E3779B97F4A7C15 + seed * 0xD1342543DE82EF95 + 1) & (1 << 64) - 1).to_bytes(
            8, "big"
        )
        for i in range(512)
    )
    out = bytearray(-(-nbytes // len(block)) * len(block))
    for page, at in enumerate(range(0, len(out), len(block))):
        out[at : at + len(block)] = block
        out[at : at + 4] = page.to_bytes(4, "big")
    return bytes(out[:nbytes])


def demo_namespace(
    unit_bytes: int = 4096, model: str = "demo", revision: str = "r1", dtype: str = "bf16"
) -> Namespace:
    """Two blocks of two heads in a chunk: chunks of `4 * unit_bytes` bytes."""
    return a_namespace(2 * unit_bytes, 2, model, revision, dtype)


def demo_keys(namespace: Namespace, count: int) -> list[Key]:
    return [namespace.key(0, i.to_bytes(32, "big")) for i in range(count)]


@dataclass(slots=True)
class _Lease:
    peer: str
    ends: float
    ranges: list[tuple[int, int]]


@dataclass
class MemorySource:
    """A `PeerSource` over plain memory. `gate`, if set, holds every grant back until it is set."""

    memory: memoryview
    served: list[Namespace]
    clock: Callable[[], float] = time.monotonic
    gate: asyncio.Event | None = None
    chunks: dict[Key, GrantedChunk] = field(default_factory=dict)
    leases: dict[bytes, _Lease] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _slots: Slots | None = None

    def put(self, key: Key, payload: bytes) -> GrantedChunk:
        self._slots = self._slots or Slots(len(self.memory))
        offset = self._slots.allocate(len(payload))
        if offset is None:
            raise MemoryError("the source's memory is full")
        view = self.memory[offset : offset + len(payload)]
        view[:] = payload
        self.chunks[key] = GrantedChunk(offset, len(payload), checksum(view))
        return self.chunks[key]

    def namespaces(self) -> list[Namespace]:
        return self.served

    def probe(self, keys: Sequence[Key]) -> list[bool]:
        return [key in self.chunks for key in keys]

    async def grant(self, peer: str, keys: Sequence[Key], ttl: float, wait: float) -> Grant:
        if self.gate is not None:
            await self.gate.wait()
        chunks = [self.chunks.get(key) for key in keys]
        lease = secrets.token_bytes(16)
        ranges = [(c.offset, c.nbytes) for c in chunks if c is not None]
        with self._lock:
            self.leases[lease] = _Lease(peer, self.clock() + ttl, ranges)
        return Grant(lease, ttl, chunks)

    def release_grant(self, peer: str, lease: bytes) -> None:
        with self._lock:
            if lease in self.leases and self.leases[lease].peer == peer:
                del self.leases[lease]

    def peer_gone(self, peer: str) -> None:
        self.gone.append(peer)
        with self._lock:
            self.leases = {k: v for k, v in self.leases.items() if v.peer != peer}

    def authorize(self, lease: bytes, offset: int, nbytes: int) -> bool:
        with self._lock:
            held = self.leases.get(lease)
            return (
                held is not None
                and self.clock() < held.ends
                and any(at <= offset and offset + nbytes <= at + n for at, n in held.ranges)
            )


class SourceProcess:
    """A source in a process of its own. `told` is the line it printed: where to reach it.

    `SourceProcess("transport", name, size)` serves `pattern(size, 1)` by one transport; `told`
    is its description in hex. `SourceProcess("port", names, unit_bytes, count)` serves chunk i
    of `demo_keys` as `pattern(4 * unit_bytes, i)` by a peer port; `told` is its address, its
    secret "s3cret".
    """

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this module's main
            [sys.executable, "-c", f"from {__name__} import main; main()", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @cached_property
    def told(self) -> str:
        # Read when first needed, so that several can start at once.
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "a source process did not start"
        return line

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, and wait for its end. Idempotent."""
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


async def _serve_transport(name: str, size: int) -> None:
    memory = memoryview(bytearray(size))
    memory[:] = pattern(size, 1)
    transport = open_transport(name, memory, lambda lease, offset, nbytes: True, "127.0.0.1")
    await transport.start()
    print(transport.describe().hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


async def _serve_port(transports: Sequence[str], unit_bytes: int, count: int) -> None:
    namespace = demo_namespace(unit_bytes)
    memory = memoryview(bytearray(max(1, count) * 4 * unit_bytes))
    source = MemorySource(memory, [namespace])
    for i, key in enumerate(demo_keys(namespace, count)):
        source.put(key, pattern(4 * unit_bytes, i))
    opened: list[Transport] = []
    started = await start_transports(
        transports, memory, source.authorize, "127.0.0.1", opened=opened.append
    )
    settings = PeerSettings(listen="tcp://127.0.0.1:0", secret="s3cret")  # noqa: S106 - a test's
    port = PeerPort(settings, "far", "1", source, started)
    await port.start()
    print(port.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await port.close()
    for transport in opened:
        await transport.close()


def main() -> None:
    """What a source process runs; it ends with its standard input."""
    what, name, size, *rest = sys.argv[1:]
    if what == "transport":
        asyncio.run(_serve_transport(name, int(size)))
    else:
        asyncio.run(_serve_port(name.split(","), int(size), int(rest[0])))
