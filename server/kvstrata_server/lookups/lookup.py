"""Answers to `POST /v1/placements:lookup`, from the index alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstrata import api
from kvstrata.bulk import BulkLookup, BulkModelLookup, BulkNamespaceLookup, KeyRun
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata_server.lookups.apart import apart, found
from kvstrata_server.lookups.hot import HotPrefixes
from kvstrata_server.lookups.prompts import Prompt, Prompts
from kvstrata_server.lookups.reuse import Chain, Reusable, reusable
from kvstrata_server.metrics import Metrics
from kvstrata_server.placement.batches import KeyBatch
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.placement.held import Held, Reach, Tallied, tally
from kvstrata_server.placement.index import HOST
from kvstrata_server.placement.namespaces import Namespaces
from kvstrata_server.placement.table import Slots

__all__ = ["TokenLookup", "look_up", "look_up_prompts"]

TokenLookup = api.TokenLookup | BulkModelLookup | BulkNamespaceLookup

# An answer's worth of keys, as many as a request may have.
_MOST_RETURNED = api.MAX_KEYS
_PREFIX_BYTES = DIGEST_BYTES + 4


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """Keys; which of them are of which chunks (`chain`), None where that can't be told; and their
    names by position. `namespace`: the one asked about by token ids."""

    batch: KeyBatch
    chain: Chain | None
    texts: Callable[[Sequence[int]], list[str]]
    namespace: str | None = None


async def look_up(
    cluster: Cluster, metrics: Metrics, hot: HotPrefixes, asked: api.LookupRequest | BulkLookup
) -> api.LookupReply:
    """What each node that is up could serve of the keys, best node first."""
    families = cluster.index.families
    if isinstance(asked, BulkLookup):
        batch = families.of_runs(asked.keys, intern=False)
    else:
        batch = families.of_hex(asked.keys, intern=False)
    chain = await apart(len(batch), lambda: _chain(cluster, batch, asked))
    question = _Question(batch, chain, _texts_of(asked))
    held = await found(cluster.index, batch, _reach(cluster, asked.nodes))
    nodes = await _nodes(cluster, question, held)
    if asked.mode == "all":
        await apart(len(held) * len(nodes), lambda: _add_held(question, held, nodes))
        nodes.sort(key=_most_keys)
        _count(metrics, None, question, nodes)
    else:
        nodes.sort(key=_rank)
        _count(metrics, hot, question, nodes)
        if asked.return_keys:
            await apart(len(batch), lambda: _add_keys([question], nodes))
    return api.LookupReply(keys=len(batch), nodes=nodes)


async def look_up_prompts(
    cluster: Cluster, metrics: Metrics, hot: HotPrefixes, asked: TokenLookup, prompts: Prompts
) -> api.LookupReply:
    """The same of a prompt, in each namespace that it was hashed for."""
    questions: list[_Question] = []
    all_nodes: list[api.NodePlacement] = []
    for prompt in prompts.each:
        if questions:
            await asyncio.sleep(0)  # there may be hundreds of them
        question = await apart(len(prompt), partial(_of_prompt, cluster, prompt))
        questions.append(question)
        held = await found(cluster.index, question.batch, _reach(cluster, asked.nodes))
        nodes = await _nodes(cluster, question, held)
        _count(metrics, hot, question, nodes)
        all_nodes += nodes
    all_nodes.sort(key=_rank)
    keys = sum(len(question.batch) for question in questions)
    if asked.return_keys:
        await apart(keys, lambda: _add_keys(questions, all_nodes))
    return api.LookupReply(keys=keys, nodes=all_nodes, refused=prompts.refused)


def _reach(cluster: Cluster, nodes: Sequence[str] | None) -> Reach:
    return cluster.reach_up(None if nodes is None else frozenset(nodes))


# ------------------------------------------------------------ what is asked


def _of_prompt(cluster: Cluster, prompt: Prompt) -> _Question:
    return _Question(
        prompt.batch(cluster.index.families),
        prompt.chain,
        prompt.texts,
        prompt.namespace.digest.hex(),
    )


def _chain(
    cluster: Cluster, batch: KeyBatch, asked: api.LookupRequest | BulkLookup
) -> Chain | None:
    """None where keys are of several namespaces, or of one whose document isn't known, or where
    one of its groups has none."""
    families = cluster.index.families
    first = int(batch.families[0]) if len(batch) else len(families)
    if first < len(families) and (batch.families == first).all():
        return _chain_of(cluster.namespaces, {families[first].prefix: np.arange(len(batch))})
    # In a batch, keys look alike of whose families nobody holds any.
    places: dict[bytes, list[int]] = {}
    if isinstance(asked, BulkLookup):
        end = 0
        for run in asked.keys:
            start, end = end, end + len(run)
            places.setdefault(_prefix_of(run), []).extend(range(start, end))
    else:
        texts: dict[str, list[int]] = {}
        for position, text in enumerate(asked.keys):
            texts.setdefault(text[: 2 * _PREFIX_BYTES], []).append(position)
        places = {bytes.fromhex(text): at for text, at in texts.items()}
    return _chain_of(cluster.namespaces, {p: np.array(at, np.int64) for p, at in places.items()})


def _chain_of(namespaces: Namespaces, places: Mapping[bytes, Slots]) -> Chain | None:
    """By what keys begin with: namespace and group."""
    digests = {prefix[:DIGEST_BYTES] for prefix in places}
    rule = namespaces.rule(digests.pop()) if len(digests) == 1 else None
    if rule is None:
        return None
    by_group = {int.from_bytes(prefix[DIGEST_BYTES:], "big"): at for prefix, at in places.items()}
    return Chain.of(rule, by_group)


def _texts_of(asked: api.LookupRequest | BulkLookup) -> Callable[[Sequence[int]], list[str]]:
    """Names of the keys asked for, by position."""
    if isinstance(asked, api.LookupRequest):
        keys = asked.keys
        return lambda at: [keys[position] for position in at]
    named: list[str] = []

    def texts(at: Sequence[int]) -> list[str]:
        if len(at) == 1:
            return [_key_at(asked, at[0]).hex()]
        if not named:
            for run in asked.keys:
                prefix = _prefix_of(run).hex()
                hashes, size = run.hashes.hex(), 2 * run.size
                named.extend(prefix + hashes[i : i + size] for i in range(0, len(hashes), size))
        return [named[position] for position in at]

    return texts


def _prefix_of(run: KeyRun) -> bytes:
    return run.namespace + run.group.to_bytes(_PREFIX_BYTES - DIGEST_BYTES, "big")


def _key_at(asked: BulkLookup, position: int) -> Key:
    for run in asked.keys:
        if position < len(run):
            return run[position]
        position -= len(run)
    raise IndexError(position)


# ------------------------------------------------------------ what is answered


async def _nodes(cluster: Cluster, question: _Question, held: Held) -> list[api.NodePlacement]:
    chain = question.chain

    def work() -> tuple[dict[str, Tallied], Reusable | None]:
        steps = None if chain is None or chain.plain else reusable(chain, held)
        return tally(held), steps

    tallied, steps = await apart(len(held) * len(held.places), work)
    return [
        _placement(cluster, question, node, tallied[node.id], steps)
        for node in map(cluster.nodes.get, tallied)
        if node is not None  # forgotten meanwhile
    ]


def _placement(
    cluster: Cluster, question: _Question, node: Node, tallied: Tallied, steps: Reusable | None
) -> api.NodePlacement:
    step = None if question.chain is None else question.chain.rule.step

    # Where a step is a chunk, it is as many as there are without a gap.
    def tokens(steps: int) -> int | None:
        return None if step is None else steps * step

    return api.NodePlacement(
        node=node.id,
        incarnation=node.incarnation,
        prefix=tallied.prefix,
        tokens=tokens(tallied.prefix if steps is None else steps.nodes[node.id]),
        tiers={
            tier: api.Tally(
                found=found,
                prefix=prefix,
                tokens=tokens(prefix if steps is None else steps.tiers[node.id, tier]),
            )
            for tier, (found, prefix) in sorted(tallied.tiers.items())
        },
        age=cluster.age(node),
        namespace=question.namespace,
    )


def _rank(node: api.NodePlacement) -> tuple[int, int, float, str]:
    host = node.tiers.get(HOST)
    return -_worth(node), 0 if host is None else -_worth(host), node.age, node.node


def _worth(what: api.NodePlacement | api.Tally) -> int:
    return what.prefix if what.tokens is None else what.tokens


def _most_keys(node: api.NodePlacement) -> tuple[int, int, float, str]:
    host = node.tiers.get(HOST)
    return -len(node.keys or ()), 0 if host is None else -host.found, node.age, node.node


def _add_held(question: _Question, held: Held, nodes: Sequence[api.NodePlacement]) -> None:
    """Which of the keys each has."""
    has = held.per_node(held.sets)
    columns = {node: column for column, node in enumerate(held.nodes)}
    for node in nodes:
        at = np.flatnonzero(has[held.rows, columns[node.node]])
        node.keys = question.texts(at.tolist())


def _add_keys(questions: Sequence[_Question], nodes: Sequence[api.NodePlacement]) -> None:
    """What the longest prefix of each needs, of the first nodes, which are the best."""
    by_namespace = {question.namespace: question for question in questions}
    known: dict[tuple[str | None, int], list[str]] = {}
    left = _MOST_RETURNED
    for node in nodes:
        question = by_namespace[node.namespace]
        of = node.namespace, _worth(node)
        if of not in known:
            known[of] = question.texts(_needed(question, node))
        left -= len(known[of])
        if left < 0:
            return
        node.keys = known[of]


def _needed(question: _Question, node: api.NodePlacement) -> list[int]:
    if question.chain is None or question.chain.plain:
        return list(range(node.prefix))
    steps = (node.tokens or 0) // question.chain.rule.step
    needed: list[int] = question.chain.needed(steps).tolist()
    return needed


def _count(
    metrics: Metrics,
    hot: HotPrefixes | None,
    question: _Question,
    nodes: Sequence[api.NodePlacement],
) -> None:
    """What the best node has of what was asked."""
    metrics.lookup_keys.inc(len(question.batch))
    worth = [_worth(node) for node in nodes]
    best = max(worth, default=0)
    if not best:
        return
    chain, prefix, last, chunks = question.chain, best, best - 1, best
    if chain is not None:
        steps = best // chain.rule.step
        prefix = chain.covered(steps)
        last, chunks = chain.last(steps)
    metrics.lookup_hits.inc(prefix)
    if hot is not None:
        [text] = question.texts([last])
        hot.found(Key(bytes.fromhex(text)), chunks, worth.count(best))
