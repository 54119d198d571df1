"""Devices of Mamba and linear-attention states, filled by numpy: see layout_kit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvstrata.layout import StateContent, StatePages, element_bytes
from layout_kit import BLOCKS, Device, blank, heads_of, tensor


class State(NamedTuple):
    """`conv[i]` is (layers, units, channels, steps), `ssm` is (layers, heads, state elements)."""

    conv: list[np.ndarray]
    ssm: np.ndarray


def truth_of(content: StateContent, layers: int, seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    e, s = element_bytes(content.conv_dtype), element_bytes(content.state_dtype)
    conv = [
        rng.integers(0, 256**e, (layers, p.units, p.channels, content.steps), dtype=f"u{e}")
        for p in content.projections
    ]
    ssm = rng.integers(0, 256**s, (layers, content.heads, content.state), dtype=f"u{s}")
    return State(conv, ssm)


def page_of(content: StateContent, truth: State) -> np.ndarray:
    axes = (1, 0, 3, 2) if content.order == "SD" else (1, 0, 2, 3)
    parts = [part.transpose(axes) for part in truth.conv] + [truth.ssm.transpose(1, 0, 2)]
    flat = [np.ascontiguousarray(p).reshape(-1).view(np.uint8) for p in parts]
    return np.concatenate(flat)


def local_of(truth: State) -> Callable[[int, int, range], State]:
    def local(tp: int, rank: int, layers: range) -> State:
        def mine(part: np.ndarray) -> np.ndarray:
            units = heads_of(part.shape[1], tp, rank)
            return part[layers.start : layers.stop, units.start : units.stop]

        return State([mine(part) for part in truth.conv], mine(truth.ssm))

    return local


def state_device(
    content: StateContent, order: str, pad: int, together: bool, tp: int, rank: int, layers: range
) -> Device:
    """`together`: both tensors in one padded page a block, as vLLM has them; else one for each."""
    e, s = element_bytes(content.conv_dtype), element_bytes(content.state_dtype)
    heads = len(heads_of(content.heads, tp, rank))
    channels = sum(len(heads_of(p.units, tp, rank)) * p.channels for p in content.projections)
    shape = (content.steps, channels) if order == "SD" else (channels, content.steps)
    conv_bytes, ssm_bytes = channels * content.steps * e, heads * content.state * s
    bases: list[np.ndarray] = []
    views: list[tuple[np.ndarray, np.ndarray]] = []
    owners: list[tuple[int, int]] = []
    for i in range(len(layers)):
        if together:
            base = blank((BLOCKS, conv_bytes + ssm_bytes + pad), 1)
            conv = base[:, :conv_bytes].view(f"u{e}")
            ssm = base[:, conv_bytes : conv_bytes + ssm_bytes].view(f"u{s}")
            bases.append(base)
            owners.append((i, i))
        else:
            conv, ssm = blank((BLOCKS, conv_bytes // e), e), blank((BLOCKS, ssm_bytes // s), s)
            bases += [conv, ssm]
            owners.append((2 * i, 2 * i + 1))
        views.append((conv.reshape(BLOCKS, *shape), ssm.reshape(BLOCKS, heads, content.state)))
    tensors = [
        (tensor(c, bases[a], a), tensor(r, bases[b], b))
        for (c, r), (a, b) in zip(views, owners, strict=True)
    ]

    def put(block: int, truth: Any) -> None:
        for i, (conv, ssm) in enumerate(views):
            parts = [p[i].reshape(-1, content.steps) for p in truth.conv]
            rows = np.concatenate(parts)  # (channels, steps)
            conv[block] = rows.T if order == "SD" else rows
            ssm[block] = truth.ssm[i]

    page = conv_bytes + ssm_bytes + pad if together else 0
    return Device(StatePages(order, page, transpose=True), content, tensors, put, bases)
