"""Forms of attention on TPUs (ragged paged attention v3), with their alignment stripped.

One array per layer and shard, dense. The lane axis is aligned to 128 elements and the axis before
it is packed to 32 bits; what alignment adds is not in the page, so GPUs and TPUs share chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.errors import Malformed
from kvstrata.layout.attention import local_units
from kvstrata.layout.contents import AttentionContent, element_bytes
from kvstrata.layout.runs import LayerPlace
from kvstrata.layout.tensors import Axis, Cache, FieldPlaces, Pages, Tensor, certify, dense

__all__ = ["LANES", "TpuLatent", "TpuPacked"]

LANES = 128


@dataclass(frozen=True, slots=True)
class TpuPacked:
    """(pages, tokens, ceil(2 heads / pack), pack, align(D, 128)): K0, V0, K1, V1, ...

    With heads of 64 elements K and V share the lanes of one row:
    (pages, tokens, ceil(heads / pack), pack, 128). `pack` is 32 bits over those of an element.
    """

    def pages(self, content: AttentionContent, tensors: Sequence[Tensor], tp: int) -> Pages:
        if content.key != content.value:
            raise Malformed(
                f"value is {content.value}, but key is {content.key}: here they are equal"
            )
        element, heads = element_bytes(content.dtype), local_units(content.heads, tp)
        pack, shared = 4 // element, content.key * 2 == LANES
        lanes = _align(content.key, LANES) if not shared else LANES
        rows = heads if shared else 2 * heads
        inner = (content.tokens, -(-rows // pack), pack, lanes)
        strides = dense((1, *inner), element)
        names = ("blocks", "tokens", "heads / pack", "pack", "lanes")
        axes = [Axis(n, s, b) for n, s, b in zip(names, (0, *inner), strides, strict=True)]
        block, token, _, row, _ = strides
        part = content.key * element
        step = content.cell_bytes
        caches: list[Cache] = []
        places: list[tuple[LayerPlace, ...]] = []
        for i, tensor in enumerate(tensors):
            blocks = certify(tensor, f"layer {i}", element, axes)
            caches.append(Cache(tensor.buffer, tensor.offset, block, blocks, block))
            if shared:
                places.append((LayerPlace(i, 0, row, content.tokens, token),))
                continue
            k = LayerPlace(i, 0, 2 * row, content.tokens, token, 0, part, step)
            v = LayerPlace(i, row, 2 * row, content.tokens, token, part, part, step)
            places.append((k, v))
        return Pages(tuple(caches), (FieldPlaces("kv", heads, tuple(places)),)).checked()


@dataclass(frozen=True, slots=True)
class TpuLatent:
    """(pages, tokens / pack, pack, align(latent, 128)), a copy on every rank."""

    def pages(self, content: AttentionContent, tensors: Sequence[Tensor], tp: int) -> Pages:
        if content.heads != 1 or content.value:
            raise Malformed(f"heads is {content.heads} and value {content.value}: not a latent")
        element = element_bytes(content.dtype)
        pack, lanes = 4 // element, _align(content.key, LANES)
        inner = (-(-content.tokens // pack), pack, lanes)
        strides = dense((1, *inner), element)
        names = ("blocks", "tokens / pack", "pack", "lanes")
        axes = [Axis(n, s, b) for n, s, b in zip(names, (0, *inner), strides, strict=True)]
        caches = []
        for i, tensor in enumerate(tensors):
            blocks = certify(tensor, f"layer {i}", element, axes)
            caches.append(Cache(tensor.buffer, tensor.offset, strides[0], blocks, strides[0]))
        places = tuple(
            (LayerPlace(i, 0, strides[0], content.tokens, strides[2]),) for i in range(len(caches))
        )
        local_units(content.heads, tp)
        return Pages(tuple(caches), (FieldPlaces("kv", 1, places),)).checked()


def _align(n: int, to: int) -> int:
    return -(-n // to) * to
