"""The contract of a transport as a test suite.

    class TestMyTransport(TransportTests):
        transport = "mypackage.transports:MyTransport"

`transport` is what `peers.transports` would say; a source is also started by that name in a
process of its own, to be paused and killed. Needs pytest-asyncio.

What a one-sided medium can't do is said by the transport's `checks_lease`: where it is False
nothing at the source can refuse a lease, and those tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import ClassVar

import pytest
import pytest_asyncio

from kvstrata.errors import KVStrataError, LinkBroken, Malformed, PeerRefused
from kvstrata.testing.sources import SourceProcess, pattern
from kvstrata.transports import Read, Transport, open_transport

__all__ = ["TransportTests"]

SIZE = 8 << 20
LEASE = b"L" * 16
OTHER_LEASE = b"O" * 16
FILL = 0xAA


def soon(seconds: float = 20.0) -> float:
    """A deadline that a healthy test never meets."""
    return time.monotonic() + seconds


class TransportTests:
    """Inherit these tests by subclassing; see the module's docstring."""

    pytestmark = pytest.mark.asyncio

    transport: ClassVar[str]
    host: ClassVar[str] = "127.0.0.1"

    # ------------------------------------------------------------ fixtures

    @pytest.fixture
    def held(self) -> memoryview:
        """The source's region, in this process."""
        memory = memoryview(bytearray(SIZE))
        memory[:] = pattern(SIZE, 1)
        return memory

    @pytest.fixture
    def memory(self) -> memoryview:
        """The consumer's region."""
        return memoryview(bytearray([FILL]) * SIZE)

    @pytest_asyncio.fixture
    async def source(self, held: memoryview) -> AsyncIterator[Transport]:
        """Serves `held` to who holds LEASE."""
        source = open_transport(
            self.transport, held, lambda lease, offset, nbytes: lease == LEASE, self.host
        )
        await source.start()
        yield source
        await source.close()

    @pytest_asyncio.fixture
    async def consumer(self, memory: memoryview) -> AsyncIterator[Transport]:
        """Pulls into `memory`; serves nobody."""
        consumer = open_transport(self.transport, memory, lambda lease, offset, nbytes: False)
        await consumer.start()
        yield consumer
        await consumer.close()

    @pytest.fixture
    def far(self) -> Iterator[SourceProcess]:
        """A source in a process of its own, with the bytes of `held`, that grants everything."""
        far = SourceProcess("transport", self.transport, str(SIZE))
        yield far
        far.kill()

    def needs_lease(self, transport: Transport) -> None:
        if not transport.checks_lease:
            pytest.skip(f"{transport.name} reads one-sidedly: no source there to refuse a lease")

    async def check(
        self,
        consumer: Transport,
        remote: bytes,
        memory: memoryview,
        reads: Sequence[Read],
    ) -> None:
        """Pull; the bytes arrive where they should, and nowhere else."""
        expected = bytearray(memory)
        data = pattern(SIZE, 1)
        for read in reads:
            expected[read.local_offset : read.local_offset + read.nbytes] = data[
                read.remote_offset : read.remote_offset + read.nbytes
            ]
        assert await consumer.pull(remote, LEASE, reads, soon()) == [True] * len(reads)
        assert bytes(memory) == expected

    # ------------------------------------------------------------ bytes

    @pytest.mark.parametrize("size", [1, 4095, 4096, 65_537, 1 << 20, (3 << 20) + 7, SIZE])
    async def test_one_range(
        self, source: Transport, consumer: Transport, memory: memoryview, size: int
    ) -> None:
        at = SIZE - size
        await self.check(consumer, source.describe(), memory, [Read(at, at // 2, size)])

    @pytest.mark.parametrize("count", [2, 64, 1000])
    async def test_scattered_ranges(
        self, source: Transport, consumer: Transport, memory: memoryview, count: int
    ) -> None:
        reads = scattered(count, SIZE // count)
        await self.check(consumer, source.describe(), memory, reads)

    async def test_more_ranges_than_fit_in_one_request(
        self, source: Transport, consumer: Transport, memory: memoryview
    ) -> None:
        await self.check(consumer, source.describe(), memory, scattered(10_000, 512))

    async def test_nothing_asked(self, source: Transport, consumer: Transport) -> None:
        assert await consumer.pull(source.describe(), LEASE, [], soon()) == []

    async def test_one_after_another(
        self, source: Transport, consumer: Transport, memory: memoryview
    ) -> None:
        for i in range(20):
            await self.check(consumer, source.describe(), memory, [Read(i * 8192, i * 4096, 4096)])

    async def test_many_at_once(
        self, source: Transport, consumer: Transport, memory: memoryview
    ) -> None:
        share = SIZE // 32
        pulls = [
            consumer.pull(
                source.describe(), LEASE, [Read(i * share, (31 - i) * share, share)], soon()
            )
            for i in range(32)
        ]
        assert await asyncio.gather(*pulls) == [[True]] * 32
        data = pattern(SIZE, 1)
        for i in range(32):
            at = (31 - i) * share
            assert bytes(memory[at : at + share]) == data[i * share : (i + 1) * share]

    async def test_both_ways_at_once(self, held: memoryview, memory: memoryview) -> None:
        half = SIZE // 2
        memory[:] = pattern(SIZE, 2)
        nodes = [
            open_transport(self.transport, region, lambda lease, offset, nbytes: True, self.host)
            for region in (held, memory)
        ]
        try:
            for node in nodes:
                await node.start()
            first, second = nodes
            arrived = await asyncio.gather(
                first.pull(second.describe(), LEASE, [Read(0, half, half)], soon()),
                second.pull(first.describe(), LEASE, [Read(0, half, half)], soon()),
            )
            assert list(arrived) == [[True], [True]]
            assert bytes(held[half:]) == pattern(SIZE, 2)[:half]
            assert bytes(memory[half:]) == pattern(SIZE, 1)[:half]
        finally:
            for node in nodes:
                await node.close()

    async def test_from_another_process(
        self, far: SourceProcess, consumer: Transport, memory: memoryview
    ) -> None:
        await self.check(consumer, bytes.fromhex(far.told), memory, scattered(64, 65_536))

    async def test_from_two_sources(
        self, far: SourceProcess, source: Transport, consumer: Transport, memory: memoryview
    ) -> None:
        half = SIZE // 2
        arrived = await asyncio.gather(
            consumer.pull(bytes.fromhex(far.told), LEASE, [Read(0, 0, half)], soon()),
            consumer.pull(source.describe(), LEASE, [Read(half, half, half)], soon()),
        )
        assert list(arrived) == [[True], [True]]
        assert bytes(memory) == pattern(SIZE, 1)

    # ------------------------------------------------------------ what is refused

    async def test_a_denied_lease(
        self, source: Transport, consumer: Transport, memory: memoryview
    ) -> None:
        self.needs_lease(source)
        with pytest.raises(PeerRefused):
            await consumer.pull(source.describe(), OTHER_LEASE, [Read(0, 0, 4096)], soon())
        assert bytes(memory) == bytes([FILL]) * SIZE
        await self.check(consumer, source.describe(), memory, [Read(0, 0, 4096)])

    @pytest.mark.parametrize("offset", [SIZE, SIZE - 4095, 1 << 40, (1 << 62) - 1])
    async def test_a_range_outside_the_source(
        self, source: Transport, consumer: Transport, memory: memoryview, offset: int
    ) -> None:
        with pytest.raises((PeerRefused, Malformed)):
            await consumer.pull(
                source.describe(), LEASE, [Read(0, 0, 4096), Read(offset, 8192, 4096)], soon()
            )
        assert bytes(memory[8192:]) == bytes([FILL]) * (SIZE - 8192)
        await self.check(consumer, source.describe(), memory, [Read(0, 0, 4096)])

    async def test_a_range_outside_our_region_is_a_bug(
        self, source: Transport, consumer: Transport
    ) -> None:
        with pytest.raises(ValueError, match="outside the region"):
            await consumer.pull(source.describe(), LEASE, [Read(0, SIZE - 1, 2)], soon())

    @pytest.mark.parametrize("remote", [b"", b"\0", b"\xc1", b"hello", b"\x93\x01\x02\x03"])
    async def test_a_description_that_makes_no_sense(
        self, consumer: Transport, remote: bytes
    ) -> None:
        with pytest.raises(Malformed):
            await consumer.pull(remote, LEASE, [Read(0, 0, 4096)], soon())

    async def test_damaged_descriptions_harm_nothing(
        self, source: Transport, consumer: Transport, memory: memoryview
    ) -> None:
        good = source.describe()
        rng = random.Random(7)  # noqa: S311
        for _ in range(20):
            bad = bytearray(good)
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            del bad[rng.randrange(1, len(bad)) :]
            with pytest.raises(KVStrataError):
                await consumer.pull(bytes(bad), LEASE, [Read(0, 0, 4096)], soon(2))
        await self.check(consumer, good, memory, [Read(0, 0, 4096)])

    async def test_who_serves_nobody_describes_nothing(self, consumer: Transport) -> None:
        assert consumer.describe() == b""

    async def test_seen_from_where_we_dialled(
        self, source: Transport, consumer: Transport, memory: memoryview
    ) -> None:
        remote = consumer.seen_from(source.describe(), self.host)
        await self.check(consumer, remote, memory, [Read(0, 0, 4096)])

    # ------------------------------------------------------------ sources that fail

    async def test_a_killed_source(
        self, far: SourceProcess, consumer: Transport, memory: memoryview
    ) -> None:
        remote = bytes.fromhex(far.told)
        await self.check(consumer, remote, memory, [Read(0, 0, 4096)])
        far.kill()
        began = time.monotonic()
        with pytest.raises(LinkBroken):
            await consumer.pull(remote, LEASE, [Read(0, 0, 1 << 20)], soon())
        assert time.monotonic() - began < 10, "a dead source was noticed by the deadline only"

    async def test_a_source_killed_meanwhile(
        self, far: SourceProcess, consumer: Transport, memory: memoryview
    ) -> None:
        remote = bytes.fromhex(far.told)
        await self.check(consumer, remote, memory, [Read(0, 0, 4096)])
        os.kill(far.pid, signal.SIGSTOP)
        pull = asyncio.ensure_future(consumer.pull(remote, LEASE, [Read(0, 0, SIZE)], soon()))
        await asyncio.sleep(0.1)
        far.kill()
        try:
            arrived = await pull
        except LinkBroken:
            return
        # A one-sided read may have needed nothing of the paused source.
        assert arrived == [True]
        assert bytes(memory) == pattern(SIZE, 1)

    async def test_a_source_that_starts_again(
        self, far: SourceProcess, consumer: Transport, memory: memoryview
    ) -> None:
        old = bytes.fromhex(far.told)
        await self.check(consumer, old, memory, [Read(0, 0, 4096)])
        far.kill()
        again = SourceProcess("transport", self.transport, str(SIZE))
        try:
            remote = bytes.fromhex(again.told)
            assert remote != old
            await self.check(consumer, remote, memory, [Read(0, 8192, 4096)])
            with pytest.raises(KVStrataError):
                await consumer.pull(old, LEASE, [Read(0, 0, 4096)], soon(2))
            await self.check(consumer, remote, memory, [Read(4096, 16_384, 4096)])
        finally:
            again.kill()

    # ------------------------------------------------------------ deadlines and ends

    async def test_a_deadline_that_has_passed(
        self, source: Transport, consumer: Transport, memory: memoryview
    ) -> None:
        reads = scattered(64, 65_536)
        past = time.monotonic() - 1
        assert await consumer.pull(source.describe(), LEASE, reads, past) == [False] * 64
        assert bytes(memory) == bytes([FILL]) * SIZE
        await self.check(consumer, source.describe(), memory, reads)

    async def test_memory_is_free_after_the_deadline(
        self, far: SourceProcess, consumer: Transport, memory: memoryview
    ) -> None:
        remote = bytes.fromhex(far.told)
        await self.check(consumer, remote, memory, [Read(0, 0, 4096)])
        os.kill(far.pid, signal.SIGSTOP)
        try:
            reads = [Read(0, 0, SIZE // 2)]
            arrived = await consumer.pull(remote, LEASE, reads, soon(0.3))
            memory[:] = bytes([FILL]) * SIZE
        finally:
            os.kill(far.pid, signal.SIGCONT)
        # Serving this shows that the source is awake, and had its chance to write late.
        await self.check(consumer, remote, memory, [Read(0, SIZE // 2, SIZE // 2)])
        assert bytes(memory[: SIZE // 2]) == bytes([FILL]) * (SIZE // 2)
        assert arrived in ([False], [True])

    async def test_memory_is_free_after_a_cancelled_pull(
        self, far: SourceProcess, consumer: Transport, memory: memoryview
    ) -> None:
        remote = bytes.fromhex(far.told)
        await self.check(consumer, remote, memory, [Read(0, 0, 4096)])
        os.kill(far.pid, signal.SIGSTOP)
        try:
            pull = asyncio.ensure_future(
                consumer.pull(remote, LEASE, [Read(0, 0, SIZE // 2)], soon(1))
            )
            await asyncio.sleep(0.05)
            pull.cancel()
            await asyncio.wait([pull])
            memory[:] = bytes([FILL]) * SIZE
        finally:
            os.kill(far.pid, signal.SIGCONT)
        await self.check(consumer, remote, memory, [Read(0, SIZE // 2, SIZE // 2)])
        assert bytes(memory[: SIZE // 2]) == bytes([FILL]) * (SIZE // 2)

    async def test_close_ends_a_pull(
        self, far: SourceProcess, consumer: Transport, memory: memoryview
    ) -> None:
        remote = bytes.fromhex(far.told)
        await self.check(consumer, remote, memory, [Read(0, 0, 4096)])
        os.kill(far.pid, signal.SIGSTOP)
        try:
            pull = asyncio.ensure_future(consumer.pull(remote, LEASE, [Read(0, 0, SIZE)], soon()))
            await asyncio.sleep(0.05)
            await consumer.close()
            memory[:] = bytes([FILL]) * SIZE
            done, _ = await asyncio.wait([pull], timeout=5)
            assert done, "a pull outlived its transport"
            assert isinstance(pull.exception(), LinkBroken) or pull.result() == [True]
        finally:
            os.kill(far.pid, signal.SIGCONT)
        assert bytes(memory) == bytes([FILL]) * SIZE

    @pytest.mark.parametrize("seconds", [0.0, 0.01, 0.1])
    async def test_a_start_that_is_cancelled_leaves_nothing(
        self, memory: memoryview, seconds: float
    ) -> None:
        before = set(threading.enumerate())
        transport = open_transport(self.transport, memory, lambda *_: False, self.host)
        starting = asyncio.create_task(transport.start())
        await asyncio.wait([starting], timeout=seconds)
        starting.cancel()
        await asyncio.wait([starting])
        await transport.close()
        await transport.close()
        # Those of the event loop's own pool stay, idle.
        left = {t.name for t in set(threading.enumerate()) - before}
        assert not {name for name in left if not name.startswith("asyncio")}
        memory.release()  # fails where anything looks at it still

    async def test_closed(self, source: Transport, consumer: Transport) -> None:
        remote = source.describe()
        await consumer.close()
        await consumer.close()
        with pytest.raises(LinkBroken):
            await consumer.pull(remote, LEASE, [Read(0, 0, 4096)], soon())

    async def test_a_closed_source(
        self, source: Transport, consumer: Transport, memory: memoryview
    ) -> None:
        remote = source.describe()
        await self.check(consumer, remote, memory, [Read(0, 0, 4096)])
        await source.close()
        await source.close()
        with pytest.raises(KVStrataError):
            await consumer.pull(remote, LEASE, [Read(0, 0, 4096)], soon(5))


def scattered(count: int, size: int) -> list[Read]:
    """`count` ranges of `size` bytes, each to another place, none of them adjacent in order."""
    order = list(range(count))
    random.Random(count).shuffle(order)  # noqa: S311
    return [Read(i * size, j * size, size) for i, j in enumerate(order)]
