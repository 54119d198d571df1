"""How a worker tells the scheduler that a store failed.

vLLM has no place for it: its workers must report every job as successful. A file to which
workers append does: what is in it before a worker reports its job, the scheduler reads before it
would commit the chunks. A socket would not do, as its buffer can be full.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvstrata.config import run_dir
from kvstrata.errors import LinkBroken

__all__ = ["FaultLine", "fault_path", "report_fault"]

_SUFFIX = ".faults"
_LENGTH_BYTES = 8
_KEYS = msgspec.msgpack.Decoder(list[bytes])


def fault_path(engine: str) -> Path:
    """The file of one engine."""
    return run_dir() / f"{hashlib.sha256(engine.encode()).hexdigest()[:16]}{_SUFFIX}"


class FaultLine:
    """The scheduler's end. It holds a lock on its file for life, so that the next one of any
    engine can tell the files of those that were killed, and remove them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(path.parent)
        self._at = 0
        self._fd = _create(path)

    def drain(self) -> set[bytes]:
        """Keys whose store failed, told since the last call."""
        new = os.fstat(self._fd).st_size - self._at
        failed: set[bytes] = set()
        if new <= 0:
            return failed
        raw = os.pread(self._fd, new, self._at)
        at = 0
        while (body := at + _LENGTH_BYTES) <= len(raw):
            end = body + int.from_bytes(raw[at:body], "little")
            if end > len(raw):
                break  # still being written: its job has not been reported
            failed.update(_KEYS.decode(raw[body:end]))
            at = end
        self._at += at
        return failed

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def report_fault(path: str, keys: Sequence[bytes]) -> None:
    """Tell the scheduler. Raises `LinkBroken` if it can't be told: then the worker must end
    rather than report the job."""
    body = msgspec.msgpack.encode(list(keys))
    record = len(body).to_bytes(_LENGTH_BYTES, "little") + body
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            # One write, so that records of several workers don't mix.
            written = os.write(fd, record)
        finally:
            os.close(fd)
    except OSError as e:
        raise LinkBroken(f"the scheduler can't be told of a failed store: {e}") from e
    if written != len(record):
        raise LinkBroken(f"the scheduler can't be told of a failed store: {path} is full")


def _create(path: Path) -> int:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    if os.fstat(fd).st_nlink:
        return fd
    # Before we had the lock, another engine's sweep took the file for a dead one's.
    os.close(fd)
    return _create(path)


def _sweep(folder: Path) -> None:
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
