"""The processes of the demo: each started by us, each ended by its id, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from kvstrata.errors import Expired, LinkBroken

__all__ = ["Child", "until"]

T = TypeVar("T")

_GRACE = 15.0
_LOG_LINES = 12


class Child:
    """`kvstrata ARGS` as a process; what it prints goes to `log`. Ends with the block."""

    def __init__(
        self, name: str, args: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "kvstrata", *args],
                stdin=subprocess.PIPE,  # closes with us: a node sees that even if we are killed
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                # Ctrl-C is for us; we end the others in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.poll()

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def check(self) -> None:
        """Raises `LinkBroken`, with the end of its log, if it has ended."""
        if self.exit_status is not None:
            lines = self.said().strip().splitlines()[-_LOG_LINES:]
            raise LinkBroken(f"{self.name} ended with {self.exit_status}: " + " | ".join(lines))

    def stop(self) -> int:
        """Ask it to end, insist after a while; its exit status. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self.exit_status is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def until(what: str, look: Callable[[], T | None], timeout: float, *needed: Child) -> T:
    """What `look` returns once it is not None. Raises `Expired` after `timeout` seconds, and
    `LinkBroken` as soon as a process it depends on has ended."""
    deadline = time.monotonic() + timeout
    while (found := look()) is None:
        for child in needed:
            child.check()
        if time.monotonic() > deadline:
            raise Expired(f"waited {timeout:.0f} s for {what}")
        time.sleep(0.05)
    return found
