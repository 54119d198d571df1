"""The worker's half: right pages, each job reported once, no failure hidden."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec
from vllm_fakes import NAMESPACE, Clock, FakeClient, FakeNode

from kvstrata.errors import Corrupt, LinkBroken, Malformed
from kvstrata.region import Region
from kvstrata_adapters.devices.base import Copy, Device, JobResult
from kvstrata_adapters.engines.vllm.faults import FaultLine
from kvstrata_adapters.engines.vllm.pages import ChunkSpec, GroupPages, copies
from kvstrata_adapters.engines.vllm.worker import KVStrataWorker

pytestmark = pytest.mark.vllm

PAGE = 4096


def names(*numbers: int, group: int = 0) -> list[bytes]:
    return [NAMESPACE.key(group, n.to_bytes(4, "big")) for n in numbers]


def chunk_spec(keys: list[bytes], offsets: list[int], region: str = "r") -> ChunkSpec:
    return ChunkSpec("/shm", region, 1 << 20, keys, np.array(offsets, dtype=np.int64))


# ---------------------------------------------------------------- pages


def pairs(made: list[Copy]) -> list[tuple[int, list[int], list[int]]]:
    return [(c.group, c.blocks.tolist(), c.offsets.tolist()) for c in made]


def test_each_block_has_its_page() -> None:
    blocks = GPULoadStoreSpec([7, 3, 9, 4], group_sizes=[4], block_indices=[0])
    chunks = chunk_spec(names(1, 2), [10 * PAGE, 20 * PAGE])
    assert pairs(copies(blocks, chunks, [GroupPages(0, PAGE)], 2)) == [
        (0, [7, 3, 9, 4], [10 * PAGE, 11 * PAGE, 20 * PAGE, 21 * PAGE])
    ]


def test_a_load_may_start_and_end_inside_chunks() -> None:
    # Blocks 5, 6, 7 and 8 of the request, of chunks of 3 blocks.
    blocks = GPULoadStoreSpec([1, 2, 3, 4], group_sizes=[4], block_indices=[5])
    chunks = chunk_spec(names(1, 2), [0, 30 * PAGE])
    assert pairs(copies(blocks, chunks, [GroupPages(0, PAGE)], 3)) == [
        (0, [1, 2, 3, 4], [2 * PAGE, 30 * PAGE, 31 * PAGE, 32 * PAGE])
    ]


def test_groups_follow_each_other_and_may_be_empty() -> None:
    groups = [GroupPages(0, PAGE), GroupPages(2, 8192), GroupPages(3, PAGE)]
    blocks = GPULoadStoreSpec([1, 2, 3], group_sizes=[1, 0, 2], block_indices=[4, 0, 9])
    chunks = chunk_spec(names(1) + names(2, 3, group=3), [0, PAGE, 5 * PAGE])
    assert pairs(copies(blocks, chunks, groups, 1)) == [
        (0, [1], [0]),
        (3, [2, 3], [PAGE, 5 * PAGE]),
    ]


@pytest.mark.parametrize(
    ("sizes", "first", "keys"),
    [
        ([3], [0], names(1)),  # too few chunks
        ([1], [0], names(1, 2)),  # too many
        ([2], [1], names(1)),  # one more because of the start
        ([2], [0], names(1, group=1)),  # of another group
    ],
)
def test_jobs_that_do_not_fit_are_refused(
    sizes: list[int], first: list[int], keys: list[bytes]
) -> None:
    blocks = GPULoadStoreSpec(list(range(sum(sizes))), group_sizes=sizes, block_indices=first)
    with pytest.raises(Malformed):
        copies(blocks, chunk_spec(keys, [0] * len(keys)), [GroupPages(0, PAGE)], 2)


# ---------------------------------------------------------------- worker


class ScriptedDevice(Device):
    """Ends jobs when it is told to."""

    def __init__(self) -> None:
        self.given: list[tuple[str, int, int]] = []
        self.regions: list[int] = []
        self.ended: list[JobResult] = []
        self.closed = False

    def register_caches(self, *_: object) -> None: ...

    def attach(self, region: memoryview) -> None:
        self.regions.append(len(region))

    def store(self, job: int, copies: Sequence[Copy]) -> None:
        self.given.append(("store", job, len(copies)))

    def load(self, job: int, copies: Sequence[Copy]) -> None:
        self.given.append(("load", job, len(copies)))

    def finished(self) -> list[JobResult]:
        ended, self.ended = self.ended, []
        return ended

    def wait(self, jobs: Collection[int], timeout: float) -> None:
        self.waited = (set(jobs), timeout)

    def close(self) -> None:
        self.closed = True


class Bench:
    """A worker with a scripted device and a node that can be restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = FakeNode(Clock(), chunks=4)
        self.regions: list[Region] = []
        self.faults = FaultLine(folder / "f")
        self.device = ScriptedDevice()
        self.worker = KVStrataWorker(
            self.device, self.connect(), self.connect, [GroupPages(0, PAGE)], 1
        )

    def connect(self) -> FakeClient:
        client = self.node.connect()
        names = [region.name for region in self.regions]
        if f"kvstrata-n-{self.node.incarnation}" not in names:
            size = PAGE * (len(self.regions) + 1)
            self.regions.append(
                Region.create("n", self.node.incarnation, size, self.folder, populate=False)
            )
        region = self.regions[-1]
        client.welcome = type(client.welcome)(
            "n", self.node.incarnation, str(self.folder), region.name, region.size, 30.0
        )
        return client

    def spec(self, *numbers: int) -> ChunkSpec:
        region = self.regions[-1]
        return ChunkSpec(
            str(self.folder),
            region.name,
            region.size,
            names(*numbers),
            np.zeros(len(numbers), dtype=np.int64),
            str(self.faults.path),
        )


