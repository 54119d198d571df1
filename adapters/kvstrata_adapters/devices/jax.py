"""The device of an engine in JAX: sharded arrays on TPUs, GPUs, and on CPUs for tests.

    device = JaxDevice()
    device.register_caches(layers, {0: over_shards(runs_of_rank)}, {0: group.page_bytes})
    device.attach(region.view)
    device.load(1, [Copy(0, blocks=np.array([7, 3]), offsets=np.array([0, 8192]))])
    device.wait([1], timeout=5.0)        # the arrays registered are used up, these are the caches:
    device.arrays = step(device.arrays)  # a step may donate them and gives others back

`register_caches` takes one array per layer (or several layers in one), blocks on its first axis,
the others sharded as the engine likes. A *cache* of a run is a shard: shard r of array i is cache
`i * shards + r`. Shards are never gathered; each rank's share moves by itself.

Everything is called by the one thread that owns the arrays, since a load donates them:

    store   owner: gather the blocks into new arrays, start their copies to the host
            store thread: bytes of each shard -> region
    load    load thread: region -> new host arrays, one per shard
            owner, in `finished` or `wait`: onto the devices, donated scatter
            settling thread: until the scatter has run, then the job has ended

The region is only read and written by numpy: an array that JAX has been given may alias host
memory for good (on CPUs `device_put` does, whatever `may_alias` says).

Blocks move in pieces of 1, 2, 4, ... `MAX_BLOCKS`, filled up with copies of the last one, so few
shapes are ever compiled. A job takes as much device memory as its blocks until it has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from kvstrata.errors import KVStrataError, LinkBroken, Malformed
from kvstrata.layout import CopyRun
from kvstrata_adapters.devices.base import Bytes, Copy, Device, JobResult
from kvstrata_adapters.devices.grids import copy_pages, grids_of
from kvstrata_adapters.devices.jax_arrays import (
    Form,
    gatherer,
    over_shards,
    scatterer,
    shard_tensors,
)
from kvstrata_adapters.devices.jobs import Jobs, Lane, as_error
from kvstrata_adapters.devices.rows import check_copy, check_run

__all__ = ["MAX_BLOCKS", "JaxDevice", "over_shards", "shard_tensors"]

MAX_BLOCKS = 64
"""Most blocks that one gather or scatter moves; a power of two."""


@dataclass(frozen=True, slots=True)
class _Side:
    """What one direction of a group does: runs over the shards of some arrays.

    `cache` of a run counts the shards of these arrays only.
    """

    arrays: tuple[int, ...]
    runs: tuple[CopyRun, ...]
    call: Any  # the gather of a store, the scatter of a load
    masks: tuple[jax.Array | None, ...] = ()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Up to `MAX_BLOCKS` blocks of one copy. `ids` is filled up to a power of two."""

    group: int
    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    gathered: tuple[jax.Array, ...] = ()  # store: per array of the side
    updates: tuple[tuple[NDArray[Any], ...], ...] = ()  # load: per array, per shard


@dataclass(slots=True)
class _Job:
    number: int
    copies: Sequence[Copy]
    region: Bytes | None
    pieces: list[_Piece] = field(default_factory=list)
    events: list[jax.Array] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    error: KVStrataError | None = None


