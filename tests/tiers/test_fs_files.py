"""Chunk files on disk: their format, their names, damage of every kind, leftovers of the dead."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xxhash
from fs_kit import FaultySystem, temps
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigError, Corrupt
from kvstrata.keys import Key, make_key
from kvstrata.testing.tiers import aligned, payload
from kvstrata.tiers.fs_files import ChunkFiles
from kvstrata.tiers.fs_format import (
    PAGE_BYTES,
    Header,
    file_bytes,
    key_of,
    namespace_of,
    pack_header,
    parse_header,
    path_of,
)
from kvstrata.tiers.fs_index import Found
from kvstrata.tiers.fs_quarantine import QUARANTINE, Quarantine
from kvstrata.tiers.fs_root import IDENTITY, Root, RootGone
from kvstrata.tiers.fs_system import DIRECT, FileSystem
from kvstrata.tiers.fs_walk import folders, look
from kvstrata.tiers.fs_writers import WRITERS

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
    return files.write(key, view, None).new


def read(files: ChunkFiles, key: Key = KEY, size: int = SIZE) -> bytes:
    view = aligned(size)
    files.read(key, view)
    return bytes(view)


def walk(root: Root) -> tuple[list[Found], int]:
    """All chunks, the oldest first, and how many files were set aside."""
    steps = [look(root, Quarantine(root), folder) for folder in folders(root)]
    root.writers.sweep()
    return sorted(f for step in steps for f in step.found), sum(step.broken for step in steps)


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
    pack_header(page, Header(KEY, 5000, 1, parent=KEY[:-1], offset=1 << 20))
    raw = bytes(page)
    assert struct.unpack_from("<I", raw, 68) == (51,)
    assert struct.unpack_from("<Q51sx", raw, 88) == (1 << 20, KEY[:-1])
    assert raw[148:4088] == bytes(3940)
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


@given(keys, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.none() | keys)
def test_headers_round_trip(key: Key, payload_bytes: int, checksum: int, up: Key | None) -> None:
    page = aligned(PAGE_BYTES)
    header = Header(key, payload_bytes, checksum, up)
    pack_header(page, header)
    assert parse_header(page) == header


@given(keys)
def test_names_round_trip(key: Key) -> None:
    namespace, outer, inner, name = path_of(key).split("/")
    assert key_of(namespace_of(namespace) or b"", name) == key
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
    assert key_of(NAMESPACE, name) is None


@pytest.mark.parametrize("name", ["quarantine", "lost+found", "", "ab" * 15, "AB" * 16])
def test_directories_that_are_no_namespaces(name: str) -> None:
    assert namespace_of(name) is None


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


@pytest.mark.parametrize(("most_files", "most_pages"), [(5, 1000), (1000, 10)])
def test_quarantine_keeps_the_newest_within_its_bounds(
    root: Root, tmp_path: Path, most_files: int, most_pages: int
) -> None:
    files = ChunkFiles(root, Quarantine(root, most_files, most_pages * PAGE_BYTES))
    keys = [make_key(NAMESPACE, 0, bytes([i])) for i in range(12)]
    for key in keys:
        write(files, key, 1)
        path = tmp_path / path_of(key)
        path.write_bytes(bytes(2 * PAGE_BYTES))
        with pytest.raises(Corrupt):
            read(files, key, 1)
        assert not path.exists()
    names = quarantined(tmp_path)
    assert [name.split("-")[1] for name in names] == [f"{k[20:].hex()}.0.kv" for k in keys[7:]]
    assert files.quarantine.empty()
    assert quarantined(tmp_path) == []
    assert not files.quarantine.empty()


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


def test_a_walk_finds_chunks_and_their_age(root: Root, files: ChunkFiles, tmp_path: Path) -> None:
    keys = [make_key(NAMESPACE, g, h) for g in (0, 12) for h in (b"\1", b"\1\2", b"\3" * 32)]
    for i, key in enumerate(keys):
        write(files, key)
        os.utime(tmp_path / path_of(key), ns=(0, 1_000_000 - 1000 * i))
    found, broken = walk(root)
    assert [f.key for f in found] == keys[::-1]
    assert broken == 0
    on_disk = [(tmp_path / path_of(key)).stat().st_blocks * 512 for key in keys[::-1]]
    assert [f.disk_bytes for f in found] == on_disk


def test_a_walk_sets_aside_what_is_no_chunk_where_chunks_are(
    root: Root, files: ChunkFiles, tmp_path: Path
) -> None:
    write(files)
    path = tmp_path / path_of(KEY)
    os.truncate(path, 5000)
    strange = [path.parent / "notes.txt", path.parent.parent / "notes.txt"]
    misplaced = path.parent / "ffff.0.kv"
    misplaced.write_bytes(bytes(PAGE_BYTES))
    document = tmp_path / NAMESPACE.hex() / "namespace.json"
    silly = path.parent / ".nfs00000000000a1b2c00000001"  # removed, and open somewhere
    ours = [document, silly, tmp_path / "README", path.parent / "folder" / "x"]
    (path.parent / "folder").mkdir()
    (tmp_path / "lost+found").mkdir()
    for file in [*strange, *ours]:
        file.write_text("x")
    assert walk(root) == ([], 4)
    assert not any(file.exists() for file in [path, misplaced, *strange])
    assert all(file.exists() for file in ours)
    assert [n.split("-", 1)[1] for n in quarantined(tmp_path)].count("notes.txt") == 2


def test_a_walk_sweeps_what_dead_writers_left(
    root: Root, files: ChunkFiles, tmp_path: Path
) -> None:
    write(files)
    chunk = tmp_path / path_of(KEY)
    living = Root(tmp_path)
    dead = [folder / DEAD_TEMP for folder in (tmp_path, tmp_path / NAMESPACE.hex(), chunk.parent)]
    alive = chunk.parent / f".{living.writer}.3.tmp"
    lock = tmp_path / WRITERS / "12345-0123456789ab.lock"
    for path in [*dead, alive, lock]:
        path.touch()
    found, _ = walk(root)
    assert [f.key for f in found] == [KEY]
    assert alive.exists()
    assert not any(path.exists() for path in [*dead, lock])
    assert (tmp_path / WRITERS / f"{living.writer}.lock").exists()
    living.close()
    living.close()
    walk(root)
    assert not alive.exists()


def test_without_locks_what_is_old_is_left_over(tmp_path: Path) -> None:
    class NoLocks(FileSystem):
        def lock(self, fd: int) -> bool:
            raise OSError(errno.ENOLCK, "no locks")

    root = Root(tmp_path, NoLocks())
    other = Root(tmp_path, NoLocks())
    old, new = (tmp_path / f".{other.writer}.{i}.tmp" for i in range(2))
    for path, age in ((old, 7200), (new, 60)):
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    walk(root)
    assert (old.exists(), new.exists()) == (False, True)
    assert (tmp_path / WRITERS / f"{other.writer}.lock").exists()


def test_a_writer_that_was_taken_for_dead_says_that_it_lives(root: Root, tmp_path: Path) -> None:
    (tmp_path / WRITERS / f"{root.writer}.lock").unlink()
    root.writers.say_alive()
    assert root.writer in root.writers.seen()
    assert not Root(tmp_path).writers.dead(root.writer)


# ---------------------------------------------------------------- past the page cache


@pytest.mark.parametrize("size", [1, 4096, 65_536, 100_001])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_o_direct_and_the_page_cache_read_each_other(
    root: Root, tmp_path: Path, size: int, shift: int
) -> None:
    if not root.direct:
        pytest.skip("this file system does not take O_DIRECT")
    always, never = ChunkFiles(root, direct_from=0), ChunkFiles(root, direct_from=1 << 40)
    for i, (writer, reader) in enumerate([(always, never), (never, always), (always, always)]):
        key = make_key(NAMESPACE, i, b"k")
        view = aligned(size + shift)[shift:]
        view[:] = payload(key, size)
        written = writer.write(key, view, None)
        assert written.direct == (writer is always and shift == 0)
        back = aligned(size + shift + PAGE_BYTES, fill=0xAA)
        got = reader.read(key, back[shift : shift + size])
        assert got.direct == (reader is always and shift == 0)
        assert back[shift : shift + size] == payload(key, size)
        assert back[shift + size :] == b"\xaa" * PAGE_BYTES, "written past the view"
        assert (tmp_path / path_of(key)).stat().st_size == file_bytes(size)


def test_o_direct_can_be_off_and_refusals_are_lived_with(tmp_path: Path) -> None:
    assert not Root(tmp_path, direct="off").direct

    class Refuses(FileSystem):
        refuses = False

        def open(self, path: str, flags: int, mode: int = 0o644) -> int:
            if flags & DIRECT and self.refuses:
                raise OSError(errno.EINVAL, "no O_DIRECT")
            return super().open(path, flags, mode)

    system = Refuses()
    root = Root(tmp_path, system)
    files = ChunkFiles(root, direct_from=0)
    system.refuses = True
    assert write(files)
    assert read(files) == payload(KEY, SIZE)
    assert not root.direct
    assert not Root(tmp_path, system).direct
    with pytest.raises(ConfigError, match="does not take O_DIRECT"):
        Root(tmp_path, system, direct="on")


# ---------------------------------------------------------------- durability


@pytest.mark.parametrize(
    ("durability", "file_syncs", "folder_syncs"), [("none", 0, 0), ("data", 2, 0), ("full", 2, 5)]
)
def test_what_is_synced(
    tmp_path: Path, durability: Any, file_syncs: int, folder_syncs: int
) -> None:
    system = FaultySystem()
    files = ChunkFiles(Root(tmp_path, system, durability=durability))
    assert write(files)  # makes three directories
    assert write(files, make_key(NAMESPACE, 4, KEY[20:]))
    assert (system.faults["fdatasync"], system.faults["fsync"]) == (file_syncs, folder_syncs)


# ---------------------------------------------------------------- reads and writes that fail


def test_a_flip_on_the_way_is_read_again(root: Root) -> None:
    class FlipsOnce(FileSystem):
        flips = 0

        def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
            got = super().preadv(fd, parts, offset)
            if self.flips:
                self.flips -= 1
                parts[-1][0] ^= 1
            return got

    system = FlipsOnce()
    files = ChunkFiles(Root(Path(root.path), system))
    write(files)
    system.flips = 1
    assert read(files) == payload(KEY, SIZE)
    system.flips = 2
    with pytest.raises(Corrupt):
        read(files)


def test_a_read_that_ends_early_in_a_whole_file_is_an_error(root: Root) -> None:
    class Short(FileSystem):
        def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
            return 0 if offset else super().preadv(fd, [parts[0][:100]], offset)

    write(ChunkFiles(root))
    with pytest.raises(OSError, match="ended after 100"):
        read(ChunkFiles(Root(Path(root.path), Short())))
    assert read(ChunkFiles(root)) == payload(KEY, SIZE), "the file was set aside"


def test_what_close_tells_is_a_failed_store(root: Root, tmp_path: Path) -> None:
    system = FaultySystem()
    files = ChunkFiles(Root(tmp_path, system))
    system.only = lambda path: path.endswith(".tmp")
    system.errors["close"] = errno.EDQUOT
    with pytest.raises(OSError, match="uota"):
        write(files)
    system.errors.clear()
    assert not temps(tmp_path)
    assert not (tmp_path / path_of(KEY)).exists()


def test_the_root_is_never_made_by_a_store(tmp_path: Path) -> None:
    files = ChunkFiles(Root(tmp_path / "store"))
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(RootGone):
        write(files)
    assert not (tmp_path / "store").exists()


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


def test_a_store_that_is_made_is_told_of_and_one_that_is_joined_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    Root(tmp_path / "new").close()
    assert caplog.messages == [f"fs tier: made a new store in {tmp_path / 'new'}"]
    caplog.clear()
    Root(tmp_path / "new").close()
    assert caplog.messages == []


def test_a_root_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give a writable directory"):
        Root(tmp_path / "file")
