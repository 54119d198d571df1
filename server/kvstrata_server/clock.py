"""The server's clock: seconds since the epoch, as a monotonic clock counts them."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Clock", "steady_clock"]

Clock = Callable[[], float]


def steady_clock() -> Clock:
    """Starts at the wall clock and never jumps: heartbeats and deadlines survive a time step.

    It reads as seconds since the epoch so that deadlines in SQL mean something after a restart.
    """
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
