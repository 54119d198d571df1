"""vLLM's host memory as rows, and memory of our own that loads land in first."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvstrata.errors import ConfigError

__all__ = ["Buffer", "Rows", "Staging", "copy_bytes"]

_PAGE = 4096
_BUFFERS = 8
_MOST_CHUNKS = 16


class Rows:
    """`view` is vLLM's, of shape (rows, stride); a chunk is the first `used` bytes of a row."""

    def __init__(self, view: memoryview, used: int) -> None:
        """Raises `ConfigError` if chunks of that size don't fit."""
        if (
            view.shape is None
            or view.ndim != 2
            or view.readonly
            or not view.c_contiguous
            or view.itemsize != 1
        ):
            raise ConfigError("vLLM's host memory is not a writable block of rows of bytes")
        self.count, self._stride = view.shape[0], view.shape[1]
        if not self.count or used > self._stride:
            raise ConfigError(
                f"vLLM's host memory has {self.count} rows of {self._stride} bytes, a chunk has "
                f"{used}: raise `cpu_bytes_to_use`"
            )
        self.used = used
        self._bytes = view.cast("B")

    def row(self, number: int) -> memoryview:
        start = number * self._stride
        return self._bytes[start : start + self.used]

    @contextlib.contextmanager
    def rows(self, numbers: Iterable[int]) -> Iterator[list[memoryview]]:
        """Views that end with the block, unless somebody still holds a buffer of them."""
        views = [self.row(number) for number in numbers]
        try:
            yield views
        finally:
            for view in views:
                with contextlib.suppress(BufferError):
                    view.release()

    def release(self) -> None:
        """No more rows; those given out stay valid."""
        with contextlib.suppress(BufferError):
            self._bytes.release()


class Buffer:
    """Room for some chunks, each at the start of a page."""

    def __init__(self, memory: memoryview, size: int, stride: int) -> None:
        self.views = [memory[i : i + size] for i in range(0, memory.nbytes, stride)]


class Staging:
    """A few buffers of about `capacity` bytes together, each lent to one call at a time.

    Pages are taken from the system when they are first written to.
    """

    def __init__(self, capacity: int, size: int) -> None:
        stride = -(-size // _PAGE) * _PAGE
        self.chunks = max(1, min(_MOST_CHUNKS, capacity // _BUFFERS // stride))
        count = max(2, min(_BUFFERS, capacity // (self.chunks * stride)))
        memory = memoryview(mmap.mmap(-1, count * self.chunks * stride))
        each = self.chunks * stride
        self._free: asyncio.Queue[Buffer] = asyncio.Queue()
        for i in range(count):
            self._free.put_nowait(Buffer(memory[i * each : (i + 1) * each], size, stride))

    async def take(self, seconds: float) -> Buffer | None:
        """None if there is none in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0)):
                return await self._free.get()
        return None

    def give(self, buffer: Buffer) -> None:
        self._free.put_nowait(buffer)


def copy_bytes(pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
    """From the first to the second of each. numpy lets other threads run meanwhile."""
    for source, target in pairs:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
