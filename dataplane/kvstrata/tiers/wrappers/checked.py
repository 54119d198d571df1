"""Verification around a tier that doesn't verify what it loads.

Built-in tiers verify by themselves; this is for others, or for media one doesn't want to trust
them with. A payload is stored in a frame (see `frame`) with its key and checksum.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvstrata.errors import Corrupt
from kvstrata.tiers.base import Item, Tier, TierContext, checksum
from kvstrata.tiers.wrappers.frame import HEADER_BYTES, Codec, Frame, pack_frame, parse_frame
from kvstrata.tiers.wrappers.framed import Framed, FramedOptions

__all__ = ["Checked"]


class Checked(Framed):
    """Bytes that differ from what was stored are `corrupt`, and evicted from the tier within."""

    kind: ClassVar[str] = "checked"

    @classmethod
    def wrap(cls, inner: Tier, options: dict[str, Any], context: TierContext) -> Checked:
        return cls(inner, FramedOptions.parse(cls.kind, options), context)

    def encode(self, item: Item, into: memoryview) -> int:
        return encode_raw(item, into)

    def decode(self, item: Item, stored: memoryview) -> None:
        frame, body = parse_frame(stored, item.key)
        if frame.codec is not Codec.RAW:
            raise Corrupt(f"stored by another wrapper: its codec is {frame.codec.name}")
        decode_raw(item, frame, body)


def encode_raw(item: Item, into: memoryview) -> int:
    """The payload as it is, in a frame; the frame's length."""
    nbytes = item.view.nbytes
    known = checksum(item.view) if item.checksum is None else item.checksum
    pack_frame(into, Frame(item.key, Codec.RAW, nbytes, nbytes, known))
    into[HEADER_BYTES : HEADER_BYTES + nbytes] = item.view
    return HEADER_BYTES + nbytes


def decode_raw(item: Item, frame: Frame, body: memoryview) -> None:
    """Verify and copy. Raises `Corrupt`."""
    into = payload_view(item, frame)
    if body.nbytes != into.nbytes:
        raise Corrupt(f"raw body of {body.nbytes} bytes for a payload of {into.nbytes}")
    into[:] = body
    # What was copied is verified, not what was read: nobody else writes to a slot.
    verify(into, frame)


def payload_view(item: Item, frame: Frame) -> memoryview:
    """The part of the item's view that the payload fills. Raises `Corrupt` if it can't."""
    nbytes = item.view.nbytes
    if frame.payload_bytes > nbytes or (item.exact and frame.payload_bytes < nbytes):
        raise Corrupt(f"payload of {frame.payload_bytes} bytes, not {nbytes}")
    return item.view[: frame.payload_bytes]


def verify(payload: memoryview, frame: Frame) -> None:
    """Raises `Corrupt` if it is not what the frame says."""
    if checksum(payload) != frame.checksum:
        raise Corrupt("payload checksum differs")
