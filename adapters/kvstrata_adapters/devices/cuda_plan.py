"""Which copies a CUDA device makes for a job. Plain arithmetic: no GPU is needed to test it.

Fragments that are large are copied one by one, between the cache and the region (*direct*). Small
ones cost more to describe than to move: they are gathered on the device into a *staged page*, which
has what this rank moves of a page, in page order and without gaps, and that is copied in few large
pieces (or the other way round, for a load).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstrata.layout import CopyRun
from kvstrata_adapters.devices.boxes import Box, Place, fuse

__all__ = [
    "PIECE_BYTES",
    "SMALL_ALONE",
    "SMALL_IN_BATCH",
    "Extent",
    "Path",
    "Transfers",
    "pieces_of",
    "plan_path",
]

Offsets = NDArray[np.int64]

# From here on a fragment in a cuMemcpyBatchAsync moves at the link's rate: 4 to 24 KiB at 4 to 7
# GB/s, 28 KiB at 27 to 44 (H2D on an H100 with PCIe 5, vllm-project/vllm#42212).
SMALL_IN_BATCH = 28 << 10
# A copy of its own costs about 5 us of the caller: smaller ones leave most of the link idle.
SMALL_ALONE = 64 << 10
# Drivers refuse larger registrations (vLLM's host_register.py has the same bound). No copy may
# reach over two of them.
PIECE_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class Transfers:
    """Copies of `sizes[i]` bytes: device address `device[i]` <-> region byte `host[i]`."""

    device: Offsets
    host: Offsets
    sizes: Offsets

    def joined(self) -> Transfers:
        """With one copy for neighbours that are adjacent on both sides."""
        if len(self.sizes) < 2:
            return self
        ends_device, ends_host = self.device + self.sizes, self.host + self.sizes
        apart = (ends_device[:-1] != self.device[1:]) | (ends_host[:-1] != self.host[1:])
        first = np.flatnonzero(np.concatenate(([True], apart)))
        return Transfers(self.device[first], self.host[first], np.add.reduceat(self.sizes, first))

    def split(self, piece: int) -> Transfers:
        """With none that reaches over a multiple of `piece` bytes of the region."""
        first, last = self.host // piece, (self.host + self.sizes - 1) // piece
        parts = last - first + 1
        if not (parts > 1).any():
            return self
        which = np.repeat(np.arange(len(parts)), parts)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
        start = np.where(nth == 0, self.host[which], (first[which] + nth) * piece)
        end = np.minimum((first[which] + nth + 1) * piece, self.host[which] + self.sizes[which])
        return Transfers(self.device[which] + start - self.host[which], start, end - start)


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes `[page_offset, page_offset + nbytes)` of a page, at `staged_at` of a staged page."""

    page_offset: int
    nbytes: int
    staged_at: int


@dataclass(frozen=True, slots=True)
class _Fragments:
    """Of one block, in page order: addresses in row 0, how far the rows are, page offsets."""

    device: Offsets
    pitch: Offsets
    page: Offsets
    sizes: Offsets


@dataclass(frozen=True, slots=True)
class Path:
    """How the pages of a group move. `share` is what one page has, in bytes.

    Direct: the boxes' page offsets are in the page. Staged: they are in a staged page, and
    `extents` say what of the page that is.
    """

    boxes: tuple[Box, ...]
    share: int
    extents: tuple[Extent, ...] = ()
    fragments: _Fragments | None = None

    @property
    def staged(self) -> bool:
        return bool(self.extents)

    def direct_transfers(self, blocks: Offsets, offsets: Offsets) -> Transfers:
        """Between the rows `blocks[i]` and the pages at region byte `offsets[i]`."""
        f = self.fragments
        if f is None:
            raise ValueError("this path is staged")
        device = f.device + blocks[:, None] * f.pitch
        host = f.page + offsets[:, None]
        sizes = np.broadcast_to(f.sizes, host.shape)
        return Transfers(device.ravel(), host.ravel(), sizes.ravel()).joined()

    def staged_transfers(self, staging: int, offsets: Offsets) -> Transfers:
        """Between staged pages, one after another at address `staging`, and the region."""
        at = np.array([e.staged_at for e in self.extents], dtype=np.int64)
        page = np.array([e.page_offset for e in self.extents], dtype=np.int64)
        size = np.array([e.nbytes for e in self.extents], dtype=np.int64)
        device = staging + at + np.arange(len(offsets), dtype=np.int64)[:, None] * self.share
        host = page + offsets[:, None]
        sizes = np.broadcast_to(size, host.shape)
        return Transfers(device.ravel(), host.ravel(), sizes.ravel()).joined()


