"""What the layout tests compare with: device caches and pages made by numpy's own indexing.

Nothing here knows runs or strides: a device is filled through numpy views in logical order, a
page is a transposed copy of the logical tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstrata.keys import Group
from kvstrata.layout import Pages, RankRuns, Ranks, Tensor, plan_rank
from kvstrata.layout.runs import CopyRun

BACKGROUND = 0xEE
BLOCKS = 3


@dataclass
class Device:
    """One rank's allocations: `form` certifies `tensors`, `put(block, truth)` fills a block."""

    form: Any
    content: Any
    tensors: list[Any]
    put: Callable[[int, Any], None]
    buffers: list[np.ndarray]

    def pages(self, tp: int) -> Pages:
        return self.form.pages(self.content, self.tensors, tp)  # type: ignore[no-any-return]

    def bytes(self) -> list[np.ndarray]:
        return [b.reshape(-1).view(np.uint8) for b in self.buffers]


def blank(shape: Sequence[int], element: int) -> np.ndarray:
    return np.frombuffer(
        bytearray([BACKGROUND]) * (int(np.prod(shape)) * element), dtype=f"u{element}"
    ).reshape(shape)


def tensor(view: np.ndarray, base: np.ndarray, buffer: int = 0) -> Tensor:
    return Tensor(
        shape=view.shape,
        strides=view.strides,
        element_bytes=view.itemsize,
        buffer_bytes=base.nbytes,
        offset=view.__array_interface__["data"][0] - base.__array_interface__["data"][0],
        buffer=buffer,
    )


def heads_of(total: int, tp: int, rank: int) -> range:
    """The units of a rank, as engines shard them: evenly, or copies where ranks are more."""
    if tp <= total:
        return range(total // tp * rank, total // tp * (rank + 1))
    return range(rank * total // tp, rank * total // tp + 1)


def apply(
    runs: Sequence[CopyRun],
    pages: Pages,
    buffers: list[np.ndarray],
    block: int,
    page: np.ndarray,
    to_page: bool,
    written: np.ndarray | None = None,
) -> None:
    for run in runs:
        cache = pages.caches[run.cache]
        memory = buffers[cache.buffer]
        for i in range(run.count):
            inside = run.device_offset + i * run.device_stride
            assert 0 <= inside <= cache.row_bytes - run.nbytes, "a run leaves its row"
            d = cache.offset + block * cache.block_stride + inside
            p = run.page_offset + i * run.page_stride
            assert 0 <= d <= memory.size - run.nbytes, "a run leaves its allocation"
            assert 0 <= p <= page.size - run.nbytes, "a run leaves the page"
            if to_page:
                page[p : p + run.nbytes] = memory[d : d + run.nbytes]
            else:
                memory[d : d + run.nbytes] = page[p : p + run.nbytes]
            if written is not None:
                written[p : p + run.nbytes] += 1


MakeDevice = Callable[[int, int, range], Device]
"""(tp, tp_rank, layers) -> a rank's device, all background."""


def plans(
    group: Group, make: MakeDevice, ranks: Ranks
) -> list[tuple[Device, Pages, RankRuns, int, range]]:
    out = []
    for stage, layers in enumerate(ranks.stages):
        for r in range(ranks.tp):
            device = make(ranks.tp, r, layers)
            pages = device.pages(ranks.tp)
            out.append((device, pages, plan_rank(group, ranks, stage, r, pages), r, layers))
    return out


def store(
    group: Group,
    make: MakeDevice,
    ranks: Ranks,
    local: Callable[[int, int, range], Any],
    block: int,
) -> np.ndarray:
    """The page that all ranks write, each byte by one of them."""
    page = np.zeros(group.page_bytes, dtype=np.uint8)
    written = np.zeros(group.page_bytes, dtype=np.uint8)
    for device, pages, runs, r, layers in plans(group, make, ranks):
        device.put(block, local(ranks.tp, r, layers))
        apply(runs.store, pages, device.bytes(), block, page, True, written)
    assert (written == 1).all(), "a byte of the page has no writer, or several"
    return page


def check_load(
    group: Group,
    make: MakeDevice,
    ranks: Ranks,
    local: Callable[[int, int, range], Any],
    block: int,
    page: np.ndarray,
) -> None:
    """Every rank gets its block, and nothing else of its allocations changes."""
    for device, pages, runs, r, layers in plans(group, make, ranks):
        apply(runs.load, pages, device.bytes(), block, page, False)
        want = make(ranks.tp, r, layers)
        want.put(block, local(ranks.tp, r, layers))
        for got, expected in zip(device.bytes(), want.bytes(), strict=True):
            np.testing.assert_array_equal(got, expected)
