"""The driver's own parts, as far as they go without a GPU: arguments, versions, torch's views."""

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstrata.errors import KVStrataError
from kvstrata.layout import CopyRun
from kvstrata_adapters.devices.boxes import Place
from kvstrata_adapters.devices.cuda_driver import BatchCopy, TorchDriver, box_view, staged_view
from kvstrata_adapters.devices.cuda_plan import plan_path


class _Recorded:
    """A C function of cuMemcpyBatchAsync's type that notes its arguments."""

    def __init__(self, fail_index: bool, error: int = 0) -> None:
        p, size = ctypes.c_void_p, ctypes.c_size_t
        middle = [p] if fail_index else []
        self.seen: dict[str, Any] = {}

        def call(dst: int, src: int, sizes: int, n: int, attrs: int, first: int, *rest: Any) -> int:
            array = ctypes.c_uint64 * n
            self.seen = {
                "dst": list(array.from_address(dst)),
                "src": list(array.from_address(src)),
                "sizes": list(array.from_address(sizes)),
                "attributes": list((ctypes.c_uint32 * 6).from_address(attrs)),
                "first": ctypes.c_size_t.from_address(first).value,
                "rest": rest,
            }
            if fail_index and error:
                ctypes.c_size_t.from_address(rest[1]).value = 1
            return error

        kind = ctypes.CFUNCTYPE(ctypes.c_int, p, p, p, size, p, p, size, *middle, p)
        self._keep = kind(call)
        self.pointer = ctypes.cast(self._keep, p).value or 0


@pytest.mark.parametrize("fail_index", [True, False])
@pytest.mark.parametrize(("any_order", "order"), [(False, 1), (True, 3)])
def test_the_arguments_of_the_batched_copy(fail_index: bool, any_order: bool, order: int) -> None:
    recorded = _Recorded(fail_index)
    batch = BatchCopy(recorded.pointer, fail_index)
    high = 0x7F00_0000_0000
    batch(np.array([high, 2]), np.array([3, high + 4]), np.array([5, 6]), any_order, 77)
    assert recorded.seen["dst"] == [high, 2]
    assert recorded.seen["src"] == [3, high + 4]
    assert recorded.seen["sizes"] == [5, 6]
    assert recorded.seen["attributes"] == [order, 0, 0, 0, 0, 0]
    assert recorded.seen["first"] == 0
    assert recorded.seen["rest"][0] == 1  # one set of attributes
    assert recorded.seen["rest"][-1] == 77
    assert len(recorded.seen["rest"]) == (3 if fail_index else 2)


@pytest.mark.parametrize(("fail_index", "message"), [(True, "1 at copy 1 of 2$"), (False, "1$")])
def test_a_refused_batch_says_where(fail_index: bool, message: str) -> None:
    batch = BatchCopy(_Recorded(fail_index, error=1).pointer, fail_index)
    with pytest.raises(KVStrataError, match=message):
        batch(np.array([1, 2]), np.array([3, 4]), np.array([5, 6]), False, 0)


def test_an_empty_batch_calls_nothing() -> None:
    recorded = _Recorded(False)
    none = np.zeros(0, dtype=np.int64)
    BatchCopy(recorded.pointer, False)(none, none, none, False, 0)
    assert recorded.seen == {}


class _LibCuda:
    """As much of libcuda as it takes to look for the batched copy."""

    def __init__(self, version: int, has: Sequence[int]) -> None:
        self._version, self._has = version, has
        self.recorded = {v: _Recorded(fail_index=v < 13000) for v in has}

    def cuDriverGetVersion(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self._version
        return 0

    def cuGetProcAddress_v2(self, name: bytes, out: Any, version: Any, *_: Any) -> int:  # noqa: N802
        assert name == b"cuMemcpyBatchAsync"
        if version.value not in self._has:
            return 500
        out._obj.value = self.recorded[version.value].pointer
        return 0


@pytest.mark.parametrize(
    ("version", "has", "used"),
    [
        (12080, [12080], 12080),
        (12090, [12080, 13000], 12080),
        (13000, [12080, 13000], 13000),
        (13010, [12080], 12080),
    ],
)
def test_the_batched_copy_of_the_drivers_version_is_used(
    version: int, has: list[int], used: int
) -> None:
    lib = _LibCuda(version, has)
    batch = BatchCopy.of(lib)
    assert batch is not None
    batch(np.array([1]), np.array([2]), np.array([3]), True, 5)
    assert lib.recorded[used].seen["rest"][-1] == 5


@pytest.mark.parametrize(("version", "has"), [(12070, [12080]), (12080, [])])
def test_older_drivers_have_none(version: int, has: list[int]) -> None:
    assert BatchCopy.of(_LibCuda(version, has)) is None


class _Calls:
    """A library whose functions note their arguments and return `error`."""

    def __init__(self, error: int = 0) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.seen.append((name, *(getattr(a, "value", a) for a in arguments)))
            return self._error

        return call


def torch_driver(lib: _Calls, batch: Any = None) -> TorchDriver:
    """Without torch and without libcuda."""
    current = SimpleNamespace(query=lambda: True)
    driver = TorchDriver.__new__(TorchDriver)
    driver._cuda, driver._batch, driver._device = lib, batch, "cuda:0"
    driver._torch = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda _: current))
    return driver


