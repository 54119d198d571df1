"""A node of one engine's own, for when none is configured.

The first process of the engine that needs it starts it; the others find it by its socket, in a
folder named after the engine. It ends with that process in any case: the kernel closes the pipe
that is the node's standard input. What a node that was killed has left is removed by the next
start of any such node.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstrata.client import lifeline_path
from kvstrata.config import TierSettings, run_dir
from kvstrata.errors import ConfigError

__all__ = ["PrivateNode", "private_socket"]

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_END_SECONDS = 10.0


def private_socket(engine: str) -> Path:
    """Where the private node of `engine` listens. Short: socket paths have at most 107 bytes."""
    return run_dir() / f"own-{hashlib.sha256(engine.encode()).hexdigest()[:16]}" / "node.sock"


class PrivateNode:
    """The node process; `stop` ends it. Only the process that started it has one of these."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path) -> None:
        self.socket = socket
        self._process = process

    @classmethod
    def ensure(
        cls,
        engine: str,
        capacity: int,
        tiers: Sequence[TierSettings] = (),
        timeout: float = 30.0,
    ) -> PrivateNode | None:
        """Have a node at `private_socket(engine)`; None if another process has started it.

        Raises `ConfigError` if it does not come up within `timeout` seconds.
        """
        socket = private_socket(engine)
        socket.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout
        with _locked(socket.parent.parent / "own.lock", deadline):
            if _listening(socket):
                return None
            _sweep(socket.parent.parent)
            socket.parent.mkdir(mode=0o700, exist_ok=True)
            # Its messages go where the engine's go.
            process = subprocess.Popen(  # noqa: S603
                [
                    *(sys.executable, "-m", "kvstrata", "node"),
                    *("--id", socket.parent.name),
                    *("--socket", str(socket)),
                    *("--host.capacity", str(capacity)),
                    *("--tiers", json.dumps([tier.model_dump(mode="json") for tier in tiers])),
                    "--exit-with-stdin",
                ],
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                env=_environment(),
                # A signal to the engine's terminal group must not end the node before it.
                start_new_session=True,
            )
            node = cls(process, socket)
            while not _listening(socket):
                if process.poll() is not None:
                    node.stop()
                    raise ConfigError(
                        f"the engine's own node ended with exit code {process.returncode}: "
                        "see its messages above"
                    )
                if time.monotonic() > deadline:
                    node.stop()
                    raise ConfigError(f"the engine's own node did not start within {timeout:g} s")
                time.sleep(_POLL_SECONDS)
            _log.info("started a node for this engine alone at %s", socket)
            return node

    def stop(self) -> None:
        """End it and wait until it has. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            _log.warning("the engine's own node does not end: killing it")
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.socket.parent, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove the folders of private nodes that are dead. Only under the lock: none is starting."""
    for own in folder.glob("own-*/"):
        if not _listening(own / "node.sock"):
            shutil.rmtree(own, ignore_errors=True)


def _listening(socket: Path) -> bool:
    with contextlib.closing(sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(lifeline_path(socket)))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"another process holds {path} for too long") from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(fd)


def _environment() -> dict[str, str]:
    """Ours without settings meant for another node of this host."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVSTRATA_NODE_") and name != "KVSTRATA_CONFIG"
    }
