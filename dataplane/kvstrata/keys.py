"""Identity: which bytes are interchangeable, and the name of one chunk.

A *namespace* document holds everything that must match for two parties to exchange bytes.
Its digest is the first part of every key, so chunks of another model, revision, dtype or
layout can't be hit by accident. Tensor, pipeline and context parallelism are not in it.

A *key* is `namespace digest (16 B) + group (4 B, big-endian) + hash (1 to 32 B)`. The hash is
the engine's chained prefix hash at the chunk's last token; it is opaque here and never truncated.
Keys are plain `bytes`: one object, hashable, sortable by namespace and group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal, NamedTuple, NewType

import msgspec

from kvstrata.errors import Malformed, NamespaceMismatch

__all__ = [
    "DIGEST_BYTES",
    "MAX_GROUPS",
    "MAX_HASH_BYTES",
    "MAX_KEY_BYTES",
    "Field",
    "Group",
    "Key",
    "KeyParts",
    "Namespace",
    "check_keys",
    "make_key",
    "require_same",
    "split_key",
]

DIGEST_BYTES = 16
GROUP_BYTES = 4
MAX_HASH_BYTES = 32
MAX_KEY_BYTES = DIGEST_BYTES + GROUP_BYTES + MAX_HASH_BYTES

MAX_GROUPS = 128
"""Most groups of a namespace: models have one to a few dozen, and lookups look at each."""

_PREFIX_BYTES = DIGEST_BYTES + GROUP_BYTES
_MAX_CHUNK_BYTES = 1 << 34

Key = NewType("Key", bytes)

AttentionKind = Literal["full", "sliding_window", "mla", "sliding_window_mla", "mamba", "opaque"]


class KeyParts(NamedTuple):
    namespace: bytes
    group: int
    hash: bytes


def make_key(namespace: bytes, group: int, hash: bytes) -> Key:  # noqa: A002
    """The key of one chunk. Raises `Malformed` if a part has an impossible size."""
    if len(namespace) != DIGEST_BYTES:
        raise Malformed(f"namespace digest has {len(namespace)} bytes, not {DIGEST_BYTES}")
    if not 0 <= group < 1 << 32:
        raise Malformed(f"group {group} does not fit in 4 bytes")
    if not 1 <= len(hash) <= MAX_HASH_BYTES:
        raise Malformed(f"hash has {len(hash)} bytes, not 1 to {MAX_HASH_BYTES}")
    return Key(namespace + group.to_bytes(GROUP_BYTES, "big") + hash)


def split_key(key: bytes) -> KeyParts:
    """The parts of a key. Raises `Malformed` on bytes that cannot be a key."""
    if not _PREFIX_BYTES < len(key) <= MAX_KEY_BYTES:
        raise Malformed(
            f"a key has {_PREFIX_BYTES + 1} to {MAX_KEY_BYTES} bytes, this one has {len(key)}"
        )
    group = int.from_bytes(key[DIGEST_BYTES:_PREFIX_BYTES], "big")
    return KeyParts(key[:DIGEST_BYTES], group, key[_PREFIX_BYTES:])


def check_keys(raw: Iterable[bytes]) -> list[Key]:
    """Keys from outside, checked for size. Raises `Malformed` on the first that cannot be one."""
    keys = list(raw)
    for key in keys:
        if not _PREFIX_BYTES < len(key) <= MAX_KEY_BYTES:
            split_key(key)
    return keys  # type: ignore[return-value]


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a page that is sharded by units: the KV heads of attention, a Mamba state.

    A page stores it as `[units][layers][unit_bytes]`, so a rank's share is one byte range for
    every tensor-parallel degree that divides `units`.
    """

    name: str
    units: int
    unit_bytes: int


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share one attention kind and geometry; `id` is the engine's group number.

    `tokens_per_block` is what one page covers, `window` the sliding window in tokens (0: none).
    """

    id: int
    kind: AttentionKind
    layers: tuple[str, ...]
    fields: tuple[Field, ...]
    tokens_per_block: int
    window: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this group over all ranks, in the canonical layout."""
        return len(self.layers) * sum(f.units * f.unit_bytes for f in self.fields)


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The document behind a namespace digest. Two parties may exchange bytes iff it is equal.

    `revision` identifies the weights: other weights must have another one. `config` is a hash
    of the model configuration, `content_format` names what a unit's bytes mean, `hash_seed` is
    a fingerprint (not the seed) of what starts the engine's hash chain, `tenant` is a salt.
    `tokens_per_hash` is what each hash of that chain covers; it is left out where it is the
    `tokens_per_block` that all groups share.
    """

    model: str
    revision: str
    config: str
    dtype: str
    content_format: str
    groups: tuple[Group, ...]
    blocks_per_chunk: int
    hash_algorithm: str
    hash_seed: str
    scale_mode: str = "none"
    layout: str = "page-u1"
    tenant: str = ""
    schema: int = 1
    # Unset rather than a number: digests of documents that don't need it stay what they were.
    tokens_per_hash: int | msgspec.UnsetType = msgspec.UNSET

    @cached_property
    def document(self) -> bytes:
        """Canonical JSON (sorted names, no spaces): what the digest is taken over."""
        return msgspec.json.encode(self, order="sorted")

    @cached_property
    def digest(self) -> bytes:
        """First 16 bytes of the SHA-256 of `document`."""
        return hashlib.sha256(self.document).digest()[:DIGEST_BYTES]

    @cached_property
    def chunk_bytes(self) -> dict[int, int]:
        """Bytes of one chunk by group id."""
        return {g.id: g.page_bytes * self.blocks_per_chunk for g in self.groups}

    @property
    def hash_step(self) -> int | None:
        """Tokens from one hash of the engine's chain to the next; None: it isn't told."""
        if isinstance(self.tokens_per_hash, int):
            return self.tokens_per_hash
        sizes = {group.tokens_per_block for group in self.groups}
        return sizes.pop() if len(sizes) == 1 else None

    def key(self, group: int, hash: bytes) -> Key:  # noqa: A002
        return make_key(self.digest, group, hash)

    @classmethod
    def parse(cls, raw: bytes) -> Namespace:
        """A document from outside, checked. Raises `Malformed`."""
        try:
            return msgspec.json.decode(raw, type=cls).checked()
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise Malformed(f"namespace document: {e}") from e

    def checked(self) -> Namespace:
        """Itself, if its geometry is possible. Raises `Malformed` naming the field if not."""
        if self.schema != 1:
            raise Malformed(f"namespace: schema is {self.schema}, this version reads 1")
        if self.layout != "page-u1":
            raise Malformed(f"namespace: layout is {self.layout!r}, this version reads 'page-u1'")
        if len(self.groups) > MAX_GROUPS:
            raise Malformed(
                f"namespace: {len(self.groups)} groups, and at most {MAX_GROUPS} may be: let "
                "layers of one kind and geometry share one"
            )
        if self.blocks_per_chunk < 1:
            raise Malformed("namespace: blocks_per_chunk must be at least 1")
        if not self.groups or len({g.id for g in self.groups}) != len(self.groups):
            raise Malformed("namespace: groups must be present and have distinct ids")
        for i, group in enumerate(self.groups):
            counts = [group.tokens_per_block, len(group.layers), len(group.fields)]
            counts += [n for f in group.fields for n in (f.units, f.unit_bytes)]
            if min(counts) < 1 or not 0 <= group.id < 1 << 32 or group.window < 0:
                raise Malformed(f"namespace: groups[{i}] has an empty or negative part")
            if group.page_bytes * self.blocks_per_chunk > _MAX_CHUNK_BYTES:
                raise Malformed(f"namespace: groups[{i}] has chunks over {_MAX_CHUNK_BYTES} bytes")
            if isinstance(self.tokens_per_hash, int) and (
                self.tokens_per_hash < 1 or group.tokens_per_block % self.tokens_per_hash
            ):
                raise Malformed(f"namespace: groups[{i}] has blocks of no whole `tokens_per_hash`")
        return self


def require_same(ours: Namespace, theirs: Namespace) -> None:
    """Raises `NamespaceMismatch`, naming the first field that differs and both values."""
    if ours.digest == theirs.digest:
        return
    field, mine, other = _first_difference(
        msgspec.to_builtins(ours), msgspec.to_builtins(theirs), ""
    )
    raise NamespaceMismatch(
        f"namespaces differ in {field}: {mine!r} here, {other!r} there", field=field
    )


def _first_difference(ours: Any, theirs: Any, path: str) -> tuple[str, Any, Any]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in ours | theirs:
            mine, other = ours.get(name), theirs.get(name)
            if mine != other:
                return _first_difference(mine, other, f"{path}.{name}" if path else name)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return f"len({path})", len(ours), len(theirs)
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if mine != other:
                return _first_difference(mine, other, f"{path}[{i}]")
    return path, ours, theirs
