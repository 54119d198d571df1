"""The layouts of published models: proved at full size, and copied with their real heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import layout_attention_kit as attention
import layout_state_kit as state
from kvstrata.layout import (
    Content,
    OpaqueContent,
    OpaqueHeads,
    Packed,
    Pages,
    Ranks,
    StateContent,
    StatePages,
    Tensor,
    local_units,
    plan_rank,
    stage_layers,
)
from kvstrata.layout.tensors import dense
from kvstrata.testing.geometries import GEOMETRIES, LayerGroup, ModelGeometry
from layout_kit import MakeDevice, check_load, store

MODELS = {g.model: g for g in GEOMETRIES}
GROUPS = {f"{g.model} {p.group.id} {p.group.kind}": p for g in GEOMETRIES for p in g.groups}


def tensor(shape: tuple[int, ...], element: int, buffer: int) -> Tensor:
    strides = dense(shape, element)
    return Tensor(shape, strides, element, shape[0] * strides[0], buffer=buffer)


def full_pages(content: Content, layers: int, tp: int) -> Pages:
    """Of a device in vLLM's default form, without its memory."""
    if isinstance(content, StateContent):
        channels = sum(local_units(p.units, tp) * p.channels for p in content.projections)
        heads = local_units(content.heads, tp)
        pairs = [
            (
                tensor((9, content.steps, channels), 2, 2 * i),
                tensor((9, heads, content.state), 4, 2 * i + 1),
            )
            for i in range(layers)
        ]
        return StatePages("SD").pages(content, pairs, tp)
    if isinstance(content, OpaqueContent):
        shape = (9, local_units(content.units, tp), content.unit_bytes)
        return OpaqueHeads().pages(content, [tensor(shape, 1, i) for i in range(layers)], tp)
    element = {"bfloat16": 2, "float32": 4, "uint8": 1}[content.dtype]
    shape = (9, local_units(content.heads, tp), content.tokens, content.key + content.value)
    return Packed("LBHNC").pages(content, [tensor(shape, element, i) for i in range(layers)], tp)


@pytest.mark.parametrize("name", GROUPS)
def test_all_ranks_tile_the_page_of_a_published_model(name: str) -> None:
    group, content = GROUPS[name]
    for tp in (1, 2, 4, 8, 16):
        for stages in (1, 2):
            ranks = Ranks(tp, stage_layers(len(group.layers), stages))
            loaded = 0
            for stage, layers in enumerate(ranks.stages):
                for rank in {0, tp - 1}:  # plan_rank proves it for all of them
                    runs = plan_rank(
                        group, ranks, stage, rank, full_pages(content, len(layers), tp)
                    )
                    loaded += sum(r.count * r.nbytes for r in runs.load)
            assert loaded > 0


def small(part: LayerGroup) -> tuple[Any, MakeDevice, MakeDevice, Callable[..., Any], np.ndarray]:
    """Two layers of a group: a maker that stores, one that loads, the truth and its page."""
    group, content = part
    if isinstance(content, StateContent):
        truth = state.truth_of(content, 2)
        make = partial(state.state_device, content, "SD", 64, True)
        page = state.page_of(content, truth)
        return content.group(0, group.layers[:2], 16), make, make, state.local_of(truth), page
    few = content.group(0, group.kind, group.layers[:2], group.window)
    if isinstance(content, OpaqueContent):
        bytes_ = np.random.default_rng(0).integers(
            0, 256, (2, content.units, 1, content.unit_bytes), dtype=np.uint8
        )
        opaque = partial(attention.opaque_heads, content, 64)
        return few, opaque, opaque, attention.local_of(bytes_), attention.page_of(bytes_)
    makers = attention.makers(content)
    there, here = makers["LBNHC"], makers["tpu latent" if content.heads == 1 else "tpu"]
    if content.dtype == "float32":
        here = makers["BLHNC, padded"]
    if content.scheme:  # FlashMLA aligns pages to 576 bytes: 37376 become 37440
        there = partial(
            attention.packed, content, "BLHNC", -content.tokens * content.key % 576, False
        )
    cells = attention.truth_of(content, 2)
    return few, there, here, attention.local_of(cells), attention.page_of(cells)


@pytest.mark.parametrize("name", GROUPS)
def test_a_published_model_stored_by_four_ranks_is_loaded_by_one_and_by_eight(name: str) -> None:
    group, there, here, local, expected = small(GROUPS[name])
    page = store(group, there, Ranks(4, (range(2),)), local, 1)
    np.testing.assert_array_equal(page, expected)
    check_load(group, here, Ranks(1, (range(2),)), local, 0, page)
    check_load(group, here, Ranks(8, (range(1), range(1, 2))), local, 2, page)


# By hand: layers x (heads x tokens x (k + v)) x bytes; states have 3 steps of q, k and v (x, B and
# C) channels in bf16, and heads x head size x state size floats.
SIZES = {
    "meta-llama/Llama-3.1-8B": [32 * 8 * 16 * 256 * 2],
    "google/gemma-3-4b-it": [29 * 4 * 16 * 512 * 2, 5 * 4 * 16 * 512 * 2],
    "openai/gpt-oss-120b": [18 * 8 * 16 * 128 * 2] * 2,
    "deepseek-ai/DeepSeek-V3": [61 * 64 * 576 * 2],
    "Qwen/Qwen3.6-35B-A3B": [
        30 * (3 * (16 * 128 * 2 + 32 * 128) * 2 + 32 * 128**2 * 4),
        10 * 2 * 256 * 512 * 2,
    ],
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": [
        23 * (3 * (64 * 64 + 2 * 8 * 128) * 2 + 64 * 64 * 128 * 4),
        6 * 2 * 256 * 256 * 2,
    ],
    "zai-org/GLM-5.3-Flash": [
        11 * 64 * 512 * 2,
        11 * 64 * 132,
        34 * (3 * 3 * 64 * 128 * 2 + 64 * 128**2 * 4),
    ],
    "zai-org/GLM-5": [78 * 64 * 576 * 2, 78 * 64 * 132],
    "deepseek-ai/DeepSeek-V4-Flash": [
        43 * 64 * 584,
        21 * 64 * 584,
        20 * 2 * 584,
        21 * 64 * 132,
        21 * 4 * 2048 * 4,
        21 * 4 * 512 * 4,
        20 * 8 * 1024 * 4,
    ],
}


@pytest.mark.parametrize("model", MODELS)
def test_page_sizes(model: str) -> None:
    assert [p.group.page_bytes for p in MODELS[model].groups] == SIZES[model]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.model)
def test_every_figure_says_where_it_comes_from(geometry: ModelGeometry) -> None:
    names = [f.name for f in geometry.figures]
    assert len(set(names)) == len(names)
    assert all(f.source for f in geometry.figures)
    assert {f.basis for f in geometry.figures} & {"published", "config default"}
