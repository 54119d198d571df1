"""Pages between rows in host memory and the region: what every device ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.errors import Malformed
from kvstrata.layout import CopyRun
from kvstrata_adapters.devices.base import Bytes, Copy

__all__ = ["Plan", "check_copy", "check_run", "copy_pages"]


def check_run(run: CopyRun, row_bytes: Sequence[int], page_bytes: int) -> None:
    """`row_bytes[i]` is the size of a row of cache i. Raises `Malformed`, saying what it leaves."""
    if not 0 <= run.cache < len(row_bytes):
        raise Malformed(f"cache {run.cache} of {len(row_bytes)} doesn't exist")
    row, last = row_bytes[run.cache], run.count - 1
    row_end = run.device_offset + last * run.device_stride + run.nbytes
    page_end = run.page_offset + last * run.page_stride + run.nbytes
    if min(run.count, run.nbytes) < 1 or min(run.device_stride, run.page_stride) < 0:
        raise Malformed(f"not a copy: {run}")
    if run.device_offset < 0 or row_end > row:
        raise Malformed(f"{run} leaves the {row}-byte rows of its cache")
    if run.page_offset < 0 or page_end > page_bytes:
        raise Malformed(f"{run} leaves its {page_bytes}-byte page")


def check_copy(
    copy: Copy, page_bytes: Mapping[int, int], blocks: Mapping[int, int], region_bytes: int
) -> None:
    """`page_bytes` and `blocks` (how many the caches have) by group. Raises `Malformed`."""
    size = page_bytes.get(copy.group)
    if size is None:
        raise Malformed(f"group {copy.group} is not registered")
    if copy.blocks.shape != copy.offsets.shape or copy.blocks.ndim != 1:
        raise Malformed("blocks and offsets must be 1-d arrays of one length")
    if not copy.blocks.size:
        return
    if copy.blocks.min() < 0 or copy.blocks.max() >= blocks[copy.group]:
        raise Malformed(f"a block of group {copy.group} is not in [0, {blocks[copy.group]})")
    if copy.offsets.min() < 0 or copy.offsets.max() + size > region_bytes:
        raise Malformed(f"a page of group {copy.group} leaves the region")


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, with its fragments of all blocks of its cache as one view."""

    run: CopyRun
    rows: Bytes  # (blocks, count, nbytes)

    @classmethod
    def of(cls, run: CopyRun, cache: Bytes) -> Plan:
        """`cache` is (blocks, row bytes), last axis dense; `check_run` has accepted the run."""
        rows = np.lib.stride_tricks.as_strided(
            cache[:, run.device_offset :],
            (len(cache), run.count, run.nbytes),
            (cache.strides[0], run.device_stride, 1),
        )
        return cls(run, rows)


def copy_pages(plans: Sequence[Plan], copy: Copy, region: Bytes, to_region: bool) -> int:
    """Copy what `check_copy` has accepted; the bytes copied."""
    # A loop, and blocks outside runs: 1.0 to 2.5 times as fast as fancy indexing for fragments
    # of 256 B to 512 KiB (one thread, 2-core Xeon), as no temporary is made and a page is
    # written from start to end.
    views = [(plan.rows, _pages(region, plan.run)) for plan in plans]
    for block, offset in zip(copy.blocks.tolist(), copy.offsets.tolist(), strict=True):
        if to_region:
            for rows, pages in views:
                pages[offset] = rows[block]
        else:
            for rows, pages in views:
                rows[block] = pages[offset]
    return len(copy.blocks) * sum(plan.run.count * plan.run.nbytes for plan in plans)


def _pages(region: Bytes, run: CopyRun) -> Bytes:
    """The run's fragments in the page at any byte: `_pages(region, run)[offset]`."""
    span = (run.count - 1) * run.page_stride + run.nbytes
    return np.lib.stride_tricks.as_strided(
        region[run.page_offset :],
        (region.size - run.page_offset - span + 1, run.count, run.nbytes),
        (1, run.page_stride, 1),
    )
