"""From what vLLM registers to namespaces and runs, with vLLM's own certified mappings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvstrata.errors import ConfigError
from kvstrata_adapters.devices.base import Copy, as_bytes
from kvstrata_adapters.devices.cpu import CpuDevice
from kvstrata_adapters.engines.vllm.geometry import (
    Geometry,
    derive_geometry,
    hash_seed_fingerprint,
)
from kvstrata_adapters.engines.vllm.options import Options

pytestmark = pytest.mark.vllm

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
        shape = (BLOCKS, local, TOKENS, 2 * SIZE)
        if isinstance(self.spec, MLAAttentionSpec):
            shape = (BLOCKS, 1, TOKENS, SIZE)
        self.tensors = {name: torch.zeros(shape) for name in self.names}
        if layout == "LBNHC":
            self.tensors = {
                name: torch.zeros((BLOCKS, TOKENS, local, 2 * SIZE)).transpose(1, 2)
                for name in self.names
            }
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
        layer = SimpleNamespace(
            get_kv_cache_spec=lambda _: self.spec,
            get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
            isa=isa,
        )
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
            compilation_config=SimpleNamespace(
                static_forward_context=dict.fromkeys(self.names, layer)
            ),
        )

    def caches(self) -> CanonicalKVCaches:
        group = SimpleNamespace(kv_cache_spec=self.spec, layer_names=list(self.names))
        mappings = derive_canonical_mappings(
            self.vllm_config,  # type: ignore[arg-type]
            SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group]),  # type: ignore[arg-type]
            self.tensors,
        )
        rows = [as_bytes(tensor) for tensor in self.tensors.values()]
        return CanonicalKVCaches(
            [CanonicalKVCacheTensor(torch.from_numpy(row), row.shape[1]) for row in rows],
            [
                [
                    CanonicalKVCacheRef(i, rows[i].shape[1], mappings.get(name))
                    for i, name in enumerate(self.names)
                ]
            ],
        )

    def derive(self, options: Options = OPTIONS) -> Geometry:
        return derive_geometry(self.config, options, self.vllm_config, self.caches())


def device_of(model: Model, geometry: Geometry) -> CpuDevice:
    device = CpuDevice()
    device.register_caches(
        [as_bytes(tensor) for tensor in model.tensors.values()],
        geometry.runs,
        {0: geometry.namespace.groups[0].page_bytes},
        geometry.store_runs,
    )
    return device


def truth() -> np.ndarray:
    """[layer][head][token][k|v] of block 2."""
    rng = np.random.default_rng(0)
    return rng.random((LAYERS, HEADS, TOKENS, 2 * SIZE), dtype=np.float32)


PAGE = truth().nbytes
COPY = [Copy(0, np.array([2]), np.array([0]))]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_all_ranks_together_make_the_canonical_page(tp: int, layout: str) -> None:
    whole, region = truth(), bytearray(PAGE)
    ranks = [Model(tp, rank, layout=layout) for rank in range(tp)]
    geometries = [model.derive() for model in ranks]
    assert {g.namespace for g in geometries} == {Model().derive().namespace}
    local = max(1, HEADS // tp)
    heads = [slice(first := rank * HEADS // tp, first + local) for rank in range(tp)]
    for model, geometry, mine in zip(ranks, geometries, heads, strict=True):
        for layer, tensor in enumerate(model.tensors.values()):
            tensor[2] = torch.from_numpy(whole[layer, mine])
        device = device_of(model, geometry)
        device.attach(memoryview(region))
        device.store(1, COPY)
        device.wait([1], 10)
        assert device.finished()[0].error is None
        device.close()
    assert bytes(region) == whole.transpose(1, 0, 2, 3).tobytes()

    for model, geometry, mine in zip(ranks, geometries, heads, strict=True):
        for tensor in model.tensors.values():
            tensor.zero_()
        device = device_of(model, geometry)
        device.attach(memoryview(region))
        device.load(1, COPY)
        device.wait([1], 10)
        device.close()
        for layer, tensor in enumerate(model.tensors.values()):
            assert np.array_equal(tensor[2].numpy(), whole[layer, mine])
            assert not tensor[1].any()


def test_a_latent_is_written_once_by_all_ranks_together() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=SIZE, dtype=torch.float32)
    geometries = [Model(2, rank, spec=spec, backend="CPU_MLA").derive() for rank in range(2)]
    group = geometries[0].namespace.groups[0]
    assert (group.kind, group.fields[0].units) == ("mla", 1)
    assert [sum(r.nbytes * r.count for r in g.store_runs[0]) for g in geometries] == [
        group.page_bytes // LAYERS,
        group.page_bytes // LAYERS * 2,
    ]
    assert all(sum(r.nbytes * r.count for r in g.runs[0]) == group.page_bytes for g in geometries)


def test_a_sliding_window_is_its_own_kind() -> None:
    spec = SlidingWindowSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=torch.float32,
        sliding_window=20,
    )
    group = Model(spec=spec).derive().namespace.groups[0]
    assert (group.kind, group.window) == ("sliding_window", 20)
    with pytest.raises(ConfigError, match="leave `blocks_per_chunk` at 1"):
        Model(spec=spec, blocks_per_chunk=2).derive()


MAMBA = MambaSpec(block_size=TOKENS, shapes=((4, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 2}, r"pipeline parallelism \(size 2\) is not supported"),
        ({"dcp": 2}, r"decode context parallelism \(size 2\)"),
        ({"cache_dtype": "fp8"}, "leave --kv-cache-dtype at auto"),
        ({"spec": MAMBA}, r"layers.0.attn keeps its state in mode 'none', not at block"),
        ({"layout": "LHBNC", "tp": 2}, "layout LHBNC of group 0 is not supported"),
        ({"heads": 6, "tp": 4}, "6 units can't be shared evenly by 4 ranks"),
        ({"algorithm": "xxhash"}, "set PYTHONHASHSEED"),
        ({"load_format": "dummy"}, "dummy weights have no identity"),
        ({}, "the revision of org/model is not known"),
    ],
)
def test_what_can_not_be_shared_safely_is_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    given = Options() if "revision" in message or "dummy" in message else OPTIONS
    with pytest.raises(ConfigError, match=message):
        Model(**options).derive(given)


def test_a_layout_other_than_vllm_maps_is_refused() -> None:
    model = Model(tp=2, layout="LBNHC")
    model.config = Model(tp=2).config
    with pytest.raises(ConfigError, match="otherwise than 4 heads of 1024 bytes in layout LBHNC"):
        model.derive()


def test_pages_whose_bytes_depend_on_the_ranks_are_refused() -> None:
    model = Model()
    caches = model.caches()
    mapping = caches.group_data_refs[0][1].mapping
    assert mapping is not None
    opaque = replace(mapping, parallelism_agnostic=False)
    caches.group_data_refs[0][1] = CanonicalKVCacheRef(1, 4096, opaque)
    with pytest.raises(ConfigError, match=r"can't say how the bytes of layer layers.1.attn"):
        derive_geometry(model.config, OPTIONS, model.vllm_config, caches)


def test_pages_that_vllm_does_not_map_are_refused() -> None:
    model = Model()
    caches = model.caches()
    caches.group_data_refs = [[CanonicalKVCacheRef(0, 4096)]]
    with pytest.raises(ConfigError, match="vLLM does not map the pages of group 0"):
        derive_geometry(model.config, OPTIONS, model.vllm_config, caches)


def test_what_the_bytes_mean_is_in_the_namespace(tmp_path: Path) -> None:
    def digest(options: Options = OPTIONS, **model: Any) -> bytes:
        return Model(**model).derive(options).namespace.digest

    same = digest()
    assert digest(tp=2) == same
    assert digest(layout="LBNHC") == same
    different = [
        digest(Options(revision="r2")),
        digest(Options(revision="r1", tenant="t")),
        digest(backend="CPU_ATTN"),
        digest(backend="CPU_ATTN", isa="amx"),
        digest(blocks_per_chunk=2),
        digest(algorithm="sha256_cbor"),
    ]
    assert len({same, *different}) == 7


def test_a_local_folder_counts_by_its_weights_not_its_place(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        folder = tmp_path / parent / "llama"
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(b"w" * 100)
    a, b = (Model(folder=tmp_path / p / "llama").derive(Options()).namespace for p in "ab")
    assert a == b
    assert a.model == "llama"
    (tmp_path / "b" / "llama" / "model.bin").write_bytes(b"v" * 100)
    assert Model(folder=tmp_path / "b" / "llama").derive(Options()).namespace != a


def test_another_seed_of_the_hashes_is_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    fixed = hash_seed_fingerprint("sha256")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert hash_seed_fingerprint("sha256") != fixed
    assert hash_seed_fingerprint("xxhash") != hash_seed_fingerprint("sha256")
