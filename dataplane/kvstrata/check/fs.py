"""A check of an fs store, in threads, beside the nodes that use it.

Without repair it writes nothing at all. With repair it does what a node would do that came upon
the same thing: damaged and strange files go to quarantine (only if they are still the ones that
were looked at), what dead writers left is removed. A chunk that stands under another's name and
is whole goes where it belongs. Files are read in pieces, so memory is bounded whatever their size.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import xxhash

from kvstrata.check.fs_store import DESCRIPTION, described, identity_of
from kvstrata.check.report import Finding, Problem, Report
from kvstrata.errors import Corrupt, Malformed
from kvstrata.keys import Key
from kvstrata.tiers.fs_format import (
    PAGE_BYTES,
    Header,
    file_bytes,
    key_of,
    namespace_of,
    parse_header,
    path_of,
)
from kvstrata.tiers.fs_lease import EVICTOR
from kvstrata.tiers.fs_news import NEWS
from kvstrata.tiers.fs_quarantine import MOST_BYTES, QUARANTINE, Quarantine
from kvstrata.tiers.fs_root import IDENTITY, Root, disk_bytes
from kvstrata.tiers.fs_writers import WRITERS

__all__ = ["FsCheck", "FsCheckOptions"]

_TEMP = re.compile(r"\.([0-9]+-[0-9a-f]{12})\.[0-9]+\.tmp")
_HEX = re.compile("[0-9a-f]{2}")
_OWN = frozenset({IDENTITY, WRITERS, QUARANTINE, EVICTOR, NEWS})
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PIECE = 1 << 20
# A writer on another host may live though no lock is seen; it renews its file far more often.
_ORPHANED_AFTER = 3600.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class FsCheckOptions:
    """`payloads`: verify their checksums too, which reads everything."""

    repair: bool = False
    payloads: bool = True
    threads: int = 4


class FsCheck:
    """`run` checks the store at `root`. Raises `ConfigError` if there is none."""

    def __init__(
        self,
        root: Path,
        options: FsCheckOptions = FsCheckOptions(),
        progress: Progress = lambda done, of: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`progress(done, of)` is called as folders are done, from any thread."""
        self._root = os.path.abspath(root)
        self._options = options
        self._progress = progress
        self._now = now
        self._pieces = threading.local()
        self._merging = threading.Lock()
        self._joined: Root | None = None
        self._quarantine: Quarantine | None = None
        self._report = Report(self._root)

    def run(self) -> Report:
        began = time.monotonic()
        identity = identity_of(self._root)
        if identity is None:
            self._add(Problem.IDENTITY, IDENTITY, "it does not identify a store; nodes refuse it")
        else:
            self._report.id = identity
        if self._options.repair and identity is not None:
            self._joined = Root(Path(self._root))
            self._quarantine = Quarantine(self._joined)
        try:
            self._look_at_root()
            self._look_at_folders()
        finally:
            if self._joined is not None:
                self._joined.writers.sweep()
                self._joined.close()
        self._report.seconds = time.monotonic() - began
        self._report.findings.sort(key=lambda f: (f.problem, f.path))
        return self._report

    # ------------------------------------------------------------ around the chunks

    def _look_at_root(self) -> None:
        for entry in self._entries(self._root):
            if entry.name in _OWN or namespace_of(entry.name):
                continue
            if not self._temp(entry, self._report):
                what = "neither a namespace nor a node's: it is left alone"
                self._add(Problem.FOREIGN, entry.name, what)
        for entry in self._entries(f"{self._root}/{QUARANTINE}"):
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat(follow_symlinks=False)
                detail = f"{disk_bytes(stat)} bytes of disk"
                self._add(Problem.QUARANTINED, f"{QUARANTINE}/{entry.name}", detail)

    def _look_at_folders(self) -> None:
        folders: list[tuple[str, str]] = []
        for entry in self._entries(self._root):
            if namespace_of(entry.name) and entry.is_dir(follow_symlinks=False):
                self._report.namespaces += 1
                self._describe(entry.name)
                folders += [(entry.name, outer) for outer in self._outer(entry)]
        todo: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        for folder in folders:
            todo.put(folder)
        done = iter(range(1, len(folders) + 1))

        def work() -> None:
            while True:
                try:
                    namespace, outer = todo.get_nowait()
                except queue.Empty:
                    return
                part = Report(self._root)
                self._look_at(namespace, outer, part)
                with self._merging:
                    self._report.merge(part)
                    self._progress(next(done), len(folders))

        threads = max(1, self._options.threads)
        with ThreadPoolExecutor(threads, "kvstrata-fsck") as pool:
            for job in [pool.submit(work) for _ in range(threads)]:
                job.result()

    def _describe(self, namespace: str) -> None:
        path = f"{namespace}/{DESCRIPTION}"
        try:
            if described(self._root, namespace) is None:
                self._add(Problem.UNDESCRIBED, namespace, "no namespace.json: model unknown")
        except Malformed as e:
            # A node writes it anew where there is none.
            done = self._set_aside(f"{self._root}/{path}", None)
            self._add(Problem.DESCRIPTION, path, str(e), done)
        except OSError as e:
            self._add(Problem.UNREADABLE, path, str(e.strerror))

    def _outer(self, namespace: os.DirEntry[str]) -> Iterator[str]:
        for entry in self._entries(namespace.path):
            if _HEX.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield entry.name
            elif entry.name != DESCRIPTION and not self._temp(entry, self._report):
                self._foreign(entry, self._report)

    def _look_at(self, namespace: str, outer: str, part: Report) -> None:
        digest = bytes.fromhex(namespace)
        for inner in self._entries(f"{self._root}/{namespace}/{outer}"):
            if not (_HEX.fullmatch(inner.name) and inner.is_dir(follow_symlinks=False)):
                if not self._temp(inner, part):
                    self._foreign(inner, part)
                continue
            for entry in self._entries(inner.path):
                key = key_of(digest, entry.name)
                if key is not None:
                    self._look_at_chunk(entry.path, key, part)
                elif not self._temp(entry, part):
                    self._foreign(entry, part)

    def _entries(self, path: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(path) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:
            return []
        except OSError as e:
            with self._merging:
                self._add(Problem.UNREADABLE, self._relative(path), str(e.strerror))
            return []

    def _foreign(self, entry: os.DirEntry[str], part: Report) -> None:
        done, detail = "", "no chunk is called so"
        with contextlib.suppress(FileNotFoundError):
            if entry.is_file(follow_symlinks=False):
                if disk_bytes(entry.stat(follow_symlinks=False)) > MOST_BYTES:
                    detail += "; larger than the quarantine: move it away"
                else:
                    done = self._set_aside(entry.path, None)
        part.add(Finding(Problem.FOREIGN, self._relative(entry.path), detail, done))

    def _temp(self, entry: os.DirEntry[str], part: Report) -> bool:
        """Whether it is a temporary file; one of a dead writer is reported."""
        match = _TEMP.fullmatch(entry.name)
        if match is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            stat = entry.stat(follow_symlinks=False)
            if self._silent(stat.st_mtime) and self._dead(match[1]):
                done = ""
                if self._joined is not None:
                    os.unlink(entry.path)
                    done = "removed"
                detail = f"{disk_bytes(stat)} bytes of disk of a writer that died"
                part.add(Finding(Problem.ORPHAN, self._relative(entry.path), detail, done))
        return True

    def _dead(self, writer: str) -> bool:
        try:
            fd = os.open(f"{self._root}/{WRITERS}/{writer}.lock", _READ)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return self._silent(os.fstat(fd).st_mtime)
        except OSError:
            return False
        finally:
            os.close(fd)

    def _silent(self, modified: float) -> bool:
        return self._now() - modified > _ORPHANED_AFTER

    # ------------------------------------------------------------ one chunk

    def _look_at_chunk(self, path: str, key: Key, part: Report) -> None:
        try:
            fd = os.open(path, _READ)
        except FileNotFoundError:
            part.gone += 1
            return
        except OSError as e:
            done = self._set_aside(path, None) if os.path.islink(path) else ""
            detail = f"can't be opened: {e.strerror}"
            part.add(Finding(Problem.UNREADABLE, self._relative(path), detail, done))
            return
        try:
            stat = os.fstat(fd)
            found = self._examine(fd, stat, path, key)
        finally:
            os.close(fd)
        part.chunks += 1
        part.stored_bytes += disk_bytes(stat)
        if found is None:
            part.verified_bytes += stat.st_size if self._options.payloads else PAGE_BYTES
            return
        problem, detail, header = found
        if problem is Problem.NAME and header is not None:
            done = self._put_right(path, stat, header)
        elif problem is Problem.UNREADABLE:
            done = ""
        else:
            done = self._set_aside(path, stat)
        part.add(Finding(problem, self._relative(path), detail, done))

    def _examine(
        self, fd: int, stat: os.stat_result, path: str, key: Key
    ) -> tuple[Problem, str, Header | None] | None:
        """What is wrong with an open file, if anything is."""
        piece = self._piece()
        try:
            if not S_ISREG(stat.st_mode):
                return Problem.FOREIGN, "not a file", None
            if os.preadv(fd, [piece[:PAGE_BYTES]], 0) < PAGE_BYTES:
                return Problem.HEADER, f"{stat.st_size} bytes hold no header", None
            header = parse_header(piece[:PAGE_BYTES])
            if header.offset:
                return Problem.HEADER, f"header of another place, {header.offset}", None
            if stat.st_size != file_bytes(header.payload_bytes):
                wanted = file_bytes(header.payload_bytes)
                return Problem.HEADER, f"file of {stat.st_size} bytes, not {wanted}", None
            if self._options.payloads and self._checksum(fd, header) != header.checksum:
                return Problem.PAYLOAD, "payload checksum differs", None
        except Corrupt as e:
            return Problem.HEADER, str(e), None
        except OSError as e:
            return Problem.UNREADABLE, str(e.strerror), None
        if header.key != key or not path.endswith(f"/{path_of(key)}"):
            return Problem.NAME, f"it belongs at {_place(header.key)}", header
        return None

    def _checksum(self, fd: int, header: Header) -> int:
        digest, at, left = xxhash.xxh3_64(), PAGE_BYTES, header.payload_bytes
        piece = self._piece()
        while left:
            got = os.preadv(fd, [piece[: min(left, _PIECE)]], at)
            if not got:
                raise Corrupt(f"file ends after {at} bytes")
            digest.update(piece[:got])
            at, left = at + got, left - got
        return digest.intdigest()

    def _piece(self) -> memoryview:
        """This thread's buffer."""
        if not hasattr(self._pieces, "piece"):
            self._pieces.piece = memoryview(mmap.mmap(-1, _PIECE))
        piece: memoryview = self._pieces.piece
        return piece

    # ------------------------------------------------------------ repair

    def _set_aside(self, path: str, stat: os.stat_result | None) -> str:
        """To quarantine, if it is still the file that was looked at; what was done."""
        if self._quarantine is None:
            return ""
        with contextlib.suppress(OSError):
            seen = os.stat(path, follow_symlinks=False) if stat is None else stat
            if self._quarantine.take(path, seen):
                return "moved to quarantine"
        return ""

    def _put_right(self, path: str, stat: os.stat_result, header: Header) -> str:
        """A whole chunk goes under its own name, unless there is one, or no such name."""
        if self._quarantine is None:
            return ""
        with contextlib.suppress(OSError, Malformed):
            right = f"{self._root}/{path_of(header.key)}"
            os.makedirs(os.path.dirname(right), exist_ok=True)
            os.link(path, right, follow_symlinks=False)  # unlike a rename, it never replaces
            if os.path.samestat(os.stat(path, follow_symlinks=False), stat):
                os.unlink(path)
            return f"moved to {path_of(header.key)}"
        return self._set_aside(path, stat)

    def _add(self, problem: Problem, path: str, detail: str, done: str = "") -> None:
        self._report.add(Finding(problem, path, detail, done))

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self._root)


def _place(key: Key) -> str:
    try:
        return path_of(key)
    except Malformed:
        return "no place: its key can't be one"
