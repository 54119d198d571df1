"""What a chunk's object is called and what its metadata say.

    <prefix>/store.json                                          which store this is
    <prefix>/<namespace hex>/namespace.json                      the document behind the digest
    <prefix>/<namespace hex>/<hh>/<hh>/<hash hex>.<group>.kv     a chunk: its payload, nothing else
    <prefix>/kvstrata-quarantine/<nn>                            damaged objects, at most 64

Names are those of the fs tier's files. User metadata of a chunk's object:

    kvstrata-version    1
    kvstrata-key        key, hex
    kvstrata-bytes      length of the payload, decimal
    kvstrata-xxh3       xxh3-64 of the payload, 16 hex digits

Each value has one spelling, and each is compared with something: the key with the one asked for,
the length with the object's, the checksum with the payload's. So no part needs a seal.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvstrata.errors import ConfigError, Corrupt
from kvstrata.keys import DIGEST_BYTES, MAX_HASH_BYTES, Key, make_key, split_key

__all__ = ["QUARANTINE_OBJECTS", "Header", "Names", "StoreIdentity"]

QUARANTINE_OBJECTS = 64

_VERSION = "1"
_CHUNK = re.compile(
    rf"([0-9a-f]{{{2 * DIGEST_BYTES}}})/[0-9a-f]{{2}}/[0-9a-f]{{2}}/"
    rf"((?:[0-9a-f]{{2}}){{1,{MAX_HASH_BYTES}}})\.(0|[1-9][0-9]{{0,9}})\.kv"
)
_FIELDS = ("kvstrata-version", "kvstrata-key", "kvstrata-bytes", "kvstrata-xxh3")


class Header(NamedTuple):
    key: Key
    payload_bytes: int
    checksum: int

    def metadata(self) -> dict[str, str]:
        """As user metadata of an object."""
        values = (_VERSION, self.key.hex(), str(self.payload_bytes), f"{self.checksum:016x}")
        return dict(zip(_FIELDS, values, strict=True))

    @classmethod
    def parse(cls, metadata: Mapping[str, str]) -> Header:
        """Raises `Corrupt`, saying what is wrong with it."""
        version, key, payload_bytes, checksum = (metadata.get(name, "") for name in _FIELDS)
        if version != _VERSION:
            raise Corrupt(f"object of version {version!r}, this one reads {_VERSION}")
        try:
            header = cls(Key(bytes.fromhex(key)), int(payload_bytes), int(checksum, 16))
        except ValueError as e:
            raise Corrupt(f"metadata: {e}") from e
        if header.metadata() != {name: metadata.get(name) for name in _FIELDS}:
            raise Corrupt("metadata spelt in another way than they are written")
        return header


class StoreIdentity(msgspec.Struct, frozen=True):
    """Content of `store.json`."""

    id: uuid.UUID
    format: int = 1

    @classmethod
    def parse(cls, name: str, content: bytes) -> StoreIdentity:
        """Raises `ConfigError` if it isn't one that this version can use."""
        try:
            identity = msgspec.json.decode(content, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise ConfigError(f"obj tier: {name} does not identify a store: {e}") from e
        if identity.format != 1:
            raise ConfigError(f"obj tier: {name} has format {identity.format}, this one reads 1")
        return identity


class Names:
    """Names of the objects under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.root = f"{prefix}/" if prefix else ""
        self.identity = f"{self.root}store.json"
        # Others may keep what they like in a bucket that is used without a prefix.
        self.aside = f"{self.root}kvstrata-quarantine/"

    def chunk(self, key: Key) -> str:
        namespace, group, hash_ = split_key(key)
        digits = hash_.hex()
        places = f"{digits[:2]}/{digits[2:4] or '00'}"
        return f"{self.root}{namespace.hex()}/{places}/{digits}.{group}.kv"

    def namespace(self, digest: bytes) -> str:
        return f"{self.root}{digest.hex()}/namespace.json"

    def quarantine(self, place: int) -> str:
        return f"{self.aside}{place % QUARANTINE_OBJECTS:02}"

    def key(self, name: str) -> Key | None:
        """The key of the chunk whose object is called so; None if it is no chunk's."""
        match = _CHUNK.fullmatch(name, len(self.root))
        if match is None or int(match[3]) >= 1 << 32:
            return None
        key = make_key(bytes.fromhex(match[1]), int(match[3]), bytes.fromhex(match[2]))
        return key if self.chunk(key) == name else None
