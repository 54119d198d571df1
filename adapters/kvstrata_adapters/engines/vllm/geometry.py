"""From what vLLM registers to a namespace and the runs of this rank.

Nothing is guessed: the head count comes from each layer's own KV-cache spec, the interior of a
page from the layout vLLM resolved, and both are checked against vLLM's own certified mapping of
the layer. States of Mamba and the like are `state.py`'s. What can't be certified (packed layouts,
pipeline and context parallelism, per-token scales) is refused with the name of the layer and the
reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

from kvstrata.errors import ConfigError, Malformed
from kvstrata.keys import AttentionKind, Field, Group, Namespace
from kvstrata.layout import (
    CopyRun,
    FieldShare,
    LayerPlace,
    check_tiling,
    derive_runs,
    share_of,
)
from kvstrata_adapters.engines.vllm.options import Options
from kvstrata_adapters.engines.vllm.revision import folder_revision
from kvstrata_adapters.engines.vllm.state import derive_state

__all__ = ["Geometry", "derive_geometry", "hash_seed_fingerprint"]

_KINDS: dict[type[AttentionSpec], AttentionKind] = {
    FullAttentionSpec: "full",
    SlidingWindowSpec: "sliding_window",
    MLAAttentionSpec: "mla",
}
# How a layout orders the tokens and heads of one layer's page.
_HEAD_MAJOR = {"LBHNC", "BLHNC"}
_TOKEN_MAJOR = {"LBNHC", "BLNHC"}


@dataclass(frozen=True, slots=True)
class Geometry:
    """`runs[group]` is what this rank loads of a page, `store_runs[group]` what it writes."""

    namespace: Namespace
    runs: dict[int, tuple[CopyRun, ...]]
    store_runs: dict[int, tuple[CopyRun, ...]]


@dataclass(frozen=True, slots=True)
class _LayerFacts:
    kind: AttentionKind
    units: int
    """KV heads over all ranks."""
    local_units: int
    window: int
    content: str
    """What the bytes of a unit mean."""


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
    heads = vllm_config.model_config.get_total_num_kv_heads()
    groups: list[Group] = []
    contents: set[str] = set()
    runs, store_runs = {}, {}
    rows = [tensor.page_size_bytes for tensor in caches.tensors]
    tp, rank = config.parallel.tp_size, config.parallel.rank
    for offloaded, refs in zip(config.groups, caches.group_data_refs, strict=True):
        names = offloaded.layer_names
        if isinstance(layers[names[0]].get_kv_cache_spec(vllm_config), MambaSpec):
            state = derive_state(config, offloaded, refs, caches.tensors, layers, vllm_config)
            group = state.group
            runs[group.id], store_runs[group.id] = state.runs.load, state.runs.store
            groups.append(group)
            contents.add(state.tag)
            continue
        facts = {name: _layer_facts(name, layers[name], heads, tp, vllm_config) for name in names}
        fact = _common(offloaded, facts)
        group = _group(offloaded, refs, fact)
        _certify(config, offloaded, refs, fact, group.fields[0].unit_bytes, rank)
        places = _places(config, offloaded, refs, fact, group.fields[0].unit_bytes)
        runs[group.id] = _rank_runs(group, places, rank, tp, rows, write=False)
        store_runs[group.id] = _rank_runs(group, places, rank, tp, rows, write=True)
        # All ranks have one geometry, so this rank can check that together they write it all.
        check_tiling(group, [_rank_runs(group, places, r, tp, rows, write=True) for r in range(tp)])
        groups.append(group)
        contents.add(fact.content)
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
    )
    return Geometry(namespace.checked(), runs, store_runs)


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


def _layer_facts(name: str, layer: Any, heads: int, tp: int, vllm_config: Any) -> _LayerFacts:
    spec = layer.get_kv_cache_spec(vllm_config)
    kind = _KINDS.get(type(spec))
    if kind is None:
        raise ConfigError(f"layer {name} has a {type(spec).__name__}, which is not supported")
    if spec.kv_quant_mode.is_per_token_head:
        raise ConfigError(f"layer {name} has a scale per token and head, which is not supported")
    backend = layer.get_attn_backend().get_name()
    content = f"{backend.lower()}/{str(spec.dtype).removeprefix('torch.')}"
    if backend == "CPU_ATTN":
        # Tiled inside a head for one instruction set: no other can read it.
        content += f"/{layer.isa}"
    if kind == "mla":
        return _LayerFacts(kind, 1, 1, 0, f"{content}/{spec.head_size}")
    window = getattr(spec, "sliding_window", None) or 0
    local = spec.num_kv_heads
    # One layer may have other heads than the model says; the ranks then share those evenly.
    units = heads if local == max(1, heads // tp) else local * tp
    return _LayerFacts(kind, units, local, window, f"{content}/{spec.head_size}+{spec.head_size_v}")


def _common(offloaded: OffloadingGroupConfig, facts: Mapping[str, _LayerFacts]) -> _LayerFacts:
    """The facts of a group, which all its layers must share."""
    first = facts[offloaded.layer_names[0]]
    for name in offloaded.layer_names[1:]:
        if facts[name] != first:
            raise ConfigError(
                f"layers {offloaded.layer_names[0]} and {name} of group {offloaded.group_id} "
                f"differ: {first} and {facts[name]}"
            )
    return first


def _group(
    offloaded: OffloadingGroupConfig, refs: Sequence[CanonicalKVCacheRef], fact: _LayerFacts
) -> Group:
    names = offloaded.layer_names
    if len(refs) != len(names) or any(ref.mapping is None for ref in refs):
        raise ConfigError(
            f"vLLM does not map the pages of group {offloaded.group_id} ({names[0]}, ...): "
            "its layers are packed into one block, or ranks are not just tensor-parallel"
        )
    pages = {ref.page_size_bytes for ref in refs}
    if len(pages) != 1:
        raise ConfigError(f"the layers of group {offloaded.group_id} have pages of {pages} bytes")
    page = pages.pop()
    if page % fact.local_units:
        raise ConfigError(f"{page} bytes of {names[0]} don't divide into {fact.local_units} heads")
    return Group(
        id=offloaded.group_id,
        kind=fact.kind,
        layers=names,
        fields=(Field("kv", fact.units, page // fact.local_units),),
        tokens_per_block=offloaded.tokens_per_block,
        window=fact.window,
    )


def _certify(
    config: OffloadingConfig,
    offloaded: OffloadingGroupConfig,
    refs: Sequence[CanonicalKVCacheRef],
    fact: _LayerFacts,
    unit_bytes: int,
    rank: int,
) -> None:
    """Check where we take units to be against vLLM's mapping of each layer."""
    token_major = _token_major(config, offloaded, fact)
    units, _ = share_of(fact.units, 1, rank, config.parallel.tp_size)
    cell = unit_bytes // offloaded.tokens_per_block
    local_row, total_row = fact.local_units * cell, fact.units * cell
    for name, ref in zip(offloaded.layer_names, refs, strict=True):
        mapping = ref.mapping
        if mapping is None or not mapping.parallelism_agnostic:
            raise ConfigError(f"vLLM can't say how the bytes of layer {name} depend on the ranks")
        good = mapping.canonical_page_size_bytes == fact.units * unit_bytes
        for run in mapping.runs if good else ():
            for i in range(run.num_fragments):
                local = run.local_offset + i * run.local_stride
                want = units.start * unit_bytes + local
                if token_major:
                    token, inside = divmod(local, local_row)
                    want = token * total_row + units.start * cell + inside
                good &= run.canonical_offset + i * run.canonical_stride == want
        if not good:
            raise ConfigError(
                f"layer {name}: vLLM maps its page of {ref.page_size_bytes} bytes otherwise than "
                f"{fact.units} heads of {unit_bytes} bytes in layout {config.kv_cache_layout}"
            )


