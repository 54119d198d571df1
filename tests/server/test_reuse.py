"""The hybrid rule, against one that is written down key by key."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.keys import AttentionKind, Field, Group, Key, Namespace
from kvstrata.testing.geometries import GEOMETRIES
from kvstrata_server.lookups.reuse import Chain, Rule, reusable, reusable_in_order, rule_of
from kvstrata_server.placement.index import PlacementIndex

KINDS: tuple[AttentionKind, ...] = (
    *("full", "mla", "sliding_window", "sliding_window_mla", "mamba", "opaque"),
)


def a_namespace(*groups: tuple[AttentionKind, int, int], per_chunk: int = 1) -> Namespace:
    """Groups by kind, tokens per block, window."""
    made = tuple(
        Group(n, kind, (f"l{n}",), (Field("kv", 1, 8),), tokens, window)
        for n, (kind, tokens, window) in enumerate(groups)
    )
    return Namespace(*("m", "r", "c", "bf16", "f"), made, per_chunk, "xxh3", "", tokens_per_hash=1)


geometries = st.builds(
    lambda groups, per_chunk: a_namespace(*groups, per_chunk=per_chunk),
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 30)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 2),
)


def is_needed(namespace: Namespace, group: Group, tokens: int, end: int) -> bool:
    """Whether a prefix of `tokens` needs this group's chunk that ends at `end`."""
    if end > tokens:
        return False
    if group.kind == "mamba":
        return end == tokens
    if group.kind.startswith("sliding") and group.window:
        return end > tokens - max(1, group.window - 1)
    return True


def longest(namespace: Namespace, total: int, held: set[tuple[int, int]]) -> int:
    """By trying every length; `held` are (group, end of a chunk in tokens)."""
    sizes = {g.id: g.tokens_per_block * namespace.blocks_per_chunk for g in namespace.groups}
    for tokens in range(total, 0, -1):
        if any(tokens % size for size in sizes.values()):
            continue
        needed = {
            (g.id, end)
            for g in namespace.groups
            for end in range(sizes[g.id], tokens + 1, sizes[g.id])
            if is_needed(namespace, g, tokens, end)
        }
        if needed <= held:
            return tokens
    return 0


def key(namespace: Namespace, group: int, end: int) -> Key:
    return namespace.key(group, end.to_bytes(4, "big"))


Place = tuple[str, str]


def asked_for(
    namespace: Namespace, total: int, draw: st.DataObject
) -> tuple[list[tuple[int, int]], Chain | None]:
    """All chunks of a prompt, each group's in order, and groups mixed at random."""
    left = {
        g.id: list(range(size, total + 1, size))
        for g in namespace.groups
        if (size := g.tokens_per_block * namespace.blocks_per_chunk)
    }
    order = draw.draw(st.permutations([g for g, ends in left.items() for _ in ends]))
    chunks = [(g, left[g].pop(0)) for g in order]
    by_group = {
        g.id: np.array([i for i, (of, _) in enumerate(chunks) if of == g.id], np.int64)
        for g in namespace.groups
    }
    return chunks, Chain.of(rule_of(namespace), by_group)


@settings(max_examples=150, deadline=None)
@given(geometries, st.integers(0, 60), st.data())
def test_as_the_rule_says(namespace: Namespace, total: int, draw: st.DataObject) -> None:
    chunks, chain = asked_for(namespace, total, draw)
    assert chain is not None
    places: list[Place] = [("a", "host"), ("a", "fs"), ("a", "obj"), ("b", "host"), ("c", "fs")]
    missing = st.sets(st.sampled_from(chunks), max_size=4) if chunks else st.just(set())
    index = PlacementIndex()
    at: dict[Place, set[tuple[int, int]]] = {}
    for number, place in enumerate(places):
        # Mostly there: what is lost by chance alone leaves no prefix.
        at[place] = set(chunks) - draw.draw(missing)
        index.add(number, [key(namespace, *chunk) for chunk in at[place]])
    keys = [key(namespace, *chunk) for chunk in chunks]
    held = index.held(keys, {n: [place] for n, place in enumerate(places)})

    found = reusable(chain, held)
    step = chain.rule.step
    for place in places:
        assert found.tiers.get(place, 0) * step == longest(namespace, total, at[place]), place
    for node in "abc":
        anywhere = set().union(*(at[place] for place in places if place[0] == node))
        assert found.nodes.get(node, 0) * step == longest(namespace, total, anywhere), node
        steps = found.nodes.get(node, 0)
        positions = chain.needed(steps).tolist() if steps else []
        assert {chunks[p] for p in positions} == {
            (g.id, end)
            for g, end in ((namespace.groups[g], end) for g, end in chunks)
            if steps and is_needed(namespace, g, steps * step, end)
        }
        assert positions == sorted(positions)

    def rest(node: str) -> set[tuple[int, int]]:
        """What counts once host memory alone doesn't go on: of groups that need all, only what
        it has without a gap."""
        host = at.get((node, "host"), set())
        others = set().union(*(at[p] for p in places if p[0] == node and p[1] != "host"))
        for g in namespace.groups:
            ends = [end for of, end in sorted(chunks) if of == g.id]
            windowed = g.kind == "mamba" or (g.kind.startswith("sliding") and g.window)
            for end in ends:
                if (g.id, end) not in host and not windowed:
                    break
                others |= {(g.id, end)} & host
        return others

    in_order = reusable_in_order(chain, held, "host")
    for node in "abc":
        first, both = in_order.get(node, (0, 0))
        assert first * step == longest(namespace, total, at.get((node, "host"), set()))
        assert both * step == longest(namespace, total, rest(node))


