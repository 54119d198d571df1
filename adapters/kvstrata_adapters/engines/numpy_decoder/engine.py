"""The engine of the numpy decoder: its pages are numpy arrays, its device is the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstrata.layout import FieldShare, LayerPlace, check_tiling, derive_runs
from kvstrata_adapters.devices.base import Device, as_bytes
from kvstrata_adapters.devices.cpu import CpuDevice
from kvstrata_adapters.engines.numpy_decoder.model import DecoderModel, Floats
from kvstrata_adapters.engines.numpy_decoder.paged import NodeClient, PagedEngine

__all__ = ["NumpyEngine"]


class NumpyEngine(PagedEngine):
    """See `PagedEngine`."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        client: NodeClient | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pages = model.new_pages(num_blocks)
        super().__init__(model, num_blocks, client, clock)

    def _forward(self, block: int, first: int, tokens: Sequence[int], table: list[int]) -> Floats:
        return self.model.forward(block, first, tokens, self._pages, table)

    def _open_device(self, region: memoryview) -> Device:
        caches = [as_bytes(page) for page in self._pages]
        field = self._group.fields[0]
        places = tuple(LayerPlace(i, 0, unit_stride=field.unit_bytes) for i in range(len(caches)))
        share = FieldShare(field.name, 0, field.units, places)
        runs = derive_runs(self._group, [share], [cache.shape[1] for cache in caches])
        check_tiling(self._group, [runs])
        device = CpuDevice()
        device.register_caches(
            caches, {self._group.id: runs}, {self._group.id: self._group.page_bytes}
        )
        device.attach(region)
        return device
