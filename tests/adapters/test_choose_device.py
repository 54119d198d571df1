"""Which device an engine's caches get, and their rows."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvstrata.errors import Malformed
from kvstrata_adapters.devices.choose import cache_rows, open_device
from kvstrata_adapters.devices.cpu import CpuDevice
from kvstrata_adapters.devices.cuda_check import main as check
from kvstrata_adapters.devices.samples import GROUP, LAYOUTS, SHARE, Sample


def test_caches_in_host_memory_get_the_cpu_device() -> None:
    device = open_device([np.zeros((2, 8), dtype=np.uint8), SimpleNamespace(device="cpu")])
    assert isinstance(device, CpuDevice)
    device.close()


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["cuda:0", "cuda:1"], r"\['cuda:0', 'cuda:1'\]"),
        (["cpu", "cuda:0"], "one place"),
        (["xpu:0"], "xpu:0 are not supported"),
    ],
)
def test_other_places_are_refused(places: list[str], message: str) -> None:
    with pytest.raises(Malformed, match=message):
        open_device([SimpleNamespace(device=place) for place in places])


def test_rows_of_an_array() -> None:
    cache = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    assert cache_rows(cache).tobytes() == cache.tobytes()


def test_rows_of_a_tensor_that_is_elsewhere() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    # `meta` stands for a GPU: storage and strides, without bytes.
    cache = torch.zeros((4, 6, 5), dtype=torch.bfloat16, device="meta")
    rows = cache_rows(cache[1:, 2:4])
    assert (rows.shape, rows.stride(), rows.storage_offset()) == ((3, 20), (60, 1), 80)
    assert (rows.dtype, rows.device.type) == (torch.uint8, "meta")
    with pytest.raises(Malformed, match="don't lie together"):
        cache_rows(cache[:, :, :2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_is_a_ranks_share(layout: str) -> None:
    sample = Sample.of(layout, blocks=3)
    assert sample.nbytes == 3 * SHARE
    assert sum(run.nbytes * run.count for run in sample.runs.load) == SHARE
    assert GROUP.page_bytes == 4 * SHARE
    assert all(0 < cache.end <= sample.nbytes for cache in sample.caches)


def test_the_check_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import torch
    except ImportError:
        pass
    else:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    monkeypatch.setattr("sys.argv", ["cuda_check"])
    with pytest.raises(SystemExit, match="torch"):
        check()
