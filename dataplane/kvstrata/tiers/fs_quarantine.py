"""Where damaged and strange files of a store go: moved, counted, bounded.

People may look at them; nobody serves them. The newest are kept, at most so many files and so
many bytes of disk. Several nodes may use one quarantine.
"""

from __future__ import annotations

import contextlib
import os
import threading
from stat import S_ISDIR

from kvstrata.tiers.fs_root import Root, disk_bytes

__all__ = ["MOST_BYTES", "QUARANTINE", "Quarantine"]

QUARANTINE = "quarantine"

MOST_BYTES = 256 << 20
"""Of disk, for all that is in it."""

_MOST_NAME = 200  # bytes


class Quarantine:
    """Thread-safe; methods block."""

    def __init__(self, root: Root, most_files: int = 64, most_bytes: int = MOST_BYTES) -> None:
        self._root = root
        self._most_files = most_files
        self._most_bytes = most_bytes
        self._one = threading.Lock()

    def take(self, path: str, stat: os.stat_result) -> bool:
        """Move the file that has this `stat` out of the way, if it is still there."""
        system = self._root.system
        directory = self._root.at(QUARANTINE)
        with self._one, contextlib.suppress(OSError):
            if S_ISDIR(stat.st_mode) or not os.path.samestat(system.stat(path), stat):
                return False  # another node has replaced it since
            # All of a chunk's name; another may be as long as names can be.
            name = os.fsdecode(os.fsencode(os.path.basename(path))[-_MOST_NAME:])
            moved = f"{directory}/{int(system.now() * 1e9):020d}-{name}"
            try:
                with contextlib.suppress(FileExistsError):
                    system.mkdir(directory)
                system.rename(path, moved)
            except OSError:
                system.unlink(path)
            else:
                if not os.path.samestat(system.stat(moved), stat):
                    self._give_back(moved, path)
                    return False
            self._trim()
            return True
        return False

    def _give_back(self, moved: str, path: str) -> None:
        """A file that was stored in the very moment, unless there is a still newer one."""
        with contextlib.suppress(FileExistsError):
            self._root.system.link(moved, path)
        self._root.system.unlink(moved)

    def empty(self) -> bool:
        """Give its room back to the disk; whether there was any."""
        with self._one, contextlib.suppress(OSError):
            return self._trim(most_files=0)
        return False

    def _trim(self, most_files: int | None = None) -> bool:
        system = self._root.system
        most = self._most_files if most_files is None else most_files
        directory = self._root.at(QUARANTINE)
        files = nbytes = 0
        full = removed = False
        for entry in sorted(system.entries(directory), key=lambda e: e.name, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                files += 1
                nbytes += disk_bytes(system.stat(entry.path))
                full = full or files > most or nbytes > self._most_bytes
                if full:
                    system.unlink(entry.path)
                    removed = True
        return removed
