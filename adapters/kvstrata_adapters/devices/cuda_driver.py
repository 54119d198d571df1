"""The calls a CUDA device makes, and their real form: torch, and libcuda by ctypes.

Everything that decides is in `cuda` and `cuda_plan`, and is tested with a driver that computes in
host memory. **What is in this file has not been run on a GPU yet**, but for the parts that torch
can do on a CPU: `python -m kvstrata_adapters.devices.cuda_check` does, where there is one.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.errors import ConfigError, KVStrataError, Malformed
from kvstrata_adapters.devices.boxes import Box, Place

__all__ = ["BatchCopy", "CudaDriver", "TorchDriver", "box_view", "staged_view"]

Addresses = NDArray[np.int64]


class CudaDriver(Protocol):
    """Streams, events, buffers and index arrays are the driver's own objects.

    Copies and events are only queued on a stream. A call that fails raises, and has then queued
    nothing or a part.
    """

    batched: bool  # copies go many in one call

    def place(self, index: int, cache: Any) -> Place:
        """Where a cache is. Raises `Malformed` if it is not rows of bytes on this device."""

    def allocate(self, nbytes: int) -> Any:
        """Device memory, for as long as the object lives."""

    def address(self, buffer: Any) -> int: ...

    def stream(self) -> Any:
        """A new one."""

    def compute_stream(self) -> Any:
        """The one this thread computes on."""

    def wait_stream(self, stream: Any, other: Any) -> None:
        """What is queued on `stream` from now on begins after all that `other` has now."""

    def record(self, stream: Any) -> Any:
        """An event at this place of the stream."""

    def done(self, event: Any) -> bool: ...

    def seconds(self, start: Any, end: Any) -> float:
        """Between two events that are done."""

    def copy(
        self,
        dst: Addresses,
        src: Addresses,
        sizes: Addresses,
        to_host: bool,
        stream: Any,
        batch: bool,
    ) -> None:
        """One copy an item. `batch`: in one call, only between pinned and device memory."""

    def indices(self, blocks: NDArray[np.int64], stream: Any) -> Any:
        """Block numbers on the device."""

    def gather(self, box: Box, cache: Any, blocks: Any, staged: Any, share: int, s: Any) -> None:
        """The box's fragments of these blocks into staged pages of `share` bytes, on stream s."""

    def scatter(self, box: Box, cache: Any, blocks: Any, staged: Any, share: int, s: Any) -> None:
        """And back."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory of this process. Raises if the driver won't; nothing is left behind."""

    def unregister(self, address: int) -> None: ...


# ---------------------------------------------------------------- cuMemcpyBatchAsync

