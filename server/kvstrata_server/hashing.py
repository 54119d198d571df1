"""From token ids to the keys of chunks, as the engine that stored them computed it.

    sha256, sha256_cbor     vLLM: a block's hash is over (hash before it, tokens, extra keys),
    xxhash, xxhash_cbor     serialised by pickle or CBOR; before the first comes a hash of a seed
    xxh3                    Dynamo's and Mooncake's sequence hash: XXH3-64 over (hash before it,
                            hash of the block's own tokens); the first block's is the latter

A namespace tells its algorithm, and a fingerprint of the seed rather than the seed: it is looked
for among those that this server was told. What can't be computed is refused, never guessed.
Formulas: vLLM 0.32 `v1/core/kv_cache_utils.py`; Dynamo 1.6 `compute_block_hash_for_seq` and its
sequence hash. `tests/server/test_hashing.py` has vectors that those two computed.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cbor2
import xxhash

from kvstrata.errors import Malformed
from kvstrata.keys import Group, Key, Namespace

__all__ = ["DEFAULT_SEEDS", "chunk_keys", "local_hashes", "sequence_hashes", "sequence_keys"]

DEFAULT_SEEDS = ("vllm-none-hash", "0", "42")
"""vLLM's own where PYTHONHASHSEED isn't set, and the values that llm-d's guides set."""

_XXH3_SEED = 1337
_MASK = (1 << 64) - 1
_FULL = ("full", "mla")

_Digest = Callable[[Any], bytes]


def _pickled(value: Any) -> bytes:
    # vLLM's bytes, written and never read here.
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


_VLLM: dict[str, _Digest] = {
    "sha256": lambda value: hashlib.sha256(_pickled(value)).digest(),
    "sha256_cbor": lambda value: hashlib.sha256(_cbor(value)).digest(),
    "xxhash": lambda value: xxhash.xxh3_128_digest(_pickled(value)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(_cbor(value)),
}


def chunk_keys(
    namespace: Namespace,
    tokens: Sequence[int],
    seeds: Iterable[str] = DEFAULT_SEEDS,
    lora: str = "",
    salt: str = "",
) -> dict[int, list[Key]]:
    """The keys of all whole chunks of `tokens`, in order, by group of full attention.

    Raises `Malformed` if they can't be computed, and says why.
    """
    groups = [group for group in namespace.groups if group.kind in _FULL]
    sizes = {group.tokens_per_block for group in namespace.groups if group.kind != "opaque"}
    if not groups:
        raise Malformed(f"{_name(namespace)} has no group of full attention: ask by keys")
    if len(sizes) > 1:
        raise Malformed(
            f"{_name(namespace)} has blocks of {sorted(sizes)} tokens, and which of them its "
            "hashes go by isn't in its document: ask by keys"
        )
    hashes = _block_hashes(namespace, tokens, groups[0].tokens_per_block, seeds, lora, salt)
    return {group.id: _keys(namespace, group, hashes) for group in groups}


def sequence_keys(namespace: Namespace, hashes: Sequence[int]) -> dict[int, list[Key]]:
    """`chunk_keys` of blocks whose sequence hashes (scheme `xxh3`) are known."""
    if namespace.hash_algorithm != "xxh3":
        raise Malformed(
            f"{_name(namespace)} hashes by {namespace.hash_algorithm}, and these are hashes by "
            "xxh3: ask by token ids or by keys"
        )
    raw = [struct.pack(">Q", h & _MASK) for h in hashes]
    return {g.id: _keys(namespace, g, raw) for g in namespace.groups if g.kind in _FULL}


def local_hashes(tokens: Sequence[int], block: int, lora: str = "", salt: str = "") -> list[int]:
    """Dynamo's hash of each whole block by itself."""
    seed = _XXH3_SEED
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxhash.xxh3_64_intdigest(salt.encode(), 1)
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    return [
        xxhash.xxh3_64_intdigest(data[4 * i : 4 * (i + block)], seed & _MASK)
        for i in range(0, len(tokens) - block + 1, block)
    ]


def sequence_hashes(local: Iterable[int]) -> list[int]:
    """Dynamo's hash of each block together with all before it, from the blocks' own."""
    hashes: list[int] = []
    for own in local:
        own &= _MASK
        if hashes:
            own = xxhash.xxh3_64_intdigest(struct.pack("<QQ", hashes[-1], own), _XXH3_SEED)
        hashes.append(own)
    return hashes


def _block_hashes(
    namespace: Namespace,
    tokens: Sequence[int],
    block: int,
    seeds: Iterable[str],
    lora: str,
    salt: str,
) -> list[bytes]:
    name = namespace.hash_algorithm
    if tokens and not 0 <= min(tokens) <= max(tokens) < 1 << 32:
        raise Malformed("token ids are unsigned and have 32 bits")
    if name == "xxh3":
        local = local_hashes(tokens, block, lora, salt)
        return [struct.pack(">Q", h) for h in sequence_hashes(local)]
    digest = _VLLM.get(name)
    if digest is None:
        raise Malformed(
            f"{_name(namespace)} hashes by {name}, which this server can't compute (it can "
            f"{', '.join([*_VLLM, 'xxh3'])}): ask by keys"
        )
    if lora:
        raise Malformed("vLLM hashes where a LoRA lies, not just its name: ask by keys")
    parent = _start(namespace, digest, seeds)
    hashes = []
    extra: Any = (("cache_salt", salt),) if salt else None
    for i in range(0, len(tokens) - block + 1, block):
        parent = digest((parent, tuple(tokens[i : i + block]), extra))
        hashes.append(parent)
        extra = None
    return hashes


def _start(namespace: Namespace, digest: _Digest, seeds: Iterable[str]) -> bytes:
    """What comes before the first block."""
    for seed in seeds:
        start = digest(seed)
        # As `hash_seed_fingerprint` of the vLLM adapter has it.
        shown = hashlib.sha256(b"kvstrata hash seed\0" + start).hexdigest()[:32]
        if shown == namespace.hash_seed:
            return start
    raise Malformed(
        f"{_name(namespace)} starts its hashes from a seed that this server doesn't know: add the "
        "engines' PYTHONHASHSEED to the server's setting `hash_seeds`, or ask by keys"
    )


def _keys(namespace: Namespace, group: Group, hashes: Sequence[bytes]) -> list[Key]:
    """A chunk is named by the hash of its last block."""
    n = namespace.blocks_per_chunk
    return [namespace.key(group.id, h) for h in hashes[n - 1 :: n]]


def _name(namespace: Namespace) -> str:
    return f"namespace {namespace.digest.hex()} ({namespace.model})"
