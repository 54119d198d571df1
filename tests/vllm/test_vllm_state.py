"""States of real layer classes: cut out of a whole one, stored by all ranks, loaded by others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvstrata.errors import ConfigError, Malformed
from kvstrata_adapters.devices.base import Copy, as_bytes
from kvstrata_adapters.devices.cpu import CpuDevice
from kvstrata_adapters.engines.vllm.state import StateGroup, derive_state

pytestmark = pytest.mark.vllm

NAMES = ("layers.0.mixer", "layers.2.mixer")
BLOCKS, PADDING, BLOCK = 4, 96, 3
HEADS, DIM, STATE, STEPS = 4, 8, 16, 3


class Rank:
    """One rank's states of two layers, in padded rows of one allocation, as vLLM binds them."""

    def __init__(self, kind: str, tp: int = 1, rank: int = 0, groups: int = 2, **spec: Any) -> None:
        self.tp, self.rank = tp, rank
        layer: Any
        if kind == "mamba2":
            layer = object.__new__(MambaMixer2)
            layer.__dict__.update(num_heads=HEADS, head_dim=DIM, ssm_state_size=STATE)
            extra = MambaStateShapeCalculator.extra_groups_for_head_shards(groups, tp)
            layer.__dict__.update(n_groups=groups + extra, norm=SimpleNamespace(n_groups=groups))
            shapes = MambaStateShapeCalculator.mamba2_state_shape(
                tp, HEADS * DIM, groups, HEADS, DIM, STATE, STEPS + 1
            )
            self.projections = [(HEADS, DIM), (groups, STATE), (groups, STATE)]
        else:
            layer = object.__new__(QwenGatedDeltaNetAttention)
            layer.__dict__.update(num_k_heads=groups, num_v_heads=HEADS, gdn_decode_kernel="CPU")
            layer.__dict__.update(head_k_dim=STATE, head_v_dim=DIM)
            shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
                tp, groups, HEADS, STATE, DIM, STEPS + 1
            )
            self.projections = [(groups, STATE), (groups, STATE), (HEADS, DIM)]
        layer.__dict__.update(conv_kernel_size=STEPS + 1)
        self.shapes = tuple(shapes)
        dtypes = (torch.bfloat16, torch.float32)
        self.spec = MambaSpec(
            **{"block_size": 32, "shapes": self.shapes, "dtypes": dtypes}
            | {"mamba_cache_mode": "align"}
            | spec
        )
        self.page = self.spec.state_content_size_bytes
        stride = self.page + PADDING
        pool = torch.zeros(len(NAMES) * BLOCKS * stride, dtype=torch.int8)
        self.rows = list(pool.view(len(NAMES), BLOCKS, stride))
        self.layers: dict[str, Any] = {}
        for name, row in zip(NAMES, self.rows, strict=True):
            mine = object.__new__(type(layer))
            mine.__dict__.update(layer.__dict__)
            mine.__dict__["get_kv_cache_spec"] = lambda _: self.spec
            at, views = 0, []
            for shape, dtype in zip(self.shapes, dtypes, strict=True):
                nbytes = int(np.prod(shape)) * dtype.itemsize
                views.append(row[:, at : at + nbytes].view(dtype).view(-1, *shape))
                at += nbytes
            mine.__dict__["kv_cache"] = tuple(views)
            self.layers[name] = mine

    def derive(self) -> StateGroup:
        config = OffloadingConfig(
            groups=(),
            worker_kv_bytes_per_block=1,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="e",
            model=OffloadingModelConfig("m", "bfloat16"),
            cache=OffloadingCacheConfig(32, 1),
            parallel=OffloadingParallelConfig(
                self.rank, self.tp, self.tp, 1, 1, 1, 0, 1, None, True
            ),
        )
        return derive_state(
            config,
            OffloadingGroupConfig(32, NAMES, 5),
            [CanonicalKVCacheRef(i, self.page) for i in range(len(NAMES))],
            [CanonicalKVCacheTensor(row, row.shape[1]) for row in self.rows],
            self.layers,
            None,
        )

    def copy(self, region: bytearray, load: bool) -> None:
        state = self.derive()
        device = CpuDevice()
        device.register_caches(
            [as_bytes(row) for row in self.rows],
            {5: state.runs.load},
            {5: state.group.page_bytes},
            {5: state.runs.store},
        )
        device.attach(memoryview(region))
        (device.load if load else device.store)(1, [Copy(5, np.array([BLOCK]), np.array([0]))])
        device.wait([1], 5.0)
        (result,) = device.finished()
        device.close()
        assert result.error is None

    def fill(self, whole: list[tuple[list[np.ndarray], np.ndarray]]) -> None:
        """This rank's part of the whole states, cut as the model's weights are."""
        for layer, (parts, ssm) in zip(self.layers.values(), whole, strict=True):
            conv = np.concatenate([self.cut(part, 0).reshape(-1, STEPS) for part in parts])
            if mamba_utils.get_conv_state_layout() == "SD":
                conv = conv.T
            layer.kv_cache[0][BLOCK] = torch.from_numpy(conv.copy())
            layer.kv_cache[1][BLOCK] = torch.from_numpy(self.cut(ssm, 0))

    def cut(self, part: np.ndarray, axis: int) -> np.ndarray:
        local = max(1, part.shape[axis] // self.tp)
        first = self.rank * part.shape[axis] // self.tp
        return part.take(range(first, first + local), axis)


def truth(rank: Rank) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """Per layer: each projection as (units, channels, steps), and the state by heads."""
    rng = np.random.default_rng(0)
    shape = (HEADS, *rank.shapes[1][1:])
    return [
        (
            [rng.integers(0, 250, (*p, STEPS)).astype(np.float32) for p in rank.projections],
            rng.random(shape, dtype=np.float32),
        )
        for _ in NAMES
    ]


@pytest.fixture(params=["SD", "DS"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: request.param)
    monkeypatch.setattr(
        "kvstrata_adapters.engines.vllm.state.get_conv_state_layout", lambda: request.param
    )
    return str(request.param)


CASES = [("mamba2", 4, (1, 2, 4)), ("mamba2", 2, (1, 2)), ("mamba2", 1, (1, 2, 4))]
CASES += [("gdn", 2, (1, 2)), ("gdn", 4, (1, 2, 4))]


@pytest.mark.parametrize(("kind", "groups", "sizes"), CASES)
def test_all_tp_sizes_store_and_load_one_page(
    kind: str, groups: int, sizes: tuple[int, ...], order: str
) -> None:
    pages = []
    whole = truth(Rank(kind, groups=groups))
    for tp in sizes:
        ranks = [Rank(kind, tp, rank, groups) for rank in range(tp)]
        page = bytearray(ranks[0].derive().group.page_bytes)
        for rank in ranks:
            rank.fill(whole)
            rank.copy(page, load=False)
        pages.append(bytes(page))
    assert len(set(pages)) == 1
    assert len({Rank(kind, tp, 0, groups).derive().group for tp in sizes}) == 1
    for tp in sizes:
        for number in range(tp):
            want, got = (Rank(kind, tp, number, groups) for _ in range(2))
            want.fill(whole)
            got.copy(bytearray(pages[0]), load=True)
            for mine, theirs in zip(got.rows, want.rows, strict=True):
                # Padding and other blocks stay as they were, too.
                assert torch.equal(mine, theirs)


def test_a_page_holds_named_fields_in_order() -> None:
    rank = Rank("mamba2")
    whole = truth(rank)
    rank.fill(whole)
    page = bytearray(rank.derive().group.page_bytes)
    rank.copy(page, load=False)
    x = torch.from_numpy(np.stack([parts[0] for parts, _ in whole]))  # layer, head, dim, step
    want = x.permute(1, 0, 3, 2).to(torch.bfloat16).contiguous().view(torch.uint8)
    assert bytes(page[: want.numel()]) == want.numpy().tobytes()
    ssm = np.stack([ssm for _, ssm in whole]).swapaxes(0, 1)
    assert bytes(page[-ssm.nbytes :]) == ssm.tobytes()


def test_tags_tell_kinds_and_orders_apart(order: str) -> None:
    assert Rank("mamba2").derive().tag == (
        f"state-mamba2/conv-{order.lower()}/bfloat16/dim.state/float32"
    )
    # On the CPU, (v, k) memory holds (k, v): chunks of a GPU must not be taken for these.
    assert Rank("gdn").derive().tag == f"state-gdn/conv-{order.lower()}/bfloat16/k.v/float32"


def _kernel(rank: Rank) -> None:
    rank.layers[NAMES[0]].__dict__["gdn_decode_kernel"] = "triton"


def _differ(rank: Rank) -> None:
    rank.layers[NAMES[1]].__dict__["head_dim"] = DIM * 2


def _heads(rank: Rank) -> None:
    for layer in rank.layers.values():
        layer.__dict__["num_heads"] = HEADS // 2


def _dtype(rank: Rank) -> None:
    rank.spec = MambaSpec(32, rank.shapes, (torch.bfloat16,) * 2, mamba_cache_mode="align")


def _elsewhere(rank: Rank) -> None:
    rank.rows[1] = rank.rows[0]


def _attention(rank: Rank) -> None:
    rank.spec = FullAttentionSpec(  # type: ignore[assignment]
        block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32
    )


def _stranger(rank: Rank) -> None:
    old = rank.layers[NAMES[0]]
    new = type("PlamoMixer", (), {})()
    new.__dict__.update(old.__dict__)
    rank.layers[NAMES[0]] = new


@pytest.mark.parametrize(
    ("kind", "spec", "change", "message"),
    [
        ("gdn", {}, _kernel, "layers.0.mixer: how triton keeps a state is not known"),
        ("mamba2", {}, _differ, "layers.0.mixer and layers.2.mixer of group 5 differ"),
        ("mamba2", {}, _heads, r"layer 0, conv: shape\[conv channels\] is 96, it must be 80"),
        ("mamba2", {}, _dtype, "layer 0, ssm: element_bytes is 4, the content's dtype has 2"),
        ("mamba2", {}, _elsewhere, "layers.2.mixer: its tensor .* does not lie in the"),
        ("mamba2", {}, _attention, "layers.0.mixer has a FullAttentionSpec in a group of states"),
        ("mamba2", {}, _stranger, "layers.0.mixer is a PlamoMixer, whose state is not known"),
        ("mamba2", {"mamba_cache_mode": "none"}, None, "use --enable-prefix-caching"),
        ("mamba2", {"num_speculative_blocks": 1}, None, "replicated, speculative"),
        ("mamba2", {"tp_replicated": True}, None, "replicated, speculative"),
    ],
)
def test_what_is_not_known_is_refused(
    kind: str, spec: dict[str, Any], change: Any, message: str
) -> None:
    rank = Rank(kind, **spec)
    if change is not None:
        change(rank)
    with pytest.raises((ConfigError, Malformed), match=message):
        rank.derive()