class JaxDevice(Device):
    """See the module. `close` it: it owns three threads.

    `pinned`: whether bytes pass through the backend's `pinned_host` memory; by default where it
    has that and is not a CPU.
    """

    def __init__(self, pinned: bool | None = None) -> None:
        self._pinned = pinned
        self._arrays: list[jax.Array] = []
        self._forms: list[Form] = []
        self._ranks = 0
        self._blocks: dict[int, int] = {}
        self._page_bytes: dict[int, int] = {}
        self._stores: dict[int, _Side] = {}
        self._loads: dict[int, _Side] = {}
        self._region: Bytes | None = None
        self._jobs = Jobs()
        self._staged: deque[_Job] = deque()
        self._store_lane = Lane("store", self._run_store)
        self._load_lane = Lane("load", self._stage)
        self._settle_lane = Lane("settle", self._settle)

    @property
    def arrays(self) -> list[jax.Array]:
        """The caches as they are now. Set them after a step that made new ones.

        Setting raises `Malformed` on arrays of another number, shape, dtype or sharding.
        """
        return list(self._arrays)

    @arrays.setter
    def arrays(self, arrays: Sequence[jax.Array]) -> None:
        if len(arrays) != len(self._forms):
            raise Malformed(f"{len(arrays)} arrays instead of {len(self._forms)}")
        for i, (array, form) in enumerate(zip(arrays, self._forms, strict=True)):
            form.check(i, array)
        self._arrays = list(arrays)

    def register_caches(
        self,
        caches: Sequence[jax.Array],
        runs: Mapping[int, Sequence[CopyRun]],
        page_bytes: Mapping[int, int],
        store_runs: Mapping[int, Sequence[CopyRun]] | None = None,
    ) -> None:
        """`caches` are arrays of shape (blocks, ...); the runs are over their shards."""
        if self._page_bytes:
            raise Malformed("the caches of this device are registered already")
        if set(runs) != set(page_bytes) or set(store_runs or runs) != set(runs):
            raise Malformed("runs and page sizes must be of the same groups")
        stores = runs if store_runs is None else store_runs
        self._ranks = len(caches[0].addressable_shards) if caches else 0
        self._forms = [Form.of(i, array, self._ranks) for i, array in enumerate(caches)]
        row_bytes = [n for form in self._forms for n in form.row_bytes]
        for group in runs:
            for run in (*runs[group], *stores[group]):
                check_run(run, row_bytes, page_bytes[group])
            self._stores[group] = self._store_side(tuple(stores[group]))
            self._loads[group] = self._load_side(tuple(runs[group]))
            touched = {*self._stores[group].arrays, *self._loads[group].arrays}
            self._blocks[group] = min((self._forms[i].shape[0] for i in touched), default=0)
        if self._pinned is None and caches:
            device = self._forms[0].devices[0]
            kinds = {memory.kind for memory in device.addressable_memories()}
            self._pinned = device.platform != "cpu" and "pinned_host" in kinds
        self._arrays, self._page_bytes = list(caches), dict(page_bytes)

    def attach(self, region: memoryview) -> None:
        self._region = np.frombuffer(region, dtype=np.uint8)

    def store(self, job: int, copies: Sequence[Copy]) -> None:
        self._jobs.begin(job)
        task = _Job(job, copies, self._region)
        try:
            self._check(task)
            task.pieces = [self._gather(p) for copy in copies for p in _pieces(copy)]
        except Exception as e:
            task.error = as_error(job, e)
        self._store_lane.put(task)

    def load(self, job: int, copies: Sequence[Copy]) -> None:
        self._jobs.begin(job)
        self._load_lane.put(_Job(job, copies, self._region))

    def finished(self) -> list[JobResult]:
        """See `Device`. Replaces `arrays` if loads have been staged since the last call."""
        self._apply()
        return self._jobs.take()

    def wait(self, jobs: Collection[int], timeout: float) -> None:
        """See `Device`. Replaces `arrays` if loads have been staged since the last call."""
        self._jobs.wait(jobs, timeout, due=lambda: bool(self._staged), work=self._apply)

    def close(self) -> None:
        """See `Device`. `arrays` stay as they are, and valid."""
        with self._jobs.changed:
            self._jobs.closed = True
        self._store_lane.stop()
        self._load_lane.stop()
        while self._staged:
            task = self._staged.popleft()
            task.error = task.error or _closed()
            self._settle_lane.put(task)
        self._settle_lane.stop()

    # ------------------------------------------------------------ on the owner's thread

    def _store_side(self, runs: tuple[CopyRun, ...]) -> _Side:
        arrays = self._touched(runs)
        call = gatherer([self._forms[i] for i in arrays])
        return _Side(arrays, self._among(arrays, runs), call)

    def _load_side(self, runs: tuple[CopyRun, ...]) -> _Side:
        arrays = self._touched(runs)
        forms = [self._forms[i] for i in arrays]
        masks = []
        for i, form in zip(arrays, forms, strict=True):
            caches = range(i * self._ranks, (i + 1) * self._ranks)
            by_shard = [[run for run in runs if run.cache == cache] for cache in caches]
            masks.append(form.mask(i, by_shard))
        return _Side(arrays, self._among(arrays, runs), scatterer(forms), tuple(masks))

    def _touched(self, runs: Sequence[CopyRun]) -> tuple[int, ...]:
        return tuple(sorted({run.cache // self._ranks for run in runs}))

    def _among(self, arrays: tuple[int, ...], runs: Sequence[CopyRun]) -> tuple[CopyRun, ...]:
        local = {index: i * self._ranks for i, index in enumerate(arrays)}
        return tuple(
            replace(run, cache=local[run.cache // self._ranks] + run.cache % self._ranks)
            for run in runs
        )

    def _gather(self, piece: _Piece) -> _Piece:
        side = self._stores[piece.group]
        gathered = side.call(tuple(self._arrays[i] for i in side.arrays), piece.ids)
        if self._pinned:
            pinned = [array.sharding.with_memory_kind("pinned_host") for array in gathered]
            gathered = tuple(jax.device_put(list(gathered), pinned))
        for array in gathered:
            array.copy_to_host_async()
        return replace(piece, gathered=gathered)

    def _apply(self) -> None:
        """Scatter what has been staged, in order."""
        while self._staged:
            task = self._staged.popleft()
            started = time.perf_counter()
            try:
                if task.error is None:
                    task.events = [self._scatter(piece) for piece in task.pieces]
            except Exception as e:
                task.error = as_error(task.number, e)
            task.pieces = []
            task.seconds += time.perf_counter() - started
            self._settle_lane.put(task)

    def _scatter(self, piece: _Piece) -> jax.Array:
        """What is ready when the piece is in the arrays."""
        side = self._loads[piece.group]
        arrays = tuple(self._arrays[i] for i in side.arrays)
        updates = tuple(
            self._forms[i].assemble(parts, bool(self._pinned))
            for i, parts in zip(side.arrays, piece.updates, strict=True)
        )
        new, event = side.call(arrays, updates, side.masks, piece.ids)
        for i, array in zip(side.arrays, new, strict=True):
            self._arrays[i] = array
        result: jax.Array = event
        return result

    def _check(self, task: _Job) -> Bytes:
        """The region to use."""
        if self._jobs.closed:
            raise _closed()
        if task.region is None:
            raise LinkBroken("no region is attached")
        for copy in task.copies:
            check_copy(copy, self._page_bytes, self._blocks, task.region.size)
        return task.region

    # ------------------------------------------------------------ on the lanes' threads

    def _run_store(self, task: _Job) -> None:
        started = time.perf_counter()
        try:
            if task.error is None:
                region = self._check(task)  # again: it may be closed by now
                task.nbytes = sum(self._write(piece, region) for piece in task.pieces)
        except Exception as e:
            task.error = as_error(task.number, e)
        self._end(task, started)

    def _write(self, piece: _Piece, region: Bytes) -> int:
        rows = []
        for array in piece.gathered:
            for shard in array.addressable_shards:
                host = np.asarray(shard.data)  # waits for it; on CPUs a view
                rows.append(host.reshape(len(host), -1).view(np.uint8))
        return self._copy(self._stores[piece.group], piece, rows, region, to_region=True)

    def _stage(self, task: _Job) -> None:
        started = time.perf_counter()
        try:
            region = self._check(task)
            for copy in task.copies:
                for piece in _pieces(copy):
                    filled, nbytes = self._read(piece, region)
                    task.pieces.append(filled)
                    task.nbytes += nbytes
        except Exception as e:
            task.error = as_error(task.number, e)
        task.seconds = time.perf_counter() - started
        with self._jobs.changed:
            self._staged.append(task)
            self._jobs.changed.notify_all()

    def _read(self, piece: _Piece, region: Bytes) -> tuple[_Piece, int]:
        """With its rows from the region, in new host arrays."""
        side, n = self._loads[piece.group], len(piece.offsets)
        forms = [self._forms[i] for i in side.arrays]
        rows = _new_rows(len(piece.ids), [nbytes for form in forms for nbytes in form.row_bytes])
        copied = self._copy(side, piece, rows, region, to_region=False)
        for own in rows:
            own[n:] = own[n - 1]
        parts = iter(rows)
        updates = tuple(
            tuple(form.host_rows(rank, next(parts)) for rank in range(self._ranks))
            for form in forms
        )
        return replace(piece, updates=updates), copied

    def _copy(
        self, side: _Side, piece: _Piece, rows: list[Bytes], region: Bytes, to_region: bool
    ) -> int:
        grids = grids_of(rows, side.runs, self._page_bytes[piece.group])
        local = Copy(piece.group, np.arange(len(piece.offsets)), piece.offsets)
        return copy_pages(grids, local, region, to_region)

    def _settle(self, task: _Job) -> None:
        started = time.perf_counter()
        try:
            for event in task.events:
                event.block_until_ready()
        except Exception as e:
            task.error = as_error(task.number, e)
        self._end(task, started)

    def _end(self, task: _Job, started: float) -> None:
        seconds = task.seconds + time.perf_counter() - started
        task.pieces, task.events = [], []
        nbytes = task.nbytes if task.error is None else 0
        self._jobs.end(JobResult(task.number, nbytes, seconds, task.error))


def _closed() -> LinkBroken:
    return LinkBroken("the device was closed before this copy began")


def _pieces(copy: Copy) -> list[_Piece]:
    pieces = []
    for start in range(0, len(copy.blocks), MAX_BLOCKS):
        ids = copy.blocks[start : start + MAX_BLOCKS].astype(np.int32)
        filled = np.concatenate((ids, np.repeat(ids[-1:], _bucket(len(ids)) - len(ids))))
        pieces.append(_Piece(copy.group, filled, copy.offsets[start : start + MAX_BLOCKS]))
    return pieces


def _bucket(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _new_rows(rows: int, row_bytes: Sequence[int]) -> list[Bytes]:
    """New memory for `rows` rows of each size, one after the other: boxes span equal ones.

    JAX on CPUs takes it as it is; it copies what isn't aligned to 64 bytes.
    """
    sizes = [-(-rows * nbytes // 64) * 64 for nbytes in row_bytes]
    room = np.empty(sum(sizes) + 63, np.uint8)
    start = -room.ctypes.data % 64
    parts = []
    for size, nbytes in zip(sizes, row_bytes, strict=True):
        parts.append(room[start : start + rows * nbytes].reshape(rows, nbytes))
        start += size
    return parts
