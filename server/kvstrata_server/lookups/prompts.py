"""Prompts given as token ids: of which chunks they are made, in each namespace that may hold them.

Hashing a long prompt takes a tenth of a second, so it is done on another thread; namespaces that
hash alike share the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata import api
from kvstrata.bulk import TOKEN_BYTES, BulkModelTokens, BulkNamespaceTokens, check_tokens
from kvstrata.errors import Malformed, Missing
from kvstrata.keys import Namespace
from kvstrata_server.access.roles import Identity
from kvstrata_server.lookups.apart import apart
from kvstrata_server.lookups.hashing import (
    prefix_hashes,
    scheme,
    sequence_hashes,
    sequence_prefixes,
)
from kvstrata_server.lookups.reuse import Chain, rule_of
from kvstrata_server.placement.batches import Families, KeyBatch
from kvstrata_server.placement.namespaces import Namespaces
from kvstrata_server.placement.table import Slots

__all__ = [
    "MOST_CHUNKS",
    "Prompt",
    "Prompts",
    "hashed",
    "namespaces_of_model",
    "prompts_of",
    "sequenced",
]

Tokens = api.NamespaceTokens | api.ModelTokens | BulkNamespaceTokens | BulkModelTokens

TokenIds = Sequence[int] | bytes
"""Numbers, or as `kvstrata.bulk` has them."""

MOST_CHUNKS = 1 << 21
"""Of one prompt, in all its namespaces: what they are looked for by takes about 100 B for each."""

# Up to here hashing takes no longer than a change of threads is worth.
_FEW_TOKENS = 16_384


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The chunks of a namespace that a prefix of the prompt may need, in the order in which they
    end, and then of their groups.

    A key is of the group `groups[i]` (a number into the rule's) and has the hash `links[i]`, a row
    of `hashes` (n x size uint8), which are those of the prompt's prefixes.
    """

    namespace: Namespace
    hashes: npt.NDArray[np.uint8]
    chain: Chain
    groups: Slots
    links: Slots

    @classmethod
    def of(cls, namespace: Namespace, hashes: Sequence[bytes], most: int) -> Prompt:
        """`hashes` as `hashing.prefix_hashes` gives them. Raises `Malformed` for more than `most`
        chunks."""
        rule, per_hash = rule_of(namespace), namespace.hash_step
        if per_hash is None:
            raise ValueError(f"{namespace.model} has no hashes of known length")
        steps = len(hashes) * per_hash // rule.step
        chunks = steps * sum(rule.kept(group) for group in rule.groups)
        if chunks > most:
            raise Malformed(
                f"these tokens are {chunks} chunks of namespace {namespace.digest.hex()}, and at "
                f"most {MOST_CHUNKS} of all namespaces are looked for: ask about fewer tokens, or "
                "about one namespace"
            )
        parts = []
        for group in rule.groups:
            apart = min(group.tokens // per_hash, len(hashes) + 1)
            ends = np.arange(apart, len(hashes) + 1, apart)
            parts.append(rule.by_step(group, ends, steps) - 1)
        links = np.concatenate([part.reshape(-1) for part in parts])
        groups = np.repeat(np.arange(len(parts)), [part.size for part in parts])
        order = np.argsort(links, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        ends = np.cumsum([part.size for part in parts])
        positions = [
            at.reshape(part.shape)
            for at, part in zip(np.split(places, ends[:-1]), parts, strict=True)
        ]
        size = len(hashes[0]) if hashes else 1
        table = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, size)
        chain = Chain(rule, steps, tuple(positions))
        return cls(namespace, table, chain, groups[order], links[order])

    def __len__(self) -> int:
        return len(self.links)

    def batch(self, families: Families) -> KeyBatch:
        return families.of_columns(self._prefixes, self.groups, self.hashes[self.links])

    def texts(self, positions: Slots | Sequence[int]) -> list[str]:
        """The keys at these positions, as they travel in JSON."""
        prefixes, size = [prefix.hex() for prefix in self._prefixes], 2 * self.hashes.shape[1]
        at = np.asarray(positions, np.int64)
        hashes = self.hashes[self.links[at]].tobytes().hex()
        return [
            prefixes[group] + hashes[i * size : (i + 1) * size]
            for i, group in enumerate(self.groups[at].tolist())
        ]

    @property
    def _prefixes(self) -> list[bytes]:
        digest = self.namespace.digest
        return [digest + group.id.to_bytes(4, "big") for group in self.chain.rule.groups]


@dataclass(frozen=True, slots=True)
class Prompts:
    """One prompt in several namespaces. `refused`: digests of those whose hashes can't be
    computed, or that have too many chunks, and why."""

    each: Sequence[Prompt]
    refused: dict[str, str]


async def prompts_of(
    namespaces: Namespaces, who: Identity, seeds: Sequence[str], asked: Tokens
) -> Prompts:
    """Raises `Missing` if no such namespace is known, `Forbidden` if `who` may not ask about it,
    and `Malformed` if hashes can be computed for none."""
    if isinstance(asked, api.ModelTokens | BulkModelTokens):
        chosen = namespaces_of_model(namespaces, who, asked.model, asked.tenant, asked.revision)
    else:
        digest = bytes.fromhex(asked.namespace)
        namespaces.require_visible([digest], who)
        namespace = namespaces.get(digest)
        if namespace is None:
            raise Missing(
                f"no node has reported the document of namespace {asked.namespace}: ask by keys, "
                "or about one that GET /v1/namespaces lists with its document"
            )
        chosen = [namespace]
    return await hashed(chosen, asked.token_ids, seeds, asked.lora, asked.cache_salt)


async def needed_keys(
    namespaces: Namespaces, who: Identity, seeds: Sequence[str], asked: Tokens
) -> list[str]:
    """What an engine needs to go on after these tokens, as far as chunks of all groups end there.

    Raises as `prompts_of` does, and `Malformed` if they are too few, or of several namespaces.
    """
    prompts = await prompts_of(namespaces, who, seeds, asked)
    digests = [*(prompt.namespace.digest.hex() for prompt in prompts.each), *prompts.refused]
    if len(digests) > 1:
        raise Malformed(f"the model has several namespaces: name one of {', '.join(digests)}")
    [prompt] = prompts.each
    if not prompt.chain.steps:
        raise Malformed(
            f"too few tokens: chunks of all groups end every {prompt.chain.rule.step} of them"
        )
    needed = prompt.chain.needed(prompt.chain.steps)
    if len(needed) > api.MAX_KEYS:
        raise Malformed(
            f"these tokens need {len(needed)} keys, and {api.MAX_KEYS} may be: ask for "
            "the keys (`return_keys` of a lookup), and send them in parts"
        )
    return await apart(len(needed), lambda: prompt.texts(needed))


def namespaces_of_model(
    namespaces: Namespaces, who: Identity, model: str, tenant: str, revision: str | None = None
) -> list[Namespace]:
    """Raises `Missing` if there is none that `who` may know of."""
    found = [
        namespace
        for namespace in namespaces.visible(who)
        if (namespace.model, namespace.tenant) == (model, tenant)
        and revision in (None, namespace.revision)
    ]
    if not found:
        of = "" if revision is None else f", revision {revision}"
        raise Missing(f"no node has reported chunks of {model}{of}, tenant {tenant!r}")
    return found


async def hashed(
    chosen: Sequence[Namespace],
    tokens: TokenIds,
    seeds: Sequence[str],
    lora: str = "",
    salt: str = "",
) -> Prompts:
    """Raises `Malformed` if hashes can be computed for none of these namespaces."""
    count = len(tokens)
    if isinstance(tokens, bytes):
        check_tokens(tokens)
        count //= TOKEN_BYTES
    if count > _FEW_TOKENS:
        return await asyncio.to_thread(_hashed, chosen, tokens, seeds, lora, salt)
    return _hashed(chosen, tokens, seeds, lora, salt)


async def sequenced(
    chosen: Sequence[Namespace], hashes: Sequence[int], each_by_itself: bool
) -> list[Prompt]:
    """Of a prompt whose hashes by the scheme `xxh3` are known: of blocks with all before them, or
    of each block by itself. Raises `Malformed` for namespaces of other schemes."""

    def work() -> list[Prompt]:
        sequence = sequence_hashes(hashes) if each_by_itself else hashes
        prompts: list[Prompt] = []
        left = MOST_CHUNKS
        for namespace in chosen:
            prompts.append(Prompt.of(namespace, sequence_prefixes(namespace, sequence), left))
            left -= len(prompts[-1])
        return prompts

    # Of each a hash, and of each namespace's groups a few numbers.
    return await apart((4 + len(chosen)) * len(hashes), work)


def _numbers(raw: bytes) -> list[int]:
    """In parts, between which other threads may run."""
    packed = np.frombuffer(raw, f"<u{TOKEN_BYTES}")
    tokens: list[int] = []
    for start in range(0, len(packed), _FEW_TOKENS):
        tokens += packed[start : start + _FEW_TOKENS].tolist()
    return tokens


def _hashed(
    chosen: Sequence[Namespace], tokens: TokenIds, seeds: Sequence[str], lora: str, salt: str
) -> Prompts:
    if isinstance(tokens, bytes):
        tokens = _numbers(tokens)
    known: dict[tuple[str, str, int | None], list[bytes]] = {}
    prompts: list[Prompt] = []
    refused: dict[str, Malformed] = {}
    left = MOST_CHUNKS
    for namespace in chosen:
        like = scheme(namespace)
        try:
            if like not in known:
                known[like] = prefix_hashes(namespace, tokens, seeds, lora, salt)
            prompts.append(Prompt.of(namespace, known[like], left))
        except Malformed as e:
            refused[namespace.digest.hex()] = e
        else:
            left -= len(prompts[-1])
    if not prompts:
        raise next(iter(refused.values()))
    return Prompts(prompts, {digest: str(e) for digest, e in refused.items()})
