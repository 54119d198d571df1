"""The directory of an fs store, which several nodes may share.

A file appears under its own name complete: it is written beside it and renamed over. Nothing is
synced, so a power cut may leave damage; readers verify what they read.

    .kvstrata-store          which store this is, on whatever mount it is seen
    writers/<writer>.lock    locked for as long as its writer lives
    .<writer>.<n>.tmp        in any directory: being written, or left over if its writer is dead
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import secrets
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvstrata.errors import ConfigError

__all__ = ["IDENTITY", "WRITERS", "Root", "disk_bytes"]

IDENTITY = ".kvstrata-store"
WRITERS = "writers"

_TEMP = re.compile(r"\.([0-9]+-[0-9a-f]{12})\.[0-9]+\.tmp")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class _Identity(msgspec.Struct, frozen=True):
    id: uuid.UUID
    format: int = 1


class Root:
    """One writer's hold on a store. Thread-safe; every method may block."""

    def __init__(self, path: Path) -> None:
        """Create the store or join it. Raises `ConfigError` if the directory can't hold one."""
        self.path = os.path.abspath(path)
        self._temps = itertools.count()
        self._writer, self._lock = "", -1
        try:
            os.makedirs(self.at(WRITERS), exist_ok=True)
            self._register()
            self.id = self._identity()
        except OSError as e:
            self.close()
            raise ConfigError(
                f"fs tier: root {self.path} can't hold a store ({e.strerror}): give a writable "
                "directory on a file system with hard links and locks"
            ) from e
        except BaseException:
            self.close()
            raise

    def at(self, relative: str) -> str:
        return f"{self.path}/{relative}"

    def replace(self, path: str, parts: Sequence[memoryview]) -> int:
        """Put a file of these parts at `path`, in one step; the bytes it takes on disk."""
        directory = os.path.dirname(path)
        temp = self._temp(directory)
        try:
            fd = os.open(temp, _CREATE, 0o644)
        except FileNotFoundError:
            os.makedirs(directory, exist_ok=True)
            fd = os.open(temp, _CREATE, 0o644)
        try:
            try:
                _write_all(fd, parts)
                taken = disk_bytes(os.fstat(fd))
            finally:
                os.close(fd)
            os.rename(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
        return taken

    def swept(self, directory: str) -> list[os.DirEntry[str]]:
        """Entries of a directory but temporary files, of which those of the dead are removed."""
        kept = []
        with os.scandir(directory) as entries:
            for entry in entries:
                temp = _TEMP.fullmatch(entry.name)
                if temp is None:
                    kept.append(entry)
                elif not self._alive(temp[1]):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
        return kept

    def sweep_writers(self) -> None:
        """Remove the locks of dead writers: once no temporary file of theirs is left."""
        for entry in self.swept(self.at(WRITERS)):
            if not self._alive(entry.name.removesuffix(".lock")):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)

    def close(self) -> None:
        """Let go. Idempotent."""
        fd, self._lock = self._lock, -1  # one step: two threads may close
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._lock_path(self._writer))
            os.close(fd)

    def _temp(self, directory: str) -> str:
        return f"{directory}/.{self._writer}.{next(self._temps)}.tmp"

    def _identity(self) -> uuid.UUID:
        """The store's, written by whoever comes first."""
        path = self.at(IDENTITY)
        temp = self._temp(self.path)
        try:
            with open(temp, "xb") as file:
                file.write(msgspec.json.encode(_Identity(uuid.uuid4())))
            # Unlike a rename, a link never replaces.
            with contextlib.suppress(FileExistsError):
                os.link(temp, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp)
        try:
            identity = msgspec.json.decode(Path(path).read_bytes(), type=_Identity)
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise ConfigError(f"fs tier: {path} does not identify a store: {e}") from e
        if identity.format != 1:
            raise ConfigError(f"fs tier: {path} has format {identity.format}, this one reads 1")
        return identity.id

    def _lock_path(self, writer: str) -> str:
        return self.at(f"{WRITERS}/{writer}.lock")

    def _register(self) -> None:
        for _ in range(100):
            writer = f"{os.getpid()}-{secrets.token_hex(6)}"
            fd = os.open(self._lock_path(writer), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                linked = os.fstat(fd).st_nlink > 0
            except BlockingIOError:
                linked = False
            except BaseException:
                os.close(fd)
                raise
            if linked:
                self._writer, self._lock = writer, fd
                return
            os.close(fd)  # another's sweep took it for a dead writer's before it was locked
        raise ConfigError(f"fs tier: can't lock a file in {self.at(WRITERS)}: others remove it")

    def _alive(self, writer: str) -> bool:
        if writer == self._writer:
            return True
        try:
            fd = os.open(self._lock_path(writer), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # can't tell (another user's): leave it alone
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False


def disk_bytes(stat: os.stat_result) -> int:
    """Of disk really used. Some network and FUSE file systems don't say: then the size."""
    return stat.st_blocks * 512 or stat.st_size


def _write_all(fd: int, parts: Sequence[memoryview]) -> None:
    left = [part for part in parts if part.nbytes]
    offset = 0
    while left:
        written = os.pwritev(fd, left, offset)
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0][written:]
