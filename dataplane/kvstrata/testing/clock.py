"""A clock that tests set."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """Stands where `time.monotonic` would: call it for seconds, `advance` it by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("a monotonic clock doesn't go back")
        self._now += seconds
