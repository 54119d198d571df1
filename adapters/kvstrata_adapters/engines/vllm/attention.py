"""Groups of attention layers: their heads by the layout package, certified against their tensors.

A layer's own KV-cache spec says how many heads it has and of what; the layout vLLM resolved says
where they must lie. Whether they do is seen from the tensor that the layer computes with: shape,
strides and dtype are compared with what follows from the two, never believed. vLLM's own certified
mapping must exist and agree on the whole, so that what it doesn't trust isn't trusted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

from kvstrata.errors import ConfigError
from kvstrata.keys import AttentionKind, Group
from kvstrata.layout import (
    AttentionContent,
    Packed,
    PhysicalLayout,
    RankRuns,
    Ranks,
    Tensor,
    local_units,
    plan_rank,
)
from kvstrata_adapters.devices.tensors import describe
from kvstrata_adapters.engines.vllm.rows import runs_in_rows

__all__ = ["AttentionGroup", "derive_attention"]

_KINDS: dict[type[AttentionSpec], AttentionKind] = {
    FullAttentionSpec: "full",
    SlidingWindowSpec: "sliding_window",
    MLAAttentionSpec: "mla",
}
# With a row of its own for each layer. Of the others vLLM registers whole blocks of all layers,
# and certifies nothing.
_LAYOUTS = ("LBHNC", "LBNHC")


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """`tag` says what the bytes of a head mean; runs are of this rank."""

    group: Group
    tag: str
    runs: RankRuns


@dataclass(frozen=True, slots=True)
class _LayerFacts:
    kind: AttentionKind
    content: AttentionContent
    window: int
    tag: str
    tiled: bool
    """A head's tokens are not one after the other: only whole heads can be moved."""


def derive_attention(
    config: OffloadingConfig,
    offloaded: OffloadingGroupConfig,
    refs: Sequence[CanonicalKVCacheRef],
    rows: Sequence[CanonicalKVCacheTensor],
    layers: Mapping[str, Any],
    vllm_config: Any,
) -> AttentionGroup:
    """One group of attention. `layers` are vLLM's, by name; `refs` say which of `rows` each has.

    Raises `ConfigError` naming the layer, `Malformed` naming the tensor's field.
    """
    names, tp = offloaded.layer_names, config.parallel.tp_size
    facts = _common(
        offloaded, [_layer_facts(n, layers[n], offloaded, tp, vllm_config) for n in names]
    )
    content = facts.content
    group = content.group(offloaded.group_id, facts.kind, names, facts.window)
    layout = _layout(config, offloaded, facts)
    if len(refs) != len(names) or any(ref.mapping is None for ref in refs):
        raise ConfigError(
            f"vLLM does not map the pages of group {offloaded.group_id} ({names[0]}, ...): "
            "its layers are packed into one block, or ranks are not just tensor-parallel"
        )
    padded = {rows[ref.tensor_idx].page_size_bytes for ref in refs}
    if len(padded) != 1:
        raise ConfigError(f"the layers of group {offloaded.group_id} have pages of {padded} bytes")
    tensors = [_tensor(layers[name].kv_cache) for name in names]
    pages = Packed(layout, page_bytes=padded.pop()).pages(content, tensors, tp)
    runs = plan_rank(group, Ranks(tp, (range(len(names)),)), 0, config.parallel.rank, pages)
    for name, ref in zip(names, refs, strict=True):
        _check_mapping(name, ref, content, tp)
    return AttentionGroup(group, facts.tag, runs_in_rows(runs, pages.caches, names, refs, rows))


def _layer_facts(
    name: str, layer: Any, offloaded: OffloadingGroupConfig, tp: int, vllm_config: Any
) -> _LayerFacts:
    spec = layer.get_kv_cache_spec(vllm_config)
    kind = _KINDS.get(type(spec))
    if kind is None:
        raise ConfigError(f"layer {name} has a {type(spec).__name__}, which is not supported")
    if spec.kv_quant_mode.is_per_token_head:
        raise ConfigError(f"layer {name} has a scale per token and head, which is not supported")
    backend, dtype = layer.get_attn_backend().get_name(), str(spec.dtype).removeprefix("torch.")
    tag, tokens = f"{backend.lower()}/{dtype}", offloaded.tokens_per_block
    tiled = backend == "CPU_ATTN"
    if tiled:
        # Tiled inside a head for one instruction set: no other can read it.
        tag += f"/{layer.isa}"
    if kind == "mla":
        content = AttentionContent(1, tokens, spec.head_size, 0, dtype)
        return _LayerFacts(kind, content, 0, f"{tag}/{spec.head_size}", tiled)
    heads, local = vllm_config.model_config.get_total_num_kv_heads(), spec.num_kv_heads
    # One layer may have other heads than the model says; the ranks then share those evenly.
    units = heads if local == max(1, heads // tp) else local * tp
    content = AttentionContent(units, tokens, spec.head_size, spec.head_size_v, dtype)
    window = getattr(spec, "sliding_window", None) or 0
    return _LayerFacts(kind, content, window, f"{tag}/{content.key}+{content.value}", tiled)


def _common(offloaded: OffloadingGroupConfig, facts: Sequence[_LayerFacts]) -> _LayerFacts:
    """The facts of a group, which all its layers must share."""
    for name, other in zip(offloaded.layer_names, facts, strict=True):
        if other != facts[0]:
            raise ConfigError(
                f"layers {offloaded.layer_names[0]} and {name} of group {offloaded.group_id} "
                f"differ: {facts[0]} and {other}"
            )
    return facts[0]


def _layout(
    config: OffloadingConfig, offloaded: OffloadingGroupConfig, facts: _LayerFacts
) -> PhysicalLayout:
    layout = config.kv_cache_layout
    known = _LAYOUTS[:1] if facts.tiled else _LAYOUTS
    if layout not in known:
        raise ConfigError(
            f"KV cache layout {layout} of group {offloaded.group_id} is not supported: "
            f"use one of {list(known)}"
        )
    return cast(PhysicalLayout, layout)


def _tensor(kv_cache: Any) -> Tensor:
    """What a layer computes with as (blocks, heads, tokens, content)."""
    tensor = describe(kv_cache)
    if len(tensor.shape) != 3:
        return tensor
    # A latent, whose only head has no axis.
    return Tensor(
        (tensor.shape[0], 1, *tensor.shape[1:]),
        (tensor.strides[0], tensor.strides[0], *tensor.strides[1:]),
        tensor.element_bytes,
        tensor.buffer_bytes,
        tensor.offset,
        tensor.buffer,
    )


def _check_mapping(name: str, ref: CanonicalKVCacheRef, content: AttentionContent, tp: int) -> None:
    mapping, (field,) = ref.mapping, content.fields()
    if mapping is None or not mapping.parallelism_agnostic:
        raise ConfigError(f"vLLM can't say how the bytes of layer {name} depend on the ranks")
    local = local_units(content.heads, tp) * field.unit_bytes
    pages = (mapping.canonical_page_size_bytes, mapping.local_page_size_bytes, ref.page_size_bytes)
    if pages != (content.heads * field.unit_bytes, local, local):
        raise ConfigError(
            f"layer {name}: vLLM maps its page of {ref.page_size_bytes} bytes otherwise than "
            f"{content.heads} heads of {field.unit_bytes} bytes over {tp} ranks"
        )