BLOCK = GPULoadStoreSpec([3], group_sizes=[1], block_indices=[0])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.worker.shutdown()
    bench.faults.close()
    for region in bench.regions:
        region.close()


def test_each_job_is_reported_once(bench: Bench) -> None:
    assert bench.worker.submit_store(1, BLOCK, bench.spec(1))
    assert bench.worker.submit_load(2, bench.spec(1), BLOCK)
    assert bench.device.given == [("store", 1, 1), ("load", 2, 1)]
    assert bench.worker.get_finished() == []
    bench.device.ended = [JobResult(2, 10, 0.1), JobResult(1, 20, 0.2)]
    results = bench.worker.get_finished()
    assert [(r.job_id, r.success, r.transfer_size) for r in results] == [
        (2, True, 10),
        (1, True, 20),
    ]
    assert bench.worker.get_finished() == []
    assert bench.faults.drain() == set()


def test_a_store_that_failed_is_told_and_reported(bench: Bench) -> None:
    bench.worker.submit_store(1, BLOCK, bench.spec(5))
    bench.device.ended = [JobResult(1, 0, 0.0, Corrupt("no"))]
    (result,) = bench.worker.get_finished()
    assert (result.job_id, result.success) == (1, True)
    assert bench.faults.drain() == set(names(5))


def test_a_store_that_can_not_begin_is_told_and_reported(bench: Bench) -> None:
    two_chunks = bench.spec(5, 6)
    assert bench.worker.submit_store(1, BLOCK, two_chunks)
    assert bench.device.given == []
    assert bench.faults.drain() == set(names(5, 6))
    assert [r.job_id for r in bench.worker.get_finished()] == [1]


def test_a_load_that_failed_ends_the_engine(bench: Bench) -> None:
    bench.worker.submit_load(1, bench.spec(5), BLOCK)
    bench.device.ended = [JobResult(1, 0, 0.0, Corrupt("torn"))]
    with pytest.raises(Corrupt, match="torn"):
        bench.worker.get_finished()


def test_a_load_from_a_region_that_is_gone_is_refused(bench: Bench) -> None:
    spec = bench.spec(5)
    spec.region = "kvstrata-other"
    with pytest.raises(LinkBroken):
        bench.worker.submit_load(1, spec, BLOCK)


def test_only_what_runs_is_waited_for(bench: Bench) -> None:
    bench.worker.submit_store(1, BLOCK, bench.spec(1))
    bench.worker.wait({1, 2, 99})
    assert bench.device.waited == ({1}, 120.0)


def test_it_follows_its_node_to_another_region(bench: Bench) -> None:
    old = bench.spec(1)
    bench.node.die()
    bench.node.start()
    assert bench.worker.submit_store(1, BLOCK, old)
    # The node whose region that was is gone: nothing is written, and the scheduler knows.
    assert bench.device.given == []
    assert bench.faults.drain() == set(names(1))
    assert bench.worker.submit_store(2, BLOCK, bench.spec(2))
    assert bench.device.given == [("store", 2, 1)]
    assert bench.device.regions == [PAGE, 2 * PAGE]
    assert len(bench.node.clients) == 1


def test_without_a_node_nothing_is_written(bench: Bench) -> None:
    bench.node.die()
    bench.worker.submit_store(1, BLOCK, bench.spec(1))
    assert bench.device.given == []
    assert bench.faults.drain() == set(names(1))


def test_jobs_of_others_are_refused(bench: Bench) -> None:
    with pytest.raises(Malformed, match="not a job of this adapter"):
        bench.worker.submit_load(1, LoadStoreSpec(), BLOCK)


def test_it_ends_copies_before_its_session(bench: Bench) -> None:
    bench.worker.shutdown()
    assert bench.device.closed
    assert bench.node.clients == []
