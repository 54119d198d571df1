"""What an engine's device must do: move pages between its KV caches and the region.

A *cache* is an array of rows, one row per device block; a row holds that block's bytes of one or
more layers. `CopyRun`s (see `kvstrata.layout`) say which bytes of a row are which bytes of a
canonical page. One call moves many pages; each call is a *job*.

Some devices hold caches that can be written in place (`CpuDevice`). Others hold values: there a
load makes new arrays of the old ones, which the device gives back (`JaxDevice.arrays`). So that
nobody computes with arrays that a load has used up, all calls come from one thread, the one that
computes, and such a device makes new arrays only inside `finished` and `wait`.

Rules every device keeps:

- Jobs of one direction run in the order they were given; the two directions are independent.
- Each job is reported by `finished()` exactly once, with its own error: one that fails never
  fails another. After an error the bytes at its destination are undefined.
- A job uses the region that was attached when it was given.
- When `close()` has returned nothing touches the caches or the region any more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstrata.errors import KVStrataError, Malformed
from kvstrata.layout import CopyRun

__all__ = ["Bytes", "Copy", "Device", "JobResult", "as_bytes", "row_distances"]

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Copy:
    """Pages of one group: device block `blocks[i]` <-> the page at region byte `offsets[i]`.

    Both are 1-d int64 arrays of one length.
    """

    group: int
    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of one job. `nbytes` counts what was copied, `seconds` the copying alone."""

    job: int
    nbytes: int
    seconds: float
    error: KVStrataError | None = None


class Device(ABC):
    """Moves pages between a rank's caches (or those of all ranks of a process) and the region.

    Not thread-safe.
    """

    @abstractmethod
    def register_caches(
        self,
        caches: Sequence[Any],
        runs: Mapping[int, Sequence[CopyRun]],
        page_bytes: Mapping[int, int],
        store_runs: Mapping[int, Sequence[CopyRun]] | None = None,
    ) -> None:
        """Declare the caches, once, before any job.

        `caches[i]` of host memory has the shape (blocks, row bytes), any row stride, last axis
        contiguous (`as_bytes`); a device with caches of another kind says which.
        `runs[group]` is what a load reads of a page; `store_runs[group]` what a store writes,
        by default the same (ranks that hold the same bytes share the writing).
        Raises `Malformed` if a run leaves its cache or its page.
        """

    @abstractmethod
    def attach(self, region: memoryview) -> None:
        """Use this region (writable, bytes) for the jobs given from now on."""

    @abstractmethod
    def store(self, job: int, copies: Sequence[Copy]) -> None:
        """Device to region. Returns at once; job numbers must be distinct."""

    @abstractmethod
    def load(self, job: int, copies: Sequence[Copy]) -> None:
        """Region to device. Returns at once; job numbers must be distinct."""

    @abstractmethod
    def finished(self) -> list[JobResult]:
        """Jobs that ended since the last call. Never waits."""

    @abstractmethod
    def wait(self, jobs: Collection[int], timeout: float) -> None:
        """Until all of `jobs` have ended; `finished` still reports them. Raises `Expired`."""

    @abstractmethod
    def close(self) -> None:
        """Drop waiting jobs (they end with an error), finish the running ones. Idempotent."""


def as_bytes(tensor: Any) -> Bytes:
    """A CPU tensor or numpy array of shape (blocks, ...) as (blocks, row bytes), without a copy.

    The bytes of a row must lie together, in any order of their axes; rows may be apart. Works for
    dtypes that numpy lacks (bfloat16). Raises `Malformed` on other tensors.
    """
    shape = tuple(int(n) for n in tensor.shape)
    array = isinstance(tensor, np.ndarray)
    item = int(tensor.itemsize if array else tensor.element_size())
    strides = tuple(tensor.strides) if array else tuple(n * item for n in tensor.stride())
    row, pitch = row_distances(shape, strides, item)
    if array:
        rows = np.lib.stride_tricks.as_strided(tensor, (shape[0], row // item), (pitch, item))
        return rows.view(np.uint8)
    import torch

    if tensor.device.type != "cpu":
        raise Malformed(f"a tensor on {tensor.device} can't be viewed from the CPU")
    view = torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(), tensor.storage_offset() * item, (shape[0], row), (pitch, 1)
    )
    result: Bytes = view.numpy()
    return result


def row_distances(shape: Sequence[int], strides: Sequence[int], item: int) -> tuple[int, int]:
    """(bytes of a row, bytes from one row to the next) of a cache with these strides in bytes.

    Raises `Malformed` if the bytes of a row don't lie together, or rows overlap.
    """
    row = item * math.prod(shape[1:])
    if not shape or not row:
        raise Malformed(f"a KV cache of shape {shape} has no rows to copy")
    expected = item
    for stride, n in sorted(zip(strides[1:], shape[1:], strict=True)):
        if n > 1 and stride != expected:
            raise Malformed(f"the bytes of one block don't lie together: strides {strides[1:]}")
        expected *= n
    pitch = strides[0] if shape[0] > 1 else row
    if pitch < row:
        raise Malformed(f"blocks overlap: they have {row} bytes and are {pitch} apart")
    return row, pitch
