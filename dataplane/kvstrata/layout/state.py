"""The form of Mamba and linear-attention states: a convolution and a recurrent tensor per layer.

Each projection of the convolution is sharded by itself, so a rank's channels are [x|B|C] of its
own heads and groups, not a range of the whole. Named fields make the page independent of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.errors import Malformed
from kvstrata.layout.attention import local_units
from kvstrata.layout.contents import ConvOrder, StateContent, element_bytes
from kvstrata.layout.runs import LayerPlace
from kvstrata.layout.tensors import Axis, Cache, FieldPlaces, Pages, Tensor, certify

__all__ = ["StatePages"]


@dataclass(frozen=True, slots=True)
class StatePages:
    """`order` of the convolution tensor: (B, steps, channels) for SD, (B, channels, steps) for DS.

    `page_bytes` is the stride of blocks: what the engine gives one state, with its padding; 0 if
    the two tensors are dense by themselves. With `transpose` the content may have the other order,
    at the price of one fragment per element of the convolution.
    """

    order: ConvOrder
    page_bytes: int = 0
    transpose: bool = False

    def pages(
        self, content: StateContent, tensors: Sequence[tuple[Tensor, Tensor]], tp: int
    ) -> Pages:
        """`tensors[l]`: convolution and recurrent state (blocks, local heads, elements)."""
        if self.order not in ("SD", "DS"):
            raise Malformed(f"order is {self.order!r}: it must be 'SD' or 'DS'")
        if self.order != content.order and not self.transpose:
            raise Malformed(
                f"order is {self.order!r}, the content has {content.order!r}: set "
                f"VLLM_SSM_CONV_STATE_LAYOUT={content.order}, or `transpose` to copy by element"
            )
        conv_element, element = (
            element_bytes(content.conv_dtype),
            element_bytes(content.state_dtype),
        )
        heads = local_units(content.heads, tp)
        channels = [local_units(p.units, tp) * p.channels for p in content.projections]
        conv = sum(channels) * content.steps * conv_element
        ssm = heads * content.state * element
        if self.page_bytes and self.page_bytes < conv + ssm:
            raise Malformed(
                f"page_bytes is {self.page_bytes}, but the state takes {conv + ssm} bytes"
            )
        row = sum(channels) * conv_element  # of one step, in SD
        sizes = {"steps": content.steps, "channels": sum(channels)}
        step = {"steps": row, "channels": conv_element}
        if self.order == "DS":
            step = {"channels": content.steps * conv_element, "steps": conv_element}
        names = ("steps", "channels") if self.order == "SD" else ("channels", "steps")
        conv_axes = [Axis("blocks", 0, self.page_bytes or conv)]
        conv_axes += [Axis(f"conv {n}", sizes[n], step[n]) for n in names]
        ssm_axes = [
            Axis("blocks", 0, self.page_bytes or ssm),
            Axis("ssm heads", heads, content.state * element),
            Axis("ssm state", content.state, element),
        ]
        caches: list[Cache] = []
        for i, (c, s) in enumerate(tensors):
            blocks = certify(c, f"layer {i}, conv", conv_element, conv_axes)
            caches.append(Cache(c.buffer, c.offset, conv_axes[0].stride, blocks, conv))
            blocks = certify(s, f"layer {i}, ssm", element, ssm_axes)
            caches.append(Cache(s.buffer, s.offset, ssm_axes[0].stride, blocks, ssm))
        fields = []
        first = 0
        for projection, mine in zip(content.projections, channels, strict=True):
            layers = tuple(
                self._conv_places(2 * i, content, first, projection.channels, row)
                for i in range(len(tensors))
            )
            fields.append(FieldPlaces(projection.name, mine // projection.channels, layers))
            first += mine
        ssm_layers = tuple(
            (LayerPlace(2 * i + 1, 0, content.state * element),) for i in range(len(tensors))
        )
        fields.append(FieldPlaces("ssm", heads, ssm_layers))
        return Pages(tuple(caches), tuple(fields)).checked()

    def _conv_places(
        self, cache: int, content: StateContent, first: int, channels: int, row: int
    ) -> tuple[LayerPlace, ...]:
        """Units of `channels` each, from channel `first`; in SD a step has `row` bytes."""
        e, steps = element_bytes(content.conv_dtype), content.steps
        unit = channels * e
        if self.order == content.order == "SD":
            return (LayerPlace(cache, first * e, unit, steps, row),)
        if self.order == content.order:
            return (LayerPlace(cache, first * steps * e, unit * steps),)
        if self.order == "DS":  # the unit in the page is [steps][channels]
            return tuple(
                LayerPlace(
                    cache,
                    (first * steps + t) * e,
                    unit * steps,
                    channels,
                    steps * e,
                    t * unit,
                    e,
                    e,
                )
                for t in range(steps)
            )
        return tuple(
            LayerPlace(cache, t * row + first * e, unit, channels, e, t * e, e, steps * e)
            for t in range(steps)
        )