def plan_path(runs: Sequence[CopyRun], places: Sequence[Place], batched: bool) -> Path:
    """Staged if some fragments are small, and the page side has larger pieces than the device.

    `batched` says whether the driver takes many copies in one call.
    """
    boxes = fuse(runs, places)
    share = sum(box.total for box in boxes)
    smallest = min((box.nbytes for box in boxes), default=0)
    if smallest < (SMALL_IN_BATCH if batched else SMALL_ALONE):
        extents = _extents(runs)
        if extents and min(e.nbytes for e in extents) > smallest:
            moved = [part for run in runs for part in _staged(run, extents)]
            return Path(fuse(moved, places), share, extents)
    return Path(boxes, share, fragments=_fragments(boxes))


def pieces_of(nbytes: int, piece: int) -> list[tuple[int, int]]:
    """(offset, size) of pieces of at most `piece` bytes."""
    return [(at, min(piece, nbytes - at)) for at in range(0, nbytes, piece)]


def _fragments(boxes: Sequence[Box]) -> _Fragments:
    parts: list[list[Any]] = []
    for box in boxes:
        device, page = np.zeros((2, 1), dtype=np.int64)
        for step in box.steps:
            n = np.arange(step.count, dtype=np.int64)
            device = (device[:, None] + n * step.device).ravel()
            page = (page[:, None] + n * step.page).ravel()
        same = np.ones(len(page), dtype=np.int64)
        parts.append(
            [device + box.address, same * box.pitch, page + box.page_offset, same * box.nbytes]
        )
    columns = [np.concatenate(c) for c in zip(*parts, strict=True)] if parts else []
    if not columns:
        none = np.zeros(0, dtype=np.int64)
        return _Fragments(none, none, none, none)
    order = np.argsort(columns[2], kind="stable")
    return _Fragments(*(column[order] for column in columns))


def _page_offsets(run: CopyRun) -> Offsets:
    return run.page_offset + np.arange(run.count, dtype=np.int64) * run.page_stride


def _extents(runs: Sequence[CopyRun]) -> tuple[Extent, ...]:
    """What the runs cover of a page, as few ranges as can be."""
    if not runs:
        return ()
    starts = np.concatenate([_page_offsets(run) for run in runs])
    ends = starts + np.concatenate([np.full(run.count, run.nbytes) for run in runs])
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.concatenate(([True], starts[1:] > reach[:-1])))
    last = np.concatenate((first[1:], [len(starts)])) - 1
    sizes = reach[last] - starts[first]
    at = np.cumsum(sizes) - sizes
    return tuple(
        Extent(int(p), int(n), int(s)) for p, n, s in zip(starts[first], sizes, at, strict=True)
    )


def _staged(run: CopyRun, extents: Sequence[Extent]) -> list[CopyRun]:
    """The run with offsets of a staged page; one run a fragment if these are irregular."""
    pages = _page_offsets(run)
    starts = np.array([e.page_offset for e in extents], dtype=np.int64)
    staged = np.array([e.staged_at for e in extents], dtype=np.int64)
    which = np.searchsorted(starts, pages, side="right") - 1
    at = pages - starts[which] + staged[which]
    steps = np.diff(at)
    if len(at) == 1 or (steps == steps[0]).all():
        stride = int(steps[0]) if len(at) > 1 else 0
        return [replace(run, page_offset=int(at[0]), page_stride=stride)]
    return [
        CopyRun(run.cache, run.device_offset + i * run.device_stride, int(offset), run.nbytes)
        for i, offset in enumerate(at)
    ]
