"""Forms whose interior is not understood: opaque per head, or per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.errors import Malformed
from kvstrata.layout.attention import local_units
from kvstrata.layout.contents import OpaqueContent
from kvstrata.layout.runs import LayerPlace
from kvstrata.layout.tensors import Axis, Cache, FieldPlaces, Pages, Tensor, certify

__all__ = ["OpaqueHeads", "OpaquePages"]


@dataclass(frozen=True, slots=True)
class OpaqueHeads:
    """(blocks, local heads, bytes of a head) per layer, heads outermost in the page.

    `page_bytes` is the stride of blocks, if the engine pads pages or interleaves layers; 0: none.
    """

    page_bytes: int = 0

    def pages(self, content: OpaqueContent, tensors: Sequence[Tensor], tp: int) -> Pages:
        if content.ranks:
            raise Malformed(f"content {content.tag} is opaque per rank: use OpaquePages")
        return _pages(content, "kv", local_units(content.units, tp), tensors, self.page_bytes)


@dataclass(frozen=True, slots=True)
class OpaquePages:
    """(blocks, 1, bytes of the rank's page) per layer: only the same TP can read it."""

    page_bytes: int = 0

    def pages(self, content: OpaqueContent, tensors: Sequence[Tensor], tp: int) -> Pages:
        if content.ranks != tp:
            raise Malformed(f"content {content.tag} can't be read or written with tp {tp}")
        return _pages(content, "page", 1, tensors, self.page_bytes)


def _pages(
    content: OpaqueContent, field: str, units: int, tensors: Sequence[Tensor], page_bytes: int
) -> Pages:
    row = units * content.unit_bytes
    if page_bytes and page_bytes < row:
        raise Malformed(f"page_bytes is {page_bytes}, but the content takes {row} bytes")
    axes = [
        Axis("blocks", 0, page_bytes or row),
        Axis("heads", units, content.unit_bytes),
        Axis("bytes", content.unit_bytes, 1),
    ]
    caches = []
    for i, tensor in enumerate(tensors):
        blocks = certify(tensor, f"layer {i}", 1, axes)
        caches.append(Cache(tensor.buffer, tensor.offset, page_bytes or row, blocks, row))
    places = tuple((LayerPlace(i, 0, content.unit_bytes),) for i in range(len(caches)))
    return Pages(tuple(caches), (FieldPlaces(field, units, places),)).checked()
