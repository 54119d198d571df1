"""The device of an engine whose KV caches are torch tensors on a CUDA GPU.

    device = CudaDevice(TorchDriver(tensor.device))      # or devices.choose.open_device(caches)
    device.register_caches([cache_rows(t) for t in tensors], {0: runs}, {0: group.page_bytes})
    device.attach(region.view)

**It has not been run on a GPU yet**: its tests run it with a driver that computes in host memory.
Where there is a GPU, `python -m kvstrata_adapters.devices.cuda_check` checks it and prints GB/s.

- Each direction has a stream of its own, on which its jobs follow each other. A job begins when
  what the calling thread's stream had queued is done, so that a store sees what the model has
  computed, and a load does not overwrite what the model still reads.
- A job is over when its last event is; `finished` asks, and there is no thread. What is queued
  can't be taken back: `close` waits for all of it.
- `cuda_plan` chooses per group between copies of the fragments and a staged page.
- The region is pinned as it is attached. Where the driver refuses, copies go through pageable
  memory: slower, one by one, and `store` and `load` then wait for some of them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstrata.errors import Expired, KVStrataError, LinkBroken, Malformed
from kvstrata.layout import CopyRun
from kvstrata_adapters.devices.base import Bytes, Copy, Device, JobResult
from kvstrata_adapters.devices.cuda_driver import CudaDriver
from kvstrata_adapters.devices.cuda_plan import (
    PIECE_BYTES,
    Path,
    Transfers,
    pieces_of,
    plan_path,
)
from kvstrata_adapters.devices.jobs import Jobs, as_error
from kvstrata_adapters.devices.rows import check_copy, check_run

__all__ = ["CudaDevice"]

_log = logging.getLogger(__name__)

STAGING_BYTES = 32 << 20  # of device memory for each direction, taken when caches are registered
_CLOSE_SECONDS = 120.0  # copies run at GB/s; what takes longer will never end
_POLL_SECONDS = (50e-6, 1e-3)  # the first and the longest pause of a wait


@dataclass(slots=True)
class _Region:
    """A region, its registered pieces, and how many jobs use it."""

    view: Bytes
    pinned: list[int]
    jobs: int = 0

    @property
    def address(self) -> int:
        return int(self.view.ctypes.data)


@dataclass(slots=True)
class _Running:
    """A job that was queued. `end` is None if nothing was."""

    number: int
    region: _Region | None
    nbytes: int = 0
    start: Any = None
    end: Any = None
    error: KVStrataError | None = None


@dataclass(slots=True)
class _Lane:
    """One direction."""

    to_host: bool
    stream: Any
    paths: dict[int, Path] = field(default_factory=dict)
    staging: Any = None
    staging_bytes: int = 0
    queue: deque[_Running] = field(default_factory=deque)


class CudaDevice(Device):
    """See the module. Calls come from one thread. `close` it before the caches go away.

    `clock` and `sleep` serve `wait`. `piece_bytes`: how much host memory is pinned in one piece.
    """

    def __init__(
        self,
        driver: CudaDriver,
        staging_bytes: int = STAGING_BYTES,
        piece_bytes: int = PIECE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._driver = driver
        self._staging_bytes, self._piece_bytes = staging_bytes, piece_bytes
        self._clock, self._sleep = clock, sleep
        self._caches: list[Any] = []
        self._blocks: dict[int, int] = {}
        self._page_bytes: dict[int, int] = {}
        self._store = _Lane(True, driver.stream())
        self._load = _Lane(False, driver.stream())
        self._region: _Region | None = None
        self._retired: list[_Region] = []
        self._jobs = Jobs()

    def register_caches(
        self,
        caches: Sequence[Any],
        runs: Mapping[int, Sequence[CopyRun]],
        page_bytes: Mapping[int, int],
        store_runs: Mapping[int, Sequence[CopyRun]] | None = None,
    ) -> None:
        """`caches[i]` is a torch tensor of uint8, (blocks, row bytes), on this device."""
        if self._page_bytes:
            raise Malformed("the caches of this device are registered already")
        if set(runs) != set(page_bytes) or set(store_runs or runs) != set(runs):
            raise Malformed("runs and page sizes must be of the same groups")
        places = [self._driver.place(i, cache) for i, cache in enumerate(caches)]
        row_bytes = [int(cache.shape[1]) for cache in caches]
        for lane, given in ((self._load, runs), (self._store, store_runs or runs)):
            for group, group_runs in given.items():
                for run in group_runs:
                    check_run(run, row_bytes, page_bytes[group])
                path = plan_path(group_runs, places, self._driver.batched)
                lane.paths[group] = path
                rows = min((box.rows for box in path.boxes), default=self._blocks.get(group, 0))
                self._blocks[group] = min(rows, self._blocks.get(group, rows))
            shares = [path.share for path in lane.paths.values() if path.staged]
            if shares:
                lane.staging_bytes = max(self._staging_bytes, *shares)
                lane.staging = self._driver.allocate(lane.staging_bytes)
        self._caches = list(caches)
        self._page_bytes = dict(page_bytes)

    def attach(self, region: memoryview) -> None:
        view: Bytes = np.frombuffer(region, dtype=np.uint8)
        self._retire()
        self._region = _Region(view, self._pin(view))

    def store(self, job: int, copies: Sequence[Copy]) -> None:
        self._submit(self._store, job, copies)

    def load(self, job: int, copies: Sequence[Copy]) -> None:
        self._submit(self._load, job, copies)

    def finished(self) -> list[JobResult]:
        self._reap()
        return self._jobs.take()

    def wait(self, jobs: Collection[int], timeout: float) -> None:
        deadline, pause = self._clock() + timeout, _POLL_SECONDS[0]
        while True:
            self._reap()
            late = sorted(set(jobs) & {r.number for lane in self._lanes for r in lane.queue})
            if not late:
                return
            if self._clock() >= deadline:
                raise Expired(f"copy jobs {late} have not ended within {timeout} s")
            self._sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    def close(self) -> None:
        """Raises `Expired` if a copy doesn't end; the region then stays mapped and pinned."""
        self._jobs.closed = True
        self.wait([r.number for lane in self._lanes for r in lane.queue], _CLOSE_SECONDS)
        self._retire()
        self._caches.clear()

    def staged(self, group: int) -> bool:
        """Whether the group's loads go through a staged page (see `cuda_plan`)."""
        return self._load.paths[group].staged

    # ------------------------------------------------------------ jobs

    @property
    def _lanes(self) -> tuple[_Lane, _Lane]:
        return self._store, self._load

    def _submit(self, lane: _Lane, job: int, copies: Sequence[Copy]) -> None:
        self._jobs.begin(job)
        region = self._region
        running = _Running(job, region)
        lane.queue.append(running)
        if region is not None:
            region.jobs += 1
        try:
            if region is None:
                raise LinkBroken("no region is attached")
            for copy in copies:
                check_copy(copy, self._page_bytes, self._blocks, region.view.size)
            self._driver.wait_stream(lane.stream, self._driver.compute_stream())
            running.start = self._driver.record(lane.stream)
            for copy in copies:
                running.nbytes += self._queue(lane, copy, region)
        except Exception as e:  # a job must be reported whatever happens to it
            running.error = as_error(job, e)
        if running.start is None:
            return
        try:
            # Also after an error: what was queued before it must end before the job does.
            running.end = self._driver.record(lane.stream)
        except Exception as e:
            running.error = running.error or as_error(job, e)

    def _queue(self, lane: _Lane, copy: Copy, region: _Region) -> int:
        path = lane.paths[copy.group]
        if not len(copy.blocks) or not path.boxes:
            return 0
        if not path.staged:
            self._copy(lane, path.direct_transfers(copy.blocks, copy.offsets), region)
            return path.share * len(copy.blocks)
        # One buffer is enough: on its stream a round begins when the one before is done with it.
        pages = lane.staging_bytes // path.share
        address, stream = self._driver.address(lane.staging), lane.stream
        for at in range(0, len(copy.blocks), pages):
            blocks = self._driver.indices(copy.blocks[at : at + pages], stream)
            transfers = path.staged_transfers(address, copy.offsets[at : at + pages])
            move = self._driver.gather if lane.to_host else self._driver.scatter
            if not lane.to_host:
                self._copy(lane, transfers, region)
            for box in path.boxes:
                cache = self._caches[box.cache]
                move(box, cache, blocks, lane.staging, path.share, stream)
            if lane.to_host:
                self._copy(lane, transfers, region)
        return path.share * len(copy.blocks)

    def _copy(self, lane: _Lane, transfers: Transfers, region: _Region) -> None:
        if region.pinned:
            transfers = transfers.split(self._piece_bytes)
        host = transfers.host + region.address
        dst, src = (host, transfers.device) if lane.to_host else (transfers.device, host)
        self._driver.copy(
            dst, src, transfers.sizes, lane.to_host, lane.stream, batch=bool(region.pinned)
        )

    def _reap(self) -> None:
        for lane in self._lanes:
            while lane.queue and self._over(lane.queue[0]):
                job = lane.queue.popleft()
                seconds = 0.0
                if job.error is None:
                    with contextlib.suppress(Exception):  # a figure only
                        seconds = self._driver.seconds(job.start, job.end)
                if job.region is not None:
                    job.region.jobs -= 1
                self._jobs.end(JobResult(job.number, job.nbytes, seconds, job.error))
        unused = [region for region in self._retired if not region.jobs]
        for region in unused:
            self._retired.remove(region)
            self._unpin(region.pinned)

    def _over(self, job: _Running) -> bool:
        if job.end is None:
            return True
        try:
            return self._driver.done(job.end)
        except Exception as e:  # the GPU is lost: nothing runs on it any more
            job.error = job.error or as_error(job.number, e)
            return True

    # ------------------------------------------------------------ pinning

    def _pin(self, view: Bytes) -> list[int]:
        """Addresses of the registered pieces; none if the driver refuses one."""
        done: list[int] = []
        address = int(view.ctypes.data)
        try:
            for at, size in pieces_of(view.size, self._piece_bytes):
                self._driver.register(address + at, size)
                done.append(address + at)
        except Exception as e:
            self._unpin(done)
            _log.warning("the region stays pageable, copies will be slower: %s", e)
            return []
        return done

    def _unpin(self, pieces: Sequence[int]) -> None:
        for address in pieces:
            try:
                self._driver.unregister(address)
            except Exception as e:
                _log.warning("a piece of the region stays pinned: %s", e)

    def _retire(self) -> None:
        """Unpin the region once no job uses it; until then it stays mapped."""
        if self._region is not None:
            self._retired.append(self._region)
            self._region = None
        self._reap()
