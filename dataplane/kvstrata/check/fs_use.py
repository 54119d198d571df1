"""Use of an fs store: one `stat` per file, nothing is read but the namespaces' documents."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstrata.check.fs_store import described, identity_of
from kvstrata.check.use import Use, UseReport
from kvstrata.errors import Malformed
from kvstrata.tiers.fs_format import key_of, namespace_of
from kvstrata.tiers.fs_root import disk_bytes

__all__ = ["fs_use"]


def fs_use(
    root: Path,
    threads: int = 4,
    progress: Callable[[int, int], None] = lambda done, of: None,
    now: Callable[[], float] = time.time,
) -> UseReport:
    """The age of a chunk is that of its last use, as nodes note it in the file's time.

    Raises `ConfigError` if there is no store.
    """
    path = os.path.abspath(root)
    report = UseReport(path, identity_of(path) or "")
    folders: list[tuple[str, str]] = []
    for entry in _entries(path):
        if namespace_of(entry.name) and entry.is_dir(follow_symlinks=False):
            report.namespaces[entry.name] = Use()
            report.documents[entry.name] = None
            with contextlib.suppress(Malformed, OSError):
                report.documents[entry.name] = described(path, entry.name)
            folders += [
                (entry.name, inner.path)
                for inner in _entries(entry.path)
                if inner.is_dir(follow_symlinks=False)
            ]
            report.other_bytes += sum(map(_size, _files(entry.path)))
        elif entry.is_dir(follow_symlinks=False):
            report.other_bytes += sum(_size(file) for file in _files(entry.path))
        else:
            report.other_bytes += _size(entry)
    began = now()

    def work(folder: tuple[str, str]) -> tuple[str, Use, int]:
        namespace, outer = folder
        use, other = Use(), 0
        digest = bytes.fromhex(namespace)
        for inner in _entries(outer):
            for file in _files(inner.path) if inner.is_dir(follow_symlinks=False) else [inner]:
                with contextlib.suppress(FileNotFoundError):
                    stat = file.stat(follow_symlinks=False)
                    if key_of(digest, file.name) is None:
                        other += disk_bytes(stat)
                    else:
                        use.add(disk_bytes(stat), max(0.0, began - stat.st_mtime))
        return namespace, use, other

    with ThreadPoolExecutor(max(1, threads), "kvstrata-du") as pool:
        for done, (namespace, use, other) in enumerate(pool.map(work, folders), 1):
            report.namespaces[namespace].merge(use)
            report.other_bytes += other
            progress(done, len(folders))
    return report


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _files(path: str) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _entries(path) if not entry.is_dir(follow_symlinks=False))


def _size(entry: os.DirEntry[str]) -> int:
    with contextlib.suppress(FileNotFoundError):
        return disk_bytes(entry.stat(follow_symlinks=False))
    return 0
