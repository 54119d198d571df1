"""From what vLLM registers to a namespace and the runs of this rank.

Nothing is guessed: `attention.py` and `state.py` certify each group's tensors against what its
layers say of themselves. What can't be certified (packed layouts, pipeline and context parallelism,
per-token scales) is refused with the name of the layer and the reason.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig

from kvstrata.errors import ConfigError, Malformed
from kvstrata.keys import Group, Namespace
from kvstrata.layout import CopyRun
from kvstrata_adapters.engines.vllm.attention import derive_attention
from kvstrata_adapters.engines.vllm.options import Options
from kvstrata_adapters.engines.vllm.revision import folder_revision
from kvstrata_adapters.engines.vllm.state import derive_state

__all__ = ["Geometry", "derive_geometry", "hash_seed_fingerprint", "tokens_per_hash"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """`runs[group]` is what this rank loads of a page, `store_runs[group]` what it writes."""

    namespace: Namespace
    runs: dict[int, tuple[CopyRun, ...]]
    store_runs: dict[int, tuple[CopyRun, ...]]


def derive_geometry(
    config: OffloadingConfig, options: Options, vllm_config: Any, caches: CanonicalKVCaches
) -> Geometry:
    """Raises `ConfigError` if the model's KV can't be shared safely."""
    try:
        return _derive(config, options, vllm_config, caches)
    except Malformed as e:
        raise ConfigError(f"the KV cache of {config.model.name}: {e}") from e


def _derive(
    config: OffloadingConfig, options: Options, vllm_config: Any, caches: CanonicalKVCaches
) -> Geometry:
    _check_parallel(config, vllm_config)
    layers = vllm_config.compilation_config.static_forward_context
    groups: list[Group] = []
    contents: set[str] = set()
    runs, store_runs = {}, {}
    for offloaded, refs in zip(config.groups, caches.group_data_refs, strict=True):
        first = layers[offloaded.layer_names[0]].get_kv_cache_spec(vllm_config)
        derive = derive_state if isinstance(first, MambaSpec) else derive_attention
        found = derive(config, offloaded, refs, caches.tensors, layers, vllm_config)
        runs[found.group.id], store_runs[found.group.id] = found.runs.load, found.runs.store
        groups.append(found.group)
        contents.add(found.tag)
    if config.cache.blocks_per_chunk > 1 and any(g.window or g.kind == "mamba" for g in groups):
        raise ConfigError(
            "chunks of a sliding-window group or of states may lack their first blocks: "
            "leave `blocks_per_chunk` at 1 for this model"
        )
    namespace = Namespace(
        model=_model_name(config.model.name),
        revision=options.revision or _revision(config, vllm_config),
        config=_config_hash(vllm_config),
        dtype=config.model.dtype,
        content_format=" ".join(sorted(contents)),
        groups=tuple(groups),
        blocks_per_chunk=config.cache.blocks_per_chunk,
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        hash_seed=hash_seed_fingerprint(str(vllm_config.cache_config.prefix_caching_hash_algo)),
        tenant=options.tenant,
        tokens_per_hash=tokens_per_hash(config),
    )
    return Geometry(namespace.checked(), runs, store_runs)


def tokens_per_hash(config: OffloadingConfig) -> int | UnsetType:
    """Where the groups' blocks don't tell: vLLM hashes by their greatest common divisor, or by
    `prefix_match_unit`."""
    tokens: int = config.cache.tokens_per_hash
    return UNSET if all(g.tokens_per_block == tokens for g in config.groups) else tokens


def hash_seed_fingerprint(algorithm: str) -> str:
    """Of what starts vLLM's hash chain in this process. Raises `ConfigError` if it is random."""
    function = get_hash_fn_by_name(algorithm)
    if (
        function in kv_cache_utils._NON_CRYPTO_HASH_FUNCTIONS
        and kv_cache_utils.os.getenv("PYTHONHASHSEED") is None
    ):
        raise ConfigError(
            f"prefix hashes by {algorithm} start from a random seed in each process, so no chunk "
            "could be found again: set PYTHONHASHSEED, or --prefix-caching-hash-algo sha256"
        )
    none_hash = function(kv_cache_utils.resolve_none_hash_seed(function))
    return hashlib.sha256(b"kvstrata hash seed\0" + none_hash).hexdigest()[:32]


def _check_parallel(config: OffloadingConfig, vllm_config: Any) -> None:
    parallel = config.parallel
    for name, size in (
        ("pipeline", parallel.pp_size),
        ("prefill context", parallel.pcp_size),
        ("decode context", parallel.dcp_size),
    ):
        if size > 1:
            raise ConfigError(f"{name} parallelism (size {size}) is not supported")
    if vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        # Scales may be computed at run time, and would then have to travel with the bytes.
        raise ConfigError(
            f"a KV cache of {vllm_config.cache_config.cache_dtype} is not supported: "
            "leave --kv-cache-dtype at auto"
        )


def _model_name(name: str) -> str:
    """A local folder by its last part: where it lies does not change the bytes."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def _revision(config: OffloadingConfig, vllm_config: Any) -> str:
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        raise ConfigError("dummy weights have no identity: set `kvstrata.revision`")
    if Path(config.model.name).is_dir():
        return folder_revision(Path(config.model.name))
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise ConfigError(
            f"the revision of {config.model.name} is not known: set `kvstrata.revision`"
        )
    return str(commit)


def _config_hash(vllm_config: Any) -> str:
    """Of the model's configuration with every override, but not of where it came from."""
    model = vllm_config.model_config
    document = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        document.pop(name, None)
    document["kvstrata"] = [str(model.dtype), str(model.quantization)]
    raw = json.dumps(document, sort_keys=True, default=str).encode()
    return hashlib.sha256(raw).hexdigest()[:32]
