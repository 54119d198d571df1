"""What a chunk file is called and what it holds.

    <root>/<namespace hex>/<hh>/<hh>/<hash hex>.<group>.kv

`hh` are the first two bytes of the hash (`00` for the second of a one-byte hash). The file is a
header page, then the payload, zero padded to whole pages, so that O_DIRECT can read both into
page-aligned memory. Numbers are little-endian.

    offset  bytes
    0       8      magic `KVSTRATA`
    8       4      version, 1
    12      4      length of the key
    16      52     key, zero padded
    68      4      length of the parent's key, 0: none or not known
    72      8      length of the payload
    80      8      xxh3-64 of the payload
    88      8      where this header page stands in its file, 0
    96      52     key of the parent, the chunk that this one extends, zero padded
    148     3940   zero
    4088    8      xxh3-64 of the 4088 bytes before

Several chunks of one request may stand in one file some day, since creating a file is what a
store of a small chunk costs. The format has room for it: every chunk begins with a header page of
its own that says where it stands (offset 88), so such a file is a sequence of what is described
above, and a place is `(path, offset)`. This version writes and reads chunks at offset 0 only; a
header that says otherwise is not this chunk's.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import xxhash

from kvstrata.errors import Corrupt
from kvstrata.keys import DIGEST_BYTES, MAX_HASH_BYTES, Key, split_key

__all__ = [
    "PAGE_BYTES",
    "Header",
    "file_bytes",
    "key_of",
    "namespace_of",
    "pack_header",
    "parse_header",
    "path_of",
]

PAGE_BYTES = 4096

_MAGIC = b"KVSTRATA"
_VERSION = 1
_FIELDS = struct.Struct("<8sII52sIQQQ52s")
_SEAL = struct.Struct("<Q")
_SEAL_OFFSET = PAGE_BYTES - _SEAL.size
_NAMESPACE = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_FILE = re.compile(rf"((?:[0-9a-f]{{2}}){{1,{MAX_HASH_BYTES}}})\.(0|[1-9][0-9]{{0,9}})\.kv")


class Header(NamedTuple):
    key: Key
    payload_bytes: int
    checksum: int
    parent: Key | None = None
    offset: int = 0


def file_bytes(payload_bytes: int) -> int:
    """Size of the file that holds a payload."""
    return PAGE_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


def pack_header(page: memoryview, header: Header) -> None:
    """Write the header over the whole of `page` (`PAGE_BYTES` writable bytes)."""
    page[:] = bytes(PAGE_BYTES)
    key, payload_bytes, checksum, parent, offset = header
    parent = parent or Key(b"")
    _FIELDS.pack_into(
        page,
        0,
        _MAGIC,
        _VERSION,
        len(key),
        key,
        len(parent),
        payload_bytes,
        checksum,
        offset,
        parent,
    )
    _SEAL.pack_into(page, _SEAL_OFFSET, xxhash.xxh3_64_intdigest(page[:_SEAL_OFFSET]))


def parse_header(page: memoryview) -> Header:
    """The header on a page read from a file. Raises `Corrupt`, saying what is wrong with it."""
    magic, version, key_bytes, key, parent_bytes, payload_bytes, checksum, offset, parent = (
        _FIELDS.unpack_from(page, 0)
    )
    if magic != _MAGIC:
        raise Corrupt(f"not a chunk file: it starts with {magic!r}")
    if version != _VERSION:
        raise Corrupt(f"chunk file of version {version}, this one reads {_VERSION}")
    (seal,) = _SEAL.unpack_from(page, _SEAL_OFFSET)
    if xxhash.xxh3_64_intdigest(page[:_SEAL_OFFSET]) != seal:
        raise Corrupt("header checksum differs")
    return Header(
        Key(key[:key_bytes]),
        payload_bytes,
        checksum,
        Key(parent[:parent_bytes]) if parent_bytes else None,
        offset,
    )


def path_of(key: Key) -> str:
    """Where the chunk's file is, relative to the root."""
    namespace, group, hash_ = split_key(key)
    name = hash_.hex()
    return f"{namespace.hex()}/{name[:2]}/{name[2:4] or '00'}/{name}.{group}.kv"


def key_of(namespace: bytes, name: str) -> Key | None:
    """The key of file `name` of a namespace; None if it is not a chunk file."""
    match = _FILE.fullmatch(name)
    if match is None or int(match[2]) >= 1 << 32:
        return None
    return Key(namespace + int(match[2]).to_bytes(4, "big") + bytes.fromhex(match[1]))


def namespace_of(directory: str) -> bytes | None:
    """The namespace whose chunks are in a directory of the root; None for any other directory."""
    return bytes.fromhex(directory) if _NAMESPACE.fullmatch(directory) else None
