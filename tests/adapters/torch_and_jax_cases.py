"""Chunks of torch CPU workers at TP=2 and of a JAX engine at TP=4; run by `test_torch_and_jax.py`.

A torch worker keeps its heads in tensors of torch's own, in every layout an engine may choose,
registered as vLLM's worker registers its own: described, certified, planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvstrata.layout import LAYOUTS, AttentionContent, Packed, Ranks, Split, plan_rank
from kvstrata_adapters.devices.base import Copy, Device
from kvstrata_adapters.devices.choose import open_device
from kvstrata_adapters.devices.cpu import CpuDevice
from kvstrata_adapters.devices.jax import JaxDevice, over_shards, shard_tensors
from kvstrata_adapters.devices.tensors import describe, rows_of

LAYERS, BLOCKS, HEADS, TOKENS, KEY, VALUE = 3, 6, 4, 4, 8, 8
WIDTH = KEY + VALUE
CONTENTS = {
    "float32": AttentionContent(HEADS, TOKENS, KEY, VALUE, "float32"),
    "bfloat16": AttentionContent(HEADS, TOKENS, KEY, VALUE, "bfloat16"),
}
WORKERS, DEVICES = 2, 4
STAGES = (range(LAYERS),)


@dataclass
class Worker:
    """One rank of an engine in torch. `layers[l]`: (blocks, local heads, tokens, K|V) as bits."""

    device: Device
    layers: list[Any]
    fill: Callable[[int, int, Any], None]
    read: Callable[[int, int], Any]


def bits_of(dtype: str) -> Any:
    return {"float32": torch.int32, "bfloat16": torch.int16}[dtype]


def packed(layout: str, dtype: str) -> tuple[Any, list[Any], list[Any]]:
    """The form, its tensors, and per layer a view (blocks, heads, tokens, K|V)."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS // WORKERS, "N": TOKENS, "C": WIDTH}
    whole = torch.zeros([sizes[a] for a in layout], dtype=getattr(torch, dtype))
    layers = list(whole.permute([layout.index(a) for a in "LBHNC"]))
    return Packed(layout), layers, layers  # type: ignore[arg-type]


