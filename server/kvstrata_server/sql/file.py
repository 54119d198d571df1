"""SQLite's file: used by one server, and still the one that was opened.

SQLite goes on with a file that was removed or replaced: it takes writes that nobody will find.
"""

from __future__ import annotations

import fcntl
import os

from kvstrata.errors import ConfigError

__all__ = ["DatabaseFile"]

_Identity = tuple[int, int]


class DatabaseFile:
    """The file at a path. Methods block for as long as its file system does."""

    def __init__(self, path: str, shown: str) -> None:
        self._path = path
        self._lock_path = f"{path}-lock"
        self._shown = shown
        self._lock: int | None = None
        self._opened: _Identity | None = None

    def claim(self) -> None:
        """Keep a second server off: each has an index of its own, and would not see what the
        other one wrote. The claim ends with the process, however it ends. Raises `ConfigError`."""
        if self._lock is not None and _identity(self._lock_path) == _identity(self._lock):
            return
        try:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise ConfigError(
                f"server.database {self._shown} can't be opened: {e.strerror}. "
                "Make its directory, or choose one that this user may write to"
            ) from e
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(lock)
            raise ConfigError(
                f"server.database {self._shown} is used by another control plane: end that one, "
                "or choose another file"
            ) from e
        self.release()
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def opened(self) -> None:
        """Connections lead to what is at the path now."""
        self._opened = _identity(self._path)

    def check(self) -> None:
        """Raises `OSError`, with what to do, where what is written would be lost: it is no more
        the file that was opened, or not this server's alone."""
        if self._opened is None or self._lock is None:
            return
        found = _identity(self._path)
        if found != self._opened:
            what = "removed" if found is None else "replaced by another one"
            raise FileNotFoundError(
                f"the file of server.database {self._shown} was {what} under this server, so that "
                "nothing would be kept: put that very file back, or restart the server, which "
                "goes on with what is there then"
            )
        # Whoever removed the claim's file let others make one: have it again, if none did.
        try:
            self.claim()
        except ConfigError as e:
            raise FileExistsError(str(e)) from e


def _identity(file: str | int) -> _Identity | None:
    """Which file it is. Not opened to see it: to close it again would end SQLite's own locks."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
