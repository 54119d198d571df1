"""The CUDA device on a GPU. `make test-gpu` runs it and prints GB/s."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstrata.errors import KVStrataError
from kvstrata.layout import CopyRun
from kvstrata.testing import DeviceTests
from kvstrata_adapters.devices import cuda_plan
from kvstrata_adapters.devices.base import Copy
from kvstrata_adapters.devices.choose import cache_rows, open_device
from kvstrata_adapters.devices.cuda import CudaDevice
from kvstrata_adapters.devices.cuda_check import check_layout
from kvstrata_adapters.devices.cuda_driver import TorchDriver
from kvstrata_adapters.devices.samples import LAYOUTS

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA GPU here", allow_module_level=True)


class TestCudaDevice(DeviceTests):
    """Small fragments, staged."""

    def open_device(self, rows: Sequence[Any]) -> tuple[CudaDevice, Sequence[Any]]:
        return CudaDevice(TorchDriver("cuda:0")), [torch.from_numpy(r).cuda() for r in rows]

    def rows_of(self, device: Any, caches: Sequence[Any]) -> list[Any]:
        return [cache.cpu().numpy() for cache in caches]


class TestCudaDeviceDirect(TestCudaDevice):
    """The same by one batched copy of all fragments."""

    @pytest.fixture(autouse=True)
    def _nothing_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_plan, "SMALL_IN_BATCH", 0)
        monkeypatch.setattr(cuda_plan, "SMALL_ALONE", 0)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_moves_the_bytes_that_the_cpu_device_moves(layout: str, pinned: bool) -> None:
    check_layout(layout, pinned, blocks=12)


def test_a_store_sees_what_the_model_is_still_computing() -> None:
    size = 1 << 20
    cache = torch.zeros((4, size), dtype=torch.uint8, device="cuda")
    device, region = open_device([cache]), np.zeros(size, dtype=np.uint8)
    assert isinstance(device, CudaDevice)
    device.register_caches([cache_rows(cache)], {0: [CopyRun(0, 0, 0, size)]}, {0: size})
    device.attach(memoryview(region))
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 64
    cache[2] = 7
    device.store(1, [Copy(0, np.array([2]), np.array([0]))])
    device.wait([1], 30.0)
    assert (region == 7).all()
    device.close()


def test_memory_that_is_pinned_already_is_copied_as_pageable() -> None:
    size = 1 << 20
    region, cache = np.zeros(size, dtype=np.uint8), torch.ones((1, size), dtype=torch.uint8).cuda()
    driver = TorchDriver("cuda:0")
    driver.register(region.ctypes.data, size)
    with pytest.raises(KVStrataError):
        driver.register(region.ctypes.data, size)
    device = CudaDevice(driver)
    device.register_caches([cache], {0: [CopyRun(0, 0, 0, size)]}, {0: size})
    device.attach(memoryview(region))
    device.store(1, [Copy(0, np.array([0]), np.array([0]))])
    device.wait([1], 30.0)
    assert (device.finished()[0].error, int(region.min())) == (None, 1)
    device.close()
    driver.unregister(region.ctypes.data)
    torch.cuda.synchronize()  # no error is left behind
