"""Which rows of vLLM's host memory are interchangeable.

A secondary tier of vLLM sees rows: a chunk's bytes as vLLM's workers laid them out, and nothing
of what is inside. So the namespace holds whatever that layout can depend on. Where vLLM keeps its
canonical layout (`canonical_layout`, and every layer portable), rows don't depend on the ranks,
and the namespace doesn't name them; elsewhere only engines of the same parallel sizes share.
"""

from __future__ import annotations

import hashlib
import json
import sys
from types import FrameType
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    canonical_format_id,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, RSWASpec, is_full_attention_spec
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.version import __version__

from kvstrata.errors import ConfigError, Malformed
from kvstrata.keys import Field, Group, Namespace
from kvstrata_adapters.engines.vllm.geometry import (
    _config_hash,
    _model_name,
    _revision,
    hash_seed_fingerprint,
    tokens_per_hash,
)
from kvstrata_adapters.engines.vllm.tier_options import TierOptions

__all__ = ["Engine", "engine_being_made", "row_namespace"]


class Engine(NamedTuple):
    """What vLLM's connector knows of the engine that it belongs to; vLLM gives its tiers a part of
    it, without the weights' revision, the hash algorithm or the kinds of its groups."""

    vllm_config: Any
    kv_cache_config: Any


def row_namespace(spec: OffloadingSpec, options: TierOptions, engine: Engine) -> Namespace:
    """Of the engine that `spec` belongs to. One chunk is the used part of a row.

    Raises `ConfigError` if its rows can't be told from those of others.
    """
    config: OffloadingConfig = spec.config
    vllm_config = engine.vllm_config
    _check_whole(config, engine.kv_cache_config)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "KV scales that are computed at run time (calculate_kv_scales) are not in the rows, "
            "so no other engine could read them: take scales from the checkpoint"
        )
    copies = 1 if spec.replicated_layout else config.parallel.world_size
    page = config.worker_kv_bytes_per_block * copies
    if page < 1:
        raise ConfigError("vLLM does not say how large a block of its KV cache is")
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    quantized = str(vllm_config.cache_config.cache_dtype).startswith("fp8")
    namespace = Namespace(
        model=_model_name(config.model.name),
        revision=options.revision or _weights(config, vllm_config),
        config=_config_hash(vllm_config),
        dtype=config.model.dtype,
        content_format=_content(config, vllm_config, bool(spec.replicated_layout)),
        groups=tuple(
            Group(g.group_id, "opaque", ("row",), (Field("row", 1, page),), g.tokens_per_block)
            for g in config.groups
        ),
        blocks_per_chunk=config.cache.blocks_per_chunk,
        hash_algorithm=algorithm,
        hash_seed=hash_seed_fingerprint(algorithm),
        scale_mode="checkpoint" if quantized else "none",
        tenant=options.tenant,
        tokens_per_hash=tokens_per_hash(config),
    )
    try:
        return namespace.checked()
    except Malformed as e:
        raise ConfigError(f"the KV cache of {config.model.name}: {e}") from e


def engine_being_made() -> Engine:
    """From the connector's call that, further up the stack, makes a tier.

    Raises `ConfigError` if there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = Engine(frame.f_locals.get("vllm_config"), frame.f_locals.get("kv_cache_config"))
        if isinstance(found.vllm_config, VllmConfig) and isinstance(
            found.kv_cache_config, KVCacheConfig
        ):
            return found
        frame = frame.f_back
    raise ConfigError(
        f"vLLM {__version__} makes its tiers where its configuration is not at hand, so this "
        "model's chunks can't be told from others: use KVStrataOffloadingSpec instead"
    )


def _check_whole(config: OffloadingConfig, kv_cache_config: Any) -> None:
    """vLLM stores a chunk of a sliding window, or of states, when its last block is there; what
    its first blocks' place holds then is another chunk's."""
    if config.cache.blocks_per_chunk == 1:
        return
    for group in config.groups:
        kept = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        if not is_full_attention_spec(kept) or isinstance(kept, RSWASpec):
            raise ConfigError(
                f"chunks of group {group.group_id} ({type(kept).__name__}) may lack their first "
                "blocks: leave `blocks_per_chunk` at 1 for this model, and `block_size` unset"
            )


def _weights(config: OffloadingConfig, vllm_config: Any) -> str:
    try:
        return _revision(config, vllm_config)
    except ConfigError as e:
        raise ConfigError(f"{e} (here: `revision`, in the tier's entry)") from e


def _content(config: OffloadingConfig, vllm_config: Any, replicated: bool) -> str:
    """A tag of all that decides how a row is laid out inside."""
    parallel = config.parallel
    layout = str(config.kv_cache_layout)
    if config.canonical_layout and parallel.is_parallelism_agnostic:
        rows = f"canonical-{canonical_format_id(layout)}"
    else:
        rows = (
            f"ranks-{parallel.world_size}/tp-{parallel.tp_size}/pp-{parallel.pp_size}"
            f"/pcp-{parallel.pcp_size}/dcp-{parallel.dcp_size}"
        )
        if config.canonical_layout:
            rows += f"/{canonical_format_id(layout)}"
        if replicated:
            rows += "/one-copy"
    layers = [(g.group_id, *g.layer_names) for g in config.groups]
    return " ".join(
        (
            f"vllm-row/{'.'.join(__version__.split('.')[:2])}",
            rows,
            f"{layout}/{_attention(vllm_config)}",
            _machine(),
            f"tokens-per-hash-{config.cache.tokens_per_hash}",
            f"layers-{hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:32]}",
        )
    )


def _attention(vllm_config: Any) -> str:
    """What is configured of how a page looks inside; the rest follows from the machine."""
    chosen = hashlib.sha256(repr(vllm_config.attention_config).encode()).hexdigest()[:16]
    runner = "v2" if vllm_config.use_v2_model_runner else "v1"
    return f"{vllm_config.cache_config.cache_dtype}/{runner}/attention-{chosen}"


def _machine() -> str:
    """vLLM picks an attention backend, and with it a layout, by what it runs on."""
    if not current_platform.is_cpu():
        found = current_platform.get_device_capability()
        version = "any" if found is None else found.as_version_str()
        return f"{current_platform.device_type}/{version}"
    machine = current_platform.get_cpu_architecture().name.lower()
    amx = "/amx" if torch.cpu._is_amx_tile_supported() else ""
    return f"cpu/{machine}/{torch.backends.cpu.get_cpu_capability().lower()}{amx}"
