"""Arrays as the layout package sees them, and the rows that a device takes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstrata.errors import Malformed
from kvstrata.layout import AttentionContent, Cache, Packed, Tensor
from kvstrata_adapters.devices.tensors import describe, rows_of

CONTENT = AttentionContent(heads=2, tokens=4, key=3, value=3, dtype="float16")


def test_a_view_by_its_place_in_its_allocation() -> None:
    whole = np.zeros((5, 6, 7), dtype=np.float32)
    view = whole[1:, ::2].transpose(2, 0, 1)
    start = whole.ctypes.data
    assert describe(view) == Tensor((7, 4, 3), (4, 168, 56), 4, 840, offset=168, buffer=start)
    assert describe(view[0]).buffer == start


@pytest.mark.parametrize("order", ["BHNC", "BNHC", "HBNC"])
def test_rows_are_the_memory_of_the_blocks(order: str) -> None:
    sizes = {"B": 3, "H": 2, "N": 4, "C": 6}
    own = np.arange(144, dtype=np.float16).reshape([sizes[a] for a in order])
    layer = own.transpose([order.index(a) for a in "BHNC"])
    (cache,) = Packed(f"L{order}").pages(CONTENT, [describe(layer)], 1).caches  # type: ignore[arg-type]
    rows = rows_of(cache, [np.zeros(3), layer])
    assert rows.shape == (3, cache.row_bytes)
    for row, block in zip(rows, layer, strict=True):
        assert row[:12].tobytes() == block[0, 0].tobytes()
    rows[1, :2] = np.frombuffer(np.float16(-1).tobytes(), np.uint8)
    assert layer[1, 0, 0, 0] == -1


def test_memory_in_an_order_of_its_own_is_seen_whole() -> None:
    fortran = np.asfortranarray(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    start = describe(fortran).buffer
    rows = rows_of(Cache(start, 0, 24, 1, 24), [fortran])
    assert np.shares_memory(rows, fortran)
    assert rows.tobytes() == fortran.tobytes(order="F")


def test_caches_of_other_memory_are_refused() -> None:
    own = np.zeros((4, 8), dtype=np.uint8)
    with pytest.raises(Malformed, match="no tensor lies in the allocation"):
        rows_of(Cache(1, 0, 8, 4, 8), [own])
    with pytest.raises(Malformed, match="leaves an allocation of 32 bytes"):
        rows_of(Cache(own.ctypes.data, 0, 16, 4, 8), [own])
    holder = np.ndarray((4, 2), np.uint8, buffer=bytearray(32), strides=(8, 1))
    with pytest.raises(Malformed, match="is not all of its memory"):
        rows_of(Cache(holder.ctypes.data, 0, 8, 4, 2), [holder])


def test_a_tensor_of_torch() -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    whole = torch.zeros((5, 6, 7), dtype=torch.bfloat16)
    view = whole[1:, 2:4]
    seen = describe(view)
    assert (seen.shape, seen.strides) == ((4, 2, 7), (84, 14, 2))
    assert (seen.offset, seen.buffer_bytes, seen.element_bytes) == (112, 420, 2)
    rows = rows_of(Cache(seen.buffer, seen.offset, 84, 4, 28), [view])
    rows[0, :2] = np.frombuffer(np.float32(1).tobytes(), np.uint8)[2:]
    assert view[0, 0, 0] == 1
    with pytest.raises(Malformed, match="leaves an allocation"):
        rows_of(Cache(seen.buffer, seen.offset, 84, 5, 28), [view])
    meta = torch.zeros((5, 6, 7), dtype=torch.bfloat16, device="meta")  # stands for a GPU
    rows = rows_of(Cache(describe(meta).buffer, 84, 84, 4, 28), [meta])
    assert (rows.shape, rows.stride(), rows.device.type) == ((4, 28), (84, 1), "meta")