def split(order: str, halves: str, dtype: str) -> tuple[Any, list[Any], list[Any]]:
    """As `packed`; a view is a pair of K and V."""
    inner = {"NHD": (TOKENS, HEADS // WORKERS), "HND": (HEADS // WORKERS, TOKENS)}[order]
    tensors = []
    for _ in range(LAYERS):
        if halves == "apart":  # (2, blocks, ...), as older vLLM has it
            tensors.append(
                tuple(torch.zeros((2, BLOCKS, *inner, KEY), dtype=getattr(torch, dtype)))
            )
        else:  # (blocks, 2, ...)
            both = torch.zeros((BLOCKS, 2, *inner, KEY), dtype=getattr(torch, dtype))
            tensors.append((both[:, 0], both[:, 1]))
    by_head = (0, 1, 2, 3) if order == "HND" else (0, 2, 1, 3)
    views = [tuple(half.permute(by_head) for half in pair) for pair in tensors]
    return Split(order, halves), tensors, views  # type: ignore[arg-type]


FORMS: dict[str, Callable[[str], tuple[Any, list[Any], list[Any]]]] = {
    **{f"packed {layout}": lambda dtype, a=layout: packed(a, dtype) for layout in LAYOUTS},
    **{
        f"split {order} {halves}": lambda dtype, a=order, b=halves: split(a, b, dtype)
        for order in ("NHD", "HND")
        for halves in ("apart", "in_block")
    },
}


def worker(form_name: str, dtype: str, rank: int, region: bytearray) -> Worker:
    content = CONTENTS[dtype]
    group = content.group(0, "full", [f"l{i}" for i in range(LAYERS)])
    form, tensors, views = FORMS[form_name](dtype)
    pairs = [t if isinstance(t, tuple) else (t,) for t in tensors]
    seen = [tuple(describe(t) for t in pair) for pair in pairs]
    given: list[Any] = [pair if len(pair) == 2 else pair[0] for pair in seen]
    pages = form.pages(content, given, WORKERS)
    runs = plan_rank(group, Ranks(WORKERS, STAGES), 0, rank, pages)
    flat = [t for pair in pairs for t in pair]
    device = open_device(flat)
    assert isinstance(device, CpuDevice)
    device.register_caches(
        [rows_of(cache, flat) for cache in pages.caches],
        {0: runs.load},
        {0: group.page_bytes},
        {0: runs.store},
    )
    device.attach(memoryview(region))
    bits = bits_of(dtype)

    def fill(layer: int, block: int, values: Any) -> None:
        view = views[layer]
        if isinstance(view, tuple):
            view[0].view(bits)[block] = values[..., :KEY]
            view[1].view(bits)[block] = values[..., KEY:]
        else:
            view.view(bits)[block] = values

    def read(layer: int, block: int) -> Any:
        view = views[layer]
        if isinstance(view, tuple):
            return torch.cat([half.view(bits)[block] for half in view], dim=-1)
        return view.view(bits)[block]

    return Worker(device, views, fill, read)


def jax_engine(dtype: str, region: bytearray) -> JaxDevice:
    """TP=4: an array of each layer, sharded over its heads."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("tp",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "tp"))
    shape = (BLOCKS, HEADS, TOKENS, WIDTH)
    arrays = [jax.device_put(jnp.zeros(shape, dtype), sharding) for _ in range(LAYERS)]
    content = CONTENTS[dtype]
    group = content.group(0, "full", [f"l{i}" for i in range(LAYERS)])
    plans = [
        plan_rank(
            group,
            Ranks(DEVICES, STAGES),
            0,
            rank,
            Packed("LBHNC").pages(content, shard_tensors(arrays, rank), DEVICES),
        )
        for rank in range(DEVICES)
    ]
    device = JaxDevice()
    device.register_caches(
        arrays,
        {0: over_shards([plan.load for plan in plans])},
        {0: group.page_bytes},
        {0: over_shards([plan.store for plan in plans])},
    )
    device.attach(memoryview(region))
    return device


def run(device: Device, way: str, job: int, blocks: list[int], offsets: list[int]) -> int:
    copies = [Copy(0, np.array(blocks, np.int64), np.array(offsets, np.int64))]
    (device.store if way == "store" else device.load)(job, copies)
    device.wait([job], 30)
    (result,) = device.finished()
    assert result.error is None
    return result.nbytes


def pages_of(truth: np.ndarray, block: int) -> bytes:
    """`truth` is (layers, blocks, heads, tokens, K|V): [head][layer][token][K|V] of one block."""
    return np.ascontiguousarray(truth[:, block].transpose(1, 0, 2, 3)).tobytes()


@pytest.mark.parametrize("dtype", CONTENTS)
@pytest.mark.parametrize("form", FORMS)
def test_chunks_go_from_torch_workers_to_jax_and_back(form: str, dtype: str) -> None:
    page = CONTENTS[dtype].group(0, "full", [f"l{i}" for i in range(LAYERS)]).page_bytes
    region = bytearray(4 * page)
    # Any bits, NaNs too: bytes are what counts.
    width = np.dtype({"float32": np.int32, "bfloat16": np.int16}[dtype])
    truth = np.frombuffer(
        np.random.default_rng(3).bytes(LAYERS * BLOCKS * page // LAYERS), width
    ).reshape(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
    workers = [worker(form, dtype, rank, region) for rank in range(WORKERS)]
    share = HEADS // WORKERS
    for rank, one in enumerate(workers):
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                mine = truth[layer, block, rank * share : (rank + 1) * share]
                one.fill(layer, block, torch.from_numpy(mine.copy()))
        assert run(one.device, "store", 1, [4, 1], [0, page]) == page  # half of each page
    assert region[:page] == pages_of(truth, 4)
    assert region[page : 2 * page] == pages_of(truth, 1)

    jax_device = jax_engine(dtype, region)
    run(jax_device, "load", 1, [2, 5], [0, page])
    for layer, array in enumerate(jax_device.arrays):
        held = np.array(jax.lax.bitcast_convert_type(array, width.name))
        assert np.array_equal(held[2], truth[layer, 4])
        assert np.array_equal(held[5], truth[layer, 1])

    run(jax_device, "store", 2, [5, 2], [2 * page, 3 * page])
    assert region[2 * page : 3 * page] == region[page : 2 * page]
    assert region[3 * page :] == region[:page]
    jax_device.close()

    for rank, one in enumerate(workers):
        run(one.device, "load", 2, [0, 3], [2 * page, 3 * page])
        for layer in range(LAYERS):
            for block, was in ((0, 1), (3, 4)):
                mine = truth[layer, was, rank * share : (rank + 1) * share]
                assert torch.equal(one.read(layer, block), torch.from_numpy(mine.copy()))
            untouched = truth[layer, 2, rank * share : (rank + 1) * share]
            assert torch.equal(one.read(layer, 2), torch.from_numpy(untouched.copy()))
        one.device.close()
