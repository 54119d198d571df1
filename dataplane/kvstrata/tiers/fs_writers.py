"""Who uses an fs store: a file for each writer, locked for as long as it lives.

Locks only tell sooner that a writer is dead; where there are none, or they reach no other host,
what nobody touched for an hour is left over.

    writers/<writer>.lock    its time is renewed
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets

from kvstrata.errors import ConfigError
from kvstrata.tiers.fs_system import FileSystem

__all__ = ["WRITERS", "Writers"]

WRITERS = "writers"

# Of what is left over where locks tell nothing.
_ORPHANED_AFTER = 3600.0


class Writers:
    """Of the store at a path, and after `join` this one among them. Thread-safe; every method may
    block, and but for `leave` and `dead` raise `OSError`."""

    def __init__(self, root: str, system: FileSystem) -> None:
        self.name = ""
        """Of this one."""
        self._folder = f"{root}/{WRITERS}"
        self._system = system
        self._lock, self._locks_work = -1, True

    def join(self) -> None:
        """Be one of them, under a name that nobody had before. Raises `ConfigError` if the others
        don't let it."""
        system = self._system
        with contextlib.suppress(FileExistsError):
            system.mkdir(self._folder)
        for _ in range(100):
            name = f"{os.getpid()}-{secrets.token_hex(6)}"
            # Nothing stays open for writing: that would keep people from remounting read-only.
            path = self._path(name)
            fd = system.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL)
            try:
                fd = self._locked(fd, path)
                linked = system.fstat(fd).st_nlink > 0
            except FileNotFoundError:
                linked = False
            except BaseException:
                system.close(fd)
                raise
            if linked:
                self.name, self._lock = name, fd
                return
            system.close(fd)  # another's sweep took it for a dead writer's before it was locked
        raise ConfigError(f"fs tier: can't lock a file in {self._folder}: others remove it")

    def leave(self) -> None:
        """Idempotent."""
        fd, self._lock = self._lock, -1  # one step: two threads may close
        if fd >= 0:
            with contextlib.suppress(OSError):
                self._system.unlink(self._path(self.name))
            with contextlib.suppress(OSError):
                self._system.close(fd)

    def say_alive(self) -> None:
        """Renew the time of our file, or the file, if a host that our lock doesn't reach took us
        for dead."""
        path = self._path(self.name)
        try:
            self._system.utime(path, self._system.now())
        except FileNotFoundError:
            fd = self._system.open(path, os.O_RDONLY | os.O_CREAT)
            fd, self._lock = self._lock, self._locked(fd, path)
            self._system.close(fd)

    def seen(self) -> dict[str, float]:
        """Every writer's name, and when it last said that it lives, by the file's time."""
        found = {}
        for entry in self._files():
            with contextlib.suppress(FileNotFoundError):
                found[entry.name.removesuffix(".lock")] = entry.stat().st_mtime
        return found

    def dead(self, name: str) -> bool:
        """Whether a writer is known to be dead. Not knowing is False."""
        if name == self.name or not self._locks_work:
            return False
        try:
            fd = self._system.open(self._path(name), os.O_RDWR)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # another user's
        try:
            return self._system.lock(fd)
        except OSError:
            return False
        finally:
            self._system.close(fd)

    def orphaned(self, entry: os.DirEntry[str], name: str) -> bool:
        """Whether a file of a writer is left over."""
        if self._locks_work:
            return self.dead(name)
        with contextlib.suppress(OSError):
            age = self._system.now() - entry.stat(follow_symlinks=False).st_mtime
            return name != self.name and age > _ORPHANED_AFTER
        return False

    def sweep(self) -> None:
        """Remove the files of the dead: once no temporary file of theirs is left."""
        for entry in self._files():
            if self.orphaned(entry, entry.name.removesuffix(".lock")):
                with contextlib.suppress(FileNotFoundError):
                    self._system.unlink(entry.path)

    def _files(self) -> list[os.DirEntry[str]]:
        return [e for e in self._system.entries(self._folder) if e.name.endswith(".lock")]

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}.lock"

    def _locked(self, fd: int, path: str) -> int:
        """A file's descriptor that holds the lock, where there are locks at all."""
        system = self._system
        try:
            if system.lock(fd):
                return fd
        except OSError as e:
            if e.errno != errno.EBADF:
                self._locks_work = False
                return fd
            # NFS asks for a file open for writing.
            writing = system.open(path, os.O_RDWR)
            system.close(fd)
            self._locks_work = system.lock(writing)
            return writing
        raise FileNotFoundError(errno.ENOENT, "another's sweep holds it")
