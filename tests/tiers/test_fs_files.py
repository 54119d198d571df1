"""Chunk files on disk: their format, their names, damage of every kind, leftovers of the dead."""

from __future__ import annotations

import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigError, Corrupt
from kvstrata.keys import Key, make_key
from kvstrata.testing.tiers import aligned, payload
from kvstrata.tiers.fs_files import QUARANTINE, QUARANTINE_FILES, ChunkFiles
from kvstrata.tiers.fs_format import (
    PAGE_BYTES,
    Header,
    file_bytes,
    key_of,
    pack_header,
    parse_header,
    path_of,
)
from kvstrata.tiers.fs_root import IDENTITY, WRITERS, Root

NAMESPACE = bytes(range(16))
KEY = make_key(NAMESPACE, 3, bytes(range(100, 132)))
SIZE = 2 * PAGE_BYTES
DEAD_TEMP = ".12345-0123456789ab.7.tmp"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


@pytest.fixture
def files(root: Root) -> ChunkFiles:
    return ChunkFiles(root)


def write(files: ChunkFiles, key: Key = KEY, size: int = SIZE) -> bool:
    view = aligned(size)
    view[:] = payload(key, size)
    return files.write(key, view, None)[0]


def read(files: ChunkFiles, key: Key = KEY, size: int = SIZE) -> bytes:
    view = aligned(size)
    files.read(key, view)
    return bytes(view)


def quarantined(root: Path) -> list[str]:
    directory = root / QUARANTINE
    return sorted(p.name for p in directory.iterdir()) if directory.exists() else []


# ---------------------------------------------------------------- format


def test_header_layout_is_the_published_one() -> None:
    page = aligned(PAGE_BYTES, fill=0xFF)
    pack_header(page, Header(KEY, 5000, 0x0123456789ABCDEF))
    raw = bytes(page)
    assert raw[:8] == b"KVSTRATA"
    assert struct.unpack_from("<II", raw, 8) == (1, 52)
    assert raw[16:68] == KEY
    assert struct.unpack_from("<IQQ", raw, 68) == (0, 5000, 0x0123456789ABCDEF)
    assert raw[88:4088] == bytes(4000)
    assert raw[4088:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(raw[:4088]))


def test_an_unknown_version_is_refused() -> None:
    page = aligned(PAGE_BYTES)
    pack_header(page, Header(KEY, 1, 2))
    struct.pack_into("<I", page, 8, 2)
    with pytest.raises(Corrupt, match="version 2"):
        parse_header(page)


keys = st.builds(
    make_key,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=1, max_size=32),
)


