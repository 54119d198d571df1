"""The worker's half: copies between this rank's KV caches and the node's region."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvstrata.client import Client
from kvstrata.errors import KVStrataError, LinkBroken, Malformed
from kvstrata.region import Region
from kvstrata_adapters.devices.base import Device
from kvstrata_adapters.engines.vllm.faults import report_fault
from kvstrata_adapters.engines.vllm.pages import ChunkSpec, GroupPages, copies
from kvstrata_adapters.private_node import PrivateNode

__all__ = ["KVStrataWorker"]

_log = logging.getLogger(__name__)

# Copies run at GB/s; one that takes longer than this will never end.
_WAIT_SECONDS = 120.0


class KVStrataWorker(OffloadingWorker):
    """Reports each job once. A store that failed never becomes readable: the scheduler is told
    before the job is reported. A load that failed ends the engine rather than serve wrong bytes:
    vLLM's offloading worker has no way to report one.

    Jobs are the device's: on a GPU they run on its own streams behind what the calling thread's
    stream has queued, and have ended when their events have. So `submit_store`, `submit_load`,
    `get_finished` and `wait` are called by the thread that runs the model, as vLLM does.

    The session in `client` registers the namespace, and tells the node that this process may
    still be writing after the scheduler died. `connect` makes another one when the node was
    restarted. `own_node` ends with this worker, if this worker started it.
    """

    def __init__(
        self,
        device: Device,
        client: Client,
        connect: Callable[[], Client],
        groups: Sequence[GroupPages],
        blocks_per_chunk: int,
        own_node: PrivateNode | None = None,
    ) -> None:
        self._device = device
        self._client = client
        self._connect = connect
        self._groups = groups
        self._blocks_per_chunk = blocks_per_chunk
        self._own_node = own_node
        self._region: Region | None = None
        self._stores: dict[int, ChunkSpec] = {}
        self._loads: set[int] = set()
        self._results: list[TransferResult] = []
        welcome = client.welcome
        self._attach(welcome.shm_dir, welcome.region, welcome.region_bytes)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        chunks = _chunks(dst_spec)
        try:
            self._follow(chunks)
            self._device.store(
                job_id, copies(src_spec, chunks, self._groups, self._blocks_per_chunk)
            )
            self._stores[job_id] = chunks
        except KVStrataError as e:
            self._failed(job_id, chunks, e)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        chunks = _chunks(src_spec)
        self._attach(chunks.shm_dir, chunks.region, chunks.region_bytes)
        self._device.load(job_id, copies(dst_spec, chunks, self._groups, self._blocks_per_chunk))
        self._loads.add(job_id)
        return True

    def get_finished(self) -> list[TransferResult]:
        for result in self._device.finished():
            chunks = self._stores.pop(result.job, None)
            self._loads.discard(result.job)
            if result.error is None:
                self._results.append(
                    TransferResult(result.job, True, result.nbytes, result.seconds)
                )
            elif chunks is None:
                raise result.error
            else:
                self._failed(result.job, chunks, result.error)
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        running = job_ids & (self._stores.keys() | self._loads)
        self._device.wait(running, _WAIT_SECONDS)

    def shutdown(self) -> None:
        # The order matters: once the session is closed the node may reuse what we write to.
        self._device.close()
        self._client.close()
        if self._region is not None:
            self._region.close()
            self._region = None
        if self._own_node is not None:
            self._own_node.stop()

    def _failed(self, job: int, chunks: ChunkSpec, error: KVStrataError) -> None:
        _log.warning("storing %d chunks failed: %s", len(chunks.keys), error)
        report_fault(chunks.faults, chunks.keys)
        self._results.append(TransferResult(job, True))

    def _follow(self, chunks: ChunkSpec) -> None:
        """Have a session with the node whose region is to be written, and map that region."""
        try:
            self._client.receive()  # nothing comes on this session but its end
            here = self._client.welcome.region == chunks.region
        except LinkBroken:
            here = False
        if not here:
            self._client.close()
            self._client = self._connect()
            if self._client.welcome.region != chunks.region:
                raise LinkBroken(f"the node of region {chunks.region} is gone")
        self._attach(chunks.shm_dir, chunks.region, chunks.region_bytes)

    def _attach(self, shm_dir: str, name: str, size: int) -> None:
        if self._region is not None and self._region.name == name:
            return
        region = Region.attach(name, size, Path(shm_dir))
        self._device.attach(region.view)
        if self._region is not None:
            self._region.close()  # jobs given before keep it mapped until they end
        self._region = region


def _chunks(spec: LoadStoreSpec) -> ChunkSpec:
    if not isinstance(spec, ChunkSpec):
        raise Malformed(f"not a job of this adapter: {type(spec).__name__}")
    return spec
