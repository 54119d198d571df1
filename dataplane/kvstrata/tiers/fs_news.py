"""What those that share a store tell each other: chunks stored, used and removed.

    news/<writer>.<n>        records of one writer, appended; the next file when one is long

Each reads on where it stopped in the others' files. So everybody's index follows everybody's
stores and the evictor's removals within seconds, without walks. News may be late, lost or wrong:
the directory is the truth, and the next walk or load finds out.

A record has 96 bytes: 1 what (`+`, `-`, `=` used, `.` no chunk but
a total), 3 zero, 4 length of the key, 8 bytes on disk,
8 all bytes its writer ever stored, 8 time (float, seconds since the epoch), 52 key, 12 zero.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvstrata.keys import DIGEST_BYTES, MAX_KEY_BYTES, Key
from kvstrata.tiers.fs_root import Root, write_all

__all__ = ["NEWS", "REMOVED", "STORED", "TOTAL", "USED", "News", "Record"]

NEWS = "news"
STORED, REMOVED, USED, TOTAL = b"+", b"-", b"=", b"."

_RECORD = struct.Struct("<c3xIQQd52s12x")
_MOST_BYTES = 8 << 20  # of a file
_MOST_AT_ONCE = 65_536 * _RECORD.size
# Of a dead writer's, until everybody has read it.
_KEEP = 600.0


class Record(NamedTuple):
    """`total` is the sum of `disk_bytes` of all that its writer ever stored, this included."""

    what: bytes
    key: Key
    disk_bytes: int
    total: int
    time: float


class News:
    """One writer's part. Methods block; one thread at a time."""

    def __init__(self, root: Root) -> None:
        self._root, self._system = root, root.system
        self._at: dict[str, int] = {}
        self._file = 0
        self._size = 0

    def start(self) -> None:
        """Take what is there as read. To be called before a walk. Raises `OSError`."""
        with contextlib.suppress(FileExistsError):
            self._system.mkdir(self._root.at(NEWS))
        for entry in self._entries():
            self._at[entry.name] = entry.stat().st_size // _RECORD.size * _RECORD.size

    def write(self, records: Sequence[Record]) -> None:
        """Append. Raises `OSError`; some may be lost then."""
        if not records:
            return
        content = b"".join(
            _RECORD.pack(r.what, len(r.key), r.disk_bytes, r.total, r.time, r.key) for r in records
        )
        if self._size >= _MOST_BYTES:
            self._next_file()
        fd = self._open()
        try:
            if self._system.fstat(fd).st_size != self._size:
                # Somebody removed it: at this place in another file nobody would look.
                self._system.close(fd)
                self._next_file()
                fd = self._open()
            write_all(self._system, fd, [memoryview(content)], self._size)
        finally:
            self._system.close(fd)
        self._size += len(content)

    def read(self) -> list[tuple[str, Record]]:
        """What others have written since: `(writer, record)`, each writer's in order."""
        news: list[tuple[str, Record]] = []
        there = {}
        for entry in sorted(self._entries(), key=_age):
            writer = entry.name.rpartition(".")[0]
            if writer == self._root.writer:
                continue
            with contextlib.suppress(FileNotFoundError):
                there[entry.name] = self._read(entry, self._at.get(entry.name, 0), writer, news)
        self._at = there
        return news

    def sweep(self, living: Sequence[str]) -> None:
        """Remove what writers that are gone left long ago. Raises `OSError`."""
        for entry in self._entries():
            if entry.name.rpartition(".")[0] not in living:
                with contextlib.suppress(FileNotFoundError):
                    if self._system.now() - entry.stat().st_mtime > _KEEP:
                        self._system.unlink(entry.path)

    def _read(
        self, entry: os.DirEntry[str], start: int, writer: str, news: list[tuple[str, Record]]
    ) -> int:
        """Add what a file has from `start` on; where to go on."""
        size = min(self._system.stat(entry.path).st_size - start, _MOST_AT_ONCE)
        if size < _RECORD.size:
            return start
        content = memoryview(bytearray(size))
        fd = self._system.open(entry.path, os.O_RDONLY)
        try:
            size = self._system.preadv(fd, [content], start)
        finally:
            self._system.close(fd)
        whole = size // _RECORD.size * _RECORD.size
        for what, length, disk, total, time, key in _RECORD.iter_unpack(content[:whole]):
            if what not in (STORED, REMOVED, USED, TOTAL):
                break  # a hole that a network file system shows before its content
            start += _RECORD.size
            if DIGEST_BYTES + 4 < length <= MAX_KEY_BYTES or what == TOTAL:
                news.append((writer, Record(what, Key(key[:length]), disk, total, time)))
        return start

    def _open(self) -> int:
        return self._system.open(self._path(self._file), os.O_WRONLY | os.O_CREAT)

    def _next_file(self) -> None:
        self._file, self._size = self._file + 1, 0
        if self._file >= 2:  # the one before may still be read
            with contextlib.suppress(FileNotFoundError):
                self._system.unlink(self._path(self._file - 2))

    def _entries(self) -> list[os.DirEntry[str]]:
        return [e for e in self._system.entries(self._root.at(NEWS)) if _age(e)[1] >= 0]

    def _path(self, n: int) -> str:
        return self._root.at(f"{NEWS}/{self._root.writer}.{n}")


def _age(entry: os.DirEntry[str]) -> tuple[str, int]:
    writer, _, n = entry.name.rpartition(".")
    return writer, int(n) if writer and n.isdigit() else -1