_STREAM_ORDER, _ANY_ORDER = 1, 3  # CUmemcpySrcAccessOrder


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The two location hints stay 0: not given."""

    _fields_ = (
        ("src_access_order", ctypes.c_uint),
        ("src_type", ctypes.c_uint),
        ("src_id", ctypes.c_int),
        ("dst_type", ctypes.c_uint),
        ("dst_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """cuMemcpyBatchAsync, at `pointer`. CUDA 13 dropped the argument `failIdx` (`fail_index`)."""

    def __init__(self, pointer: int, fail_index: bool) -> None:
        p = ctypes.c_void_p
        middle = [p] if fail_index else []
        size = ctypes.c_size_t
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, p, p, p, size, p, p, size, *middle, p)(pointer)
        self._fail_index = fail_index

    @classmethod
    def of(cls, libcuda: Any) -> BatchCopy | None:
        """None if the driver has none: it came with CUDA 12.8."""
        version = ctypes.c_int()
        if libcuda.cuDriverGetVersion(ctypes.byref(version)) or version.value < 12080:
            return None
        for wanted in (13000, 12080):
            pointer, found = ctypes.c_void_p(), ctypes.c_int()
            if version.value < wanted:
                continue
            error = libcuda.cuGetProcAddress_v2(
                b"cuMemcpyBatchAsync",
                ctypes.byref(pointer),
                ctypes.c_int(wanted),
                ctypes.c_uint64(0),
                ctypes.byref(found),
            )
            if not error and pointer.value:
                return cls(pointer.value, fail_index=wanted < 13000)
        return None

    def __call__(
        self, dst: Addresses, src: Addresses, sizes: Addresses, any_order: bool, stream: int
    ) -> None:
        """Queue the copies. `any_order`: the sources may be read before the stream comes to it."""
        if not len(sizes):
            return
        arrays = [np.ascontiguousarray(a, dtype=np.uint64) for a in (dst, src, sizes)]
        attributes = _Attributes(src_access_order=_ANY_ORDER if any_order else _STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(2**64 - 1)
        error = self._call(
            *(a.ctypes.data for a in arrays),
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            *([ctypes.addressof(failed)] if self._fail_index else []),
            stream,
        )
        if error:
            at = f" at copy {failed.value} of {len(sizes)}" if failed.value < len(sizes) else ""
            raise KVStrataError(f"cuMemcpyBatchAsync failed with CUDA error {error}{at}")


# ---------------------------------------------------------------- torch


def box_view(torch: Any, box: Box, cache: Any, share: int) -> Any:
    """(rows, *counts, words) over the storage of a cache, in words as wide as all sides allow."""
    storage = cache.untyped_storage()
    offset = box.address - storage.data_ptr()
    shape = (box.rows, *box.counts, box.nbytes)
    strides = (box.pitch, *(s.device for s in box.steps))
    return _words(torch, storage, offset, shape, strides, _word(box, share, offset), cache.device)


def staged_view(torch: Any, box: Box, staged: Any, pages: int, share: int, cache: Any) -> Any:
    """The box in staged pages, in the same words: (pages, *counts, words)."""
    offset = box.address - cache.untyped_storage().data_ptr()
    shape = (pages, *box.counts, box.nbytes)
    strides = (share, *(s.page for s in box.steps))
    return _words(
        torch,
        staged.untyped_storage(),
        box.page_offset,
        shape,
        strides,
        _word(box, share, offset),
        staged.device,
    )


def _word(box: Box, share: int, offset: int) -> int:
    distances = [n for step in box.steps for n in (step.device, step.page)]
    return math.gcd(8, offset, box.pitch, share, box.page_offset, box.nbytes, *distances)


def _words(
    torch: Any,
    storage: Any,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    word: int,
    device: Any,
) -> Any:
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    return torch.empty(0, dtype=dtype, device=device).set_(
        storage,
        offset // word,
        (*shape[:-1], shape[-1] // word),
        (*(n // word for n in strides), 1),
    )


class TorchDriver:
    """`device`: a torch.device of type cuda. Raises `ConfigError` if libcuda can't be loaded."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch, self._device = torch, torch.device(device)
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise ConfigError(f"the CUDA driver can't be loaded: {e}") from e
        self._batch = BatchCopy.of(self._cuda)
        self.batched = self._batch is not None

    def place(self, index: int, cache: Any) -> Place:
        if cache.dtype != self._torch.uint8 or cache.dim() != 2 or cache.stride(1) != 1:
            raise Malformed(f"cache {index} must be (blocks, row bytes) of uint8, last axis dense")
        if cache.device != self._device:
            raise Malformed(f"cache {index} is on {cache.device}, this device is {self._device}")
        return Place(
            cache.data_ptr(),
            int(cache.stride(0)),
            int(cache.shape[0]),
            index,
            storage=cache.untyped_storage().data_ptr(),
        )

    def allocate(self, nbytes: int) -> Any:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)

    def address(self, buffer: Any) -> int:
        return int(buffer.data_ptr())

    def stream(self) -> Any:
        return self._torch.cuda.Stream(self._device)

    def compute_stream(self) -> Any:
        return self._torch.cuda.current_stream(self._device)

    def wait_stream(self, stream: Any, other: Any) -> None:
        stream.wait_stream(other)

    def record(self, stream: Any) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def done(self, event: Any) -> bool:
        return bool(event.query())

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def copy(
        self,
        dst: Addresses,
        src: Addresses,
        sizes: Addresses,
        to_host: bool,
        stream: Any,
        batch: bool,
    ) -> None:
        if batch and self._batch is not None:
            # Out of order only from the region: a store's source is what compute has just written
            # (vllm-project/vllm#39306).
            self._batch(dst, src, sizes, not to_host, stream.cuda_stream)
            return
        call = self._cuda.cuMemcpyDtoHAsync_v2 if to_host else self._cuda.cuMemcpyHtoDAsync_v2
        where = ctypes.c_void_p(stream.cuda_stream)
        for to, source, size in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
            error = call(ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), where)
            if error:
                raise KVStrataError(f"a copy of {size} bytes failed with CUDA error {error}")

    def indices(self, blocks: NDArray[np.int64], stream: Any) -> Any:
        # Pinned, or the copy would wait for the stream, and that for the model.
        with self._torch.cuda.stream(stream):
            pinned = self._torch.from_numpy(np.ascontiguousarray(blocks)).pin_memory()
            return pinned.to(self._device, non_blocking=True)

    def gather(self, box: Box, cache: Any, blocks: Any, staged: Any, share: int, s: Any) -> None:
        with self._torch.cuda.stream(s):
            rows = box_view(self._torch, box, cache, share)
            pages = staged_view(self._torch, box, staged, len(blocks), share, cache)
            pages.copy_(rows.index_select(0, blocks))

    def scatter(self, box: Box, cache: Any, blocks: Any, staged: Any, share: int, s: Any) -> None:
        with self._torch.cuda.stream(s):
            pages = staged_view(self._torch, box, staged, len(blocks), share, cache)
            box_view(self._torch, box, cache, share).index_copy_(0, blocks, pages)

    def register(self, address: int, nbytes: int) -> None:
        # Of the driver, not of the runtime: there a refusal stays behind as the last error, and is
        # raised by whatever torch calls next.
        self.compute_stream().query()  # makes the device's context this thread's
        portable = 1
        error = self._cuda.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(portable)
        )
        if error:
            raise KVStrataError(f"pinning {nbytes} bytes failed with CUDA error {error}")

    def unregister(self, address: int) -> None:
        error = self._cuda.cuMemHostUnregister(ctypes.c_void_p(address))
        if error:
            raise KVStrataError(f"unpinning host memory failed with CUDA error {error}")
