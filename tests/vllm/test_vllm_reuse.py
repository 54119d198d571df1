"""What the control plane takes for a prefix that an engine can go on from, against vLLM's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvstrata.keys import AttentionKind, Field, Group, Key, Namespace
from kvstrata_server.lookups.reuse import Chain, reusable, rule_of
from kvstrata_server.placement.index import PlacementIndex

pytestmark = pytest.mark.vllm

_TOKENS = 96


def as_in_vllm(group: Group) -> KVCacheSpec:
    tokens = group.tokens_per_block
    if group.kind == "mamba":
        shapes, dtypes = ((1,),), (torch.float32,)
        return MambaSpec(tokens, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if group.kind == "sliding_window":
        return SlidingWindowSpec(tokens, **sizes, sliding_window=group.window)
    return FullAttentionSpec(tokens, **sizes)


def longest(groups: list[Group], held: set[tuple[int, int]]) -> int:
    """Tokens that vLLM finds of a prompt; `held` are (group, end of a block in tokens)."""
    specs = [KVCacheGroupSpec([f"l{g.id}"], as_in_vllm(g)) for g in groups]
    sizes = [g.tokens_per_block for g in groups]
    coordinator = get_kv_cache_coordinator(
        KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=specs),
        max_model_len=_TOKENS,
        max_in_flight_tokens=_TOKENS,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=math.gcd(*sizes),
        allow_partial_hash_hits=False,
    )

    def cached(block_hash: bytes, ids: list[int]) -> list[KVCacheBlock] | None:
        end = int.from_bytes(block_hash[-4:], "big")
        there = all((group, end) in held for group in ids)
        return [KVCacheBlock(1) for _ in ids] if there else None

    coordinator.block_pool.get_cached_block = cached
    step = math.gcd(*sizes)
    hashes = [BlockHash(end.to_bytes(4, "big")) for end in range(step, _TOKENS + 1, step)]
    found = coordinator.find_longest_cache_hit(hashes, _TOKENS)
    return int(found[1])


def a_namespace(groups: list[Group]) -> Namespace:
    return Namespace(*("m", "r", "c", "bf16", "f"), tuple(groups), 1, "sha256", "")


def chain_of(groups: list[Group], chunks: list[tuple[int, int]]) -> Chain:
    of = {g.id: np.array([i for i, c in enumerate(chunks) if c[0] == g.id]) for g in groups}
    chain = Chain.of(rule_of(a_namespace(groups)), of)
    assert chain is not None
    return chain


def ours(groups: list[Group], chunks: list[tuple[int, int]], held: set[tuple[int, int]]) -> int:
    def key(group: int, end: int) -> Key:
        return a_namespace(groups).key(group, end.to_bytes(4, "big"))

    chain = chain_of(groups, chunks)
    index = PlacementIndex()
    index.add(1, [key(*chunk) for chunk in held])
    found = index.held([key(*chunk) for chunk in chunks], {1: [("n", "host")]})
    return reusable(chain, found).nodes.get("n", 0) * chain.rule.step


@st.composite
def geometries(draw: st.DrawFn) -> list[Group]:
    """Full attention and one to three others, as no engine has more kinds."""
    kinds: list[AttentionKind] = ["full", *draw(st.lists(
        st.sampled_from(["full", "sliding_window", "mamba"]), min_size=1, max_size=3
    ))]  # fmt: skip
    groups = []
    for n, kind in enumerate(kinds):
        tokens = draw(st.sampled_from([4, 8, 16]))
        windows = st.integers(2, 60) | st.integers(1, 4).map(
            lambda chunks, t=tokens: chunks * t + 1
        )
        window = draw(windows) if kind == "sliding_window" else 0
        groups.append(Group(n, kind, (f"l{n}",), (Field("kv", 1, 8),), tokens, window))
    return groups


@settings(max_examples=150, deadline=None)
@given(geometries(), st.data())
def test_as_vllm_finds_it(groups: list[Group], data: st.DataObject) -> None:
    chunks = [
        (g.id, end)
        for g in groups
        for end in range(g.tokens_per_block, _TOKENS + 1, g.tokens_per_block)
    ]
    held = set(chunks) - data.draw(st.sets(st.sampled_from(chunks), max_size=6))
    assert ours(groups, chunks, held) == longest(groups, held)
    # Just what some prefix needs, and all but one chunk of that.
    chain = chain_of(groups, chunks)
    steps = data.draw(st.integers(1, chain.steps))
    needed = {chunks[p] for p in chain.needed(steps).tolist()}
    assert longest(groups, needed) == steps * chain.rule.step
    # That of a window's edge as often as all others together.
    edges = [min(c for c in needed if c[0] == g.id) for g in groups]
    needed.remove(data.draw(st.sampled_from(edges) | st.sampled_from(sorted(needed))))
    assert ours(groups, chunks, needed) == longest(groups, needed) < steps * chain.rule.step
