"""The device of an engine whose KV caches are in host memory: numpy, and torch CPU tensors.

    device = CpuDevice()
    device.register_caches([as_bytes(kv_cache)], {0: runs}, {0: group.page_bytes})
    device.attach(region.view)
    device.store(1, [Copy(0, blocks=np.array([7, 3]), offsets=np.array([0, 8192]))])
    device.wait([1], timeout=5.0)
    (result,) = device.finished()      # JobResult(job=1, nbytes=..., seconds=..., error=None)

One thread per direction; numpy releases the GIL while it copies.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.errors import KVStrataError, LinkBroken, Malformed
from kvstrata.layout import CopyRun
from kvstrata_adapters.devices.base import Bytes, Copy, Device, JobResult
from kvstrata_adapters.devices.grids import Grid, copy_pages, grids_of
from kvstrata_adapters.devices.jobs import Jobs, Lane, as_error
from kvstrata_adapters.devices.rows import check_copy

__all__ = ["CpuDevice"]


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    copies: Sequence[Copy]
    region: Bytes | None


class CpuDevice(Device):
    """See the module. `close` it: it owns two threads."""

    def __init__(self) -> None:
        self._caches: list[Bytes] = []  # a grid keeps only one of its caches alive
        self._blocks: dict[int, int] = {}
        self._page_bytes: dict[int, int] = {}
        self._load_grids: dict[int, list[Grid]] = {}
        self._store_grids: dict[int, list[Grid]] = {}
        self._region: Bytes | None = None
        self._jobs = Jobs()
        self._lanes = [Lane("store", self._run_store), Lane("load", self._run_load)]

    def register_caches(
        self,
        caches: Sequence[Bytes],
        runs: Mapping[int, Sequence[CopyRun]],
        page_bytes: Mapping[int, int],
        store_runs: Mapping[int, Sequence[CopyRun]] | None = None,
    ) -> None:
        if self._page_bytes:
            raise Malformed("the caches of this device are registered already")
        if set(runs) != set(page_bytes) or set(store_runs or runs) != set(runs):
            raise Malformed("runs and page sizes must be of the same groups")
        self._caches = list(caches)
        for group, group_runs in runs.items():
            size = page_bytes[group]
            self._load_grids[group] = grids_of(caches, group_runs, size)
            self._store_grids[group] = (
                grids_of(caches, store_runs[group], size)
                if store_runs is not None
                else self._load_grids[group]
            )
            grids = self._load_grids[group] + self._store_grids[group]
            self._blocks[group] = min((grid.box.rows for grid in grids), default=0)
        self._page_bytes = dict(page_bytes)

    def attach(self, region: memoryview) -> None:
        self._region = np.frombuffer(region, dtype=np.uint8)

    def store(self, job: int, copies: Sequence[Copy]) -> None:
        self._jobs.begin(job)
        self._lanes[0].put(_Job(job, copies, self._region))

    def load(self, job: int, copies: Sequence[Copy]) -> None:
        self._jobs.begin(job)
        self._lanes[1].put(_Job(job, copies, self._region))

    def finished(self) -> list[JobResult]:
        return self._jobs.take()

    def wait(self, jobs: Collection[int], timeout: float) -> None:
        self._jobs.wait(jobs, timeout)

    def close(self) -> None:
        with self._jobs.changed:
            self._jobs.closed = True
        for lane in self._lanes:
            lane.stop()

    # ------------------------------------------------------------ on the lanes' threads

    def _run_store(self, job: _Job) -> None:
        self._run(job, self._store_grids, to_region=True)

    def _run_load(self, job: _Job) -> None:
        self._run(job, self._load_grids, to_region=False)

    def _run(self, job: _Job, grids: Mapping[int, list[Grid]], to_region: bool) -> None:
        started, nbytes = time.perf_counter(), 0
        error: KVStrataError | None = None
        try:
            if self._jobs.closed:
                raise LinkBroken("the device was closed before this copy began")
            if job.region is None:
                raise LinkBroken("no region is attached")
            for copy in job.copies:
                check_copy(copy, self._page_bytes, self._blocks, job.region.size)
            for copy in job.copies:
                nbytes += copy_pages(grids[copy.group], copy, job.region, to_region)
        except Exception as e:
            error = as_error(job.number, e)
        self._jobs.end(JobResult(job.number, nbytes, time.perf_counter() - started, error))
