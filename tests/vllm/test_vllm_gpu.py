"""What a worker does where KV caches are on a GPU: through the spec, with a driver in host memory.

The driver of the CUDA device's own tests runs what is queued only when an event is asked for, and
copies from wherever an address says; here it is given torch tensors that claim to be on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_kit import HostDriver
from geometry_kit import BLOCKS, HEADS, LAYERS, SIZE, TOKENS, Model
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm_fakes import Clock, FakeClient, FakeNode

from kvstrata.errors import ConfigError, KVStrataError
from kvstrata.region import Region
from kvstrata_adapters.devices import choose, cuda_driver
from kvstrata_adapters.devices.boxes import Box, Place
from kvstrata_adapters.devices.cuda import CudaDevice
from kvstrata_adapters.engines.vllm.faults import FaultLine
from kvstrata_adapters.engines.vllm.pages import ChunkSpec
from kvstrata_adapters.engines.vllm.spec import KVStrataOffloadingSpec
from kvstrata_adapters.engines.vllm.worker import KVStrataWorker

pytestmark = pytest.mark.vllm

TP, RANK = 2, 1
MINE = slice(RANK * HEADS // TP, (RANK + 1) * HEADS // TP)
TRUTH = np.random.default_rng(5).random((LAYERS, HEADS, TOKENS, 2 * SIZE), dtype=np.float32)
PAGE = TRUTH.nbytes
CANONICAL = TRUTH.transpose(1, 0, 2, 3).tobytes()


class TensorDriver(HostDriver):
    """Takes torch tensors in host memory."""

    made: list[TensorDriver]

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device
        self.made.append(self)

    def place(self, index: int, cache: Any) -> Place:
        storage = cache.untyped_storage().data_ptr()
        return replace(super().place(index, cache.numpy()), storage=storage)

    def gather(self, box: Box, cache: Any, *rest: Any) -> None:
        super().gather(box, cache.numpy(), *rest)

    def scatter(self, box: Box, cache: Any, *rest: Any) -> None:
        super().scatter(box, cache.numpy(), *rest)


class Worker:
    """A worker that the spec has made for one rank of a model, and its node's region."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        layout: str,
        tp: int = TP,
        rank: int = RANK,
    ) -> None:
        TensorDriver.made = []
        monkeypatch.setattr(cuda_driver, "TorchDriver", TensorDriver)
        monkeypatch.setattr(choose, "_place_of", lambda _: "cuda:0")
        self.model = Model(tp, rank, layout=layout)
        self.region = Region.create("n", "1", 4 * PAGE, folder)
        self.faults = FaultLine(folder / "f")
        self.node = FakeNode(Clock(), chunks=4)
        options = {"kvstrata": {"node": str(folder / "node.sock"), "revision": "r1"}}
        spec = KVStrataOffloadingSpec(replace(self.model.config, extra_config=options))
        monkeypatch.setattr(spec, "_connect", self.connect)
        monkeypatch.setattr(
            "vllm.config.get_current_vllm_config_or_none", lambda: self.model.vllm_config
        )
        made = spec.get_worker(self.model.caches())
        assert isinstance(made, KVStrataWorker)
        self.worker = made
        (self.driver,) = TensorDriver.made
        self.jobs = 0

    def connect(self, socket: Path, role: str, namespace: Any, timeout: float) -> FakeClient:
        self.namespace = namespace
        client = self.node.connect()
        client.welcome = type(client.welcome)(
            "n", "1", str(self.region.path.parent), self.region.name, self.region.size, 30.0
        )
        return client

    def spec(self, *slots: int) -> ChunkSpec:
        return ChunkSpec(
            str(self.region.path.parent),
            self.region.name,
            self.region.size,
            [self.namespace.key(0, os.urandom(4)) for _ in slots],
            np.array(slots, dtype=np.int64) * PAGE,
            str(self.faults.path),
        )

    def put(self, block: int) -> None:
        for layer, tensor in enumerate(self.model.tensors.values()):
            tensor[block] = torch.from_numpy(TRUTH[layer, MINE])

    def has(self, block: int) -> bool:
        return all(
            np.array_equal(tensor[block].numpy(), TRUTH[layer, MINE])
            for layer, tensor in enumerate(self.model.tensors.values())
        )

    def close(self) -> None:
        self.worker.shutdown()
        self.faults.close()
        self.region.close()


def blocks(*numbers: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(numbers), group_sizes=[len(numbers)], block_indices=[0])


@pytest.fixture(params=["LBHNC", "LBNHC"])
def worker(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worker]:
    made = Worker(tmp_path, monkeypatch, request.param)
    yield made
    made.close()


