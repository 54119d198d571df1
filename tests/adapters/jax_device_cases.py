"""The JAX device on four simulated devices; run by `test_jax_device.py`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvstrata.errors import Expired, LinkBroken, Malformed
from kvstrata.keys import Group
from kvstrata.layout import AttentionContent, CopyRun, Packed, Ranks, Tensor, TpuPacked, plan_rank
from kvstrata.testing import DeviceTests
from kvstrata_adapters.devices import jax as jax_device
from kvstrata_adapters.devices.base import Copy, as_bytes
from kvstrata_adapters.devices.cpu import CpuDevice
from kvstrata_adapters.devices.jax import JaxDevice, over_shards, shard_tensors

MESH = Mesh(np.array(jax.devices()[:4]), ("tp",))
BY_HEAD = NamedSharding(MESH, PartitionSpec(None, "tp"))


def bytes_of(array: jax.Array) -> list[np.ndarray]:
    """Copies of each shard's rows. No view is left behind: it would keep arrays from donation."""
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    shards = [
        np.array(jax.lax.bitcast_convert_type(s.data, bits)) for s in array.addressable_shards
    ]
    return [s.reshape(len(s), -1).view(np.uint8) for s in shards]


class TestJaxDevice(DeviceTests):
    """Four caches of the suite are the shards of an array."""

    dtype: Any = jnp.float32
    pinned = False

    def open_device(self, rows: Sequence[np.ndarray]) -> tuple[JaxDevice, list[jax.Array]]:
        return JaxDevice(self.pinned), [self.sharded(rows[:4]), self.sharded(rows[4:])]

    def sharded(self, rows: Sequence[np.ndarray]) -> jax.Array:
        dtype = np.dtype(self.dtype)
        parts = [r.view(dtype).reshape(len(r), 1, -1) for r in rows]
        placed = [jax.device_put(p, d) for p, d in zip(parts, MESH.devices, strict=True)]
        shape = (len(rows[0]), 4, parts[0].shape[-1])
        return jax.make_array_from_single_device_arrays(shape, BY_HEAD, placed)

    def rows_of(self, device: JaxDevice, caches: Sequence[Any]) -> list[np.ndarray]:
        arrays = device.arrays or caches
        return [rows for array in arrays for rows in bytes_of(array)]


class TestNarrowFloats(TestJaxDevice):
    """Random bytes: NaNs must arrive with their bits."""

    dtype = jnp.bfloat16


class TestThroughPinnedMemory(TestJaxDevice):
    dtype = jnp.uint16
    pinned = True


class TestBytesInSmallPieces(TestJaxDevice):
    dtype = jnp.float8_e4m3fn

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jax_device, "MAX_BLOCKS", 4)


# ---------------------------------------------------------------- what is JAX's own

BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 12, 4, 2, 3, 3
CONTENT = AttentionContent(HEADS, TOKENS, SIZE, SIZE, "float32")
GROUP = CONTENT.group(0, "full", [f"l{i}" for i in range(LAYERS)])
PAGE = GROUP.page_bytes


def layers(sharding: Any = BY_HEAD, seed: int = 0, heads: int = HEADS) -> list[jax.Array]:
    random = np.random.default_rng(seed)
    shape = (BLOCKS, heads, TOKENS, 2 * SIZE)
    return [
        jax.device_put(random.standard_normal(shape, np.float32), sharding) for _ in range(LAYERS)
    ]


def registered(
    arrays: list[jax.Array], content: AttentionContent = CONTENT, pinned: bool | None = None
) -> tuple[JaxDevice, Group]:
    group = content.group(0, "full", [f"l{i}" for i in range(len(arrays))])
    ranks = len(arrays[0].addressable_shards)
    plans = [
        plan_rank(
            group,
            Ranks(ranks, (range(len(arrays)),)),
            0,
            rank,
            Packed("LBHNC").pages(content, shard_tensors(arrays, rank), ranks),
        )
        for rank in range(ranks)
    ]
    device = JaxDevice(pinned)
    device.register_caches(
        arrays,
        {0: over_shards([plan.load for plan in plans])},
        {0: group.page_bytes},
        {0: over_shards([plan.store for plan in plans])},
    )
    return device, group


