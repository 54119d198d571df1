"""How a worker tells the scheduler that a store failed.

vLLM has no place for it: its workers must report every job as successful. A datagram on a Unix
socket does: it is in the scheduler's queue before the worker reports the job, so the scheduler
knows of it before it would commit the chunks.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvstrata.errors import LinkBroken

__all__ = ["FaultLine", "report_fault"]

_KEYS = msgspec.msgpack.Decoder(list[bytes])
_MOST_KEYS = 1000  # of 52 bytes: far below the kernel's default socket buffer
_MOST_BYTES = 1 << 17


class FaultLine:
    """The scheduler's end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.setblocking(False)

    def drain(self) -> set[bytes]:
        """Keys whose store failed, told since the last call. Never waits."""
        failed: set[bytes] = set()
        while True:
            try:
                failed.update(_KEYS.decode(self._socket.recv(_MOST_BYTES)))
            except BlockingIOError:
                return failed

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def report_fault(path: str, keys: Sequence[bytes], timeout: float = 10.0) -> None:
    """Tell the scheduler. Raises `LinkBroken` if it can't be told: then the worker must end
    rather than report the job."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as line:
        line.settimeout(timeout)
        try:
            for i in range(0, len(keys), _MOST_KEYS):
                line.sendto(msgspec.msgpack.encode(list(keys[i : i + _MOST_KEYS])), path)
        except OSError as e:
            raise LinkBroken(f"the scheduler can't be told of a failed store: {e}") from e