@settings(max_examples=100, deadline=None)
@given(geometries, st.integers(1, 8), st.data())
def test_it_takes_each_of_the_chunks_needed_and_no_others(
    namespace: Namespace, steps: int, draw: st.DataObject
) -> None:
    step = rule_of(namespace).step
    tokens = steps * step
    chunks, chain = asked_for(namespace, tokens + step, draw)
    assert chain is not None
    groups = {g.id: g for g in namespace.groups}
    needed = [c for c in chunks if is_needed(namespace, groups[c[0]], tokens, c[1])]
    assert needed == [chunks[p] for p in chain.needed(steps).tolist()]
    # Each node but the last lacks one of them.
    index = PlacementIndex()
    for node in range(len(needed) + 1):
        index.add(node, [key(namespace, *c) for c in [*needed[:node], *needed[node + 1 :]]])
    reach = {n: [(str(n), "host")] for n in range(len(needed) + 1)}
    held = index.held([key(namespace, *chunk) for chunk in chunks], reach)
    found = reusable(chain, held).nodes
    assert found.pop(str(len(needed))) == steps
    assert all(each < steps for each in found.values())


@pytest.mark.parametrize(
    ("group", "last"),
    [
        (("full", 16, 0), None),
        (("full", 16, 128), None),
        (("opaque", 16, 128), None),
        (("mamba", 16, 0), 1),
        (("sliding_window", 16, 0), None),  # a window that the document doesn't tell
        (("sliding_window", 16, 1), 1),
        (("sliding_window", 16, 17), 1),
        (("sliding_window", 16, 18), 2),
        (("sliding_window_mla", 64, 128), 2),
    ],
)
def test_how_much_a_group_needs(group: tuple[AttentionKind, int, int], last: int | None) -> None:
    [rule] = rule_of(a_namespace(group)).groups
    assert (rule.tokens, rule.last) == (group[1], last)


def geometry(model: str) -> Rule:
    [found] = [g for g in GEOMETRIES if g.model == model]
    groups = tuple(each.group for each in found.groups)
    return rule_of(Namespace(*("m", "r", "c", "bf16", "f"), groups, 1, "sha256", ""))


def test_published_models() -> None:
    qwen = geometry("Qwen/Qwen3.6-35B-A3B")
    assert qwen.step == 256
    assert [(g.id, g.last) for g in qwen.groups] == [(0, 1), (1, None)]
    gemma = geometry("google/gemma-3-4b-it")
    assert [(g.id, g.last, gemma.kept(g)) for g in gemma.groups] == [(0, 64, 1), (1, None, 1)]
    deepseek = geometry("deepseek-ai/DeepSeek-V4-Flash")
    assert deepseek.step == math.lcm(64, 256, 4, 8) == 256
    # Of the compressor's states 2 of 64 chunks are ever needed, so no others are looked for.
    assert [(g.tokens, g.last, deepseek.kept(g)) for g in deepseek.groups] == [
        (64, 2, 2),
        (256, None, 1),
        (256, None, 1),
        (256, None, 1),
        (4, 2, 2),
        (4, 2, 2),
        (8, 16, 16),
    ]


def test_many_holders_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = a_namespace(("full", 1, 0), ("mamba", 2, 0))
    chunks = [(0, n) for n in range(1, 21)] + [(1, n) for n in range(2, 21, 2)]
    positions = {0: np.arange(20), 1: np.arange(20, 30)}
    chain = Chain.of(rule_of(namespace), positions)
    assert chain is not None
    index = PlacementIndex()
    for node in range(20):
        index.add(node, [key(namespace, *c) for c in chunks if c[1] <= node + 1])
    keys = [key(namespace, *chunk) for chunk in chunks]
    held = index.held(keys, {n: [(f"n{n:02}", "host")] for n in range(20)})
    whole = reusable(chain, held)
    assert [whole.nodes[f"n{n:02}"] for n in range(20)] == [(n + 1) // 2 for n in range(20)]
    monkeypatch.setattr("kvstrata_server.lookups.reuse._MOST_CELLS", 100)
    assert reusable(chain, held) == whole
    assert reusable_in_order(chain, held, "host")["n19"] == (10, 10)