def pages(blocks: Sequence[int], offsets: Sequence[int]) -> list[Copy]:
    return [Copy(0, np.array(blocks, np.int64), np.array(offsets, np.int64))]


def canonical(arrays: Sequence[jax.Array], block: int) -> bytes:
    """[head][layer][token][K|V]"""
    host = np.stack([np.array(a)[block] for a in arrays])
    return host.transpose(1, 0, 2, 3).tobytes()


@pytest.fixture
def device() -> Iterator[JaxDevice]:
    device, _ = registered(layers())
    yield device
    device.close()


def test_the_shards_of_a_page_are_in_place(device: JaxDevice) -> None:
    region = bytearray(3 * PAGE)
    device.attach(memoryview(region))
    device.store(1, pages([5, 2], [2 * PAGE, 0]))
    device.wait([1], 30)
    assert device.finished()[0].nbytes == 2 * PAGE
    assert region[2 * PAGE :] == canonical(device.arrays, 5)
    assert region[:PAGE] == canonical(device.arrays, 2)


def test_a_load_is_done_in_place_and_uses_the_old_arrays_up(device: JaxDevice) -> None:
    before = device.arrays
    places = [s.data.unsafe_buffer_pointer() for a in before for s in a.addressable_shards]
    region = np.random.default_rng(1).bytes(3 * PAGE)
    device.attach(memoryview(bytearray(region)))
    device.load(1, pages([0, 4, 7], [PAGE, 0, 2 * PAGE]))
    device.wait([1], 30)
    assert all(array.is_deleted() for array in before)
    after = device.arrays
    assert places == [s.data.unsafe_buffer_pointer() for a in after for s in a.addressable_shards]
    assert canonical(after, 4) == region[:PAGE]


def test_arrays_change_only_inside_calls_of_the_owner(device: JaxDevice) -> None:
    device.attach(memoryview(bytearray(PAGE)))
    before = device.arrays
    device.load(1, pages([0], [0]))
    with device._jobs.changed:
        assert device._jobs.changed.wait_for(lambda: device._staged, 30)
    assert not any(array.is_deleted() for array in before)
    device.finished()
    assert all(array.is_deleted() for array in before)


def test_steps_that_donate_go_between_jobs(device: JaxDevice) -> None:
    step = jax.jit(lambda arrays: [a + 1 for a in arrays], donate_argnums=0)
    region = bytearray(4 * PAGE)
    device.attach(memoryview(region))
    want = [canonical(device.arrays, 3)]
    device.store(1, pages([3], [0]))
    device.arrays = step(device.arrays)  # before the store has been waited for
    want.append(canonical(device.arrays, 3))
    device.store(2, pages([3], [PAGE]))
    device.wait([1, 2], 30)
    device.load(3, pages([3], [0]))
    device.wait([3], 30)
    device.arrays = step(device.arrays)
    assert canonical(device.arrays, 3) == want[1]
    assert [bytes(region[:PAGE]), bytes(region[PAGE : 2 * PAGE])] == want


def test_few_shapes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_device, "MAX_BLOCKS", 8)
    device, _ = registered(layers())
    calls = device._stores[0].call, device._loads[0].call
    for call in calls:
        call.clear_cache()
    device.attach(memoryview(bytearray(BLOCKS * PAGE)))
    for n in range(1, BLOCKS + 1):
        device.store(n, pages(range(n), range(0, n * PAGE, PAGE)))
        device.wait([n], 30)
        device.load(100 + n, pages(range(n), range(0, n * PAGE, PAGE)))
        device.wait([100 + n], 30)
    assert [r.error for r in device.finished()] == [None] * 2 * BLOCKS
    assert [call._cache_size() for call in calls] == [4, 4]
    device.close()


