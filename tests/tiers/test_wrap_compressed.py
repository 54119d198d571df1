"""What is compressed and what isn't, and that no lie in a frame outgrows a slot."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import zstandard
from wrap_kit import blank, context_of, item, key, memory, soft_item

from kvstrata.errors import ConfigError
from kvstrata.testing import FakeClock
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.testing.tiers import aligned
from kvstrata.tiers.base import Item, Outcome, checksum
from kvstrata.tiers.wrappers.compressed import Compressed
from kvstrata.tiers.wrappers.frame import HEADER_BYTES, Codec, Frame, pack_frame, parse_frame

SIZE = 50_000


@pytest.fixture
def inner() -> MemoryTier:
    return memory(context_of(FakeClock()))


def around(inner: MemoryTier, **options: Any) -> Compressed:
    return Compressed.wrap(inner, options, inner.context)


def codec(inner: MemoryTier, stored: Item) -> Codec:
    content = memoryview(inner.chunks[stored.key][0])
    return parse_frame(content, stored.key)[0].codec


async def test_what_shrinks_is_compressed(inner: MemoryTier) -> None:
    tier = around(inner)
    soft, hard = soft_item(1, SIZE), item(2, SIZE)
    assert await tier.store([soft, hard]) == [Outcome.STORED] * 2
    assert codec(inner, soft) is Codec.ZSTD
    assert codec(inner, hard) is Codec.RAW
    assert len(inner.chunks[soft.key][0]) < SIZE // 10
    assert len(inner.chunks[hard.key][0]) == SIZE + HEADER_BYTES
    into = [blank(soft), blank(hard)]
    assert await tier.load(into) == [Outcome.LOADED] * 2
    assert [i.view for i in into] == [soft.view, hard.view]
    counters = tier.usage().counters
    assert (counters["compressed"], counters["stored_raw"]) == (1, 1)
    saved = SIZE - len(inner.chunks[soft.key][0]) + HEADER_BYTES
    assert counters["saved_bytes"] == saved
    await tier.close()


async def test_what_shrinks_too_little_is_not(inner: MemoryTier) -> None:
    tier = around(inner, min_saving=0.5)
    mixed = item(1, SIZE)
    mixed.view[: SIZE // 4] = bytes(SIZE // 4)
    assert await tier.store([mixed]) == [Outcome.STORED]
    assert codec(inner, mixed) is Codec.RAW
    await tier.close()


@pytest.mark.parametrize("level", [-5, 1, 9])
async def test_levels(inner: MemoryTier, level: int) -> None:
    tier = around(inner, level=level)
    soft = soft_item(1, SIZE)
    assert await tier.store([soft]) == [Outcome.STORED]
    into = blank(soft)
    assert await tier.load([into]) == [Outcome.LOADED]
    assert into.view == soft.view
    await tier.close()


async def test_loads_into_more_memory(inner: MemoryTier) -> None:
    tier = around(inner)
    soft = soft_item(1, SIZE)
    await tier.store([soft])
    into = blank(soft, SIZE + 777, exact=False)
    assert await tier.load([into]) == [Outcome.LOADED]
    assert into.view[:SIZE] == soft.view
    assert into.view[SIZE:] == b"\xaa" * 777
    await tier.close()


def forged(payload_bytes: int, body: bytes, known: int) -> bytes:
    """A frame whose header is in order, whatever is in it."""
    view = memoryview(bytearray(HEADER_BYTES) + body)
    pack_frame(view, Frame(key(1), Codec.ZSTD, payload_bytes, len(body), known))
    return bytes(view)


async def load_forged(inner: MemoryTier, content: bytes) -> Outcome:
    tier = around(inner)
    inner.chunks[key(1)] = content, 0
    slot = aligned(2 * SIZE, fill=0x55)
    [outcome] = await tier.load([Item(key(1), slot[:SIZE])])
    assert slot[SIZE:] == b"\x55" * SIZE, "written past the slot"
    assert key(1) not in inner.chunks
    await tier.close()
    return outcome


async def test_a_bomb_is_stopped_at_the_end_of_the_slot(inner: MemoryTier) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    assert len(bomb) < SIZE
    zeros = checksum(memoryview(bytes(SIZE)))
    assert await load_forged(inner, forged(SIZE, bomb, zeros)) is Outcome.CORRUPT


async def test_a_bomb_that_does_not_say_its_size(inner: MemoryTier) -> None:
    plain = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8 << 20))
    zeros = checksum(memoryview(bytes(SIZE)))
    assert await load_forged(inner, forged(SIZE, plain, zeros)) is Outcome.CORRUPT


async def test_less_than_the_header_says(inner: MemoryTier) -> None:
    short = zstandard.ZstdCompressor().compress(bytes(SIZE - 1))
    zeros = checksum(memoryview(bytes(SIZE)))
    assert await load_forged(inner, forged(SIZE, short, zeros)) is Outcome.CORRUPT


async def test_more_than_the_slot_by_the_header(inner: MemoryTier) -> None:
    body = zstandard.ZstdCompressor().compress(bytes(2 * SIZE))
    zeros = checksum(memoryview(bytes(2 * SIZE)))
    assert await load_forged(inner, forged(2 * SIZE, body, zeros)) is Outcome.CORRUPT


async def test_no_zstd_at_all(inner: MemoryTier) -> None:
    assert await load_forged(inner, forged(SIZE, b"x" * 100, 1)) is Outcome.CORRUPT


async def test_a_window_that_is_too_large(inner: MemoryTier) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(
        compression_params=parameters
    ).compressobj()  # streaming: it keeps the window as asked
    body = compressor.compress(bytes(SIZE)) + compressor.flush()
    zeros = checksum(memoryview(bytes(SIZE)))
    assert await load_forged(inner, forged(SIZE, body, zeros)) is Outcome.CORRUPT


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": 0}, "level 0"),
        ({"level": 30}, "level"),
        ({"levle": 3}, "levle: there is no such setting"),
        ({"min_saving": 1}, "min_saving"),
        ({"scratch": "lots"}, "scratch"),
        ({"threads": 0}, "threads"),
    ],
)
def test_options_that_cannot_work(inner: MemoryTier, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"wrapper compressed: .*{says}"):
        around(inner, **options)


def test_a_missing_package_says_what_to_install(
    inner: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstrata\[compress\]'"):
        around(inner)
