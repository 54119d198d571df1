"""One rank's pages in each layout, for the checks and benchmarks of devices.

A rank of 4 of a model of 32 layers and 8 heads of 128 + 128 bf16, in blocks of 16 tokens: 512 KiB a
block. In fragments of 512 KiB (BHLNC, whose order is the page's own), 8 KiB (heads before tokens),
512 bytes (tokens before heads) or 256 bytes (K and V apart).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

from kvstrata.keys import Group
from kvstrata.layout import (
    AttentionContent,
    Cache,
    Packed,
    Pages,
    PhysicalLayout,
    RankRuns,
    Ranks,
    Split,
    Tensor,
    plan_rank,
    stage_layers,
)

__all__ = ["GROUP", "LAYOUTS", "SHARE", "Sample"]

_LAYERS, _TP, _RANK = 32, 4, 1
_CONTENT = AttentionContent(heads=8, tokens=16, key=128, value=128, dtype="bfloat16")
_HEADS, _ELEMENT = _CONTENT.heads // _TP, 2
_SPLIT = "split NHD"

GROUP: Group = _CONTENT.group(0, "full", tuple(f"layer{i}" for i in range(_LAYERS)))
SHARE = GROUP.page_bytes // _TP
"""Bytes of a page that the rank has."""
LAYOUTS = (*get_args(PhysicalLayout), _SPLIT)


@dataclass(frozen=True, slots=True)
class Sample:
    """Caches in one allocation of `nbytes` bytes, and the copy runs."""

    layout: str
    blocks: int
    nbytes: int
    caches: tuple[Cache, ...]
    runs: RankRuns

    @classmethod
    def of(cls, layout: str, blocks: int) -> Sample:
        """`layout` is one of `LAYOUTS`."""
        pages, nbytes = _split(blocks) if layout == _SPLIT else _packed(layout, blocks)
        runs = plan_rank(GROUP, Ranks(_TP, stage_layers(_LAYERS, 1)), 0, _RANK, pages)
        return cls(layout, blocks, nbytes, pages.caches, runs)


def _packed(layout: str, blocks: int) -> tuple[Pages, int]:
    sizes = {"L": _LAYERS, "B": blocks, "H": _HEADS, "N": _CONTENT.tokens, "C": 256}
    stride, step = {}, 1
    for axis in reversed(layout):
        stride[axis], step = step, step * sizes[axis]
    shape, strides = (blocks, _HEADS, _CONTENT.tokens, 256), tuple(stride[a] for a in "BHNC")
    tensors = [_tensor(shape, strides, step, i * stride["L"]) for i in range(_LAYERS)]
    pages = Packed(cast(PhysicalLayout, layout)).pages(_CONTENT, tensors, _TP)
    return pages, step * _ELEMENT


def _split(blocks: int) -> tuple[Pages, int]:
    shape = (blocks, _CONTENT.tokens, _HEADS, 128)
    strides = (_CONTENT.tokens * _HEADS * 128, _HEADS * 128, 128, 1)
    half = blocks * strides[0]
    size = 2 * _LAYERS * half
    halves = [_tensor(shape, strides, size, i * half) for i in range(2 * _LAYERS)]
    k_and_v = list(zip(halves[::2], halves[1::2], strict=True))
    return Split("NHD").pages(_CONTENT, k_and_v, _TP), size * _ELEMENT


def _tensor(shape: tuple[int, ...], strides: tuple[int, ...], size: int, at: int) -> Tensor:
    """Strides, size and offset in elements."""
    bytes_of = tuple(n * _ELEMENT for n in strides)
    return Tensor(shape, bytes_of, _ELEMENT, size * _ELEMENT, at * _ELEMENT)