@pytest.mark.parametrize(("to_host", "any_order"), [(True, False), (False, True)])
def test_only_the_region_is_read_out_of_order(to_host: bool, any_order: bool) -> None:
    batches: list[tuple[Any, ...]] = []
    driver = torch_driver(_Calls(), lambda *a: batches.append(a))
    one, two, n = (np.array([i]) for i in (1, 2, 3))
    driver.copy(one, two, n, to_host, SimpleNamespace(cuda_stream=9), batch=True)
    assert batches == [(one, two, n, any_order, 9)]


@pytest.mark.parametrize(
    ("to_host", "name"), [(True, "cuMemcpyDtoHAsync_v2"), (False, "cuMemcpyHtoDAsync_v2")]
)
def test_copies_one_by_one(to_host: bool, name: str) -> None:
    lib = _Calls()
    stream = SimpleNamespace(cuda_stream=9)
    high = 0x7F00_0000_0000
    arrays = np.array([high, 2]), np.array([3, high]), np.array([5, 6])
    torch_driver(lib, batch=None).copy(*arrays, to_host, stream, batch=True)
    assert lib.seen == [(name, high, 3, 5, 9), (name, 2, high, 6, 9)]
    with pytest.raises(KVStrataError, match="a copy of 5 bytes failed with CUDA error 700"):
        torch_driver(_Calls(700)).copy(*arrays, to_host, stream, batch=False)


def test_host_memory_is_registered_with_the_driver() -> None:
    lib = _Calls()
    driver = torch_driver(lib)
    driver.register(4096, 1 << 36)
    driver.unregister(4096)
    assert lib.seen == [
        ("cuMemHostRegister_v2", 4096, 1 << 36, 1),
        ("cuMemHostUnregister", 4096),
    ]
    with pytest.raises(KVStrataError, match="pinning 5 bytes failed with CUDA error 712"):
        torch_driver(_Calls(712)).register(4096, 5)
    with pytest.raises(KVStrataError, match="713"):
        torch_driver(_Calls(713)).unregister(4096)


@pytest.mark.parametrize("offset", [0, 2, 8])
def test_torch_moves_boxes_between_caches_and_staged_pages(offset: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    layers = torch.randint(0, 256, (3, 5, 4, 2, 16), dtype=torch.uint8)  # L, B, N, H, C
    caches = [layer.reshape(5, -1) for layer in layers]
    places = [
        Place(c.data_ptr(), c.stride(0), 5, i, c.untyped_storage().data_ptr())
        for i, c in enumerate(caches)
    ]
    # [H][L][N][C] of the rank's two heads, behind `offset` bytes that are another's.
    runs = [
        CopyRun(layer, 16 * head, offset + 64 * (3 * head + layer), 16, 4, 32, 16)
        for head in range(2)
        for layer in range(3)
    ]
    path = plan_path(runs, places, batched=True)
    (box,) = path.boxes
    staged = torch.zeros(4 * path.share, dtype=torch.uint8)
    blocks = torch.tensor([4, 0, 2])
    pages = staged_view(torch, box, staged, 3, path.share, caches[0])
    rows_view = box_view(torch, box, caches[0], path.share)
    assert rows_view.dtype == pages.dtype == torch.int64
    pages.copy_(rows_view.index_select(0, blocks))
    want = layers[:, blocks].permute(1, 3, 0, 2, 4)
    assert torch.equal(staged[: 3 * path.share], want.reshape(-1))

    layers.zero_()
    rows_view.index_copy_(0, blocks, pages)
    assert torch.equal(layers[:, blocks].permute(1, 3, 0, 2, 4), want)
    assert not layers[:, [1, 3]].any()
