"""The format of the `tcp` transport.

A pull is one request and one answer on a connection of its own, little-endian:

    request   magic "kvsr" · version u8 · 3 zero bytes · count u32 · lease 16 B
              then count times: offset u64 · nbytes u64
    answer    magic "kvsa" · version u8 · status u8 · 2 zero bytes
              then, if the status is OK, per range in order: granted u8 · its bytes if granted
"""

from __future__ import annotations

import enum
import struct

__all__ = [
    "ANSWER",
    "ANSWER_MAGIC",
    "ENDED",
    "GRANTED",
    "IDLE_SECONDS",
    "LEASE_BYTES",
    "MAX_RANGES",
    "RANGE",
    "REQUEST",
    "REQUEST_MAGIC",
    "VERSION",
    "Status",
]

VERSION = 1
LEASE_BYTES = 16
MAX_RANGES = 4096

REQUEST = struct.Struct("<4sBxxxI16s")
RANGE = struct.Struct("<QQ")
ANSWER = struct.Struct("<4sBBxx")
REQUEST_MAGIC = b"kvsr"
ANSWER_MAGIC = b"kvsa"
GRANTED, ENDED = b"\x01", b"\x00"

# How long a source keeps the connection of a consumer that was once authorized.
IDLE_SECONDS = 60.0


class Status(enum.IntEnum):
    OK = 0
    DENIED = 1
    MALFORMED = 2
    BUSY = 3
