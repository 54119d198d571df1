"""A walk over the directory of a store: what is there, without reading a payload.

It is cut into steps, one per directory of the first two levels, so that threads share it and its
progress can be told: a million chunks of one namespace are 256 steps. On its way it removes what
dead writers left and sets files aside that are no chunks where chunks are.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata.tiers.fs_files import plausible
from kvstrata.tiers.fs_format import key_of, namespace_of
from kvstrata.tiers.fs_index import SKEW, Found
from kvstrata.tiers.fs_quarantine import Quarantine
from kvstrata.tiers.fs_root import Root, disk_bytes

__all__ = ["Folder", "Step", "folders", "look"]


class Folder(NamedTuple):
    """`<root>/<namespace>/<hh>`."""

    namespace: str
    outer: str


class Step(NamedTuple):
    """Chunks of one folder; `broken` files went to quarantine."""

    found: list[Found]
    broken: int


def folders(root: Root) -> list[Folder]:
    """The steps of a walk."""
    steps = []
    for namespace in root.swept(root.path):
        if namespace_of(namespace.name) and namespace.is_dir(follow_symlinks=False):
            steps += [
                Folder(namespace.name, outer.name)
                for outer in root.swept(namespace.path)
                if outer.is_dir(follow_symlinks=False)
            ]
    return steps


def look(root: Root, quarantine: Quarantine, folder: Folder) -> Step:
    """One step: what is in a folder. Raises `OSError`."""
    namespace = bytes.fromhex(folder.namespace)
    latest = root.system.now() + SKEW
    found: list[Found] = []
    broken = 0
    for inner in _swept(root, root.at(f"{folder.namespace}/{folder.outer}")):
        if not inner.is_dir(follow_symlinks=False):
            broken += _set_aside(quarantine, inner)
            continue
        prefix = folder.outer + inner.name
        for entry in _swept(root, inner.path):
            key = key_of(namespace, entry.name)
            # A one-byte hash has no second directory of its own.
            if key is None or not (entry.name.startswith(prefix) or _short(key, prefix)):
                broken += _set_aside(quarantine, entry)
                continue
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if plausible(stat):
                found.append(Found(min(stat.st_mtime, latest), key, disk_bytes(stat)))
            else:
                broken += _set_aside(quarantine, entry)
    return Step(found, broken)


def _swept(root: Root, path: str) -> list[os.DirEntry[str]]:
    try:
        return root.swept(path)
    except FileNotFoundError:
        return []


def _short(key: Key, prefix: str) -> bool:
    return len(key) == DIGEST_BYTES + 5 and prefix == f"{key[-1]:02x}00"


def _set_aside(quarantine: Quarantine, entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return quarantine.take(entry.path, entry.stat(follow_symlinks=False))
    return False
