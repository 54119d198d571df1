"""The contract of a device as a test suite.

    class TestMyDevice(DeviceTests):
        def open_device(self, rows):
            caches = [to_device(r) for r in rows]
            return MyDevice(), caches

        def rows_of(self, device, caches):
            return [to_host(c) for c in caches]

`rows` are bytes of eight caches: the first four of one shape, the last four of another, so that a
device of four ranks can keep each four as the shards of one array. The rows' sizes and all runs
are of whole 4 bytes, for devices that can't cut elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstrata.errors import KVStrataError, LinkBroken, Malformed
from kvstrata.layout import CopyRun

__all__ = ["DeviceTests", "DeviceUnderTest", "PageCopy"]

Bytes = NDArray[np.uint8]

FIRST, SECOND, PART = 0, 1, 2
"""Groups: fragments of rows, whole rows, and pages that are only a part of the rows of SECOND."""

_SHAPES = [(16, 96)] * 4 + [(12, 40)] * 4
_RUNS: Mapping[int, tuple[CopyRun, ...]] = {
    FIRST: tuple(
        CopyRun(c, 8 * h, 32 * (3 * c + h), 8, count=4, device_stride=24, page_stride=8)
        for c in range(4)
        for h in range(3)
    ),
    SECOND: tuple(CopyRun(4 + c, 0, 40 * c, 40) for c in range(4)),
    PART: tuple(CopyRun(4 + c, 8, 16 * c, 16) for c in range(4)),
}
_PAGE_BYTES = {FIRST: 384, SECOND: 160, PART: 64}
_SECONDS = 30.0
_FILL = 0xEE


@dataclass(frozen=True, slots=True)
class PageCopy:
    """What `store` and `load` take: block `blocks[i]` <-> the page at region byte `offsets[i]`."""

    group: int
    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]


class Result(Protocol):
    """How a job ended."""

    @property
    def job(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def error(self) -> KVStrataError | None: ...


class DeviceUnderTest(Protocol):
    """What the suite uses of a device; `kvstrata_adapters.devices.base` says what it means."""

    def register_caches(
        self,
        caches: Sequence[Any],
        runs: Mapping[int, Sequence[CopyRun]],
        page_bytes: Mapping[int, int],
        store_runs: Mapping[int, Sequence[CopyRun]] | None = None,
    ) -> None: ...
    def attach(self, region: memoryview) -> None: ...
    def store(self, job: int, copies: Sequence[Any]) -> None: ...
    def load(self, job: int, copies: Sequence[Any]) -> None: ...
    def finished(self) -> Sequence[Result]: ...
    def wait(self, jobs: Collection[int], timeout: float) -> None: ...
    def close(self) -> None: ...


class _Bench:
    """A device with its caches, a region, and what both should hold."""

    def __init__(self, suite: DeviceTests, **registered: Any) -> None:
        random = np.random.default_rng(5)
        self.suite = suite
        self.rows = [random.integers(0, 256, shape, dtype=np.uint8) for shape in _SHAPES]
        self.device, self.caches = suite.open_device([r.copy() for r in self.rows])
        self.device.register_caches(self.caches, _RUNS, _PAGE_BYTES, **registered)
        self.region = bytearray([_FILL]) * 16_000
        self.want = bytearray(self.region)
        self.jobs = 0

    def attach(self) -> _Bench:
        self.device.attach(memoryview(self.region))
        return self

    def fill(self) -> None:
        """Other bytes into the region."""
        self.region[:] = np.random.default_rng(7).bytes(len(self.region))
        self.want[:] = self.region

    def store(self, *copies: PageCopy) -> int:
        self.jobs += 1
        self.device.store(self.jobs, copies)
        return self.jobs

    def load(self, *copies: PageCopy) -> int:
        self.jobs += 1
        self.device.load(self.jobs, copies)
        return self.jobs

    def end(self) -> Sequence[Result]:
        """All jobs so far ended; what `finished` says."""
        self.device.wait(range(1, self.jobs + 1), _SECONDS)
        return self.device.finished()

    def expect(self, to_region: bool, *copies: PageCopy, runs: Any = _RUNS) -> int:
        """Do to `want` or `rows` what the device should do; the bytes of it."""
        page, nbytes = np.frombuffer(self.want, np.uint8), 0
        for copy in copies:
            for block, offset in zip(copy.blocks, copy.offsets, strict=True):
                for run in runs[copy.group]:
                    for i in range(run.count):
                        at = run.device_offset + i * run.device_stride
                        there = offset + run.page_offset + i * run.page_stride
                        row = self.rows[run.cache][block, at : at + run.nbytes]
                        bytes_there = page[there : there + run.nbytes]
                        if to_region:
                            bytes_there[:] = row
                        else:
                            row[:] = bytes_there
                        nbytes += run.nbytes
        return nbytes

    def check(self) -> None:
        """Caches and region hold what they should, byte for byte, also where nothing was copied."""
        assert self.region == self.want
        for i, held in enumerate(self.suite.rows_of(self.device, self.caches)):
            assert held.shape == self.rows[i].shape
            assert np.array_equal(held, self.rows[i]), f"cache {i}"


def pages(group: int, blocks: Sequence[int], offsets: Sequence[int]) -> PageCopy:
    return PageCopy(group, np.array(blocks, np.int64), np.array(offsets, np.int64))


_SOME: Mapping[str, PageCopy] = {
    "one": pages(FIRST, [3], [400]),
    "any order": pages(FIRST, [7, 0, 5], [0, 3000, 800]),
    "at any byte": pages(FIRST, [9, 2], [1, 1003]),
    "to the last byte": pages(SECOND, [11, 10], [16_000 - 160, 5]),
    "all blocks": pages(FIRST, [*range(15, -1, -1)], [*range(0, 16 * 400, 400)]),
    "parts of rows": pages(PART, [4, 1, 11], [64, 0, 200]),
}
_BAD: Sequence[tuple[PageCopy, str]] = [
    (pages(FIRST, [16], [0]), r"not in \[0, 16\)"),
    (pages(SECOND, [0, 12], [0, 160]), r"not in \[0, 12\)"),
    (pages(FIRST, [-1], [0]), r"not in \[0, 16\)"),
    (pages(FIRST, [0], [16_000 - 383]), "leaves the region"),
    (pages(FIRST, [0], [-1]), "leaves the region"),
    (pages(FIRST, [0, 1], [0]), "one length"),
    (pages(9, [0], [0]), "group 9"),
]


class DeviceTests:
    """Inherit these tests by subclassing; see the module's docstring for the hooks."""

    # ------------------------------------------------------------ hooks

    def open_device(self, rows: Sequence[Bytes]) -> tuple[DeviceUnderTest, Sequence[Any]]:
        """A new device, and what its `register_caches` takes for caches that hold these rows."""
        raise NotImplementedError

    def rows_of(self, device: DeviceUnderTest, caches: Sequence[Any]) -> list[Bytes]:
        """Copies of what the registered caches hold now, in the order of `rows`."""
        raise NotImplementedError

    # ------------------------------------------------------------ fixtures

    @pytest.fixture
    def bench(self) -> Iterator[_Bench]:
        bench = _Bench(self)
        yield bench
        bench.device.close()

    @pytest.fixture
    def ready(self, bench: _Bench) -> _Bench:
        return bench.attach()

    # ------------------------------------------------------------ bytes

    @pytest.mark.parametrize("copy", _SOME.values(), ids=_SOME.keys())
    def test_a_store_writes_its_pages_and_nothing_else(self, ready: _Bench, copy: PageCopy) -> None:
        ready.store(copy)
        (result,) = ready.end()
        assert (result.error, result.nbytes) == (None, ready.expect(True, copy))
        assert result.seconds > 0
        ready.check()

    @pytest.mark.parametrize("copy", _SOME.values(), ids=_SOME.keys())
    def test_a_load_writes_its_blocks_and_nothing_else(self, ready: _Bench, copy: PageCopy) -> None:
        ready.fill()
        ready.load(copy)
        (result,) = ready.end()
        assert (result.error, result.nbytes) == (None, ready.expect(False, copy))
        assert result.seconds > 0
        ready.check()

    def test_pages_come_back_to_other_blocks(self, ready: _Bench) -> None:
        out, back = pages(FIRST, [1, 8, 4], [0, 400, 800]), pages(FIRST, [9, 2, 0], [800, 0, 400])
        ready.store(out)
        ready.expect(True, out)
        ready.end()
        ready.load(back)
        ready.expect(False, back)
        ready.end()
        ready.check()
        assert np.array_equal(ready.rows[0][[9, 2, 0]], ready.rows[0][[4, 1, 8]])

    def test_a_job_has_pages_of_several_groups(self, ready: _Bench) -> None:
        out = (pages(SECOND, [2, 3], [8, 168]), pages(FIRST, [2], [1000]), pages(PART, [0], [400]))
        back = (pages(FIRST, [6], [1000]), pages(SECOND, [7], [168]), pages(PART, [8], [400]))
        ready.store(*out)
        assert ready.end()[0].nbytes == ready.expect(True, *out) == 2 * 160 + 384 + 64
        ready.load(*back)
        assert ready.end()[0].nbytes == ready.expect(False, *back)
        ready.check()

    def test_a_job_may_be_empty(self, ready: _Bench) -> None:
        ready.store()
        ready.load(pages(FIRST, [], []))
        assert sorted((r.job, r.nbytes, r.error) for r in ready.end()) == [
            (1, 0, None),
            (2, 0, None),
        ]
        ready.check()

    def test_what_was_copied_is_a_copy(self, ready: _Bench) -> None:
        ready.store(pages(FIRST, [1], [0]))
        ready.expect(True, pages(FIRST, [1], [0]))
        ready.end()
        ready.load(pages(FIRST, [1, 5], [4000, 0]))
        ready.expect(False, pages(FIRST, [1, 5], [4000, 0]))
        ready.end()
        ready.check()
        ready.fill()
        ready.check()

    def test_loads_and_stores_may_have_different_runs(self) -> None:
        mine = {group: runs[:3] for group, runs in _RUNS.items()}
        bench = _Bench(self, store_runs=mine).attach()
        try:
            out, back = pages(FIRST, [4, 5], [0, 384]), pages(FIRST, [0], [384])
            bench.store(out)
            assert bench.end()[0].nbytes == bench.expect(True, out, runs=mine) == 2 * 96
            bench.load(back)
            assert bench.end()[0].nbytes == bench.expect(False, back) == 384
            bench.check()
        finally:
            bench.device.close()

    # ------------------------------------------------------------ jobs

    @pytest.mark.parametrize("to_region", [True, False])
    @pytest.mark.parametrize(("bad", "message"), _BAD)
    def test_a_bad_job_fails_alone(
        self, ready: _Bench, bad: PageCopy, message: str, to_region: bool
    ) -> None:
        ready.fill()
        give = ready.store if to_region else ready.load
        good = [pages(FIRST, [1], [400]), pages(SECOND, [1], [0])]
        give(good[0])
        give(good[1], bad)
        give(good[1])
        first, failed, last = ready.end()
        assert [first.job, failed.job, last.job] == [1, 2, 3]
        assert isinstance(failed.error, Malformed)
        with pytest.raises(Malformed, match=message):
            raise failed.error
        assert [first.error, last.error] == [None, None]
        ready.expect(to_region, *good)
        ready.check()

    def test_stores_run_in_order(self, ready: _Bench) -> None:
        for block in range(10):
            ready.store(pages(FIRST, [block], [0]))
        assert [r.job for r in ready.end()] == list(range(1, 11))
        ready.expect(True, pages(FIRST, [9], [0]))
        ready.check()

    def test_loads_run_in_order(self, ready: _Bench) -> None:
        ready.fill()
        for page in range(10):
            ready.load(pages(FIRST, [2], [page * 384]))
        assert [r.job for r in ready.end()] == list(range(1, 11))
        ready.expect(False, pages(FIRST, [2], [9 * 384]))
        ready.check()

    def test_each_job_is_reported_once(self, ready: _Bench) -> None:
        seen: list[int] = []
        for block in range(6):
            ready.store(pages(FIRST, [block], [block * 384]))
            ready.load(pages(SECOND, [block], [8000]))
            seen += [r.job for r in ready.device.finished()]
        ready.device.wait([1, 2], _SECONDS)
        ready.device.wait([1, 2], 0.0)
        ready.device.wait([], 0.0)
        seen += [r.job for r in ready.end()]
        assert sorted(seen) == list(range(1, 13))
        assert not ready.device.finished()

    def test_without_a_region_a_job_fails(self, bench: _Bench) -> None:
        bench.store(pages(FIRST, [0], [0]))
        bench.load(pages(FIRST, [0], [0]))
        assert all(isinstance(r.error, LinkBroken) for r in bench.end())
        bench.check()

    def test_a_job_uses_the_region_attached_when_it_was_given(self, ready: _Bench) -> None:
        second = bytearray(1000)
        ready.store(pages(FIRST, [0], [0]))
        ready.device.attach(memoryview(second))
        ready.store(pages(FIRST, [1], [3]))
        assert [r.error for r in ready.end()] == [None, None]
        ready.expect(True, pages(FIRST, [0], [0]))
        ready.check()
        assert not any(second[:3])
        ready.expect(True, pages(FIRST, [1], [0]))
        assert second[3:387] == ready.want[:384]

    # ------------------------------------------------------------ registering, closing

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (CopyRun(8, 0, 0, 8), "cache 8"),
            (CopyRun(-1, 0, 0, 8), "cache -1"),
            (CopyRun(0, 96, 0, 8), "leaves the 96-byte rows"),
            (CopyRun(0, 0, 0, 8, count=2, device_stride=92), "leaves the 96-byte rows"),
            (CopyRun(0, -8, 0, 8), "leaves the 96-byte rows"),
            (CopyRun(0, 0, 380, 8), "leaves its 384-byte page"),
            (CopyRun(0, 0, 0, 0), "not a copy"),
        ],
    )
    def test_runs_that_leave_rows_or_pages_are_refused(self, wrong: CopyRun, message: str) -> None:
        rows = [np.zeros(shape, np.uint8) for shape in _SHAPES]
        for direction in ("runs", "store_runs"):
            device, caches = self.open_device(rows)
            runs = {"runs": {0: [CopyRun(0, 0, 0, 8)]}} | {direction: {0: [wrong]}}
            with pytest.raises(Malformed, match=message):
                device.register_caches(caches, page_bytes={0: 384}, **runs)
            device.close()

    def test_caches_are_registered_once(self, ready: _Bench) -> None:
        with pytest.raises(Malformed, match="registered already"):
            ready.device.register_caches(ready.caches, _RUNS, _PAGE_BYTES)

    def test_groups_must_have_runs_and_pages(self) -> None:
        device, caches = self.open_device([np.zeros(shape, np.uint8) for shape in _SHAPES])
        with pytest.raises(Malformed, match="same groups"):
            device.register_caches(caches, _RUNS, {FIRST: 384})
        device.close()

    def test_a_closed_device_has_reported_all_and_touches_nothing(self, ready: _Bench) -> None:
        for block in range(8):
            ready.store(pages(FIRST, [block], [block * 384]))
            ready.load(pages(SECOND, [block], [8000]))
        ready.device.close()
        ended = ready.device.finished()
        assert sorted(r.job for r in ended) == list(range(1, 17))
        assert {type(r.error) for r in ended} <= {type(None), LinkBroken}
        held = [r.copy() for r in self.rows_of(ready.device, ready.caches)]
        ready.fill()
        for give in (ready.device.store, ready.device.load):
            with pytest.raises(LinkBroken):
                give(99, [pages(FIRST, [0], [0])])
        ready.device.close()
        assert ready.region == ready.want
        for before, now in zip(held, self.rows_of(ready.device, ready.caches), strict=True):
            assert np.array_equal(before, now)
        assert not ready.device.finished()
