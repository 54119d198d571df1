"""The chunk files of a store: everything of the fs tier that reads and writes payloads.

Methods are called from threads, many at once, and block. Payloads go straight between item
memory and the page cache, the header through a page of each thread's own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from kvstrata.errors import Corrupt
from kvstrata.keys import Key
from kvstrata.tiers.base import checksum as checksum_of
from kvstrata.tiers.fs_format import (
    PAGE_BYTES,
    Header,
    file_bytes,
    key_of,
    pack_header,
    parse_header,
    path_of,
)
from kvstrata.tiers.fs_root import Root, disk_bytes

__all__ = ["QUARANTINE", "QUARANTINE_FILES", "ChunkFiles", "Found", "Recovered"]

QUARANTINE = "quarantine"
QUARANTINE_FILES = 64

# O_NONBLOCK is nothing to a regular file; a FIFO in its place must not hold a thread.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ZEROS = memoryview(bytes(PAGE_BYTES))


class Found(NamedTuple):
    """A chunk file: `modified` in ns since the epoch, `disk_bytes` really used."""

    modified: int
    key: Key
    disk_bytes: int


class Recovered(NamedTuple):
    """Oldest first; `broken` files went to quarantine."""

    found: list[Found]
    broken: int


class ChunkFiles:
    def __init__(self, root: Root) -> None:
        self._root = root
        self._pages = threading.local()
        self._quarantining = threading.Lock()

    def write(self, key: Key, view: memoryview, checksum: int | None) -> tuple[bool, int]:
        """Whether the file was written (False: a valid one was there), and its bytes on disk.

        A file that is damaged in header or size, or holds another payload size, is replaced.
        """
        path = self._root.at(path_of(key))
        present = self._present(path, key, view.nbytes)
        if present is not None:
            return False, present
        page = self._page()
        if checksum is None:
            checksum = checksum_of(view)
        pack_header(page, Header(key, view.nbytes, checksum))
        padding = file_bytes(view.nbytes) - PAGE_BYTES - view.nbytes
        return True, self._root.replace(path, [page, view, _ZEROS[:padding]])

    def read(self, key: Key, view: memoryview) -> int:
        """Fill `view` with the verified payload; the file's bytes on disk.

        Raises `FileNotFoundError`, or `Corrupt` if it isn't this chunk in this size, intact: the
        file is in quarantine then, and what `view` holds is meaningless.
        """
        path = self._root.at(path_of(key))
        fd = os.open(path, _READ)
        try:
            stat = os.fstat(fd)
            try:
                self._read_verified(fd, stat, key, view)
            except Corrupt:
                self._quarantine(path, stat)
                raise
            return disk_bytes(stat)
        finally:
            os.close(fd)

    def remove(self, key: Key) -> bool:
        """Whether there was a file."""
        try:
            os.unlink(self._root.at(path_of(key)))
        except FileNotFoundError:
            return False
        return True

    def probe(self, key: Key) -> int | None:
        """Bytes on disk of what looks like this chunk's file; it isn't opened."""
        try:
            stat = os.stat(self._root.at(path_of(key)), follow_symlinks=False)
        except FileNotFoundError:
            return None
        return disk_bytes(stat) if _plausible(stat) else None

    def describe(self, namespace: bytes, document: bytes) -> None:
        """Put the namespace's document beside its chunks, for people and tools."""
        path = self._root.at(f"{namespace.hex()}/namespace.json")
        if not os.path.exists(path):
            self._root.replace(path, [memoryview(document)])

    def recover(self) -> Recovered:
        """What the directory holds, without reading a payload; sweeps what the dead left."""
        found: list[Found] = []
        broken = 0
        for namespace in self._folders(self._root.path):
            for outer in self._folders(namespace.path):
                for inner in self._folders(outer.path):
                    for entry in self._root.swept(inner.path):
                        key = key_of(namespace.name, entry.name)
                        if key is None or self._root.at(path_of(key)) != entry.path:
                            continue
                        try:
                            stat = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue
                        if _plausible(stat):
                            found.append(Found(stat.st_mtime_ns, key, disk_bytes(stat)))
                        else:
                            self._quarantine(entry.path, stat)
                            broken += 1
        self._root.sweep_writers()
        return Recovered(sorted(found), broken)

    def _folders(self, path: str) -> Iterator[os.DirEntry[str]]:
        return (e for e in self._root.swept(path) if e.is_dir(follow_symlinks=False))

    def _page(self) -> memoryview:
        """This thread's header page, aligned like slots are."""
        page: memoryview | None = getattr(self._pages, "page", None)
        if page is None:
            page = self._pages.page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        return page

    def _present(self, path: str, key: Key, payload_bytes: int) -> int | None:
        try:
            fd = os.open(path, _READ)
        except OSError:
            return None
        try:
            stat = os.fstat(fd)
            page = self._page()
            _read_all(fd, [page])
            header = parse_header(page)
        except (Corrupt, OSError):
            return None
        finally:
            os.close(fd)
        same = header.key == key and header.payload_bytes == payload_bytes
        return disk_bytes(stat) if same and stat.st_size == file_bytes(payload_bytes) else None

    def _read_verified(self, fd: int, stat: os.stat_result, key: Key, view: memoryview) -> None:
        if stat.st_size != file_bytes(view.nbytes):
            raise Corrupt(f"file of {stat.st_size} bytes, not {file_bytes(view.nbytes)}")
        page = self._page()
        _read_all(fd, [page, view])
        header = parse_header(page)
        if header.key != key:
            raise Corrupt(f"holds another chunk: {header.key.hex()}")
        if header.payload_bytes != view.nbytes:
            raise Corrupt(f"payload of {header.payload_bytes} bytes, not {view.nbytes}")
        if checksum_of(view) != header.checksum:
            raise Corrupt("payload checksum differs")

    def _quarantine(self, path: str, stat: os.stat_result) -> None:
        directory = self._root.at(QUARANTINE)
        with self._quarantining, contextlib.suppress(OSError):
            if not os.path.samestat(os.stat(path, follow_symlinks=False), stat):
                return  # another node has replaced it since
            try:
                os.makedirs(directory, exist_ok=True)
                os.rename(path, f"{directory}/{time.time_ns():020d}-{os.path.basename(path)}")
            except OSError:
                os.unlink(path)
            for name in sorted(os.listdir(directory))[:-QUARANTINE_FILES]:
                os.unlink(f"{directory}/{name}")


def _plausible(stat: os.stat_result) -> bool:
    return stat.st_size >= PAGE_BYTES and stat.st_size % PAGE_BYTES == 0


def _read_all(fd: int, parts: list[memoryview]) -> None:
    """Fill the parts from the start of the file. Raises `Corrupt` if it is shorter."""
    offset = 0
    left = [part for part in parts if part.nbytes]
    while left:
        got = os.preadv(fd, left, offset)
        if got == 0:
            raise Corrupt(f"file ends after {offset} bytes")
        offset += got
        while left and got >= left[0].nbytes:
            got -= left.pop(0).nbytes
        if left:
            left[0] = left[0][got:]
