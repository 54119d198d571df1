"""Forms of attention on GPUs and CPUs: packed in the six layouts of vLLM, and K/V apart.

`Packed` takes one tensor per layer of shape (B, H, N, C), as vLLM's logical view has it whatever
the physical layout is. `Split` takes one tensor for keys and one for values. Both give the same
page, so engines of either kind share chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvstrata.errors import Malformed
from kvstrata.layout.contents import AttentionContent, element_bytes
from kvstrata.layout.runs import LayerPlace, share_of
from kvstrata.layout.tensors import Axis, Cache, FieldPlaces, Pages, Tensor, certify

__all__ = ["LAYOUTS", "Packed", "PhysicalLayout", "Split", "local_units"]

PhysicalLayout = Literal["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
LAYOUTS: tuple[PhysicalLayout, ...] = get_args(PhysicalLayout)


def local_units(units: int, tp: int) -> int:
    """How many of a field's units each rank holds. Raises `Malformed` if they can't be shared."""
    return len(share_of(units, 1, 0, tp)[0])


@dataclass(frozen=True, slots=True)
class Packed:
    """[B, H, N, C] in a physical layout, C = K|V of one token of one head.

    `page_bytes` is what the engine gives one block of one layer, if it pads it; `block_bytes` what
    it gives one block of all layers where B is outermost and other groups need more. 0: no padding.
    """

    layout: PhysicalLayout
    page_bytes: int = 0
    block_bytes: int = 0

    def pages(self, content: AttentionContent, tensors: Sequence[Tensor], tp: int) -> Pages:
        """`tensors[l]` of the rank's layer l: (blocks, local heads, tokens, key + value)."""
        element, heads = element_bytes(content.dtype), local_units(content.heads, tp)
        if not tensors:
            return Pages((), (FieldPlaces("kv", heads, ()),))
        sizes = {"H": heads, "N": content.tokens, "C": content.key + content.value}
        strides, row = self._strides(sizes, element, tensors)
        axes = [Axis("heads", heads, strides["H"]), Axis("tokens", content.tokens, strides["N"])]
        axes = [Axis("blocks", 0, strides["B"]), *axes, Axis("content", sizes["C"], element)]
        blocks = [certify(t, f"layer {i}", element, axes) for i, t in enumerate(tensors)]
        if self.layout[0] == "L":
            caches = [
                Cache(t.buffer, t.offset, strides["B"], n, row)
                for t, n in zip(tensors, blocks, strict=True)
            ]
            starts = [(i, 0) for i in range(len(tensors))]
        else:
            caches = [Cache(tensors[0].buffer, tensors[0].offset, strides["B"], blocks[0], row)]
            starts = [(0, i * strides["L"]) for i in range(len(tensors))]
            for i, tensor in enumerate(tensors):
                want = (caches[0].buffer, caches[0].offset + i * strides["L"], blocks[0])
                have = (tensor.buffer, tensor.offset, blocks[i])
                if have != want:
                    raise Malformed(
                        f"layer {i}: buffer, offset and blocks are {have}, in {self.layout} they "
                        f"are {want}"
                    )
        places = tuple(
            (LayerPlace(cache, at, strides["H"], content.tokens, strides["N"]),)
            for cache, at in starts
        )
        return Pages(tuple(caches), (FieldPlaces("kv", heads, places),)).checked()

    def _strides(
        self, sizes: dict[str, int], element: int, tensors: Sequence[Tensor]
    ) -> tuple[dict[str, int], int]:
        """Byte strides by axis, and the bytes of a row, from its first to its last byte."""
        if self.layout not in LAYOUTS:
            raise Malformed(f"layout is {self.layout!r}: it must be one of {list(LAYOUTS)}")
        # In L-outermost layouts a layer's tensor does not depend on the others.
        sizes = sizes | {"L": len(tensors), "B": max(tensors[0].shape[0], 1)}
        strides, step = {}, element
        for axis in reversed(self.layout):
            if set(self.layout[:2]) == {"L", "B"} and axis == self.layout[1]:
                step = _padded("page_bytes", self.page_bytes, step)
            if axis == self.layout[0] == "B":
                step = _padded("block_bytes", self.block_bytes, step)
            strides[axis], step = step, step * sizes[axis]
        if self.page_bytes and set(self.layout[:2]) != {"L", "B"}:
            raise Malformed(f"page_bytes is {self.page_bytes}: {self.layout} has no pages to pad")
        if self.block_bytes and self.layout[0] != "B":
            raise Malformed(
                f"block_bytes is {self.block_bytes}: blocks are not outermost in {self.layout}"
            )
        inside = "HNC" if self.layout[0] == "L" else "LHNC"
        return strides, element + sum((sizes[a] - 1) * strides[a] for a in inside)


