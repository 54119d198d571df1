"""What wrappers put around a payload, so that it can be verified and told apart.

    offset  bytes
    0       8      magic `KVSFRAME`
    8       2      version, 1
    10      1      codec: 0 raw, 1 zstd, 2 AES-256-GCM
    11      1      length of the key
    12      52     key, zero padded
    64      8      length of the payload
    72      8      length of the body, which follows the header
    80      8      xxh3-64 of the payload; 0 where the codec authenticates by itself
    88      8      which secret the body is encrypted with, else 0
    96      12     nonce of the encryption, else 0
    108     12     zero
    120     8      xxh3-64 of the 120 bytes before

Numbers are little-endian. The body is the payload (raw), one zstd frame, or ciphertext and tag.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import xxhash

from kvstrata.errors import Corrupt
from kvstrata.keys import Key

__all__ = ["HEADER_BYTES", "Codec", "Frame", "pack_frame", "parse_frame"]

HEADER_BYTES = 128
NONCE_BYTES = 12

_MAGIC = b"KVSFRAME"
_VERSION = 1
_FIELDS = struct.Struct("<8sHBB52sQQQQ12s12x")
_SEAL = struct.Struct("<Q")
_SEAL_OFFSET = HEADER_BYTES - _SEAL.size


class Codec(enum.IntEnum):
    """What the body is."""

    RAW = 0
    ZSTD = 1
    AES_256_GCM = 2


class Frame(NamedTuple):
    """The fields of a header; lengths in bytes."""

    key: Key
    codec: Codec
    payload_bytes: int
    body_bytes: int
    checksum: int = 0
    secret: int = 0
    nonce: bytes = b""


def pack_frame(memory: memoryview, frame: Frame) -> None:
    """Write the header over the first `HEADER_BYTES` of `memory`."""
    _FIELDS.pack_into(
        memory,
        0,
        _MAGIC,
        _VERSION,
        frame.codec,
        len(frame.key),
        frame.key,
        frame.payload_bytes,
        frame.body_bytes,
        frame.checksum,
        frame.secret,
        frame.nonce,
    )
    _SEAL.pack_into(memory, _SEAL_OFFSET, xxhash.xxh3_64_intdigest(memory[:_SEAL_OFFSET]))


def parse_frame(memory: memoryview, key: Key) -> tuple[Frame, memoryview]:
    """The header and the body of what was stored under `key`, at the start of `memory`.

    Raises `Corrupt`, saying what is wrong: nothing in the body is verified yet.
    """
    if memory.nbytes < HEADER_BYTES:
        raise Corrupt(f"{memory.nbytes} bytes hold no frame")
    (
        magic,
        version,
        codec,
        key_bytes,
        padded,
        payload_bytes,
        body_bytes,
        checksum,
        secret,
        nonce,
    ) = _FIELDS.unpack_from(memory, 0)
    if magic != _MAGIC:
        raise Corrupt("no frame: it was stored without this wrapper, or its start is damaged")
    if version != _VERSION:
        raise Corrupt(f"frame of version {version}, this one reads {_VERSION}")
    (seal,) = _SEAL.unpack_from(memory, _SEAL_OFFSET)
    if xxhash.xxh3_64_intdigest(memory[:_SEAL_OFFSET]) != seal:
        raise Corrupt("frame header checksum differs")
    if padded[:key_bytes] != key:
        raise Corrupt(f"holds another chunk: {padded[:key_bytes].hex()}")
    try:
        codec = Codec(codec)
    except ValueError as e:
        raise Corrupt(f"unknown codec {codec}") from e
    if body_bytes > memory.nbytes - HEADER_BYTES:
        raise Corrupt(f"body of {body_bytes} bytes, {memory.nbytes - HEADER_BYTES} are here")
    frame = Frame(key, codec, payload_bytes, body_bytes, checksum, secret, nonce)
    return frame, memory[HEADER_BYTES : HEADER_BYTES + body_bytes]
