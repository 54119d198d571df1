"""How long to wait before trying again."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Growing waits between attempts: `base`, doubled up to `cap` seconds, the upper half random.

    The random part keeps the clients of a server that comes back from all calling at once.
    """

    def __init__(
        self, base: float = 0.1, cap: float = 10.0, rand: Callable[[], float] = random.random
    ) -> None:
        self._base, self._cap, self._rand = base, cap, rand
        self._failures = 0

    def next(self) -> float:
        """Seconds to wait after one more failure."""
        full = min(self._cap, self._base * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return full * (0.5 + 0.5 * self._rand())

    def reset(self) -> None:
        """It worked: the next failure starts from `base`."""
        self._failures = 0
