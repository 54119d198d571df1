"""How many tokens of a prompt an engine need not compute where some chunks are.

A prefix of T tokens is of use if a node has, of each group of layers:

    full, mla                            all chunks from the first to T
    sliding_window, sliding_window_mla   those that cover the `window` - 1 tokens before T, which
                                         the next token still attends to (all where T is less),
                                         and in any case the one that ends at T
    mamba                                the one that ends at T: the state after T tokens
    opaque                               all, since what they hold isn't known

and T is where chunks of all groups end, a multiple of what the namespace's `step` covers. It is
the rule of vLLM 0.32's hybrid cache coordinator (`v1/core/kv_cache_coordinator.py`, window blocks
by `cdiv(window - 1, block)` in `single_type_kv_cache_manager.py`) without speculative decoding.
Its offloading connector rounds `window` up instead, which differs where a chunk's tokens divide
`window` - 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstrata.keys import Group, Namespace
from kvstrata_server.placement.held import Bools, Held
from kvstrata_server.placement.table import Slots

__all__ = ["Chain", "GroupRule", "Reusable", "Rule", "reusable", "reusable_in_order", "rule_of"]

# More than any prompt has: a window of as many is as good as all.
_MOST_CHUNKS = 1 << 32
# Cells of one matrix of keys by holders: 4 MB.
_MOST_CELLS = 1 << 22


@dataclass(frozen=True, slots=True)
class GroupRule:
    """A chunk of the group `id` covers `tokens`; `last` is how many chunks before T have to be
    there, None for all."""

    id: int
    tokens: int
    last: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """Of one namespace: prefixes end at multiples of `step` tokens."""

    step: int
    groups: tuple[GroupRule, ...]

    def chunks(self, group: GroupRule) -> int:
        """Of this group in a step."""
        return self.step // group.tokens

    def kept(self, group: GroupRule) -> int:
        """Of these, the last ones that any prefix needs."""
        chunks = self.chunks(group)
        return chunks if group.last is None else min(group.last, chunks)

    def by_step(self, group: GroupRule, chunks: Slots, steps: int) -> Slots:
        """Of all of this group's chunks, in order, those that prefixes of so many steps may need:
        (steps, kept)."""
        if not steps:  # then a step may be longer than any array
            return np.empty((0, 1), np.int64)
        count = self.chunks(group)
        return chunks[: steps * count].reshape(steps, count)[:, count - self.kept(group) :]


def rule_of(namespace: Namespace) -> Rule:
    per_chunk = namespace.blocks_per_chunk
    groups = tuple(_group_rule(group, per_chunk) for group in namespace.groups)
    return Rule(math.lcm(*(group.tokens for group in groups)), groups)


def _group_rule(group: Group, per_chunk: int) -> GroupRule:
    tokens = group.tokens_per_block * per_chunk
    if group.kind == "mamba":
        return GroupRule(group.id, tokens, 1)
    if group.kind in ("sliding_window", "sliding_window_mla") and group.window:
        last = max(1, -(-(group.window - 1) // tokens))
        return GroupRule(group.id, tokens, last if last < _MOST_CHUNKS else None)
    return GroupRule(group.id, tokens, None)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Which of some keys are of a prompt's chunks, and of which.

    `positions` are into these keys, per group of the rule: (steps, kept) of those that prefixes
    may need, in order.
    """

    rule: Rule
    steps: int
    positions: tuple[Slots, ...]

    @classmethod
    def of(cls, rule: Rule, by_group: Mapping[int, Slots]) -> Chain | None:
        """From the positions of all of each group's keys, in order. None if a group is missing, and
        nothing can be told."""
        if any(group.id not in by_group for group in rule.groups):
            return None
        steps = min(len(by_group[group.id]) // rule.chunks(group) for group in rule.groups)
        positions = (rule.by_step(group, by_group[group.id], steps) for group in rule.groups)
        return cls(rule, steps, tuple(positions))

    @property
    def plain(self) -> bool:
        """Whether a prefix is so many keys without a gap, and nothing else."""
        return len(self.rule.groups) == 1 and self.rule.groups[0].last is None

    def needed(self, steps: int) -> Slots:
        """Positions of the keys that a prefix of so many steps needs, in the keys' order."""
        needed = []
        for group, positions in zip(self.rule.groups, self.positions, strict=True):
            before = positions[:steps].reshape(-1)
            needed.append(before if group.last is None else before[-group.last :])
        return np.sort(np.concatenate(needed))

    def covered(self, steps: int) -> int:
        """How many of the keys lie in such a prefix."""
        return sum(positions[:steps].size for positions in self.positions)

    def last(self, steps: int) -> tuple[int, int]:
        """The key that names such a prefix, at least one step long: its position, and how many
        chunks of its group that prefix has."""
        at = next((i for i, g in enumerate(self.rule.groups) if g.last is None), 0)
        chunks = steps * self.rule.chunks(self.rule.groups[at])
        return int(self.positions[at][steps - 1, -1]), chunks


@dataclass(frozen=True, slots=True)
class Reusable:
    """Steps of the longest prefix: per node over any mix of its tiers, and per tier by itself."""

    nodes: dict[str, int]
    tiers: dict[tuple[str, str], int]


def reusable(chain: Chain, held: Held) -> Reusable:
    # Most nodes have what they have in one tier.
    several = np.flatnonzero(np.diff(np.append(held.starts, len(held.places))) > 1)
    sets = np.concatenate([held.sets, held.per_node(held.sets)[:, several]], axis=1)
    steps = _longest(chain, held, sets).tolist()
    tiers = dict(zip(held.places, steps, strict=False))
    nodes = {node: tiers[node, tier] for node, tier in held.places}
    for at, found in zip(several.tolist(), steps[len(held.places) :], strict=True):
        nodes[held.nodes[at]] = found
    return Reusable(nodes, tiers)


def reusable_in_order(chain: Chain, held: Held, first: str) -> dict[str, tuple[int, int]]:
    """Per node the steps of its longest prefix in the tier `first`, and that with all other tiers
    together; but of groups that need all chunks, `first` counts only up to its first gap."""
    is_first = np.array([tier == first for _, tier in held.places], bool)
    there = held.per_node(held.sets & is_first)
    others = held.per_node(held.sets & ~is_first)
    alone = _longest(chain, held, there).tolist()
    both = _longest(chain, held, others, there).tolist()
    return dict(zip(held.nodes, zip(alone, both, strict=True), strict=True))


def _longest(chain: Chain, held: Held, sets: Bools, first: Bools | None = None) -> Slots:
    """Steps of the longest prefix for each column of `sets`, whose rows are those of `held.sets`.

    `first`: what, of groups that need all chunks, counts only up to its first gap.
    """
    wide = max(1, _MOST_CELLS // max(1, len(held)))
    columns = sets.shape[1]
    if columns <= wide:
        return _longest_of(chain, held, sets, first)
    parts = [slice(start, start + wide) for start in range(0, columns, wide)]
    return np.concatenate(
        [
            _longest_of(chain, held, sets[:, p], None if first is None else first[:, p])
            for p in parts
        ]
    )


def _longest_of(chain: Chain, held: Held, sets: Bools, first: Bools | None) -> Slots:
    best = np.full(sets.shape[1], chain.steps, np.int64)
    if not chain.steps:
        return best
    windows = []
    for group, positions in zip(chain.rule.groups, chain.positions, strict=True):
        if group.last is not None:
            windows.append((group.last, positions))
            continue
        here = held.rows[positions.reshape(-1)]
        if first is None:
            gaps = held.gaps(here, sets)
        else:
            ahead = held.gaps(here, first)
            gaps = _gap(sets[here] | (np.arange(len(here))[:, None] < ahead))
        best = np.minimum(best, gaps // max(1, positions.shape[1]))
    most = int(best.max(initial=0))
    if not most or not windows:
        return best
    anywhere = sets if first is None else sets | first
    good = np.arange(most)[:, None] < best
    for last, positions in windows:
        good &= _complete(anywhere[held.rows[positions[:most].reshape(-1)]], most, last)
    end: Slots = np.where(good.any(axis=0), most - good[::-1].argmax(axis=0), 0)
    return end


def _gap(there: Bools) -> Slots:
    """Per column the number of rows before the first that isn't there."""
    gap: Slots = np.where(there.all(axis=0), len(there), there.argmin(axis=0))
    return gap


def _complete(there: Bools, steps: int, last: int) -> Bools:
    """Per step whether the `last` chunks before its end are there, or all if it has fewer."""
    kept = len(there) // steps
    if last <= kept:
        return np.asarray(there.reshape(steps, kept, -1).all(axis=1), bool)
    ends = np.arange(1, steps + 1) * kept
    starts = np.maximum(ends - last, 0)
    sums = np.zeros((len(there) + 1, there.shape[1]), np.int32)
    np.cumsum(there, axis=0, dtype=np.int32, out=sums[1:])
    return np.asarray(sums[ends] - sums[starts] == (ends - starts)[:, None], bool)
