"""Copies between caches and the region: right bytes, right order, one failure at a time."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.errors import Expired, LinkBroken, Malformed
from kvstrata.keys import Field, Group
from kvstrata.layout import CopyRun, FieldShare, LayerPlace, derive_runs
from kvstrata.region import Region
from kvstrata_adapters.devices import cpu
from kvstrata_adapters.devices.base import Copy, as_bytes
from kvstrata_adapters.devices.cpu import CpuDevice

BLOCKS, HEADS, TOKENS, CELL, LAYERS = 8, 2, 4, 6, 3
UNIT = TOKENS * CELL
GROUP = Group(
    id=0,
    kind="full",
    layers=tuple(f"l{i}" for i in range(LAYERS)),
    fields=(Field("kv", HEADS, UNIT),),
    tokens_per_block=TOKENS,
)
PAGE = GROUP.page_bytes


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def caches(seed: int = 0, padding: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (BLOCKS, HEADS * UNIT + padding)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(LAYERS)]


def head_major() -> tuple[CopyRun, ...]:
    places = tuple(LayerPlace(i, 0, unit_stride=UNIT) for i in range(LAYERS))
    return derive_runs(GROUP, [FieldShare("kv", 0, HEADS, places)], [HEADS * UNIT] * LAYERS)


def token_major() -> tuple[CopyRun, ...]:
    places = tuple(
        LayerPlace(i, 0, unit_stride=CELL, pieces=TOKENS, piece_stride=HEADS * CELL)
        for i in range(LAYERS)
    )
    return derive_runs(GROUP, [FieldShare("kv", 0, HEADS, places)], [HEADS * UNIT] * LAYERS)


def pages(blocks: list[int], offsets: list[int], group: int = 0) -> list[Copy]:
    return [Copy(group, np.array(blocks, dtype=np.int64), np.array(offsets, dtype=np.int64))]


def test_a_page_holds_units_outermost_then_layers(device: CpuDevice) -> None:
    source, region = caches(), bytearray(4 * PAGE + 5)
    device.register_caches(source, {0: head_major()}, {0: PAGE})
    device.attach(memoryview(region))
    device.store(1, pages([5, 2], [PAGE + 5, 3 * PAGE + 5]))
    device.wait([1], 10)
    (result,) = device.finished()
    assert (result.job, result.nbytes, result.error) == (1, 2 * PAGE, None)
    assert result.seconds > 0
    for block, offset in ((5, PAGE + 5), (2, 3 * PAGE + 5)):
        want = b"".join(
            source[layer][block, head * UNIT : (head + 1) * UNIT].tobytes()
            for head in range(HEADS)
            for layer in range(LAYERS)
        )
        assert region[offset : offset + PAGE] == want
    assert not any(region[: PAGE + 5])
    assert not any(region[2 * PAGE + 5 : 3 * PAGE + 5])


@pytest.mark.parametrize("padding", [0, 7])
def test_store_by_one_layout_and_load_by_another(device: CpuDevice, padding: int) -> None:
    source, region = caches(padding=padding), bytearray(2 * PAGE)
    device.register_caches(source, {0: token_major()}, {0: PAGE})
    device.attach(memoryview(region))
    device.store(1, pages([1, 6], [PAGE, 0]))
    device.wait([1], 10)

    target = [np.zeros((BLOCKS, HEADS * UNIT), dtype=np.uint8) for _ in range(LAYERS)]
    other = CpuDevice()
    other.register_caches(target, {0: head_major()}, {0: PAGE})
    other.attach(memoryview(region))
    other.load(1, pages([0, 3], [PAGE, 0]))
    other.wait([1], 10)
    other.close()
    assert [r.error for r in device.finished() + other.finished()] == [None, None]
    for layer in range(LAYERS):
        for block, was in ((0, 1), (3, 6)):
            row = source[layer][was, : HEADS * UNIT].reshape(TOKENS, HEADS, CELL)
            assert target[layer][block].tobytes() == row.transpose(1, 0, 2).tobytes()
        assert not target[layer][[1, 2, 4, 5, 6, 7]].any()


def test_ranks_that_share_the_writing_load_everything(device: CpuDevice) -> None:
    source, region = caches(), bytearray(PAGE)
    mine = tuple(r for r in head_major() if r.cache == 1)
    device.register_caches(source, {0: head_major()}, {0: PAGE}, store_runs={0: mine})
    device.attach(memoryview(region))
    device.store(1, pages([0], [0]))
    device.wait([1], 10)
    assert device.finished()[0].nbytes == PAGE // LAYERS
    assert region.count(0) >= PAGE - PAGE // LAYERS
    device.load(2, pages([4], [0]))
    device.wait([2], 10)
    assert device.finished()[0].nbytes == PAGE
    assert np.array_equal(source[1][4], source[1][0])


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        (pages([BLOCKS], [0]), r"not in \[0, 8\)"),
        (pages([-1], [0]), r"not in \[0, 8\)"),
        (pages([0], [1]), "leaves the region"),
        (pages([0], [-1]), "leaves the region"),
        (pages([0, 1], [0]), "one length"),
        (pages([0], [0], group=9), "group 9 is not registered"),
    ],
)
def test_a_bad_job_fails_alone(device: CpuDevice, copies: list[Copy], message: str) -> None:
    source, region = caches(), bytearray(PAGE)
    device.register_caches(source, {0: head_major()}, {0: PAGE})
    device.attach(memoryview(region))
    device.store(1, copies)
    device.store(2, pages([0], [0]))
    device.wait([1, 2], 10)
    bad, good = device.finished()
    assert isinstance(bad.error, Malformed)
    assert re.search(message, str(bad.error))
    assert (good.job, good.error) == (2, None)


def test_an_unexpected_failure_is_reported_too(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.register_caches(caches(), {0: head_major()}, {0: PAGE})
    device.attach(memoryview(bytearray(PAGE)))
    monkeypatch.setattr(cpu, "copy_pages", lambda *_: 1 // 0)
    device.store(1, pages([0], [0]))
    device.wait([1], 10)
    assert "ZeroDivisionError" in str(device.finished()[0].error)


def test_without_a_region_a_job_fails(device: CpuDevice) -> None:
    device.register_caches(caches(), {0: head_major()}, {0: PAGE})
    device.load(1, pages([0], [0]))
    device.wait([1], 10)
    assert isinstance(device.finished()[0].error, LinkBroken)


def test_a_job_uses_the_region_attached_when_it_was_given(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, first, second = caches(), bytearray(PAGE), bytearray(PAGE)
    gate, copy = threading.Event(), cpu.copy_pages
    monkeypatch.setattr(cpu, "copy_pages", lambda *a: (gate.wait(10), copy(*a))[1])
    device.register_caches(source, {0: head_major()}, {0: PAGE})
    device.attach(memoryview(first))
    device.store(1, pages([0], [0]))
    device.attach(memoryview(second))
    device.store(2, pages([1], [0]))
    gate.set()
    device.wait([1, 2], 10)
    assert np.frombuffer(first, np.uint8)[:UNIT].tobytes() == source[0][0, :UNIT].tobytes()
    assert np.frombuffer(second, np.uint8)[:UNIT].tobytes() == source[0][1, :UNIT].tobytes()


def test_order_within_a_direction_and_independence_between(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, copy = threading.Event(), cpu.copy_pages

    def slow_store(*args: object) -> int:
        if args[3]:
            gate.wait(10)
        return copy(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu, "copy_pages", slow_store)
    device.register_caches(caches(), {0: head_major()}, {0: PAGE})
    device.attach(memoryview(bytearray(8 * PAGE)))
    for job in range(1, 9):
        device.store(job, pages([job - 1], [(job - 1) * PAGE]))
    device.load(100, pages([0], [0]))
    device.wait([100], 10)
    assert [r.job for r in device.finished()] == [100]
    with pytest.raises(Expired, match=r"\[8\]"):
        device.wait([8], 0.0)
    with pytest.raises(Malformed, match="job 8 is still running"):
        device.store(8, pages([0], [0]))
    gate.set()
    device.wait([8], 10)
    assert [r.job for r in device.finished()] == list(range(1, 9))


def test_close_ends_what_waits_with_an_error_and_touches_nothing_after(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, copy, stop = threading.Event(), threading.Event(), cpu.copy_pages, cpu.Lane.stop

    def held(*args: object) -> int:
        begun.set()
        gate.wait(10)
        return copy(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu, "copy_pages", held)
    # The first copy goes on only once close() has begun.
    monkeypatch.setattr(cpu.Lane, "stop", lambda lane: (gate.set(), stop(lane)))
    region = bytearray(2 * PAGE)
    device.register_caches(caches(), {0: head_major()}, {0: PAGE})
    device.attach(memoryview(region))
    device.store(1, pages([0], [0]))
    device.store(2, pages([1], [PAGE]))
    assert begun.wait(10)
    device.close()
    first, second = device.finished()
    assert first.error is None
    assert isinstance(second.error, LinkBroken)
    assert not any(region[PAGE:])
    with pytest.raises(LinkBroken):
        device.store(3, pages([0], [0]))
    device.close()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (CopyRun(3, 0, 0, 8), "cache 3 of 3"),
        (CopyRun(0, 0, 0, HEADS * UNIT + 1), "leaves the 48-byte rows"),
        (CopyRun(0, -1, 0, 8), "leaves the 48-byte rows"),
        (CopyRun(0, 0, PAGE - 7, 8), "leaves its 144-byte page"),
        (CopyRun(0, 0, 0, 8, count=4, device_stride=8, page_stride=-8), "not a copy"),
        (CopyRun(0, 0, 0, 0), "not a copy"),
    ],
)
def test_runs_are_checked_when_registered(device: CpuDevice, run: CopyRun, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        device.register_caches(caches(), {0: [run]}, {0: PAGE})


def test_a_shared_region_is_copied_to_and_can_be_closed(device: CpuDevice, tmp_path: Path) -> None:
    region = Region.create("n", "1", 1 << 16, tmp_path)
    device.register_caches(caches(), {0: head_major()}, {0: PAGE})
    device.attach(region.view)
    device.store(1, pages([3], [4096]))
    device.wait([1], 10)
    assert device.finished()[0].error is None
    assert any(region.view[4096 : 4096 + PAGE])
    region.close()


def test_as_bytes_views_rows_in_place() -> None:
    cache = np.arange(2 * 3 * 4, dtype=np.uint16).reshape(2, 3, 4)
    rows = as_bytes(cache)
    assert rows.shape == (2, 24)
    rows[1, 0] = 99
    assert cache[1, 0, 0] == 99 + (cache[1, 0, 0] & 0xFF00)
    # Heads before tokens or after: the bytes of a row are the same bytes.
    assert as_bytes(cache.transpose(0, 2, 1)).tobytes() == rows.tobytes()


def test_as_bytes_keeps_the_distance_of_rows() -> None:
    cache = np.zeros((4, 10), dtype=np.uint8)
    rows = as_bytes(cache[:, 2:8])
    assert (rows.shape, rows.strides) == ((4, 6), (10, 1))
    rows[:] = 1
    assert cache.sum() == 24
    assert as_bytes(cache[2:3, 2:8]).shape == (1, 6)


@pytest.mark.parametrize(
    "cache",
    [
        np.zeros((2, 4, 4), dtype=np.uint8)[:, :, ::2],
        np.zeros((2, 4, 4), dtype=np.uint8)[:, :2, :2],
        np.zeros((2, 4), dtype=np.uint8)[:, ::-1],
        np.zeros((2, 0), dtype=np.uint8),
        np.lib.stride_tricks.as_strided(np.zeros(16, dtype=np.uint8), (4, 4), (2, 1)),
    ],
)
def test_as_bytes_refuses_rows_that_are_not_ranges(cache: np.ndarray) -> None:
    with pytest.raises(Malformed):
        as_bytes(cache)
