"""What threads of the fs tier do to one chunk, with every error made an outcome."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from kvstrata.errors import Corrupt
from kvstrata.keys import Key
from kvstrata.tiers.base import Item, Outcome
from kvstrata.tiers.fs_files import ChunkFiles, SetAside
from kvstrata.tiers.fs_health import Condition, condition_of

__all__ = ["LATE", "Done", "Work", "failed"]


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one chunk. `condition` is what its `error` tells of the mount, `set_aside`
    whether it went to quarantine by this, `time` that of its file."""

    outcome: Outcome
    disk_bytes: int = 0
    parent: Key | None = None
    time: float = 0.0
    direct: bool = False
    set_aside: bool = False
    error: str = ""
    condition: Condition | None = None


LATE = Done(Outcome.FAILED)
"""Nobody has begun it, or it has not come back."""


def failed(error: OSError) -> Done:
    condition = condition_of(error)
    full = condition is Condition.FULL
    outcome = Outcome.NO_ROOM if full else Outcome.FAILED
    return Done(outcome, error=str(error), condition=condition)


class Work:
    """Methods block; called from threads, many at once."""

    def __init__(self, files: ChunkFiles) -> None:
        self._files = files

    def probe(self, key: Key) -> Done:
        try:
            found = self._files.probe(key)
        except OSError as e:
            return failed(e)
        if found is None:
            return Done(Outcome.MISSING)
        return Done(Outcome.PRESENT, found[0], time=found[1])

    def look_for(self, item: Item) -> Done:
        try:
            there = self._files.present(item.key, item.view.nbytes)
        except OSError as e:
            return failed(e)
        return (
            Done(Outcome.MISSING)
            if there is None
            else Done(Outcome.PRESENT, there, parent=item.parent)
        )

    def store(self, item: Item) -> Done:
        try:
            written = self._files.write(item.key, item.view, item.checksum, item.parent)
        except OSError as e:
            return failed(e)
        outcome = Outcome.STORED if written.new else Outcome.PRESENT
        return Done(outcome, written.disk_bytes, parent=item.parent, direct=written.direct)

    def load(self, item: Item) -> Done:
        files = self._files
        try:
            try:
                read = files.read(item.key, item.view, item.exact)
            except OSError as e:
                if e.errno != errno.ESTALE:
                    raise
                # Replaced or removed on the server while we had it open: what is there now?
                read = files.read(item.key, item.view, item.exact)
        except FileNotFoundError:
            return Done(Outcome.MISSING)
        except Corrupt as e:
            return Done(Outcome.CORRUPT, set_aside=isinstance(e, SetAside), error=str(e))
        except OSError as e:
            done = failed(e)
            return Done(Outcome.FAILED, error=done.error, condition=done.condition)
        return Done(Outcome.LOADED, read.disk_bytes, parent=read.parent, direct=read.direct)

    def unlink(self, key: Key) -> Done:
        try:
            return Done(Outcome.PRESENT if self._files.remove(key) else Outcome.MISSING)
        except OSError as e:
            return Done(Outcome.FAILED, error=str(e), condition=condition_of(e))