def test_caches_on_a_gpu_get_the_cuda_device_there(worker: Worker) -> None:
    assert isinstance(worker.worker._device, CudaDevice)
    assert worker.driver.device == "cuda:0"
    assert sum(worker.driver.registered.values()) == worker.region.size  # pinned


def test_a_store_takes_what_the_model_has_queued_and_ends_by_its_event(worker: Worker) -> None:
    worker.driver.compute.tasks.append(lambda: worker.put(3))
    worker.driver.hold = True
    assert worker.worker.submit_store(7, blocks(3), worker.spec(1))
    assert worker.worker.get_finished() == []
    assert not any(worker.region.view)
    worker.driver.compute.tasks.append(lambda: worker.model.tensors["layers.0.attn"].zero_())
    worker.driver.hold = False
    (result,) = worker.worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (7, True, PAGE // TP)
    assert worker.region.view[PAGE + PAGE // TP : 2 * PAGE] == CANONICAL[PAGE // TP :]
    assert not any(worker.region.view[: PAGE + PAGE // TP])
    assert not any(worker.region.view[2 * PAGE :])
    assert worker.faults.drain() == set()


def test_a_load_waits_for_what_still_reads_and_fills_the_blocks(worker: Worker) -> None:
    worker.region.view[:PAGE] = CANONICAL
    seen = []
    worker.driver.compute.tasks.append(lambda: seen.append(worker.has(2)))
    assert worker.worker.submit_load(1, worker.spec(0), blocks(2))
    worker.worker.wait({1})
    (result,) = worker.worker.get_finished()
    assert (result.job_id, result.success) == (1, True)
    assert seen == [False]
    assert worker.has(2)
    others = [n for n in range(BLOCKS) if n != 2]
    assert not any(tensor[others].any() for tensor in worker.model.tensors.values())


def test_what_was_stored_comes_back_to_other_blocks(worker: Worker) -> None:
    worker.put(0)
    spec = worker.spec(2)
    worker.worker.submit_store(1, blocks(0), spec)
    worker.worker.wait({1})
    worker.worker.submit_load(2, spec, blocks(4))
    worker.worker.wait({2})
    assert [r.job_id for r in worker.worker.get_finished()] == [1, 2]
    assert worker.has(4)


def test_ranks_with_the_same_heads_share_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    for rank in (2, 3):
        folder = tmp_path / f"{rank}"
        folder.mkdir()
        worker = Worker(folder, monkeypatch, "LBHNC", 2 * HEADS, rank)
        worker.worker.submit_store(1, blocks(0), worker.spec(0))
        worker.worker.submit_load(2, worker.spec(0), blocks(1))
        worker.worker.wait({1, 2})
        sizes.append([r.transfer_size for r in worker.worker.get_finished()])
        worker.close()
    head = PAGE // HEADS
    assert sizes == [[head // 3, head], [2 * head // 3, head]]


def test_a_copy_that_fails_is_one_store_s_failure(worker: Worker) -> None:
    worker.put(0)
    worker.driver.fail_copy = {1}
    bad, good = worker.spec(0), worker.spec(1)
    worker.worker.submit_store(1, blocks(0), bad)
    worker.worker.submit_store(2, blocks(0), good)
    worker.worker.wait({1, 2})
    assert sorted(r.job_id for r in worker.worker.get_finished()) == [1, 2]
    assert worker.faults.drain() == set(bad.keys)
    assert worker.region.view[PAGE + PAGE // TP : 2 * PAGE] == CANONICAL[PAGE // TP :]


def test_a_load_that_fails_ends_the_engine(worker: Worker) -> None:
    worker.driver.fail_copy = {1}
    worker.worker.submit_load(1, worker.spec(0), blocks(0))
    with pytest.raises(KVStrataError, match="cuMemcpyBatchAsync failed"):
        worker.worker.get_finished()


def test_copies_end_and_memory_is_unpinned_before_the_session_ends(worker: Worker) -> None:
    worker.put(0)
    worker.worker.submit_store(1, blocks(0), worker.spec(0))
    worker.worker.shutdown()
    assert worker.region.view[PAGE // TP : PAGE] == CANONICAL[PAGE // TP :]
    assert worker.driver.registered == {}
    assert worker.node.clients == []


def test_caches_where_no_device_is_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    config = replace(model.config, extra_config={"kvstrata": {"node": "/x", "revision": "r1"}})
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: model.vllm_config)
    monkeypatch.setattr(choose, "_place_of", lambda _: "xpu:0")
    with pytest.raises(ConfigError, match="KV caches on xpu:0 are not supported: only cpu and"):
        KVStrataOffloadingSpec(config).get_worker(model.caches())