def test_a_late_job_is_named_and_a_closed_device_drops_it(
    device: JaxDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun, copy = threading.Event(), threading.Semaphore(0), jax_device.copy_pages

    def held(*args: Any, **options: Any) -> int:
        begun.release()
        gate.wait(30)
        return copy(*args, **options)

    monkeypatch.setattr(jax_device, "copy_pages", held)
    monkeypatch.setattr(device._store_lane, "stop", _before(gate.set, device._store_lane.stop))
    region = bytearray(2 * PAGE)
    device.attach(memoryview(region))
    before = device.arrays
    device.store(1, pages([0], [0]))
    device.store(2, pages([1], [PAGE]))
    device.load(3, pages([1], [PAGE]))
    with pytest.raises(Expired, match=r"\[1, 3\]"):
        device.wait([1, 3], 0.0)
    with pytest.raises(Malformed, match="job 2 is still running"):
        device.load(2, pages([0], [0]))
    assert begun.acquire(timeout=30)
    assert begun.acquire(timeout=30)  # the store and the load
    device.close()
    errors = {r.job: r.error for r in device.finished()}
    assert errors[1] is None
    assert isinstance(errors[2], LinkBroken)
    assert isinstance(errors[3], LinkBroken)
    assert not any(region[PAGE:])
    assert [a is b for a, b in zip(device.arrays, before, strict=True)] == [True] * LAYERS


def _before(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    return lambda: (first(), then())[1]


def test_a_scatter_that_fails_is_one_job_s_failure(
    device: JaxDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.attach(memoryview(bytearray(PAGE)))
    scatter, failing = device._scatter, iter([True, False])
    monkeypatch.setattr(device, "_scatter", lambda p: 1 // 0 if next(failing) else scatter(p))
    device.load(1, pages([0], [0]))
    device.load(2, pages([1], [0]))
    device.wait([1, 2], 30)
    bad, good = device.finished()
    assert "ZeroDivisionError" in str(bad.error)
    assert (good.job, good.error) == (2, None)


def test_arrays_of_another_kind_are_refused(device: JaxDevice) -> None:
    with pytest.raises(Malformed, match="2 arrays instead of 3"):
        device.arrays = device.arrays[:2]
    other = device.arrays[1].astype(jnp.float16)
    with pytest.raises(Malformed, match="array 1 is float16"):
        device.arrays = [device.arrays[0], other, device.arrays[2]]
    whole = jax.device_put(device.arrays[2], NamedSharding(MESH, PartitionSpec()))
    with pytest.raises(Malformed, match="array 2 is sharded as"):
        device.arrays = [*device.arrays[:2], whole]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (lambda: layers(NamedSharding(MESH, PartitionSpec("tp"))), "sharded over its blocks"),
        (lambda: [layers()[0], *layers(jax.devices()[0])], "array 1 has 1 shards, array 0 has 4"),
        (lambda: [jnp.zeros(4)], "no rows"),
        (lambda: [jnp.zeros((4, 4), jnp.bool_)], "of dtype bool"),
        (lambda: [jnp.zeros((4, 4), jnp.int4)], "of dtype int4"),
    ],
)
def test_arrays_that_cannot_be_moved_are_refused(
    arrays: Callable[[], list[jax.Array]], message: str
) -> None:
    device = JaxDevice()
    with pytest.raises(Malformed, match=message):
        device.register_caches(arrays(), {0: [CopyRun(0, 0, 0, 8)]}, {0: 8})
    device.close()


def test_runs_that_cut_elements_are_refused() -> None:
    device = JaxDevice()
    with pytest.raises(Malformed, match="array 0, shard 0 cut elements of float32"):
        device.register_caches(layers(), {0: [CopyRun(0, 0, 0, 6)]}, {0: 8})
    device.close()


@pytest.mark.parametrize("pinned", [False, True])
def test_heads_with_copies_on_several_devices(pinned: bool) -> None:
    """TP=4 over two KV heads: two devices hold each, and share the writing."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("head", "copy"))
    sharding = NamedSharding(mesh, PartitionSpec(None, "head"))
    content = AttentionContent(2, TOKENS, SIZE, SIZE, "float32")
    device, group = registered(layers(sharding, heads=2), content, pinned)
    region = bytearray(group.page_bytes)
    device.attach(memoryview(region))
    device.store(1, pages([6], [0]))
    device.wait([1], 30)
    assert device.finished()[0].nbytes == group.page_bytes
    assert region == canonical(device.arrays, 6)
    device.load(2, pages([7], [0]))
    device.wait([2], 30)
    assert device.finished()[0].nbytes == 2 * group.page_bytes
    for array in device.arrays:
        for rows in bytes_of(array):
            assert np.array_equal(rows[7], rows[6])
    device.close()


def test_pages_of_tpus_leave_their_padding_behind() -> None:
    """(pages, tokens, 2 heads / 2, 2, 128), of which 40 elements are keys and values."""
    content = AttentionContent(HEADS, TOKENS, 40, 40, "bfloat16")
    group = content.group(0, "full", ["l0", "l1"])
    random = np.random.default_rng(4)
    host = random.integers(0, 1 << 16, (2, BLOCKS, TOKENS, HEADS, 2, 128), np.uint16)
    sharding = NamedSharding(MESH, PartitionSpec(None, None, "tp"))
    arrays = [jax.device_put(layer.copy(), sharding) for layer in host]
    stages = (range(2),)
    plans = [
        plan_rank(
            group,
            Ranks(4, stages),
            0,
            rank,
            TpuPacked().pages(content, shard_tensors(arrays, rank), 4),
        )
        for rank in range(4)
    ]
    device, region = JaxDevice(), bytearray(group.page_bytes)
    device.register_caches(
        arrays, {0: over_shards([plan.load for plan in plans])}, {0: group.page_bytes}
    )
    device.attach(memoryview(region))
    device.store(1, pages([5], [0]))
    device.wait([1], 30)
    # [layer][token][head][K, V][lane] -> [head][layer][token][K|V]
    kept = host[:, 5, :, :, :, :40].transpose(2, 0, 1, 3, 4)
    assert region == kept.tobytes()
    device.load(2, pages([1], [0]))
    device.wait([2], 30)
    host[:, 1, ..., :40] = host[:, 5, ..., :40]
    assert [r.error for r in device.finished()] == [None, None]
    assert all(np.array_equal(np.array(a), h) for a, h in zip(device.arrays, host, strict=True))
    device.close()


def cpu_rank(rank: int, ranks: int, caches: list[np.ndarray], region: bytearray) -> CpuDevice:
    """One of `ranks` engine workers on CPU, its heads in arrays [block][token][head][K|V]."""
    tensors = [
        Tensor(
            tuple(c.transpose(0, 2, 1, 3).shape),
            tuple(c.transpose(0, 2, 1, 3).strides),
            4,
            c.nbytes,
            buffer=i,
        )
        for i, c in enumerate(caches)
    ]
    held = Packed("LBNHC").pages(CONTENT, tensors, ranks)
    plan = plan_rank(GROUP, Ranks(ranks, (range(LAYERS),)), 0, rank, held)
    device = CpuDevice()
    device.register_caches(
        [as_bytes(c) for c in caches], {0: plan.load}, {0: PAGE}, {0: plan.store}
    )
    device.attach(memoryview(region))
    return device


def test_chunks_go_from_cpu_workers_to_jax_and_back() -> None:
    """Stored at TP=2 from token-major CPU caches, loaded at TP=4 by JAX, and the other way."""
    random, region = np.random.default_rng(2), bytearray(4 * PAGE)
    shape = (BLOCKS, TOKENS, HEADS // 2, 2 * SIZE)
    caches = [[random.standard_normal(shape, np.float32) for _ in range(LAYERS)] for _ in range(2)]
    workers = [cpu_rank(r, 2, own, region) for r, own in enumerate(caches)]
    for worker in workers:
        worker.store(1, pages([3, 8], [0, PAGE]))
        worker.wait([1], 30)
        assert worker.finished()[0].nbytes == PAGE  # half of each page

    device, _ = registered(layers(seed=9))
    device.attach(memoryview(region))
    device.load(1, pages([10, 0], [0, PAGE]))
    device.wait([1], 30)
    for layer, array in enumerate(device.arrays):
        for block, was in ((10, 3), (0, 8)):
            heads = np.concatenate([own[layer][was] for own in caches], axis=1)
            assert np.array_equal(np.array(array)[block], heads.transpose(1, 0, 2))

    device.store(2, pages([10, 0], [3 * PAGE, 2 * PAGE]))
    device.wait([2], 30)
    assert [r.error for r in device.finished()] == [None, None]
    assert region[3 * PAGE :] == region[:PAGE]
    assert region[2 * PAGE : 3 * PAGE] == region[PAGE : 2 * PAGE]
    device.close()

    for worker, own in zip(workers, caches, strict=True):
        worker.load(2, pages([1], [3 * PAGE]))
        worker.wait([2], 30)
        worker.close()
        assert all(np.array_equal(layer[1], layer[3]) for layer in own)
