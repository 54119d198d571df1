"""vLLM's tiering spec for engines on the CPU.

vLLM refuses host offloading there, and its own worker copies by CUDA. All that is replaced is that
worker; host memory, scheduler, tiering manager and tiers are vLLM's, as it runs them on GPUs.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["CpuTieringSpec"]


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyWorker(kv_caches, region, self.blocks_per_chunk)


class CopyWorker(OffloadingWorker):
    """Copies when it is asked, block by block."""

    def __init__(
        self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        self._region = region
        self._groups = caches.group_data_refs
        self._pages = [tensor.page_size_bytes for tensor in caches.tensors]
        self._device = [
            tensor.tensor.view(torch.int8).view(len(tensor.tensor), -1) for tensor in caches.tensors
        ]
        self._blocks_per_chunk = blocks_per_chunk
        self._host = [
            region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages
        ]
        self._results: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        for host, device in self._pairs(src_spec, dst_spec):
            host.copy_(device)
        return self._done(job_id)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for host, device in self._pairs(dst_spec, src_spec):
            device.copy_(host)
        return self._done(job_id)

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """All have ended."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()

    def _done(self, job_id: int) -> bool:
        self._results.append(TransferResult(job_id, True))
        return True

    def _pairs(
        self, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Host and device bytes of every layer of every block."""
        assert isinstance(chunks, CPULoadStoreSpec)
        pairs = []
        numbers, rows = iter(blocks.block_ids.tolist()), iter(chunks.chunk_ids.tolist())
        per = self._blocks_per_chunk
        for refs, count, index in zip(
            self._groups, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            first = index % per
            row = -1
            for at in range(first, first + count):
                if at == first or at % per == 0:
                    row = next(rows)
                block = next(numbers)
                for ref in refs:
                    start = (at % per) * self._pages[ref.tensor_idx]
                    host = self._host[ref.tensor_idx][row, start : start + ref.page_size_bytes]
                    pairs.append((host, self._device[ref.tensor_idx][block, : ref.page_size_bytes]))
        return pairs
