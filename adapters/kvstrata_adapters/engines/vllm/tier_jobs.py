"""A transfer between rows of vLLM's host memory and the tiers, seen from both of its threads.

vLLM's scheduler thread makes a job and takes its result; the loop thread works on it. A job ends
once, by whoever ends it first. While somebody touches its rows it can't be ended, so that vLLM
never gives a row to another chunk while we still write to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["Chunk", "Job"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of a job. `key` is vLLM's, `name` and `parent` are ours.

    `hint` is the index of the first tier that may have it (loads only).
    """

    key: bytes
    name: bytes
    row: int
    parent: bytes | None = None
    hint: int = 0


class Job:
    """`keys` are all that vLLM asked for, `chunks` those that are worked on, in the order of the
    chain, heads first. `patience` is in seconds, `deadline` on the monotonic clock.

    `done` are the keys that succeeded so far; final once the job has `ended`.
    """

    def __init__(
        self,
        number: int,
        keys: Sequence[bytes],
        chunks: Sequence[Chunk],
        is_load: bool,
        patience: float,
    ) -> None:
        self.id = number
        self.keys = keys
        self.chunks = chunks
        self.is_load = is_load
        self.began = time.monotonic()
        self.deadline = self.began + patience
        self.done: set[bytes] = set()
        self.ended = False
        self._touching = 0
        self._changed = threading.Condition()

    @property
    def success(self) -> bool:
        return len(self.done) == len(self.keys)

    def touch(self) -> bool:
        """Ask to touch the rows, and say so with `untouch`. False: the job has ended."""
        with self._changed:
            if not self.ended:
                self._touching += 1
            return not self.ended

    def untouch(self, done: Collection[bytes] = ()) -> None:
        """`done` succeeded."""
        with self._changed:
            self._touching -= 1
            if not self.ended:
                self.done.update(done)
            self._changed.notify_all()

    def end(self, seconds: float = 0.0, force: bool = False) -> bool:
        """End it, once nobody touches its rows, waiting that long for it. Whether this call did.

        `force`: then end it all the same. Only for stores, whose readers do no harm: what they
        read is written beside the checksum of what was there, and never served.
        """
        with self._changed:
            free = self._changed.wait_for(lambda: self.ended or not self._touching, seconds)
            if self.ended or not (free or force):
                return False
            self.ended = True
            return True