def _token_major(
    config: OffloadingConfig, offloaded: OffloadingGroupConfig, fact: _LayerFacts
) -> bool:
    if fact.units == 1 or config.kv_cache_layout in _HEAD_MAJOR:
        return False
    if config.kv_cache_layout in _TOKEN_MAJOR:
        return True
    raise ConfigError(
        f"KV cache layout {config.kv_cache_layout} of group {offloaded.group_id} is not supported: "
        f"use one of {sorted(_HEAD_MAJOR | _TOKEN_MAJOR)}"
    )


def _places(
    config: OffloadingConfig,
    offloaded: OffloadingGroupConfig,
    refs: Sequence[CanonicalKVCacheRef],
    fact: _LayerFacts,
    unit_bytes: int,
) -> tuple[LayerPlace, ...]:
    if not _token_major(config, offloaded, fact):
        return tuple(LayerPlace(ref.tensor_idx, 0, unit_bytes) for ref in refs)
    tokens = offloaded.tokens_per_block
    cell = unit_bytes // tokens
    return tuple(
        LayerPlace(ref.tensor_idx, 0, cell, pieces=tokens, piece_stride=fact.local_units * cell)
        for ref in refs
    )


def _rank_runs(
    group: Group,
    places: tuple[LayerPlace, ...],
    rank: int,
    ranks: int,
    rows: Sequence[int],
    write: bool,
) -> tuple[CopyRun, ...]:
    units, layers = share_of(group.fields[0].units, len(group.layers), rank, ranks)
    layers = layers if write else range(len(group.layers))
    share = FieldShare(
        "kv", units.start, len(units), places[layers.start : layers.stop], layers.start
    )
    return derive_runs(group, [share], rows)


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
