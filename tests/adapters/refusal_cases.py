"""Tensors that are not what the geometry says, registered in every adapter.

Each adapter gets two layers of one rank of TP=2, heads before tokens in memory. The second one is
wrong in one way; the error must say in which. Run by `test_refusals.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cuda_kit import HostDriver

from kvstrata.errors import ConfigError, Malformed
from kvstrata.layout import AttentionContent, Packed, Ranks, Tensor, plan_rank
from kvstrata_adapters.devices.base import Device
from kvstrata_adapters.devices.choose import open_device
from kvstrata_adapters.devices.cuda import CudaDevice
from kvstrata_adapters.devices.tensors import describe, rows_of

BLOCKS, HEADS, TOKENS, SIZE, TP = 5, 4, 8, 16, 2
LOCAL = HEADS // TP
CONTENT = AttentionContent(HEADS, TOKENS, SIZE, SIZE, "float32")
GROUP = CONTENT.group(0, "full", ["l0", "l1"])


@dataclass(frozen=True)
class Memory:
    """What an engine allocates for a layer: (blocks, heads, tokens, K|V), in memory in `order`."""

    heads: int = LOCAL
    dtype: str = "float32"
    order: tuple[int, int, int, int] = (0, 1, 2, 3)

    @property
    def stored(self) -> list[int]:
        shape = (BLOCKS, self.heads, TOKENS, 2 * SIZE)
        return [shape[axis] for axis in self.order]

    @property
    def back(self) -> list[int]:
        return [self.order.index(axis) for axis in range(4)]


# What is wrong, and how the error names it: in bytes, as it is and as it must be.
WRONG = {
    "stride": (Memory(order=(0, 2, 1, 3)), r"stride\[heads\] is 128 bytes, it must be 1024"),
    "head count": (Memory(heads=LOCAL + 1), r"shape\[heads\] is 3, it must be 2"),
    "dtype": (Memory(dtype="float16"), r"element_bytes is 2, the content's dtype has 4"),
}


def numpy_layer(memory: Memory) -> Any:
    return np.zeros(memory.stored, memory.dtype).transpose(memory.back)


def torch_layer(memory: Memory) -> Any:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-vllm")
    return torch.zeros(memory.stored, dtype=getattr(torch, memory.dtype)).permute(memory.back)


def register(device: Device, layers: Sequence[Any]) -> None:
    """As an engine does: described, certified, planned, registered."""
    pages = Packed("LBHNC").pages(CONTENT, [describe(layer) for layer in layers], TP)
    runs = plan_rank(GROUP, Ranks(TP, (range(2),)), 0, 1, pages)
    rows = [rows_of(cache, layers) for cache in pages.caches]
    device.register_caches(rows, {0: runs.load}, {0: GROUP.page_bytes}, {0: runs.store})


def in_numpy(memory: Memory) -> None:
    layers = [numpy_layer(Memory()), numpy_layer(memory)]
    register(open_device(layers), layers)


def in_torch(memory: Memory) -> None:
    layers = [torch_layer(Memory()), torch_layer(memory)]
    register(open_device(layers), layers)


def in_cuda(memory: Memory) -> None:
    """With a driver whose device memory is numpy's."""
    register(CudaDevice(HostDriver()), [numpy_layer(Memory()), numpy_layer(memory)])


def in_jax(memory: Memory) -> None:
    """An array sharded over two devices. It has no strides: a wrong one is of another order."""
    jax: Any = pytest.importorskip(
        "jax", reason="jax is not installed: pip install 'kvstrata[jax]'"
    )
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kvstrata_adapters.devices.jax import JaxDevice, over_shards, shard_tensors

    mesh = Mesh(np.array(jax.devices()[:TP]), ("tp",))

    def sharded(memory: Memory) -> Any:
        axes: list[str | None] = [None, None, None, None]
        axes[memory.order.index(1)] = "tp"
        shape = list(memory.stored)
        shape[memory.order.index(1)] *= TP
        zeros = jax.numpy.zeros(shape, memory.dtype)
        return jax.device_put(zeros, NamedSharding(mesh, PartitionSpec(*axes)))

    def view(tensor: Tensor, memory: Memory) -> Tensor:
        """By its logical axes, as an engine that transposes describes it."""
        return Tensor(
            tuple(tensor.shape[axis] for axis in memory.back),
            tuple(tensor.strides[axis] for axis in memory.back),
            tensor.element_bytes,
            tensor.buffer_bytes,
            tensor.offset,
            tensor.buffer,
        )

    kinds = [Memory(), memory]
    arrays = [sharded(kind) for kind in kinds]
    plans = [
        plan_rank(
            GROUP,
            Ranks(TP, (range(2),)),
            0,
            rank,
            Packed("LBHNC").pages(
                CONTENT,
                [view(t, k) for t, k in zip(shard_tensors(arrays, rank), kinds, strict=True)],
                TP,
            ),
        )
        for rank in range(TP)
    ]
    device = JaxDevice()
    device.register_caches(
        arrays, {0: over_shards([plan.load for plan in plans])}, {0: GROUP.page_bytes}
    )
    device.close()


def in_vllm(memory: Memory) -> None:
    """What vLLM registers is right; what a layer computes with is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it imports warns of deprecations, once
        pytest.importorskip(
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping",
            reason="vLLM is not installed: make test-vllm",
        )
    from geometry_kit import Model

    model = Model(TP, 1)
    name = model.names[1]
    if memory != Memory():
        model.layers[name].kv_cache = torch_layer(memory)
    model.derive()


ADAPTERS: dict[str, Callable[[Memory], None]] = {
    "numpy": in_numpy,
    "torch": in_torch,
    "cuda": in_cuda,
    "jax": in_jax,
    "vllm": in_vllm,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_wrong_tensor_is_refused_by_the_name_of_what_is_wrong(adapter: str, wrong: str) -> None:
    memory, message = WRONG[wrong]
    with pytest.raises((Malformed, ConfigError), match=rf"layer 1: {message}"):
        ADAPTERS[adapter](memory)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_right_one_is_not(adapter: str) -> None:
    ADAPTERS[adapter](Memory())
