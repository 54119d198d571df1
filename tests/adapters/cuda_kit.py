"""A CUDA driver without CUDA: device memory is host memory, streams run when they are asked.

What is queued on a stream runs when an event behind it is asked for (`done`), never earlier: a
missing wait, or a buffer that is used again too early, gives wrong bytes here too. `hold` keeps
everything from running. `log` has the calls in the order they were made.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstrata.errors import KVStrataError, Malformed
from kvstrata_adapters.devices.boxes import Box, Place


@dataclass
class Stream:
    name: str
    tasks: list[Callable[[], None]] = field(default_factory=list)
    ran: int = 0

    def run(self, until: int | None = None) -> None:
        until = len(self.tasks) if until is None else until
        while self.ran < until:
            self.ran += 1
            self.tasks[self.ran - 1]()


@dataclass(frozen=True)
class Event:
    stream: Stream
    at: int
    time: float


@dataclass(frozen=True)
class CopyCall:
    stream: str
    to_host: bool
    batch: bool
    dst: list[int]
    src: list[int]
    sizes: list[int]


class HostDriver:
    def __init__(self, batched: bool = True) -> None:
        self.batched = batched
        self.log: list[Any] = []
        self.hold = False
        self.compute = Stream("compute")
        self.streams: list[Stream] = []
        self.registered: dict[int, int] = {}
        self.refuse_register_at: int | None = None
        self.fail_copy: set[int] = set()  # numbers of calls to `copy`
        self.lost = False
        self._copies = itertools.count(1)
        self._time = itertools.count(1)

    @property
    def calls(self) -> list[CopyCall]:
        return [entry for entry in self.log if isinstance(entry, CopyCall)]

    def place(self, index: int, cache: Any) -> Place:
        if cache.dtype != np.uint8:
            raise Malformed(f"cache {index} must be bytes")
        # Storages are told apart, as those of torch are.
        base = cache if cache.base is None else cache.base
        return Place(cache.ctypes.data, cache.strides[0], len(cache), index, storage=id(base))

    def allocate(self, nbytes: int) -> Any:
        return np.full(nbytes, 0xDD, dtype=np.uint8)

    def address(self, buffer: Any) -> int:
        return int(buffer.ctypes.data)

    def stream(self) -> Stream:
        self.streams.append(Stream(("store", "load")[len(self.streams)]))
        return self.streams[-1]

    def compute_stream(self) -> Stream:
        return self.compute

    def wait_stream(self, stream: Stream, other: Stream) -> None:
        self.log.append(("wait", stream.name, other.name))
        until = len(other.tasks)
        stream.tasks.append(lambda: other.run(until))

    def record(self, stream: Stream) -> Event:
        self.log.append(("record", stream.name))
        return Event(stream, len(stream.tasks), next(self._time))

    def done(self, event: Event) -> bool:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.hold:
            return event.stream.ran >= event.at
        event.stream.run(event.at)
        return True

    def seconds(self, start: Event, end: Event) -> float:
        return end.time - start.time

    def copy(
        self, dst: Any, src: Any, sizes: Any, to_host: bool, stream: Stream, batch: bool
    ) -> None:
        if next(self._copies) in self.fail_copy:
            raise KVStrataError("cuMemcpyBatchAsync failed with CUDA error 1 at copy 0 of 1")
        call = CopyCall(stream.name, to_host, batch, dst.tolist(), src.tolist(), sizes.tolist())
        self.log.append(call)

        def run() -> None:
            for to, source, size in zip(call.dst, call.src, call.sizes, strict=True):
                ctypes.memmove(to, source, size)

        stream.tasks.append(run)

    def indices(self, blocks: Any, stream: Stream) -> Any:
        return blocks.copy()

    def gather(self, box: Box, cache: Any, blocks: Any, staged: Any, share: int, s: Stream) -> None:
        self.log.append(("gather", s.name, len(blocks)))
        rows, pages = self._views(box, cache, staged, len(blocks), share)
        s.tasks.append(lambda: pages.__setitem__(slice(None), rows[blocks]))

    def scatter(
        self, box: Box, cache: Any, blocks: Any, staged: Any, share: int, s: Stream
    ) -> None:
        self.log.append(("scatter", s.name, len(blocks)))
        rows, pages = self._views(box, cache, staged, len(blocks), share)
        s.tasks.append(lambda: rows.__setitem__(blocks, pages))

    def _views(self, box: Box, cache: Any, staged: Any, pages: int, share: int) -> tuple[Any, Any]:
        start = cache[:1, box.address - cache.ctypes.data :][0]
        return (
            np.lib.stride_tricks.as_strided(
                start,
                (box.rows, *box.counts, box.nbytes),
                (box.pitch, *(s.device for s in box.steps), 1),
            ),
            np.lib.stride_tricks.as_strided(
                staged[box.page_offset :],
                (pages, *box.counts, box.nbytes),
                (share, *(s.page for s in box.steps), 1),
            ),
        )

    def register(self, address: int, nbytes: int) -> None:
        if len(self.registered) == self.refuse_register_at:
            raise KVStrataError(f"pinning {nbytes} bytes failed with CUDA error 801")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]
