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
from kvstrata.keys import Key, Namespace

__all__ = [
    "DEFAULT_SEEDS",
    "chunk_keys",
    "local_hashes",
    "prefix_hashes",
    "scheme",
    "sequence_hashes",
    "sequence_prefixes",
]

DEFAULT_SEEDS = ("vllm-none-hash", "0", "42")
"""vLLM's own where PYTHONHASHSEED isn't set, and the values that llm-d's guides set."""

_XXH3_SEED = 1337
_MASK = (1 << 64) - 1
# Tokens of a call that lets no other thread run.
_PART = 1 << 16

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


def scheme(namespace: Namespace) -> tuple[str, str, int | None]:
    """Namespaces that are equal in this have the same hashes of the same tokens."""
    return namespace.hash_algorithm, namespace.hash_seed, namespace.hash_step


def prefix_hashes(
    namespace: Namespace,
    tokens: Sequence[int],
    seeds: Iterable[str] = DEFAULT_SEEDS,
    lora: str = "",
    salt: str = "",
) -> list[bytes]:
    """The engine's hash of each prefix that is a multiple of `namespace.hash_step` long.

    Raises `Malformed` if they can't be computed, and says why.
    """
    step = _step(namespace)
    for start in range(0, len(tokens), _PART):
        part = tokens[start : start + _PART]
        if not 0 <= min(part) <= max(part) < 1 << 32:
            raise Malformed("token ids are unsigned and have 32 bits")
    name = namespace.hash_algorithm
    if name == "xxh3":
        return [_packed(h) for h in sequence_hashes(local_hashes(tokens, step, lora, salt))]
    digest = _VLLM.get(name)
    if digest is None:
        raise Malformed(
            f"{_name(namespace)} hashes by {name}, which this server can't compute (it can "
            f"{', '.join([*_VLLM, 'xxh3'])}): ask by keys"
        )
    if lora:
        raise Malformed(
            f"{_name(namespace)} hashes as vLLM does, where a LoRA lies and not just its name: "
            "ask by keys"
        )
    parent = _start(namespace, digest, seeds)
    hashes = []
    extra: Any = (("cache_salt", salt),) if salt else None
    for i in range(0, len(tokens) - step + 1, step):
        parent = digest((parent, tuple(tokens[i : i + step]), extra))
        hashes.append(parent)
        extra = None
    return hashes


def sequence_prefixes(namespace: Namespace, hashes: Sequence[int]) -> list[bytes]:
    """`prefix_hashes` of blocks whose sequence hashes (scheme `xxh3`) are known."""
    if namespace.hash_algorithm != "xxh3":
        raise Malformed(
            f"{_name(namespace)} hashes by {namespace.hash_algorithm}, and these are hashes by "
            "xxh3: ask by token ids or by keys"
        )
    _step(namespace)
    return [_packed(h) for h in hashes]


def chunk_keys(
    namespace: Namespace,
    tokens: Sequence[int],
    seeds: Iterable[str] = DEFAULT_SEEDS,
    lora: str = "",
    salt: str = "",
) -> dict[int, list[Key]]:
    """The keys of all whole chunks of `tokens`, in order, by group: the hash of what ends there.

    Raises `Malformed` if they can't be computed, and says why.
    """
    hashes = prefix_hashes(namespace, tokens, seeds, lora, salt)
    keys = {}
    for group in namespace.groups:
        apart = group.tokens_per_block * namespace.blocks_per_chunk // _step(namespace)
        keys[group.id] = [namespace.key(group.id, h) for h in hashes[apart - 1 :: apart]]
    return keys


def local_hashes(tokens: Sequence[int], block: int, lora: str = "", salt: str = "") -> list[int]:
    """Dynamo's hash of each whole block by itself."""
    seed = _XXH3_SEED
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxhash.xxh3_64_intdigest(salt.encode(), 1)
    if block > len(tokens):  # which may be more than any structure has
        return []
    form = struct.Struct(f"<{block}I")
    return [
        xxhash.xxh3_64_intdigest(form.pack(*tokens[i : i + block]), seed & _MASK)
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


def _packed(sequence_hash: int) -> bytes:
    return struct.pack(">Q", sequence_hash & _MASK)


def _step(namespace: Namespace) -> int:
    step = namespace.hash_step
    if step is None:
        sizes = sorted({group.tokens_per_block for group in namespace.groups})
        raise Malformed(
            f"{_name(namespace)} has blocks of {sizes} tokens, and its document doesn't tell which "
            "its hashes go by (`tokens_per_hash`): ask by keys"
        )
    return step


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


def _name(namespace: Namespace) -> str:
    return f"namespace {namespace.digest.hex()} ({namespace.model})"
