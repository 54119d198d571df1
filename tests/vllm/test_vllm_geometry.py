"""From what vLLM registers to namespaces and runs, with vLLM's own certified mappings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from geometry_kit import HEADS, LAYERS, OPTIONS, SIZE, TOKENS, Model
from vllm.v1.kv_cache_interface import (
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef

from kvstrata.errors import ConfigError
from kvstrata_adapters.devices.base import Copy
from kvstrata_adapters.devices.choose import cache_rows, open_device
from kvstrata_adapters.devices.cpu import CpuDevice
from kvstrata_adapters.engines.vllm.geometry import (
    Geometry,
    derive_geometry,
    hash_seed_fingerprint,
)
from kvstrata_adapters.engines.vllm.options import Options

pytestmark = pytest.mark.vllm


def device_of(model: Model, geometry: Geometry) -> CpuDevice:
    rows = [tensor.tensor for tensor in model.caches().tensors]
    device = open_device(rows)
    assert isinstance(device, CpuDevice)
    device.register_caches(
        [cache_rows(row) for row in rows],
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


def test_pages_with_padding_are_shared_without_it() -> None:
    """As hybrid models have it, whose states need larger pages."""
    plain = Model(tp=2, rank=1)
    page = plain.spec.page_size_bytes
    for layout in ("LBHNC", "LBNHC"):
        spec = replace(plain.spec, page_size_padded=page + 192)
        model, region = Model(tp=2, rank=1, layout=layout, spec=spec), bytearray(PAGE)
        assert model.derive().namespace == plain.derive().namespace
        whole = truth()
        for layer, tensor in enumerate(model.tensors.values()):
            tensor[2] = torch.from_numpy(whole[layer, HEADS // 2 :])
        device = device_of(model, model.derive())
        device.attach(memoryview(region))
        device.store(1, COPY)
        device.wait([1], 10)
        assert device.finished()[0].error is None
        device.close()
        assert region[PAGE // 2 :] == whole[:, HEADS // 2 :].transpose(1, 0, 2, 3).tobytes()


def test_a_layout_other_than_the_tensors_is_refused() -> None:
    model = Model(tp=2, layout="LBNHC")
    model.config = Model(tp=2).config
    with pytest.raises(ConfigError, match=r"stride\[heads\] is 128 bytes, it must be 1024"):
        model.derive()


def test_a_page_that_vllm_maps_otherwise_is_refused() -> None:
    model = Model(tp=2)
    caches = model.caches()
    ref = caches.group_data_refs[0][1]
    assert ref.mapping is not None
    half = replace(ref.mapping, canonical_page_size_bytes=2048)
    caches.group_data_refs[0][1] = replace(ref, mapping=half)
    with pytest.raises(ConfigError, match=r"layers.1.attn: .* than 4 heads of 1024 bytes"):
        derive_geometry(model.config, OPTIONS, model.vllm_config, caches)


def test_a_layer_that_computes_elsewhere_is_refused() -> None:
    model = Model()
    model.layers["layers.1.attn"].kv_cache = torch.zeros_like(model.tensors["layers.1.attn"])
    with pytest.raises(ConfigError, match=r"layers.1.attn: its tensor .* does not lie in the"):
        model.derive()


def test_heads_that_a_cpu_tiles_are_moved_whole_or_not_at_all() -> None:
    assert Model(backend="CPU_ATTN").derive()
    with pytest.raises(ConfigError, match=r"layout LBNHC of group 0 .* use one of \['LBHNC'\]"):
        Model(backend="CPU_ATTN", layout="LBNHC").derive()


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