def _padded(name: str, given: int, needed: int) -> int:
    if given and given < needed:
        raise Malformed(f"{name} is {given}, but the content takes {needed} bytes")
    return given or needed


@dataclass(frozen=True, slots=True)
class Split:
    """Keys and values in tensors of their own: (B, N, H, D) for NHD, (B, H, N, D) for HND.

    `halves` says where the K/V axis stands: "apart" (tensors of their own, or outside the blocks:
    (2, B, ...)), or "in_block" ((B, 2, ...)), where `block_bytes` may be more than both halves
    (TRT-LLM: (B, L, 2, ...)). Slice the engine's tensor with `Tensor.at`.
    """

    order: Literal["NHD", "HND"]
    halves: Literal["apart", "in_block"] = "apart"
    block_bytes: int = 0

    def pages(
        self, content: AttentionContent, tensors: Sequence[tuple[Tensor, Tensor]], tp: int
    ) -> Pages:
        """`tensors[l]`: keys and values of the rank's layer l."""
        if self.order not in ("NHD", "HND"):
            raise Malformed(f"order is {self.order!r}: it must be 'NHD' or 'HND'")
        if not content.value:
            raise Malformed("value is 0: a latent has no values to keep apart, use Packed")
        heads, element = local_units(content.heads, tp), element_bytes(content.dtype)
        sizes = [n * element for n in (content.key, content.value)]
        half = [heads * content.tokens * n for n in sizes]
        caches: list[Cache] = []
        places: list[tuple[LayerPlace, ...]] = []
        for i, pair in enumerate(tensors):
            layer = []
            for name, tensor, size, nbytes in zip("KV", pair, sizes, half, strict=True):
                head, token = (
                    (size, heads * size) if self.order == "NHD" else (content.tokens * size, size)
                )
                inner = [Axis("heads", heads, head), Axis("tokens", content.tokens, token)]
                if self.order == "NHD":
                    inner.reverse()
                needed = nbytes if self.halves == "apart" else sum(half)
                stride = _padded("block_bytes", self.block_bytes, needed)
                axes = [Axis("blocks", 0, stride), *inner, Axis("dim", size // element, element)]
                blocks = certify(tensor, f"layer {i}, {name}", element, axes)
                layer.append(
                    LayerPlace(
                        len(caches),
                        0,
                        head,
                        content.tokens,
                        token,
                        at=0 if name == "K" else sizes[0],
                        piece_bytes=size,
                        piece_step=content.cell_bytes,
                    )
                )
                caches.append(Cache(tensor.buffer, tensor.offset, stride, blocks, nbytes))
            k, v = pair
            if self.halves == "in_block" and (v.buffer, v.offset) != (k.buffer, k.offset + half[0]):
                raise Malformed(
                    f"layer {i}: offset of V is {v.offset}, it must be {k.offset + half[0]}"
                )
            places.append(tuple(layer))
        return Pages(tuple(caches), (FieldPlaces("kv", heads, tuple(places)),)).checked()
