"""One rank of a model as vLLM would register it, with vLLM's own mappings, without an engine."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvstrata_adapters.engines.vllm.geometry import Geometry, derive_geometry
from kvstrata_adapters.engines.vllm.options import Options

HEADS, TOKENS, SIZE, LAYERS, BLOCKS = 4, 8, 16, 3, 5
OPTIONS = Options(revision="r1")


class Model:
    """One rank of a model with one group, as vLLM would register it."""

    def __init__(
        self,
        tp: int = 1,
        rank: int = 0,
        *,
        layout: str = "LBHNC",
        spec: KVCacheSpec | None = None,
        heads: int = HEADS,
        pp: int = 1,
        dcp: int = 1,
        blocks_per_chunk: int = 1,
        cache_dtype: str = "auto",
        backend: str = "FLASH_ATTN",
        isa: str = "vec",
        folder: Path | None = None,
        load_format: str = "auto",
        algorithm: str = "sha256",
    ) -> None:
        local = max(1, heads // tp)
        self.spec = spec or FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=local, head_size=SIZE, dtype=torch.float32
        )
        self.names = tuple(f"layers.{i}.attn" for i in range(LAYERS))
        latent = isinstance(self.spec, MLAAttentionSpec)
        inner = (1, TOKENS, SIZE) if latent else (local, TOKENS, 2 * SIZE)
        order = (1, 0, 2) if layout == "LBNHC" else (0, 1, 2)
        self.tensors = {name: self.cache(inner, order) for name in self.names}
        self.config = OffloadingConfig(
            groups=(OffloadingGroupConfig(TOKENS, self.names, 0),),
            worker_kv_bytes_per_block=1,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="e",
            model=OffloadingModelConfig(str(folder or "org/model"), "float32"),
            cache=OffloadingCacheConfig(TOKENS, blocks_per_chunk),
            parallel=OffloadingParallelConfig(rank, tp * pp, tp, pp, 1, dcp, 0, 1, None, True),
            kv_cache_layout=layout,
        )
        self.layers = {
            name: SimpleNamespace(
                get_kv_cache_spec=lambda _: self.spec,
                get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
                isa=isa,
                # MLA layers drop the axis of their only head.
                kv_cache=tensor.squeeze(1) if latent else tensor,
            )
            for name, tensor in self.tensors.items()
        }
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp,
                prefill_context_parallel_size=1,
                decode_context_parallel_size=1,
                cp_kv_cache_interleave_size=1,
                world_size=tp * pp,
                rank=rank,
            ),
            model_config=SimpleNamespace(
                get_total_num_kv_heads=lambda: heads,
                hf_config=SimpleNamespace(to_dict=lambda: {"hidden": 1, "_name_or_path": "x"}),
                dtype=torch.float32,
                quantization=None,
            ),
            cache_config=SimpleNamespace(
                cache_dtype=cache_dtype, prefix_caching_hash_algo=algorithm
            ),
            load_config=SimpleNamespace(load_format=load_format),
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
        )

    def cache(self, inner: tuple[int, int, int], order: tuple[int, int, int]) -> torch.Tensor:
        """(blocks, heads, tokens, content), in memory in this order, and padded as the spec is."""
        page = max(self.spec.page_size_bytes // 4, math.prod(inner))
        pages = torch.zeros((BLOCKS, page))
        blocks = pages[:, : math.prod(inner)].unflatten(1, [inner[axis] for axis in order])
        return blocks.permute(0, *(1 + order.index(axis) for axis in range(3)))

    def caches(self) -> CanonicalKVCaches:
        group = SimpleNamespace(kv_cache_spec=self.spec, layer_names=list(self.names))
        mappings = derive_canonical_mappings(
            self.vllm_config,  # type: ignore[arg-type]
            SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group]),  # type: ignore[arg-type]
            self.tensors,
        )
        page = getattr(self.spec, "unpadded_page_size_bytes", self.spec.page_size_bytes)
        rows = [self.row(tensor) for tensor in self.tensors.values()]
        return CanonicalKVCaches(
            [CanonicalKVCacheTensor(row, row.shape[1]) for row in rows],
            [
                [
                    CanonicalKVCacheRef(i, page, mappings.get(name))
                    for i, name in enumerate(self.names)
                ]
            ],
        )

    def row(self, tensor: torch.Tensor) -> torch.Tensor:
        """As vLLM's worker makes it: (blocks, bytes of a padded page) of its storage."""
        pitch = tensor.stride(0) * tensor.element_size()
        return torch.tensor([], dtype=torch.int8).set_(
            tensor.untyped_storage(),
            tensor.storage_offset() * tensor.element_size(),
            (len(tensor), self.spec.page_size_bytes),
            (pitch, 1),
        )

    def derive(self, options: Options = OPTIONS) -> Geometry:
        return derive_geometry(self.config, options, self.vllm_config, self.caches())
