"""Many copy runs as few boxes: what lies at regular distances is copied by one call.

A run is one row of fragments; the runs of a page are usually a regular grid of such rows, over
tokens, layers and units. A copy call costs its own time (a third of a microsecond in numpy, five
on a GPU), so a token-major page of 64 runs is better copied as one box of (2, 32, 16) fragments.

Boxes are in addresses, not in caches: layers that were allocated one after another, at equal
distances, are one box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstrata.layout import CopyRun

__all__ = ["Box", "Place", "Step", "fuse"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where cache `cache` is: row i begins at `address + i * pitch`.

    Only caches of equal `storage` may be one box.
    """

    address: int
    pitch: int
    rows: int
    cache: int
    storage: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """`count` times, `device` bytes further in the row and `page` bytes further in the page."""

    count: int
    device: int
    page: int


@dataclass(frozen=True, slots=True)
class Box:
    """A grid of fragments of `nbytes` bytes that rows and a page have in common.

    The first is at `address` in row 0 of cache `cache`, `pitch` further in each next row, and at
    `page_offset` in the page. `steps`, the outermost first, lead to the others.
    """

    address: int
    pitch: int
    rows: int
    page_offset: int
    nbytes: int
    cache: int
    storage: int
    steps: tuple[Step, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(s.count for s in self.steps)

    @property
    def total(self) -> int:
        """Bytes of a page."""
        total = self.nbytes
        for step in self.steps:
            total *= step.count
        return total

    @property
    def page_span(self) -> int:
        """From the first to the last byte in the page."""
        return self.nbytes + sum((s.count - 1) * s.page for s in self.steps)

    @property
    def device_span(self) -> int:
        """From the first to the last byte in a row."""
        return self.nbytes + sum((s.count - 1) * s.device for s in self.steps)


def fuse(runs: Sequence[CopyRun], places: Sequence[Place]) -> tuple[Box, ...]:
    """The same copies in as few boxes as one pass after another finds. Runs are checked already.

    All distances of a box are positive, in the page and in memory.
    """
    boxes = sorted((_box(run, places[run.cache]) for run in runs), key=lambda b: b.page_offset)
    while len(fewer := _fused(boxes)) < len(boxes):
        boxes = fewer
    return tuple(_dense(box) for box in boxes)


def _box(run: CopyRun, place: Place) -> Box:
    step = (Step(run.count, run.device_stride, run.page_stride),) if run.count > 1 else ()
    return Box(
        place.address + run.device_offset,
        place.pitch,
        place.rows,
        run.page_offset,
        run.nbytes,
        place.cache,
        place.storage,
        step,
    )


def _fused(boxes: Sequence[Box]) -> list[Box]:
    """Neighbours at one distance from each other as one box, with one more step."""
    out: list[Box] = []
    at = 0
    while at < len(boxes):
        first, count = boxes[at], 1
        step = _distance(first, boxes[at + 1]) if at + 1 < len(boxes) else None
        if step is not None:
            count = 2
            while (
                at + count < len(boxes)
                and _distance(boxes[at + count - 1], boxes[at + count]) == step
            ):
                count += 1
            outer = Step(count, step[0], step[1])
            first = replace(first, steps=(outer, *first.steps))
        out.append(first)
        at += count
    return out


def _distance(a: Box, b: Box) -> tuple[int, int] | None:
    """(device, page) bytes from a to b, if they differ in nothing else."""
    if (a.storage, a.pitch, a.rows, a.nbytes, a.steps) != (
        b.storage,
        b.pitch,
        b.rows,
        b.nbytes,
        b.steps,
    ):
        return None
    device, page = b.address - a.address, b.page_offset - a.page_offset
    return (device, page) if device > 0 and page > 0 else None


def _dense(box: Box) -> Box:
    """Fragments without gaps on both sides are one fragment."""
    while box.steps and box.steps[-1].device == box.steps[-1].page == box.nbytes:
        box = replace(box, nbytes=box.nbytes * box.steps[-1].count, steps=box.steps[:-1])
    return box
