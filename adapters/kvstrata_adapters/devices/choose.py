"""The device for an engine's caches, by where they are.

device = open_device(tensors)
device.register_caches([cache_rows(t) for t in tensors], runs, page_bytes)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstrata.errors import Malformed
from kvstrata_adapters.devices.base import Device, as_bytes, row_distances
from kvstrata_adapters.devices.cpu import CpuDevice

__all__ = ["cache_rows", "open_device"]


def open_device(caches: Sequence[Any]) -> Device:
    """For numpy arrays or torch tensors, all in host memory or all on one CUDA GPU.

    Raises `Malformed` for others, `ConfigError` where the CUDA driver can't be loaded.
    """
    places = sorted({_place_of(cache) for cache in caches})
    if not places or places == ["cpu"]:
        return CpuDevice()
    if len(places) > 1:
        raise Malformed(f"KV caches of one rank must be in one place, these are on {places}")
    if not places[0].startswith("cuda"):
        raise Malformed(f"KV caches on {places[0]} are not supported: only cpu and cuda")
    from kvstrata_adapters.devices.cuda import CudaDevice
    from kvstrata_adapters.devices.cuda_driver import TorchDriver

    return CudaDevice(TorchDriver(places[0]))


def cache_rows(tensor: Any) -> Any:
    """A cache of shape (blocks, ...) as rows of bytes, without a copy, as the device takes it.

    `as_bytes` says what is refused.
    """
    if _place_of(tensor) == "cpu":
        return as_bytes(tensor)
    import torch

    item = int(tensor.element_size())
    shape = tuple(int(n) for n in tensor.shape)
    row, pitch = row_distances(shape, tuple(n * item for n in tensor.stride()), item)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset() * item, (shape[0], row), (pitch, 1)
    )


def _place_of(cache: Any) -> str:
    return "cpu" if isinstance(cache, np.ndarray) else str(cache.device)
