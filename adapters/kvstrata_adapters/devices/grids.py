"""Pages between caches in host memory and the region, box by box.

A box (`kvstrata_adapters.devices.boxes`) is one view of many dimensions, so that numpy's own loops
run over layers, units and tokens. Figures are in `benchmarks/device_copy.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstrata.errors import Malformed
from kvstrata.layout import CopyRun
from kvstrata_adapters.devices.base import Bytes, Copy
from kvstrata_adapters.devices.boxes import Box, Place, fuse
from kvstrata_adapters.devices.rows import check_run

__all__ = ["Grid", "copy_pages", "grids_of"]

# Up to here a fragment is one numpy item: numpy's innermost loop then runs over fragments, not over
# the bytes of one. Longer ones are moved as bytes, which numpy does by memcpy.
_ITEM_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Grid:
    """A box, and its fragments in all rows as one view.

    The view is (rows, *counts) of items of a fragment's size, or (rows, *counts, nbytes) of bytes.
    It may reach over several caches and keeps none of them but the first alive.
    """

    box: Box
    rows: NDArray[Any]


def grids_of(caches: Sequence[Bytes], runs: Sequence[CopyRun], page_bytes: int) -> list[Grid]:
    """`caches[i]` is (blocks, row bytes). Raises `Malformed` if a run leaves its cache or page."""
    for i, cache in enumerate(caches):
        if cache.ndim != 2 or (cache.shape[1] > 1 and cache.strides[1] != 1):
            raise Malformed(f"cache {i} must be (blocks, row bytes) with the last axis dense")
    for run in runs:
        check_run(run, [cache.shape[1] for cache in caches], page_bytes)
    places = [
        Place(cache.ctypes.data, cache.strides[0], len(cache), i) for i, cache in enumerate(caches)
    ]
    return [_grid_of(box, caches) for box in fuse(runs, places)]


def copy_pages(grids: Sequence[Grid], copy: Copy, region: Bytes, to_region: bool) -> int:
    """Copy what `check_copy` has accepted; the bytes copied."""
    # A loop over the blocks, boxes inside: no temporary is made, and a page is written from start
    # to end. numpy walks a box in the order of its destination.
    if not len(copy.blocks):
        return 0
    # The pages view has an item at each possible offset; with every byte one, a region of a
    # terabyte would have more than numpy can count.
    step = int(np.gcd.reduce(copy.offsets)) or region.size
    views = [(grid.rows, _pages(region, grid.box, step)) for grid in grids]
    for block, page in zip(copy.blocks.tolist(), (copy.offsets // step).tolist(), strict=True):
        if to_region:
            for rows, pages in views:
                pages[page] = rows[block]
        else:
            for rows, pages in views:
                rows[block] = pages[page]
    return len(copy.blocks) * sum(grid.box.total for grid in grids)


def _grid_of(box: Box, caches: Sequence[Bytes]) -> Grid:
    cache = caches[box.cache]
    start = cache[:, box.address - cache.ctypes.data :][0]
    return Grid(box, _view(box, start, box.rows, box.pitch, [s.device for s in box.steps]))


def _pages(region: Bytes, box: Box, step: int) -> NDArray[Any]:
    """The box's fragments in the pages at each `step` bytes: `_pages(region, box, step)[i]`."""
    room = region.size - box.page_offset - box.page_span
    start, strides = region[box.page_offset :], [s.page for s in box.steps]
    return _view(box, start, room // step + 1, step, strides)


def _view(box: Box, start: Bytes, rows: int, pitch: int, strides: Sequence[int]) -> NDArray[Any]:
    """`start` begins with the first fragment of the first row."""
    if box.steps and box.nbytes <= _ITEM_BYTES:
        item = start[: box.nbytes].view(f"V{box.nbytes}")
        return np.lib.stride_tricks.as_strided(item, (rows, *box.counts), (pitch, *strides))
    shape = (rows, *box.counts, box.nbytes)
    return np.lib.stride_tricks.as_strided(start, shape, (pitch, *strides, 1))