@given(keys, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_headers_round_trip(key: Key, payload_bytes: int, checksum: int) -> None:
    page = aligned(PAGE_BYTES)
    header = Header(key, payload_bytes, checksum)
    pack_header(page, header)
    assert parse_header(page) == header


@given(keys)
def test_names_round_trip(key: Key) -> None:
    namespace, outer, inner, name = path_of(key).split("/")
    assert key_of(namespace, name) == key
    assert len(outer) == len(inner) == 2


@pytest.mark.parametrize(
    ("hash_", "expected"),
    [
        (b"\xab", "ab/00/ab.7.kv"),
        (b"\xab\x00", "ab/00/ab00.7.kv"),
        (b"\xab\xcd\xef", "ab/cd/abcdef.7.kv"),
    ],
)
def test_paths(hash_: bytes, expected: str) -> None:
    assert path_of(make_key(NAMESPACE, 7, hash_)) == f"{NAMESPACE.hex()}/{expected}"


@pytest.mark.parametrize(
    "name",
    [
        "ab.7.kv.bak",
        "AB.7.kv",
        "abc.7.kv",
        ".7.kv",
        "ab.07.kv",
        "ab.-1.kv",
        "ab.4294967296.kv",
        "ab.kv",
        "namespace.json",
        "ab" * 33 + ".0.kv",
        "ab.7.kv\n",
    ],
)
def test_names_that_are_no_chunks(name: str) -> None:
    assert key_of(NAMESPACE.hex(), name) is None
    assert key_of("quarantine", "ab.7.kv") is None


@pytest.mark.parametrize(("size", "expected"), [(0, 4096), (1, 8192), (4096, 8192), (4097, 12288)])
def test_files_are_whole_pages(files: ChunkFiles, tmp_path: Path, size: int, expected: int) -> None:
    assert file_bytes(size) == expected
    assert write(files, size=size)
    assert (tmp_path / path_of(KEY)).stat().st_size == expected
    assert read(files, size=size) == payload(KEY, size)


# ---------------------------------------------------------------- damage


def test_any_changed_byte_of_the_header_is_corrupt(files: ChunkFiles, tmp_path: Path) -> None:
    write(files)
    path = tmp_path / path_of(KEY)
    good = path.read_bytes()
    for i in range(PAGE_BYTES):
        bad = bytearray(good)
        bad[i] ^= 1 << i % 8
        path.write_bytes(bad)
        with pytest.raises(Corrupt):
            read(files)
        assert not path.exists()
    path.write_bytes(good)
    assert read(files) == payload(KEY, SIZE)


@pytest.mark.parametrize("at", [0, 1, 511, 512, SIZE // 2, SIZE - 1])
def test_any_changed_byte_of_the_payload_is_corrupt(
    files: ChunkFiles, tmp_path: Path, at: int
) -> None:
    write(files)
    path = tmp_path / path_of(KEY)
    bad = bytearray(path.read_bytes())
    bad[PAGE_BYTES + at] ^= 0x80
    path.write_bytes(bad)
    with pytest.raises(Corrupt, match="payload checksum"):
        read(files)


@pytest.mark.parametrize("size", [*range(0, file_bytes(SIZE), 512), file_bytes(SIZE) + 512])
def test_a_file_cut_short_or_too_long_is_corrupt(
    files: ChunkFiles, tmp_path: Path, size: int
) -> None:
    write(files)
    path = tmp_path / path_of(KEY)
    os.truncate(path, size)
    with pytest.raises(Corrupt, match="file of"):
        read(files)
    assert not path.exists()
    assert len(quarantined(tmp_path)) == 1


def test_a_whole_file_of_another_chunk_is_corrupt(files: ChunkFiles, tmp_path: Path) -> None:
    other = make_key(NAMESPACE, 4, KEY[20:])
    write(files)
    write(files, other)
    os.replace(tmp_path / path_of(other), tmp_path / path_of(KEY))
    with pytest.raises(Corrupt, match="another chunk"):
        read(files)


def test_a_payload_of_another_size_in_the_same_pages_is_corrupt(files: ChunkFiles) -> None:
    write(files, size=SIZE - 1)
    with pytest.raises(Corrupt, match="payload of 8191 bytes"):
        read(files, size=SIZE)


def test_quarantine_keeps_the_newest(files: ChunkFiles, tmp_path: Path) -> None:
    keys = [make_key(NAMESPACE, 0, bytes([i])) for i in range(QUARANTINE_FILES + 6)]
    for key in keys:
        write(files, key, 1)
        os.truncate(tmp_path / path_of(key), 10)
        with pytest.raises(Corrupt):
            read(files, key, 1)
    names = quarantined(tmp_path)
    assert [name.split("-")[1] for name in names] == [f"{k[20:].hex()}.0.kv" for k in keys[6:]]


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(file_bytes(SIZE))])
def test_a_broken_file_is_replaced_by_a_store(
    files: ChunkFiles, tmp_path: Path, content: bytes
) -> None:
    write(files)
    assert not write(files), "a valid file was written again"
    (tmp_path / path_of(KEY)).write_bytes(content)
    assert write(files)
    assert read(files) == payload(KEY, SIZE)


def test_a_file_of_another_size_is_replaced_by_a_store(files: ChunkFiles) -> None:
    write(files, size=SIZE)
    assert write(files, size=SIZE - 1)
    assert read(files, size=SIZE - 1) == payload(KEY, SIZE - 1)


def test_a_present_file_is_left_alone(files: ChunkFiles, tmp_path: Path) -> None:
    write(files)
    before = (tmp_path / path_of(KEY)).stat()
    assert not write(files)
    after = (tmp_path / path_of(KEY)).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_fifo_in_the_place_of_a_file_holds_no_thread(files: ChunkFiles, tmp_path: Path) -> None:
    write(files)
    path = tmp_path / path_of(KEY)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Corrupt):
        read(files)


