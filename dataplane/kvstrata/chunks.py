"""A chunk in the host tier: what is known of it beside its bytes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvstrata.keys import Key

__all__ = ["Chunk", "State", "is_idle"]


class State(enum.IntEnum):
    """Of a key, as `HostTier.find` sees it."""

    ABSENT = 0
    READY = 1
    WRITING = 2


@dataclass(slots=True, eq=False)
class Chunk:
    """A slot with a key. `readers` counts leases, `io` reads and writes in flight by others; of
    two chunks that with the larger number in `used` was written or leased later."""

    key: Key
    offset: int
    nbytes: int
    owner: str
    state: State
    expires: float
    readers: int = 0
    io: int = 0
    visible: bool = True
    checksum: int | None = None
    used: int = 0


# Looking a member up in its class for every chunk would cost as much as the rest of the test.
_READY = State.READY


def is_idle(chunk: Chunk) -> bool:
    """Whether it may be given up: readable, and nobody leases or reads it."""
    return chunk.readers == 0 and chunk.io == 0 and chunk.state is _READY
