"""Groups of Mamba 2 and gated-delta-net layers: their state by named fields, free of TP.

vLLM's own canonical layout leaves a state to the rank that wrote it. Here the layer says of which
projections its convolution is made and how many heads and groups there are over all ranks; the
tensors that it computes with say where they lie. Both must agree, or the model is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

from kvstrata.errors import ConfigError
from kvstrata.keys import Group
from kvstrata.layout import (
    RankRuns,
    Ranks,
    StateContent,
    StatePages,
    Tensor,
    plan_rank,
)
from kvstrata_adapters.devices.tensors import describe
from kvstrata_adapters.engines.vllm.rows import runs_in_rows

__all__ = ["StateGroup", "derive_state", "state_content"]


@dataclass(frozen=True, slots=True)
class StateGroup:
    """`tag` says what the bytes of its fields mean; runs are of this rank."""

    group: Group
    tag: str
    runs: RankRuns


def derive_state(
    config: OffloadingConfig,
    offloaded: OffloadingGroupConfig,
    refs: Sequence[CanonicalKVCacheRef],
    rows: Sequence[CanonicalKVCacheTensor],
    layers: Mapping[str, Any],
    vllm_config: Any,
) -> StateGroup:
    """One group of states. `layers` are vLLM's, by name; `refs` say which of `rows` each has.

    Raises `ConfigError` naming the layer, `Malformed` naming the tensor or field.
    """
    names = offloaded.layer_names
    if len(refs) != len(names):
        raise ConfigError(
            f"{len(names)} layers of group {offloaded.group_id} have {len(refs)} rows"
        )
    contents = [state_content(name, layers[name], vllm_config) for name in names]
    for name, content in zip(names, contents, strict=True):
        if content != contents[0]:
            raise ConfigError(
                f"layers {names[0]} and {name} of group {offloaded.group_id} differ: "
                f"{contents[0]} and {content}"
            )
    content, tp = contents[0], config.parallel.tp_size
    group = content.group(offloaded.group_id, names, offloaded.tokens_per_block)
    tensors = [_tensors(name, layers[name].kv_cache) for name in names]
    stride = tensors[0][0].strides[0]
    pages = StatePages(content.order, stride).pages(content, tensors, tp)
    stages = (range(len(names)),)
    runs = plan_rank(group, Ranks(tp, stages), 0, config.parallel.rank, pages)
    return StateGroup(group, content.tag, runs_in_rows(runs, pages.caches, names, refs, rows))


def state_content(name: str, layer: Any, vllm_config: Any) -> StateContent:
    """What a layer's state is made of, over all ranks. Raises `ConfigError` if it is not known."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    spec = layer.get_kv_cache_spec(vllm_config)
    if not isinstance(spec, MambaSpec):
        raise ConfigError(f"layer {name} has a {type(spec).__name__} in a group of states")
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"layer {name} keeps its state in mode {spec.mamba_cache_mode!r}, not at block "
            "boundaries: use --enable-prefix-caching, and leave --mamba-cache-mode at align"
        )
    if spec.tp_replicated or spec.num_speculative_blocks or len(spec.dtypes) != 2:
        raise ConfigError(
            f"layer {name} has a state that is replicated, speculative or of "
            f"{len(spec.dtypes)} parts, which is not supported"
        )
    conv, ssm = (str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
    order = get_conv_state_layout()
    # By class, not by `mamba_type`: others of that type shard in their own ways.
    if type(layer) is MambaMixer2:
        return StateContent.mamba2(
            heads=layer.num_heads,
            head_dim=layer.head_dim,
            # The mixer's own count includes copies for ranks; its norm keeps the model's.
            groups=layer.norm.n_groups,
            state=layer.ssm_state_size,
            kernel=layer.conv_kernel_size,
            conv_dtype=conv,
            state_dtype=ssm,
            order=order,
        )
    if type(layer) is QwenGatedDeltaNetAttention:
        if layer.gdn_decode_kernel != "CPU":
            raise ConfigError(
                f"layer {name}: how {layer.gdn_decode_kernel} keeps a state is not known"
            )
        return StateContent.delta_net(
            key_heads=layer.num_k_heads,
            value_heads=layer.num_v_heads,
            key_dim=layer.head_k_dim,
            value_dim=layer.head_v_dim,
            kernel=layer.conv_kernel_size,
            conv_dtype=conv,
            state_dtype=ssm,
            order=order,
            # Its kernels view (v, k) memory as (k, v), unlike those of GPUs.
            interior="k.v",
        )
    raise ConfigError(f"layer {name} is a {type(layer).__name__}, whose state is not known")


def _tensors(name: str, views: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The convolution and the recurrent state that a layer computes with."""
    conv, ssm = views
    try:
        # A view or an error, never a copy.
        ssm = ssm.view(ssm.shape[0], ssm.shape[1], -1)
    except RuntimeError as e:
        raise ConfigError(f"layer {name}: a head of its state does not lie together: {e}") from e
    return describe(conv), describe(ssm)
