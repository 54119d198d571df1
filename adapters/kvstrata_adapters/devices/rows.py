"""What every device checks: that runs and jobs stay in rows, pages and the region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstrata.errors import Malformed
from kvstrata.layout import CopyRun
from kvstrata_adapters.devices.base import Copy

__all__ = ["check_copy", "check_run"]


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
