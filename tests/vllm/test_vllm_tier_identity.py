"""Rows of engines that differ in anything their bytes can depend on are never confused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm_processes import make_model
from vllm_tier_kit import BLOCK, ROW, make_config, make_layout, make_spec

from kvstrata.errors import ConfigError
from kvstrata.keys import Namespace
from kvstrata_adapters.engines.vllm.tier_identity import Engine, engine_being_made, row_namespace
from kvstrata_adapters.engines.vllm.tier_options import TierOptions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def vllm_config(model: Path) -> Any:
    return make_config(model)


def options(**given: Any) -> TierOptions:
    return TierOptions.parse("KVStrataTier", {"tiers": [{"type": "fs", "root": "/x"}], **given})


def name(
    vllm_config: Any,
    change: Callable[[Any], Any] = lambda config: config,
    extra: dict[str, Any] | None = None,
    **given: Any,
) -> Namespace:
    """The namespace after `change` of what vLLM tells its tiers."""
    spec = make_spec(vllm_config, {"cpu_bytes_to_use": 1 << 20, **(extra or {})})
    spec.config = change(spec.config)
    return row_namespace(spec, options(**given), Engine(vllm_config, make_layout()))


def replace(part: str = "", **values: Any) -> Callable[[Any], Any]:
    def change(config: Any) -> Any:
        if not part:
            return dataclasses.replace(config, **values)
        inner = dataclasses.replace(getattr(config, part), **values)
        return dataclasses.replace(config, **{part: inner})

    return change


def test_equal_engines_have_one_namespace(vllm_config: Any, model: Path) -> None:
    first = name(vllm_config)
    assert first == name(make_config(model))
    assert first.chunk_bytes == {0: ROW}
    assert first.hash_algorithm == "sha256"
    assert first.model == "tiny"


def test_where_the_model_lies_does_not_matter(vllm_config: Any, model: Path) -> None:
    other = model.parent / "elsewhere" / "tiny"
    other.parent.mkdir()
    other.symlink_to(model)
    assert name(vllm_config) == name(make_config(other))


@pytest.mark.parametrize(
    "change",
    [
        replace("parallel", tp_size=2),
        replace("parallel", pp_size=2),
        replace("parallel", dcp_size=2),
        replace("model", dtype="fp8"),
        replace("cache", tokens_per_hash=16),
        replace("cache", blocks_per_chunk=2),
        replace(kv_cache_layout="LBNHC"),
        replace(worker_kv_bytes_per_block=ROW // 2),
        replace(canonical_layout=True),
    ],
    ids=str,
)
def test_what_rows_depend_on_is_in_it(vllm_config: Any, change: Callable[[Any], Any]) -> None:
    assert name(vllm_config).digest != name(vllm_config, change).digest


def test_layers_are_in_it(vllm_config: Any) -> None:
    def other(config: Any) -> Any:
        (group,) = config.groups
        renamed = dataclasses.replace(group, layer_names=group.layer_names[::-1])
        return dataclasses.replace(config, groups=(renamed,))

    assert name(vllm_config).digest != name(vllm_config, other).digest


def canonical(ranks: int, portable: bool = True) -> Callable[[Any], Any]:
    """As vLLM describes a tensor-parallel engine that keeps its canonical layout."""

    def change(config: Any) -> Any:
        parallel = dataclasses.replace(
            config.parallel, world_size=ranks, tp_size=ranks, is_parallelism_agnostic=portable
        )
        return dataclasses.replace(
            config,
            canonical_layout=True,
            parallel=parallel,
            worker_kv_bytes_per_block=ROW // ranks,
        )

    return change


def test_canonical_rows_do_not_depend_on_the_ranks(vllm_config: Any) -> None:
    one, two = (name(vllm_config, canonical(n)) for n in (1, 2))
    assert one == two
    assert name(vllm_config, canonical(2, portable=False)) != two
    assert name(vllm_config, canonical(1, portable=False)) != one


def test_rows_as_ranks_wrote_them_do(vllm_config: Any) -> None:
    def ranks(n: int) -> Callable[[Any], Any]:
        return lambda config: dataclasses.replace(canonical(n)(config), canonical_layout=False)

    one, two = (name(vllm_config, ranks(n)) for n in (1, 2))
    assert one.chunk_bytes == two.chunk_bytes
    assert one.digest != two.digest


def test_what_the_operator_says_is_in_it(vllm_config: Any) -> None:
    found = {
        name(vllm_config, **given).digest for given in ({}, {"tenant": "t"}, {"revision": "r"})
    }
    assert len(found) == 3


def test_other_weights_are_another_revision(vllm_config: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = make_model(tmp_path / "tiny")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += torch.ones_like(weights["model.norm.weight"])
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    mine, theirs = name(vllm_config), name(make_config(other))
    assert mine.revision != theirs.revision
    assert (mine.model, mine.config) == (theirs.model, theirs.config)


def test_how_the_engine_is_set_up_is_in_it(vllm_config: Any, model: Path) -> None:
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}
    mine = name(vllm_config)
    assert mine.config != name(make_config(model, hf_overrides=rope)).config
    vllm_config.attention_config.flash_attn_version = 3
    assert mine.content_format != name(vllm_config).content_format


def test_random_hashes_are_refused(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        name(vllm_config)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = name(vllm_config)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert one.hash_seed != name(vllm_config).hash_seed


def test_weights_without_identity_are_refused(vllm_config: Any) -> None:
    vllm_config.load_config.load_format = "dummy"
    with pytest.raises(ConfigError, match="`revision`, in the tier's entry"):
        name(vllm_config)
    assert name(vllm_config, revision="mine").revision == "mine"


def test_scales_made_at_run_time_are_refused(vllm_config: Any) -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(calculate_kv_scales=True))
    spec = make_spec(vllm_config, {"cpu_bytes_to_use": 1 << 20})
    with pytest.raises(ConfigError, match="scales"):
        row_namespace(spec, options(), Engine(config, make_layout()))


def test_the_configuration_is_that_of_the_engine_being_made(vllm_config: Any) -> None:
    layout = KVCacheConfig(1, [], [])

    def connector(vllm_config: Any, kv_cache_config: Any) -> Any:
        return (lambda: engine_being_made())()

    assert connector(vllm_config, layout) == (vllm_config, layout)
    with pytest.raises(ConfigError, match="KVStrataOffloadingSpec"):
        connector(vllm_config, None)
    with pytest.raises(ConfigError, match="KVStrataOffloadingSpec"):
        connector(object(), layout)


@pytest.mark.parametrize("blocks", [1, 2])
def test_chunks_that_may_lack_blocks_are_refused(vllm_config: Any, blocks: int) -> None:
    spec = make_spec(vllm_config, {"cpu_bytes_to_use": 1 << 20, "blocks_per_chunk": blocks})
    windows = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=64
    )
    engine = Engine(vllm_config, KVCacheConfig(1, [], [KVCacheGroupSpec(["a"], windows)]))
    if blocks == 1:
        assert row_namespace(spec, options(), engine)
    else:
        with pytest.raises(ConfigError, match=r"SlidingWindowSpec.*blocks_per_chunk"):
            row_namespace(spec, options(), engine)
