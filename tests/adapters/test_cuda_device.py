"""The CUDA device with a driver in host memory: right bytes, order, paths and pinning."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_kit import HostDriver
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import Expired, KVStrataError, LinkBroken
from kvstrata.layout import CopyRun
from kvstrata.testing import DeviceTests
from kvstrata_adapters.devices import cuda_plan
from kvstrata_adapters.devices.base import Copy, Device
from kvstrata_adapters.devices.boxes import Place
from kvstrata_adapters.devices.cpu import CpuDevice
from kvstrata_adapters.devices.cuda import CudaDevice
from kvstrata_adapters.devices.cuda_plan import Extent, Transfers, pieces_of, plan_path
from kvstrata_adapters.devices.samples import GROUP, LAYOUTS, SHARE, Sample

KIB = 1 << 10
BIG = 32 * KIB  # a fragment that is copied by itself
SMALL = [CopyRun(0, 0, 0, 16, count=4, device_stride=32, page_stride=16)]
LARGE = [CopyRun(0, 0, 0, BIG), CopyRun(1, 0, BIG, BIG)]


def rows(n: int, size: int, caches: int = 1) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, (n, size), dtype=np.uint8) for _ in range(caches)]


def opened(
    runs: Sequence[CopyRun], page: int, caches: Sequence[np.ndarray], **how: Any
) -> tuple[CudaDevice, HostDriver]:
    driver = how.pop("driver", None) or HostDriver()
    device = CudaDevice(driver, **how)
    device.register_caches(caches, {0: runs}, {0: page})
    return device, driver


def copy(blocks: Sequence[int], offsets: Sequence[int], group: int = 0) -> list[Copy]:
    return [Copy(group, np.array(blocks, dtype=np.int64), np.array(offsets, dtype=np.int64))]


class TestStagedConformance(DeviceTests):
    """All fragments of the suite are small. The staging buffer holds two pages of the largest."""

    def open_device(self, rows: Sequence[Any]) -> tuple[CudaDevice, Sequence[Any]]:
        return CudaDevice(HostDriver(), staging_bytes=800, piece_bytes=4096), rows

    def rows_of(self, device: Any, caches: Sequence[Any]) -> list[Any]:
        return [np.array(c) for c in caches]


class TestDirectConformance(TestStagedConformance):
    """The same with every fragment a copy of its own."""

    @pytest.fixture(autouse=True)
    def _nothing_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_plan, "SMALL_IN_BATCH", 0)


class TestPageableConformance(TestStagedConformance):
    """Where nothing can be pinned."""

    def open_device(self, rows: Sequence[Any]) -> tuple[CudaDevice, Sequence[Any]]:
        driver = HostDriver(batched=False)
        driver.refuse_register_at = 0
        return CudaDevice(driver), rows


# ---------------------------------------------------------------- order


def test_a_store_waits_for_what_compute_had_queued() -> None:
    (cache,) = rows(4, BIG)
    device, driver = opened([CopyRun(0, 0, 0, BIG)], BIG, [cache])
    region = bytearray(BIG)
    device.attach(memoryview(region))
    driver.compute.tasks.append(lambda: cache.__setitem__(2, 7))
    device.store(1, copy([2], [0]))
    driver.compute.tasks.append(lambda: cache.__setitem__(2, 9))  # after it: not waited for
    device.wait([1], 1.0)
    assert set(region) == {7}
    assert driver.log[:2] == [("wait", "store", "compute"), ("record", "store")]
    assert driver.log[-1] == ("record", "store")


def test_a_load_waits_for_what_compute_still_reads() -> None:
    (cache,) = rows(4, BIG)
    was = cache[1].copy()
    seen: list[np.ndarray] = []
    device, driver = opened([CopyRun(0, 0, 0, BIG)], BIG, [cache])
    device.attach(memoryview(bytearray(BIG)))
    driver.compute.tasks.append(lambda: seen.append(cache[1].copy()))
    device.load(1, copy([1], [0]))
    device.wait([1], 1.0)
    assert np.array_equal(seen[0], was)
    assert not cache[1].any()
    assert ("wait", "load", "compute") in driver.log


def test_directions_have_streams_of_their_own_and_say_which_way_they_go() -> None:
    device, driver = opened(LARGE, 2 * BIG, rows(4, BIG, 2))
    device.attach(memoryview(bytearray(2 * BIG)))
    device.store(1, copy([0], [0]))
    device.load(2, copy([1], [0]))
    device.wait([1, 2], 1.0)
    assert [(c.stream, c.to_host, c.batch) for c in driver.calls] == [
        ("store", True, True),
        ("load", False, True),
    ]
    device.close()


def test_a_job_ends_when_its_own_event_does_and_waits_have_a_deadline() -> None:
    now = [0.0]
    device, driver = opened(
        LARGE,
        2 * BIG,
        rows(4, BIG, 2),
        clock=lambda: now[0],
        sleep=lambda s: now.__setitem__(0, now[0] + s),
    )
    device.attach(memoryview(bytearray(4 * BIG)))
    driver.hold = True
    device.store(1, copy([0], [0]))
    device.store(2, copy([1], [2 * BIG]))
    device.load(3, copy([2], [0]))
    assert device.finished() == []
    with pytest.raises(Expired, match=r"jobs \[1, 2, 3\] have not ended within 2.0 s"):
        device.wait([1, 2, 3], 2.0)
    assert 2.0 <= now[0] < 2.1
    driver.streams[1].run()
    assert [r.job for r in device.finished()] == [3]
    driver.streams[0].run(3)  # waits for compute, copies, waits for compute
    assert [r.job for r in device.finished()] == [1]
    driver.hold = False
    assert [(r.job, r.nbytes, r.seconds > 0) for r in device.finished()] == [(2, 2 * BIG, True)]


# ---------------------------------------------------------------- paths


def test_large_fragments_are_one_batch() -> None:
    caches = rows(4, BIG, 2)
    device, driver = opened(LARGE, 2 * BIG, caches)
    region = np.zeros(6 * BIG, dtype=np.uint8)
    device.attach(memoryview(region))
    device.store(1, copy([3, 1], [0, 4 * BIG]))
    device.wait([1], 1.0)
    (call,) = driver.calls
    base = region.ctypes.data
    assert call.dst == [base, base + BIG, base + 4 * BIG, base + 5 * BIG]
    assert call.src == [c.ctypes.data + b * BIG for b in (3, 1) for c in caches]
    assert call.sizes == [BIG] * 4


def test_small_fragments_are_staged_in_rounds_on_the_stream() -> None:
    (cache,) = rows(8, 128)
    device, driver = opened(SMALL, 64, [cache], staging_bytes=2 * 64)
    region = bytearray(1000)
    device.attach(memoryview(region))
    device.store(1, copy([5, 0, 7], [0, 64, 500]))
    device.wait([1], 1.0)
    names = [e[0] if isinstance(e, tuple) else "copy" for e in driver.log]
    assert names == ["wait", "record", "gather", "copy", "gather", "copy", "record"]
    # Two pages that are neighbours in the region are one copy.
    assert [c.sizes for c in driver.calls] == [[128], [64]]
    for block, at in ((5, 0), (0, 64), (7, 500)):
        want = cache[block].reshape(4, 32)[:, :16].tobytes()
        assert bytes(region[at : at + 64]) == want

    driver.log.clear()
    device.load(2, copy([1, 2, 3], [500, 0, 64]))
    device.wait([2], 1.0)
    names = [e[0] if isinstance(e, tuple) else "copy" for e in driver.log]
    assert names == ["wait", "record", "copy", "scatter", "copy", "scatter", "record"]
    assert np.array_equal(cache[[1, 2, 3]][:, :16], cache[[7, 5, 0]][:, :16])


@pytest.mark.parametrize(
    ("nbytes", "batched", "staged"),
    [
        (28 * KIB, True, False),
        (28 * KIB - 4, True, True),
        (64 * KIB, False, False),
        (64 * KIB - 4, False, True),
    ],
)
def test_the_path_is_chosen_by_the_smallest_fragment(
    nbytes: int, batched: bool, staged: bool
) -> None:
    run = CopyRun(0, 0, 0, nbytes, count=3, device_stride=2 * nbytes, page_stride=nbytes)
    large = CopyRun(0, 6 * nbytes, 3 * nbytes, 100 * KIB)
    path = plan_path([run, large], [Place(0, 1 << 20, 4, 0)], batched)
    assert path.staged is staged
    assert path.share == 3 * nbytes + 100 * KIB


def test_staging_is_of_no_use_where_the_page_is_as_fragmented() -> None:
    run = CopyRun(0, 0, 0, 16, count=4, device_stride=64, page_stride=64)
    path = plan_path([run], [Place(0, 256, 4, 0)], batched=True)
    assert not path.staged
    moved = path.direct_transfers(np.array([1]), np.array([1000]))
    assert moved.device.tolist() == [256, 320, 384, 448]
    assert moved.host.tolist() == [1000, 1064, 1128, 1192]


def test_extents_are_what_a_rank_has_of_a_page() -> None:
    # Keys and values apart, for two units that are not neighbours in the page.
    runs = [
        CopyRun(half, 32 * unit, 1000 * unit + 8 * half, 8, 4, 8, 16)
        for unit in range(2)
        for half in range(2)
    ]
    path = plan_path(runs, [Place(0, 64, 4, 0, 1), Place(0, 64, 4, 1, 2)], batched=True)
    assert path.extents == (Extent(0, 64, 0), Extent(1000, 64, 64))
    assert path.share == 128
    moved = path.staged_transfers(10_000, np.array([0, 5000]))
    assert moved.device.tolist() == [10_000, 10_064, 10_128, 10_192]
    assert moved.host.tolist() == [0, 1000, 5000, 6000]
    assert moved.sizes.tolist() == [64] * 4


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_moves_the_bytes_that_the_cpu_device_moves(layout: str, batched: bool) -> None:
    sample = Sample.of(layout, blocks=5)
    (was,) = rows(1, sample.nbytes)[0]
    memory = [was.copy(), was.copy()]
    regions = [bytearray(5 * GROUP.page_bytes), bytearray(5 * GROUP.page_bytes)]
    cuda = CudaDevice(HostDriver(batched), staging_bytes=2 * SHARE, piece_bytes=1 << 20)
    devices: list[Device] = [cuda, CpuDevice()]
    offsets = [GROUP.page_bytes * i for i in (3, 0, 2, 4, 1)]
    for device, held, region in zip(devices, memory, regions, strict=True):
        caches = [cache.view(held) for cache in sample.caches]
        runs = sample.runs
        device.register_caches(caches, {0: runs.load}, {0: GROUP.page_bytes}, {0: runs.store})
        device.attach(memoryview(region))
        device.store(1, copy([4, 1, 0, 2, 3], offsets))
        device.wait([1], 30.0)
        device.load(2, copy([0, 1, 2, 3, 4], offsets))
        device.wait([2], 30.0)
        assert [(r.error, r.nbytes) for r in device.finished()] == [(None, sample.nbytes)] * 2
    assert cuda.staged(0) is (layout != "BHLNC")
    assert regions[0] == regions[1]
    assert np.array_equal(*memory)
    assert not np.array_equal(memory[0], was)
    for device in devices:
        device.close()


# ---------------------------------------------------------------- transfers


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), min_size=1, max_size=8),
    st.integers(1, 64),
)
def test_no_part_of_a_split_reaches_over_two_pieces(
    copies: list[tuple[int, int]], piece: int
) -> None:
    host = np.array([at for at, _ in copies], dtype=np.int64)
    sizes = np.array([n for _, n in copies], dtype=np.int64)
    device = host * 7
    parts = Transfers(device, host, sizes).split(piece)
    assert (parts.host // piece == (parts.host + parts.sizes - 1) // piece).all()
    assert (parts.sizes > 0).all()

    def pairs(t: Transfers) -> list[tuple[int, int]]:
        return [
            (d + i, h + i)
            for d, h, n in zip(t.device.tolist(), t.host.tolist(), t.sizes.tolist(), strict=True)
            for i in range(n)
        ]

    assert pairs(parts) == pairs(Transfers(device, host, sizes))


def test_neighbours_on_both_sides_are_joined() -> None:
    t = Transfers(
        np.array([0, 10, 20, 40]), np.array([100, 110, 125, 145]), np.array([10, 10, 20, 5])
    )
    joined = t.joined()
    assert joined.device.tolist() == [0, 20]
    assert joined.host.tolist() == [100, 125]
    assert joined.sizes.tolist() == [20, 25]


def test_pieces_cover_a_region_once() -> None:
    assert pieces_of(10, 4) == [(0, 4), (4, 4), (8, 2)]
    assert pieces_of(8, 4) == [(0, 4), (4, 4)]
    assert pieces_of(0, 4) == []


# ---------------------------------------------------------------- pinning


def test_the_region_is_pinned_in_pieces_that_no_copy_reaches_over() -> None:
    caches = rows(4, BIG, 2)
    device, driver = opened(LARGE, 2 * BIG, caches, piece_bytes=BIG + 8)
    region = np.zeros(4 * BIG, dtype=np.uint8)
    device.attach(memoryview(region))
    base = region.ctypes.data
    assert driver.registered == {
        base: BIG + 8,
        base + BIG + 8: BIG + 8,
        base + 2 * BIG + 16: BIG + 8,
        base + 3 * BIG + 24: BIG - 24,
    }
    device.store(1, copy([3], [BIG]))
    device.wait([1], 1.0)
    (call,) = driver.calls
    assert [d - base for d in call.dst] == [BIG, BIG + 8, 2 * BIG, 2 * BIG + 16]
    assert call.sizes == [8, BIG - 8, 16, BIG - 16]
    assert np.array_equal(region[BIG : 3 * BIG].reshape(2, BIG), [c[3] for c in caches])
    device.close()
    assert driver.registered == {}


def test_what_can_not_be_pinned_is_copied_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    driver = HostDriver()
    driver.refuse_register_at = 1
    device, _ = opened(LARGE, 2 * BIG, rows(4, BIG, 2), driver=driver, piece_bytes=BIG)
    with caplog.at_level(logging.WARNING):
        device.attach(memoryview(bytearray(2 * BIG)))
    assert "stays pageable" in caplog.text
    assert driver.registered == {}  # also what had been pinned before the refusal
    device.store(1, copy([0], [0]))
    device.wait([1], 1.0)
    assert device.finished()[0].error is None
    assert [c.batch for c in driver.calls] == [False]


def test_a_region_is_unpinned_when_the_last_job_that_uses_it_has_ended() -> None:
    device, driver = opened(LARGE, 2 * BIG, rows(4, BIG, 2))
    first, second = (np.zeros(2 * BIG, dtype=np.uint8) for _ in range(2))
    device.attach(memoryview(first))
    driver.hold = True
    device.store(1, copy([0], [0]))
    device.attach(memoryview(second))
    assert set(driver.registered) == {first.ctypes.data, second.ctypes.data}
    driver.hold = False
    assert [r.error for r in device.finished()] == [None]
    assert set(driver.registered) == {second.ctypes.data}
    device.attach(memoryview(first))
    assert set(driver.registered) == {first.ctypes.data}
    device.close()
    assert driver.registered == {}


# ---------------------------------------------------------------- failures


def test_a_copy_that_fails_fails_its_job_only() -> None:
    (cache,) = rows(8, 128)
    device, driver = opened(SMALL, 64, [cache], staging_bytes=64)
    region = bytearray(1000)
    device.attach(memoryview(region))
    driver.fail_copy = {3}
    device.store(1, copy([1], [0]))
    device.store(2, copy([2, 3], [64, 128]))  # its first copy is queued, its second fails
    device.store(3, copy([4], [256]))
    driver.hold = True
    assert device.finished() == []  # not before what was queued has ended
    driver.hold = False
    first, failed, last = device.finished()
    assert (first.error, last.error) == (None, None)
    assert (failed.job, failed.seconds) == (2, 0.0)
    assert "CUDA error 1" in str(failed.error)
    assert bytes(region[256:320]) == cache[4].reshape(4, 32)[:, :16].tobytes()


def test_when_the_gpu_is_lost_all_jobs_are_reported() -> None:
    device, driver = opened(LARGE, 2 * BIG, rows(4, BIG, 2))
    device.attach(memoryview(bytearray(2 * BIG)))
    device.store(1, copy([0], [0]))
    device.load(2, copy([1], [0]))
    driver.lost = True
    ended = device.finished()
    assert sorted(r.job for r in ended) == [1, 2]
    assert all(isinstance(r.error, KVStrataError) for r in ended)
    device.close()
    with pytest.raises(LinkBroken):
        device.store(3, copy([0], [0]))
