"""Arrays of an engine as the layout package sees them, and its pages as a device takes them.

    tensors = [describe(cache) for cache in kv_caches]
    pages = Packed("LBNHC").pages(content, tensors, tp)
    runs = plan_rank(group, ranks, stage, tp_rank, pages)
    device = open_device(kv_caches)
    rows = [rows_of(cache, kv_caches) for cache in pages.caches]
    device.register_caches(rows, {0: runs.load}, {0: group.page_bytes}, {0: runs.store})

Works for numpy arrays and torch tensors, those on GPUs too, without a copy. JAX arrays have no
strides to describe: see `jax_arrays.shard_tensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstrata.errors import Malformed
from kvstrata.layout import Cache, Tensor
from kvstrata_adapters.devices.base import Bytes

__all__ = ["describe", "rows_of"]


def describe(tensor: Any) -> Tensor:
    """A numpy array or torch tensor by shape, strides and place, all in bytes.

    `buffer` is where its allocation begins, so that tensors of one allocation know each other.
    """
    start, nbytes = _allocation(tensor)
    if isinstance(tensor, np.ndarray):
        strides, item, at = tensor.strides, tensor.itemsize, int(tensor.ctypes.data)
    else:
        item, at = int(tensor.element_size()), int(tensor.data_ptr())
        strides = tuple(int(n) * item for n in tensor.stride())
    shape = tuple(int(n) for n in tensor.shape)
    return Tensor(shape, tuple(strides), item, nbytes, at - start, start)


def rows_of(cache: Cache, tensors: Sequence[Any]) -> Any:
    """The rows of one of a rank's `Pages.caches`, (blocks, row bytes), over these tensors' memory.

    `tensors` are those that were described. Raises `Malformed` if the cache is not in their memory.
    """
    for tensor in tensors:
        start, nbytes = _allocation(tensor)
        if start != cache.buffer:
            continue
        if isinstance(tensor, np.ndarray):
            return cache.view(_bytes_of(_root(tensor)))
        if cache.end > nbytes:
            raise Malformed(f"{cache} leaves an allocation of {nbytes} bytes")
        import torch

        rows = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage(),
            cache.offset,
            (cache.blocks, cache.row_bytes),
            (cache.block_stride, 1),
        )
        return rows.numpy() if tensor.device.type == "cpu" else rows
    raise Malformed(f"no tensor lies in the allocation of {cache}")


def _allocation(tensor: Any) -> tuple[int, int]:
    """Where it begins, and its bytes."""
    if isinstance(tensor, np.ndarray):
        root = _root(tensor)
        return int(root.ctypes.data), int(root.nbytes)
    storage = tensor.untyped_storage()
    return int(storage.data_ptr()), int(storage.nbytes())


def _bytes_of(root: np.ndarray[Any, Any]) -> Bytes:
    """In memory order. Raises `Malformed` if there are gaps: then it isn't all of an allocation."""
    by_stride = sorted(range(root.ndim), key=lambda axis: root.strides[axis], reverse=True)
    ordered = root.transpose(by_stride)
    if not ordered.flags.c_contiguous:
        raise Malformed(f"an array of strides {root.strides} is not all of its memory")
    return ordered.reshape(-1).view(np.uint8)


def _root(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that it is a view of, however far."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
