"""The chunk files of a store: everything of the fs tier that reads and writes payloads.

Methods are called from threads, many at once, and block. Payloads go straight between item
memory and the disk or the page cache; the header, and what O_DIRECT can't take from the end of a
payload, go through two pages of each thread's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from stat import S_ISREG
from typing import NamedTuple

from kvstrata.errors import Corrupt
from kvstrata.keys import Key
from kvstrata.tiers.base import checksum as checksum_of
from kvstrata.tiers.fs_format import (
    PAGE_BYTES,
    Header,
    file_bytes,
    pack_header,
    parse_header,
    path_of,
)
from kvstrata.tiers.fs_quarantine import Quarantine
from kvstrata.tiers.fs_root import Root, disk_bytes
from kvstrata.tiers.fs_system import DIRECT, FileSystem

__all__ = ["DIRECT_FROM", "ChunkFiles", "Read", "SetAside", "Written", "plausible"]

# O_NONBLOCK is nothing to a regular file; a FIFO in its place must not hold a thread.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
# Below this a read of the page cache beats the disk, and a write is not worth waiting for.
DIRECT_FROM = 64 << 10


class SetAside(Corrupt):
    """It went to quarantine now."""


class Written(NamedTuple):
    """`new` is False where a valid file was there already."""

    new: bool
    disk_bytes: int
    direct: bool = False


class Read(NamedTuple):
    """`payload_bytes` fill the view from its start; `parent` is what the chunk extends."""

    disk_bytes: int
    payload_bytes: int
    parent: Key | None
    direct: bool


class ChunkFiles:
    def __init__(
        self, root: Root, quarantine: Quarantine | None = None, direct_from: int = DIRECT_FROM
    ) -> None:
        self.quarantine = Quarantine(root) if quarantine is None else quarantine
        self._root = root
        self._system = root.system
        self._own = threading.local()
        self._direct_from = direct_from

    def write(
        self, key: Key, view: memoryview, checksum: int | None, parent: Key | None = None
    ) -> Written:
        """Put the chunk in its file, unless a valid one is there.

        A file that is damaged in header or size, or holds another payload size, is replaced.
        Raises `OSError`, as `RootGone` where there is no store any more.
        """
        path = self._root.at(path_of(key))
        present = self._present(path, key, view.nbytes)
        if present is not None:
            return Written(False, present)
        head, tail = self._pages()
        if checksum is None:
            checksum = checksum_of(view)
        pack_header(head, Header(key, view.nbytes, checksum, parent))
        whole, rest = divmod(view.nbytes, PAGE_BYTES)
        parts = [head, view[: whole * PAGE_BYTES]]
        if rest:
            tail[:rest] = view[whole * PAGE_BYTES :]
            tail[rest:] = bytes(PAGE_BYTES - rest)
            parts.append(tail)
        if self._direct(view):
            try:
                return Written(True, self._root.replace(path, parts, direct=True), direct=True)
            except OSError as e:
                self._refused(e)
        return Written(True, self._root.replace(path, parts))

    def read(self, key: Key, view: memoryview, exact: bool = True) -> Read:
        """Fill `view` with the verified payload; not `exact`: its start, with a shorter one.

        Raises `FileNotFoundError`, or `Corrupt` if it isn't this chunk in this size, intact: the
        file is in quarantine then, as `SetAside` by this call, and what `view` holds is
        meaningless.
        """
        path = self._root.at(path_of(key))
        fd, direct = self._open(path, view)
        try:
            stat = self._system.fstat(fd)
            try:
                try:
                    return self._read_verified(fd, stat, key, view, exact, direct)
                except Corrupt:
                    # Bits also flip on their way here, which is no reason to lose the chunk.
                    return self._read_verified(fd, stat, key, view, exact, direct)
            except Corrupt as e:
                if self.quarantine.take(path, stat):
                    raise SetAside(str(e)) from e
                raise  # another has set it aside, or replaced it
        finally:
            self._system.close(fd)

    def present(self, key: Key, payload_bytes: int) -> int | None:
        """Bytes on disk of a file that holds the chunk, by its header and size."""
        return self._present(self._root.at(path_of(key)), key, payload_bytes)

    def remove(self, key: Key) -> bool:
        """Whether there was a file."""
        try:
            self._system.unlink(self._root.at(path_of(key)))
        except FileNotFoundError:
            return False
        return True

    def probe(self, key: Key) -> tuple[int, float] | None:
        """Bytes on disk and time of what looks like this chunk's file; it isn't opened."""
        try:
            stat = self._system.stat(self._root.at(path_of(key)))
        except FileNotFoundError:
            return None
        return (disk_bytes(stat), stat.st_mtime) if plausible(stat) else None

    def write_access(self, key: Key, seconds: float) -> None:
        """Keep the time of an access in the file's own."""
        with contextlib.suppress(FileNotFoundError):
            self._system.utime(self._root.at(path_of(key)), seconds)

    def describe(self, namespace: bytes, document: bytes) -> None:
        """Put the namespace's document beside its chunks, for people and tools."""
        path = self._root.at(f"{namespace.hex()}/namespace.json")
        try:
            self._system.stat(path)
        except FileNotFoundError:
            self._root.replace(path, [memoryview(document)])

    # ------------------------------------------------------------ past the page cache

    def _direct(self, view: memoryview) -> bool:
        return self._root.direct and view.nbytes >= self._direct_from and _aligned(view)

    def _open(self, path: str, view: memoryview) -> tuple[int, bool]:
        if self._direct(view):
            try:
                return self._system.open(path, _READ | DIRECT), True
            except OSError as e:
                self._refused(e)
        return self._system.open(path, _READ), False

    def _refused(self, error: OSError) -> None:
        """After an error with O_DIRECT: do without from now on, if that was it."""
        if error.errno != errno.EINVAL:
            raise error
        self._root.direct = False

    def _pages(self) -> tuple[memoryview, memoryview]:
        """This thread's pages for a header and the end of a payload, aligned like slots are."""
        try:
            head, tail = self._own.pages
        except AttributeError:
            memory = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
            head, tail = self._own.pages = memory[:PAGE_BYTES], memory[PAGE_BYTES:]
        return head, tail

    # ------------------------------------------------------------ verification

    def _present(self, path: str, key: Key, payload_bytes: int) -> int | None:
        try:
            fd = self._system.open(path, _READ)
        except OSError:
            return None
        try:
            stat = self._system.fstat(fd)
            head, _ = self._pages()
            _read_all(self._system, fd, [head])
            header = parse_header(head)
        except (Corrupt, OSError):
            return None
        finally:
            with contextlib.suppress(OSError):
                self._system.close(fd)
        same = header[:2] == (key, payload_bytes) and header.offset == 0
        return disk_bytes(stat) if same and stat.st_size == file_bytes(payload_bytes) else None

    def _read_verified(
        self,
        fd: int,
        stat: os.stat_result,
        key: Key,
        view: memoryview,
        exact: bool,
        direct: bool,
    ) -> Read:
        size = stat.st_size
        if size != file_bytes(view.nbytes) and (exact or not _shorter(size, view.nbytes)):
            raise Corrupt(f"file of {size} bytes, not {file_bytes(view.nbytes)}")
        head, tail = self._pages()
        pages = min(view.nbytes, size - PAGE_BYTES) // PAGE_BYTES
        whole = pages * PAGE_BYTES
        ends_inside = size > PAGE_BYTES + whole
        parts = [head, view[:whole]]
        if ends_inside:
            # O_DIRECT reads whole pages; a plain read goes where it belongs.
            parts.append(tail if direct else view[whole:])
        _read_all(self._system, fd, parts, size)
        header = parse_header(head)
        if header.key != key or header.offset:
            raise Corrupt(f"holds another chunk: {header.key.hex()} at {header.offset}")
        length = header.payload_bytes
        fits = length == view.nbytes if exact else length <= view.nbytes
        if not fits or file_bytes(length) != size:
            raise Corrupt(f"payload of {length} bytes, not {view.nbytes}")
        if ends_inside and direct:
            view[whole:length] = tail[: length - whole]
        if checksum_of(view[:length]) != header.checksum:
            raise Corrupt("payload checksum differs")
        return Read(disk_bytes(stat), length, header.parent, direct)


def plausible(stat: os.stat_result) -> bool:
    """Whether a file may be a chunk's, by what can be told without opening it."""
    size = stat.st_size
    return S_ISREG(stat.st_mode) and size >= PAGE_BYTES and size % PAGE_BYTES == 0


def _shorter(size: int, payload_bytes: int) -> bool:
    return PAGE_BYTES <= size <= file_bytes(payload_bytes) and size % PAGE_BYTES == 0


def _aligned(view: memoryview) -> bool:
    if view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_BYTES == 0


def _read_all(system: FileSystem, fd: int, parts: Sequence[memoryview], size: int = 0) -> None:
    """Fill the parts from the start of the file, which says it has `size` bytes.

    Raises `Corrupt` if it is shorter, `OSError` if it isn't and the rest doesn't come.
    """
    offset = 0
    left = [part for part in parts if part.nbytes]
    while left:
        got = system.preadv(fd, left, offset)
        if got == 0:
            if offset < size:
                raise OSError(errno.EIO, f"a read of {size} bytes ended after {offset}")
            raise Corrupt(f"file ends after {offset} bytes")
        offset += got
        while left and got >= left[0].nbytes:
            got -= left.pop(0).nbytes
        if left and got:
            left[0] = left[0][got:]
