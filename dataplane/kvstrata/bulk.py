"""Messages with many keys, as msgpack: the same as in `kvstrata.api`, at a tenth of the work.

Sent with `Content-Type: application/msgpack` where JSON would be taken. A run of keys that share
namespace, group and size of hash travels as these three and all hashes in one piece, so that
neither side makes an object a key.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from itertools import groupby
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstrata.errors import Malformed
from kvstrata.keys import DIGEST_BYTES, MAX_HASH_BYTES, Key, split_key

__all__ = [
    "MAX_TOKENS",
    "MEDIA_TYPE",
    "TOKEN_BYTES",
    "BulkChange",
    "BulkLookup",
    "BulkModelLookup",
    "BulkModelTokens",
    "BulkNamespaceLookup",
    "BulkNamespaceTokens",
    "BulkReport",
    "KeyRun",
    "check_tokens",
    "packed_tokens",
    "runs_of",
]

MEDIA_TYPE = "application/msgpack"

Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]


class KeyRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys in order: `hashes` is `size` bytes for each of them."""

    namespace: Annotated[bytes, Meta(description=f"Digest, {DIGEST_BYTES} bytes")]
    group: Annotated[int, Meta(ge=0, lt=1 << 32)]
    size: Annotated[int, Meta(ge=1, le=MAX_HASH_BYTES, description="Bytes of one hash")]
    hashes: Annotated[bytes, Meta(description="`size` bytes for each key")]

    def __len__(self) -> int:
        return len(self.hashes) // self.size

    def __getitem__(self, position: int) -> Key:
        hash_ = self.hashes[position * self.size : (position + 1) * self.size]
        return Key(self.namespace + self.group.to_bytes(4, "big") + hash_)

    def each(self) -> list[Key]:
        return [self[i] for i in range(len(self))]

    def check(self) -> None:
        """Raises `Malformed` where the schema alone doesn't tell."""
        if len(self.namespace) != DIGEST_BYTES:
            raise Malformed(f"namespace digest has {len(self.namespace)} bytes, not {DIGEST_BYTES}")
        if len(self.hashes) % self.size:
            raise Malformed(f"{len(self.hashes)} bytes are no row of hashes of {self.size} bytes")


MAX_TOKENS = 1 << 20
"""Most token ids in one message."""
TOKEN_BYTES = 4

Text = Annotated[str, Meta(max_length=512)]
Nodes = Annotated[list[Name], Meta(max_length=10_000)]
# A list of a million numbers would take a tenth of a second to read.
TokenIds = Annotated[bytes, Meta(description="4 bytes for each token id, the lowest first")]
Runs = Annotated[list[KeyRun], Meta(max_length=65_536)]


class BulkChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `api.Change`."""

    location: Name
    added: Runs = []
    removed: Runs = []


class BulkReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `api.Report`, POST /v1/nodes/{id}/reports."""

    incarnation: Name
    seq: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    changes: Annotated[list[BulkChange], Meta(max_length=64)]
    snapshot: Literal["no", "first", "more", "last", "only"] = "no"
    namespaces: Annotated[list[str], Meta(max_length=64)] = []


class BulkLookup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `api.LookupRequest`, POST /v1/placements:lookup. Runs follow each other in the chain."""

    keys: Annotated[list[KeyRun], Meta(min_length=1, max_length=65_536)]
    mode: Literal["prefix", "all"] = "prefix"
    nodes: Nodes | None = None
    return_keys: bool = False


class BulkNamespaceTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `api.NamespaceTokens`, but for the token ids, which are in one piece and may be more."""

    namespace: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
    token_ids: TokenIds
    lora: Text = ""
    cache_salt: Text = ""


class BulkModelTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `api.ModelTokens`, but for the token ids, which are in one piece and may be more."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    token_ids: TokenIds
    revision: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    tenant: Text = ""
    lora: Text = ""
    cache_salt: Text = ""


class BulkNamespaceLookup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `api.TokenLookup`, POST /v1/placements:lookup, for a namespace."""

    tokens: BulkNamespaceTokens
    nodes: Nodes | None = None
    return_keys: bool = False


class BulkModelLookup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `api.TokenLookup`, POST /v1/placements:lookup, for a model."""

    tokens: BulkModelTokens
    nodes: Nodes | None = None
    return_keys: bool = False


def check_tokens(packed: bytes) -> None:
    """Raises `Malformed` if these are no token ids, none, or too many."""
    if len(packed) % TOKEN_BYTES:
        raise Malformed(f"{len(packed)} bytes are no row of token ids of {TOKEN_BYTES} bytes")
    if not 0 < len(packed) <= MAX_TOKENS * TOKEN_BYTES:
        raise Malformed(f"{len(packed) // TOKEN_BYTES} token ids, and not 1 to {MAX_TOKENS}")


def packed_tokens(token_ids: Iterable[int]) -> bytes:
    """As they travel. Raises `Malformed` if one has more than 32 bits, or is negative."""
    try:
        tokens = array("I", token_ids)
    except OverflowError as e:
        raise Malformed("token ids are unsigned and have 32 bits") from e
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def runs_of(keys: Iterable[bytes]) -> list[KeyRun]:
    """Checked keys, in order; long runs where neighbours are of one namespace and group."""
    parts = map(split_key, keys)
    return [
        KeyRun(namespace, group, size, b"".join(part.hash for part in of_one))
        for (namespace, group, size), of_one in groupby(
            parts, key=lambda p: (p.namespace, p.group, len(p.hash))
        )
    ]
