"""zstd around a tier: less of the medium for more of the CPU.

KV caches compress little (the low bits of their values are noise), so it is off unless a setting
asks for it, and each chunk that doesn't shrink enough is stored as it is. Extra `compress`.
"""

from __future__ import annotations

import threading
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvstrata.errors import ConfigError, Corrupt
from kvstrata.tiers.base import Item, Tier, TierContext, checksum
from kvstrata.tiers.wrappers.base import extra_module
from kvstrata.tiers.wrappers.checked import decode_raw, encode_raw, payload_view, verify
from kvstrata.tiers.wrappers.frame import HEADER_BYTES, Codec, Frame, pack_frame, parse_frame
from kvstrata.tiers.wrappers.framed import Framed, FramedOptions

__all__ = ["Compressed", "CompressedOptions"]

# What level 22 asks of a reader for the largest payloads is not worth a slot's load.
_MAX_WINDOW_BYTES = 1 << 27
_LEVELS = (-100, 19)


class CompressedOptions(FramedOptions):
    """Options of the wrapper `compressed`."""

    level: Annotated[int, Field(ge=_LEVELS[0], le=_LEVELS[1])] = 1
    """zstd's level: negative is faster, above 3 is slower than most disks."""
    min_saving: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """A payload that does not shrink by this fraction is stored as it is."""


class Compressed(Framed):
    """Counts `compressed` and `stored_raw` chunks, and `saved_bytes`."""

    kind: ClassVar[str] = "compressed"

    def __init__(
        self, inner: Tier, options: CompressedOptions, context: TierContext, zstandard: Any
    ) -> None:
        """Use `wrap`."""
        super().__init__(inner, options, context)
        self._options = options
        self._zstandard = zstandard
        self._local = threading.local()
        self._counters |= {"compressed": 0, "stored_raw": 0, "saved_bytes": 0}

    @classmethod
    def wrap(cls, inner: Tier, options: dict[str, Any], context: TierContext) -> Compressed:
        parsed = CompressedOptions.parse(cls.kind, options)
        if not parsed.level:
            raise ConfigError("wrapper compressed: level 0 means nothing: write 1, or -1 for speed")
        zstandard = extra_module("zstandard", "compress", cls.kind)
        return cls(inner, parsed, context, zstandard)

    def encode(self, item: Item, into: memoryview) -> int:
        nbytes = item.view.nbytes
        packed = self._compressor().compress(item.view)
        saved = nbytes - len(packed)
        pays = saved >= max(nbytes * self._options.min_saving, 1)
        self.count("compressed" if pays else "stored_raw")
        if not pays:
            return encode_raw(item, into)
        self.count("saved_bytes", saved)
        known = checksum(item.view) if item.checksum is None else item.checksum
        pack_frame(into, Frame(item.key, Codec.ZSTD, nbytes, len(packed), known))
        into[HEADER_BYTES : HEADER_BYTES + len(packed)] = packed
        return HEADER_BYTES + len(packed)

    def decode(self, item: Item, stored: memoryview) -> None:
        frame, body = parse_frame(stored, item.key)
        if frame.codec is Codec.RAW:
            decode_raw(item, frame, body)
            return
        if frame.codec is not Codec.ZSTD:
            raise Corrupt(f"stored by another wrapper: its codec is {frame.codec.name}")
        into = payload_view(item, frame)
        self._decompress(body, into)
        verify(into, frame)

    def _decompress(self, body: memoryview, into: memoryview) -> None:
        """Fill `into`, and not a byte more. Raises `Corrupt`."""
        filled = 0
        try:
            with self._decompressor().stream_reader(body, closefd=False) as reader:
                while filled < into.nbytes:
                    got = reader.readinto(into[filled:])
                    if not got:
                        raise Corrupt(f"zstd frame ends after {filled} of {into.nbytes} bytes")
                    filled += got
                if reader.read(1):
                    raise Corrupt(f"zstd frame holds more than {into.nbytes} bytes")
        except self._zstandard.ZstdError as e:
            raise Corrupt(f"zstd: {e}") from e

    # Neither may be used by two threads at once.

    def _compressor(self) -> Any:
        if not hasattr(self._local, "compressor"):
            self._local.compressor = self._zstandard.ZstdCompressor(level=self._options.level)
        return self._local.compressor

    def _decompressor(self) -> Any:
        if not hasattr(self._local, "decompressor"):
            self._local.decompressor = self._zstandard.ZstdDecompressor(
                max_window_size=_MAX_WINDOW_BYTES
            )
        return self._local.decompressor
