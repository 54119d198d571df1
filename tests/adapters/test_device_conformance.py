"""The public suite of devices over the CPU device; `jax_device_cases.py` runs it over JAX's."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstrata.testing import DeviceTests
from kvstrata_adapters.devices.cpu import CpuDevice


class TestCpuDevice(DeviceTests):
    padding = 0

    def open_device(self, rows: Sequence[np.ndarray]) -> tuple[CpuDevice, list[np.ndarray]]:
        caches = []
        for own in rows:
            wide = np.full((own.shape[0], own.shape[1] + self.padding), 0x77, np.uint8)
            wide[:, : own.shape[1]] = own
            caches.append(wide[:, : own.shape[1]])
        return CpuDevice(), caches

    def rows_of(self, device: CpuDevice, caches: Sequence[Any]) -> list[np.ndarray]:
        if self.padding:
            for cache in caches:
                assert (cache.base[:, cache.shape[1] :] == 0x77).all()
        return [cache.copy() for cache in caches]


class TestCpuDeviceWithRowsApart(TestCpuDevice):
    padding = 5
