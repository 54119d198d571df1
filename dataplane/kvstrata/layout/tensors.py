"""What an engine registered: tensors by shape and strides, checked against what they must be.

Strides are never trusted alone. A form knows from the geometry which shape and strides its
tensors must have; `certify` compares, and names the axis that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstrata.errors import Malformed
from kvstrata.layout.runs import LayerPlace

__all__ = ["Axis", "Cache", "FieldPlaces", "Pages", "Tensor", "certify", "dense"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view of an allocation: `strides` and `offset` (of its first element) in bytes.

    `buffer` is the number of the allocation, `buffer_bytes` its size.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    buffer_bytes: int
    offset: int = 0
    buffer: int = 0

    def at(self, axis: int, index: int) -> Tensor:
        """The tensor without one axis, as `numpy.take` would see it. Raises `Malformed`."""
        if not (0 <= axis < len(self.shape) and 0 <= index < self.shape[axis]):
            raise Malformed(f"a tensor of shape {self.shape} has no index {index} on axis {axis}")
        return Tensor(
            self.shape[:axis] + self.shape[axis + 1 :],
            self.strides[:axis] + self.strides[axis + 1 :],
            self.element_bytes,
            self.buffer_bytes,
            self.offset + index * self.strides[axis],
            self.buffer,
        )


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis must be: `size` (0: any) and `stride` in bytes."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Cache:
    """Rows of a device: block b's begins at `offset + b * block_stride` of allocation `buffer`.

    Rows may overlap where a block's bytes are not together (LHBNC); the runs of two blocks don't.
    """

    buffer: int
    offset: int
    block_stride: int
    blocks: int
    row_bytes: int

    @property
    def end(self) -> int:
        return self.offset + (self.blocks - 1) * self.block_stride + self.row_bytes

    def view(self, allocation: NDArray[np.uint8]) -> NDArray[Any]:
        """(blocks, row bytes) over the allocation's bytes, as a CPU device registers it."""
        if self.end > allocation.size:
            raise Malformed(f"{self} leaves an allocation of {allocation.size} bytes")
        return np.lib.stride_tricks.as_strided(
            allocation[self.offset :], (self.blocks, self.row_bytes), (self.block_stride, 1)
        )


@dataclass(frozen=True, slots=True)
class FieldPlaces:
    """Where a rank keeps `units` units of a field, layer by layer."""

    field: str
    units: int
    layers: tuple[tuple[LayerPlace, ...], ...]


@dataclass(frozen=True, slots=True)
class Pages:
    """One rank's device pages of a group. `caches[i]` is what a run's `cache` i means."""

    caches: tuple[Cache, ...]
    fields: tuple[FieldPlaces, ...]

    def checked(self) -> Pages:
        """Itself, if no two caches share bytes. Raises `Malformed` if they do."""
        for a, b in combinations(self.caches, 2):
            if a.buffer == b.buffer and not _apart(a, b):
                raise Malformed(
                    f"offset: two tensors share bytes of allocation {a.buffer}: {a}, {b}"
                )
        return self


def _apart(a: Cache, b: Cache) -> bool:
    if a.end <= b.offset or b.end <= a.offset:
        return True
    stride = a.block_stride  # rows of both, block after block: one stays beside the other
    if stride != b.block_stride or a.row_bytes + b.row_bytes > stride:
        return False
    distance = (b.offset - a.offset) % stride
    return a.row_bytes <= distance <= stride - b.row_bytes


def dense(shape: Sequence[int], element: int) -> tuple[int, ...]:
    """Byte strides of axes in memory order, outermost first, without gaps."""
    strides = [element]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def certify(tensor: Tensor, what: str, element: int, axes: Sequence[Axis]) -> int:
    """Check a tensor against the axes it must have; the number of blocks, its first axis.

    Raises `Malformed` naming what differs: element_bytes, the shape or the stride of an axis, or
    the allocation. The stride of an axis with one element means nothing and is not compared.
    """
    if tensor.element_bytes != element:
        raise Malformed(
            f"{what}: element_bytes is {tensor.element_bytes}, the content's dtype has {element}"
        )
    if len(tensor.shape) != len(axes) or len(tensor.strides) != len(axes):
        raise Malformed(
            f"{what}: shape is {tensor.shape} and strides {tensor.strides}, "
            f"it must have the axes {[a.name for a in axes]}"
        )
    for axis, size in zip(axes, tensor.shape, strict=True):
        if size < 1 or (axis.size and size != axis.size):
            raise Malformed(
                f"{what}: shape[{axis.name}] is {size}, it must be {axis.size or '> 0'}"
            )
    # After the shape: one axis too long also moves the strides of those outside of it.
    for axis, size, stride in zip(axes, tensor.shape, tensor.strides, strict=True):
        if size > 1 and stride != axis.stride:
            raise Malformed(
                f"{what}: stride[{axis.name}] is {stride} bytes, it must be {axis.stride}"
            )
    last = sum((n - 1) * axis.stride for n, axis in zip(tensor.shape, axes, strict=True))
    if tensor.offset < 0 or tensor.offset + last + element > tensor.buffer_bytes:
        raise Malformed(
            f"{what}: from offset {tensor.offset} it needs {last + element} bytes, "
            f"buffer_bytes is {tensor.buffer_bytes}"
        )
    return tensor.shape[0]
