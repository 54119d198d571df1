"""Devices of all attention forms, filled by numpy: see layout_kit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvstrata.layout import (
    LAYOUTS,
    AttentionContent,
    OpaqueContent,
    OpaqueHeads,
    Packed,
    Split,
    TpuLatent,
    TpuPacked,
    element_bytes,
)
from layout_kit import BLOCKS, Device, MakeDevice, blank, heads_of, tensor


def truth_of(content: AttentionContent, layers: int, seed: int = 0) -> np.ndarray:
    """(layers, heads, tokens, key + value), every element random."""
    size = element_bytes(content.dtype)
    shape = (layers, content.heads, content.tokens, content.key + content.value)
    return np.random.default_rng(seed).integers(0, 256**size, shape, dtype=f"u{size}")


def page_of(truth: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(truth.transpose(1, 0, 2, 3)).reshape(-1).view(np.uint8)


def local_of(truth: np.ndarray) -> Callable[[int, int, range], np.ndarray]:
    def local(tp: int, rank: int, layers: range) -> np.ndarray:
        heads = heads_of(truth.shape[1], tp, rank)
        return truth[layers.start : layers.stop, heads.start : heads.stop]

    return local


def packed(
    content: AttentionContent, layout: str, pad: int, own: bool, tp: int, rank: int, layers: range
) -> Device:
    """`pad` elements after each page, and each block; `own`: an allocation for each layer."""
    h, n, c = len(heads_of(content.heads, tp, rank)), content.tokens, content.key + content.value
    e, count = element_bytes(content.dtype), len(layers)
    sizes = {"L": count, "B": BLOCKS, "H": h, "N": n, "C": c}
    order = [layout.index(axis) for axis in "LBHNC"]
    compact = set(layout[:2]) == {"L", "B"}
    page = h * n * c + pad * compact
    form = Packed(layout, page * e if pad and compact else 0)
    if own and layout[0] == "L":
        bases = [
            blank((1, BLOCKS, page) if compact else [1, *(sizes[a] for a in layout[1:])], e)
            for _ in layers
        ]
    elif layout[0] == "B":
        row = count * (page if compact else h * n * c) + pad
        bases = [blank((BLOCKS, row), e)]
        form = Packed(layout, form.page_bytes, row * e if pad else 0)
    else:
        bases = [blank((count, BLOCKS, page) if compact else [sizes[a] for a in layout], e)]
    views: list[np.ndarray] = []
    per_base = count if len(bases) == 1 else 1
    for base in bases:
        shape = [sizes[a] if a != "L" else per_base for a in layout]
        inner = base
        if layout[0] == "B":
            inner = base[:, : base.shape[1] - pad]
            inner = inner.reshape(BLOCKS, count, page) if compact else inner.reshape(shape)
        if compact:
            inner = inner[..., : h * n * c].reshape(shape)
        views += list(inner.transpose(order))
    owners = range(count) if len(bases) > 1 else [0] * count
    assert all(np.shares_memory(v, bases[o]) for v, o in zip(views, owners, strict=True))
    tensors = [tensor(v, bases[o], o) for v, o in zip(views, owners, strict=True)]

    def put(block: int, truth: Any) -> None:
        for view, layer in zip(views, truth, strict=True):
            view[block] = layer

    return Device(form, content, tensors, put, bases)


def split(
    content: AttentionContent,
    order: str,
    halves: str,
    shared: bool,
    tp: int,
    rank: int,
    layers: range,
) -> Device:
    """`shared`: all layers of a block in one row of one allocation, as TRT-LLM has them."""
    h, n, k, v = len(heads_of(content.heads, tp, rank)), content.tokens, content.key, content.value
    e = element_bytes(content.dtype)
    axes = (n, h) if order == "NHD" else (h, n)
    bases, pairs = [], []
    if halves == "apart":
        for _ in layers:
            bases += [blank((BLOCKS, *axes, k), e), blank((BLOCKS, *axes, v), e)]
            pairs.append((bases[-2], bases[-1]))
    else:
        width = h * n * (k + v)
        rows = blank((BLOCKS, max(len(layers), 1), width), e)
        bases = [rows] if shared else [blank((BLOCKS, 1, width), e) for _ in layers]
        for i in range(len(layers)):
            row = rows[:, i] if shared else bases[i][:, 0]
            ks, vs = row[:, : h * n * k], row[:, h * n * k :]
            pairs.append((ks.reshape(BLOCKS, *axes, k), vs.reshape(BLOCKS, *axes, v)))
    block_bytes = len(layers) * h * n * (k + v) * e if shared and halves != "apart" else 0
    form = Split(order, halves, block_bytes)
    tensors = []
    for i, pair in enumerate(pairs):
        owner = [2 * i, 2 * i + 1] if halves == "apart" else [0 if shared else i] * 2
        tensors.append(tuple(tensor(t, bases[o], o) for t, o in zip(pair, owner, strict=True)))

    def put(block: int, truth: Any) -> None:
        for (keys, values), layer in zip(pairs, truth, strict=True):
            both = layer.transpose(1, 0, 2) if order == "NHD" else layer
            keys[block], values[block] = both[..., :k], both[..., k:]

    return Device(form, content, tensors, put, bases)


def tpu(content: AttentionContent, tp: int, rank: int, layers: range) -> Device:
    h, n, d = len(heads_of(content.heads, tp, rank)), content.tokens, content.key
    e = element_bytes(content.dtype)
    pack, shared = 4 // e, d == 64
    rows, lanes = (h, 128) if shared else (2 * h, (d + 127) // 128 * 128)
    bases = [blank((BLOCKS, n, (rows + pack - 1) // pack, pack, lanes), e) for _ in layers]
    tensors = [tensor(b, b, i) for i, b in enumerate(bases)]

    def put(block: int, truth: Any) -> None:
        for base, layer in zip(bases, truth, strict=True):
            for head in range(h):
                for token in range(n):
                    cell = layer[head, token]
                    if shared:
                        base[block, token, head // pack, head % pack, :] = cell
                        continue
                    for row, part in ((2 * head, cell[:d]), (2 * head + 1, cell[d:])):
                        base[block, token, row // pack, row % pack, :d] = part

    return Device(TpuPacked(), content, tensors, put, bases)


def tpu_latent(content: AttentionContent, tp: int, rank: int, layers: range) -> Device:
    n, d, e = content.tokens, content.key, element_bytes(content.dtype)
    pack = 4 // e
    shape = (BLOCKS, (n + pack - 1) // pack, pack, (d + 127) // 128 * 128)
    bases = [blank(shape, e) for _ in layers]
    tensors = [tensor(b, b, i) for i, b in enumerate(bases)]

    def put(block: int, truth: Any) -> None:
        for base, layer in zip(bases, truth, strict=True):
            for token in range(n):
                base[block, token // pack, token % pack, :d] = layer[0, token]

    return Device(TpuLatent(), content, tensors, put, bases)


def opaque_heads(content: OpaqueContent, pad: int, tp: int, rank: int, layers: range) -> Device:
    h, u = len(heads_of(content.units, tp, rank)), content.unit_bytes
    bases = [blank((BLOCKS, h * u + pad), 1) for _ in layers]
    views = [b[:, : h * u].reshape(BLOCKS, h, u) for b in bases]
    tensors = [tensor(v, b, i) for i, (v, b) in enumerate(zip(views, bases, strict=True))]
    form = OpaqueHeads(h * u + pad)

    def put(block: int, truth: Any) -> None:
        for view, layer in zip(views, truth, strict=True):
            view[block] = layer.reshape(h, u)

    return Device(form, content, tensors, put, bases)


def makers(content: AttentionContent) -> dict[str, MakeDevice]:
    """Every form that can keep this content, by name."""
    forms: dict[str, MakeDevice] = {}
    for layout in LAYOUTS:
        forms[layout] = partial(packed, content, layout, 0, False)
        if layout[1] != "H":
            forms[f"{layout}, padded"] = partial(packed, content, layout, 3, False)
        if layout[0] == "L":
            forms[f"{layout}, own allocations"] = partial(packed, content, layout, 0, True)
    if content.value:
        for order in ("NHD", "HND"):
            forms[f"split {order}"] = partial(split, content, order, "apart", False)
            forms[f"split {order} in block"] = partial(split, content, order, "in_block", False)
            forms[f"split {order} all layers"] = partial(split, content, order, "in_block", True)
    if content.key == content.value:
        forms["tpu"] = partial(tpu, content)
    if content.heads == 1 and not content.value:
        forms["tpu latent"] = partial(tpu_latent, content)
    return forms