# ---------------------------------------------------------------- recovery


def test_recovery_finds_chunks_oldest_first(files: ChunkFiles, tmp_path: Path) -> None:
    keys = [make_key(NAMESPACE, g, h) for g in (0, 12) for h in (b"\1", b"\1\2", b"\3" * 32)]
    for i, key in enumerate(keys):
        write(files, key)
        os.utime(tmp_path / path_of(key), ns=(0, 1000 - i))
    found, broken = files.recover()
    assert [f.key for f in found] == keys[::-1]
    assert broken == 0
    on_disk = [(tmp_path / path_of(key)).stat().st_blocks * 512 for key in keys[::-1]]
    assert [f.disk_bytes for f in found] == on_disk


def test_recovery_sets_broken_files_aside_and_ignores_strangers(
    files: ChunkFiles, tmp_path: Path
) -> None:
    write(files)
    path = tmp_path / path_of(KEY)
    os.truncate(path, 5000)
    (path.parent / "notes.txt").write_text("mine")
    misplaced = path.parent / "ffff.0.kv"
    misplaced.write_bytes(bytes(PAGE_BYTES))
    (tmp_path / "lost+found").mkdir()
    assert files.recover() == ([], 1)
    assert len(quarantined(tmp_path)) == 1
    assert misplaced.exists()
    assert (path.parent / "notes.txt").exists()


def test_recovery_sweeps_what_dead_writers_left(files: ChunkFiles, tmp_path: Path) -> None:
    write(files)
    chunk = tmp_path / path_of(KEY)
    living = Root(tmp_path)
    [writer] = {p.stem for p in (tmp_path / WRITERS).iterdir() if p.stem in living._temp("")}
    dead = [folder / DEAD_TEMP for folder in (tmp_path, tmp_path / NAMESPACE.hex(), chunk.parent)]
    alive = chunk.parent / f".{writer}.3.tmp"
    lock = tmp_path / WRITERS / "12345-0123456789ab.lock"
    for path in [*dead, alive, lock]:
        path.touch()
    found, _ = files.recover()
    assert [f.key for f in found] == [KEY]
    assert alive.exists()
    assert not any(path.exists() for path in [*dead, lock])
    assert (tmp_path / WRITERS / f"{writer}.lock").exists()
    living.close()
    living.close()
    files.recover()
    assert not alive.exists()


# ---------------------------------------------------------------- identity


def test_everyone_who_opens_a_directory_sees_the_same_store(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def join(_: int) -> Root:
        barrier.wait(timeout=10)
        return Root(tmp_path)

    for attempt in range(10):
        (tmp_path / IDENTITY).unlink(missing_ok=True)
        with ThreadPoolExecutor(8) as pool:
            roots = list(pool.map(join, range(8)))
        assert len({root.id for root in roots}) == 1, attempt
        for root in roots:
            root.close()
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_a_store_is_the_same_on_another_mount_and_another_is_another(tmp_path: Path) -> None:
    first, second = Root(tmp_path / "a"), Root(tmp_path / "b")
    assert first.id != second.id
    first.close()
    (tmp_path / "a").rename(tmp_path / "c")
    assert Root(tmp_path / "c").id == first.id


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "does not identify a store"),
        (b"{}", "does not identify a store"),
        (b'{"id":"7"}', "does not identify a store"),
        (b'{"id":"00000000-0000-0000-0000-000000000000","format":2}', "format 2"),
    ],
)
def test_an_identity_that_makes_no_sense(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / IDENTITY).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        Root(tmp_path)
    assert list((tmp_path / WRITERS).iterdir()) == []


def test_a_root_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give a writable directory"):
        Root(tmp_path / "file")
