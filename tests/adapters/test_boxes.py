"""Fusing of runs: the same bytes, in as few boxes as the layout allows."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.errors import Malformed
from kvstrata.layout import (
    LAYOUTS,
    AttentionContent,
    CopyRun,
    Packed,
    PhysicalLayout,
    Ranks,
    Tensor,
    plan_rank,
    stage_layers,
)
from kvstrata_adapters.devices.base import Copy
from kvstrata_adapters.devices.boxes import Box, Place, Step, fuse
from kvstrata_adapters.devices.grids import copy_pages, grids_of

BLOCKS = 5


def caches_and_runs(
    layout: PhysicalLayout, layers: int, heads: int, tokens: int, tp: int, rank: int
) -> tuple[list[np.ndarray], tuple[CopyRun, ...], int]:
    """One allocation in a layout of vLLM, with random bytes; the rank's caches and load runs."""
    content = AttentionContent(heads, tokens, 3, 5, "bfloat16")
    group = content.group(0, "full", tuple(f"l{i}" for i in range(layers)))
    local = max(heads // tp, 1)
    sizes = {"L": layers, "B": BLOCKS, "H": local, "N": tokens, "C": 8}
    stride, step = {}, 2
    for axis in reversed(layout):
        stride[axis], step = step, step * sizes[axis]
    tensors = [
        Tensor(
            (BLOCKS, local, tokens, 8),
            tuple(stride[a] for a in "BHNC"),
            2,
            step,
            layer * stride["L"],
        )
        for layer in range(layers)
    ]
    pages = Packed(layout).pages(content, tensors, tp)
    runs = plan_rank(group, Ranks(tp, stage_layers(layers, 1)), 0, rank, pages)
    memory = np.random.default_rng(1).integers(0, 256, step, dtype=np.uint8)
    return [c.view(memory) for c in pages.caches], runs.load, group.page_bytes


@pytest.mark.parametrize(
    ("layout", "boxes"),
    [("BHLNC", 1), ("LBHNC", 1), ("BLHNC", 1), ("LBNHC", 1), ("BLNHC", 1), ("LHBNC", 1)],
)
def test_each_packed_layout_is_one_box(layout: PhysicalLayout, boxes: int) -> None:
    caches, runs, page = caches_and_runs(layout, layers=6, heads=4, tokens=4, tp=2, rank=1)
    grids = grids_of(caches, runs, page)
    assert len(grids) == boxes
    assert sum(g.box.total for g in grids) == sum(r.nbytes * r.count for r in runs) == page // 2


def test_the_box_of_a_token_major_page() -> None:
    caches, runs, page = caches_and_runs("LBNHC", layers=6, heads=4, tokens=4, tp=2, rank=1)
    (grid,) = grids_of(caches, runs, page)
    cell, block = 16, 4 * 2 * 16
    assert grid.box.nbytes == cell
    assert grid.box.page_offset == page // 2
    assert grid.box.steps == (
        Step(2, cell, 6 * 4 * cell),
        Step(6, BLOCKS * block, 4 * cell),
        Step(4, 2 * cell, cell),
    )


def test_only_one_storage_and_one_row_distance_go_together() -> None:
    runs = [CopyRun(0, 0, 0, 8), CopyRun(1, 0, 8, 8), CopyRun(2, 0, 16, 8)]
    apart = [Place(1000 * i, 64, 4, i, storage=i) for i in range(3)]
    assert len(fuse(runs, apart)) == 3
    uneven = [Place(0, 64, 4, 0), Place(1000, 64, 4, 1), Place(2000, 72, 4, 2)]
    assert [b.counts for b in fuse(runs, uneven)] == [(2,), ()]
    fewer = [Place(0, 64, 4, 0), Place(1000, 64, 4, 1), Place(2000, 64, 3, 2)]
    assert [b.counts for b in fuse(runs, fewer)] == [(2,), ()]


def test_rows_that_lie_backwards_are_not_fused() -> None:
    runs = [CopyRun(0, 0, 0, 8), CopyRun(1, 0, 8, 8)]
    places = [Place(1000, 64, 4, 0), Place(500, 64, 4, 1)]
    assert [b.address for b in fuse(runs, places)] == [1000, 500]


def test_fragments_without_gaps_are_one_fragment() -> None:
    run = CopyRun(0, 4, 12, 8, count=4, device_stride=8, page_stride=8)
    assert fuse([run], [Place(100, 64, 4, 0)]) == (Box(104, 64, 4, 12, 32, 0, 0),)


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    layers=st.integers(1, 4),
    heads=st.sampled_from([1, 2, 4]),
    tokens=st.integers(1, 4),
    tp=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_boxes_move_the_bytes_that_the_runs_move(
    layout: PhysicalLayout, layers: int, heads: int, tokens: int, tp: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, tp - 1))
    caches, runs, page = caches_and_runs(layout, layers, heads, tokens, tp, rank)
    copy = Copy(0, np.array([3, 0, 4]), np.array([page, 5 * page, 0]) + 3)
    by_runs, by_boxes = np.zeros((2, 7 * page + 3), dtype=np.uint8)
    for run, i in product(runs, range(3)):
        row, to = caches[run.cache][copy.blocks[i]], copy.offsets[i] + run.page_offset
        for n in range(run.count):
            at, there = run.device_offset + n * run.device_stride, to + n * run.page_stride
            by_runs[there : there + run.nbytes] = row[at : at + run.nbytes]
    moved_bytes = copy_pages(grids_of(caches, runs, page), copy, by_boxes, True)
    assert moved_bytes == 3 * sum(run.count * run.nbytes for run in runs)
    assert np.array_equal(by_runs, by_boxes)

    before = [c.copy() for c in caches]
    moved = Copy(0, np.array([1, 2, 3]), copy.offsets)
    copy_pages(grids_of(caches, runs, page), moved, by_boxes, False)
    touched = np.zeros((len(caches), BLOCKS), dtype=bool)
    for run, (to, source) in product(runs, zip(moved.blocks, copy.blocks, strict=True)):
        touched[run.cache, to] = True
        at = run.device_offset
        assert np.array_equal(
            caches[run.cache][to, at : at + run.nbytes],
            before[run.cache][source, at : at + run.nbytes],
        )
    if layout != "LHBNC":  # its rows overlap
        for i, b in zip(*np.nonzero(~touched), strict=True):
            assert np.array_equal(caches[i][b], before[i][b])


def test_the_first_byte_of_the_region_alone() -> None:
    cache, region = np.arange(64, dtype=np.uint8).reshape(8, 8), np.zeros(8, dtype=np.uint8)
    copy = Copy(0, np.array([7]), np.array([0]))
    assert copy_pages(grids_of([cache], [CopyRun(0, 0, 0, 8)], 8), copy, region, True) == 8
    assert region.tolist() == list(range(56, 64))
    none = Copy(0, np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    assert copy_pages(grids_of([cache], [CopyRun(0, 0, 0, 8)], 8), none, region, True) == 0


def test_caches_must_be_rows_and_runs_must_fit() -> None:
    with pytest.raises(Malformed, match="last axis dense"):
        grids_of([np.zeros((4, 16), dtype=np.uint8)[:, ::2]], [CopyRun(0, 0, 0, 8)], 8)
    with pytest.raises(Malformed, match="leaves its 8-byte page"):
        grids_of([np.zeros((4, 16), dtype=np.uint8)], [CopyRun(0, 0, 0, 9)], 8)
