"""The end of standard input: how a process learns that the one that started it is gone.

The kernel closes the pipe with it, however it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

__all__ = ["at_end_of_stdin"]


def at_end_of_stdin(loop: asyncio.AbstractEventLoop, act: Callable[[], object]) -> None:
    """Call `act` on the loop once standard input has ended. What it holds is passed over."""

    def wait_for_end() -> None:
        # Not through sys.stdin: its lock would be held at interpreter exit.
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(act)

    threading.Thread(target=wait_for_end, name="kvstrata-stdin", daemon=True).start()
