"""What is still to be reported, as numbered batches.

A batch that was sent keeps its number and its content until it is answered, so that sending it
again is harmless. A snapshot is a row of batches, and takes the place of everything before it.
Batches are cut when they are due: a node with a million chunks reports them without a pause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvstrata import api
from kvstrata.errors import Busy, KVStrataError
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata.node.placements import PlacementChange
from kvstrata.node.reported import Reported

__all__ = ["Outbox"]

MAX_BATCH_KEYS = 4096
MAX_PENDING_KEYS = 200_000
_MAX_BATCH_DOCUMENTS = 32

Part = Literal["no", "first", "more", "last", "only"]


@dataclass(slots=True)
class _Batch:
    """Keys at a location: True where they appeared, False where they left."""

    changes: dict[str, dict[Key, bool]] = field(default_factory=dict)
    documents: dict[bytes, bytes] = field(default_factory=dict)
    part: Part = "no"

    def report(self, incarnation: str, seq: int) -> api.Report:
        return api.Report(
            incarnation=incarnation,
            seq=seq,
            changes=[
                api.Change(
                    location=location,
                    added=[key.hex() for key, here in at.items() if here],
                    removed=[key.hex() for key, here in at.items() if not here],
                )
                for location, at in self.changes.items()
            ],
            snapshot=self.part,
            namespaces=[document.decode() for document in self.documents.values()],
        )


class Outbox:
    """`collect` what changed, send what `next` gives, and tell what became of it."""

    def __init__(
        self,
        reported: Reported,
        batch_keys: int = MAX_BATCH_KEYS,
        pending_keys: int = MAX_PENDING_KEYS,
    ) -> None:
        self.next_seq = 0
        """Number of the next batch that isn't answered."""
        self._reported = reported
        self._batch_keys = batch_keys
        self._pending_keys = pending_keys
        self._snapshot_wanted = True  # what a node finds in its stores at start is news, too
        self._pending: dict[str, dict[Key, bool]] = {}
        self._unsent: Iterator[_Batch] = iter(())
        self._cutting = False
        self._sent: _Batch | None = None
        self._told: set[bytes] = set()
        # What is pending at one time, or a snapshot, is a round of batches.
        self._round = 0
        self._answered_round = 0

    def mark(self) -> int:
        """Stands for all that was collected by now: see `has_reported`."""
        return self._round + bool(self._snapshot_wanted or self._pending)

    def has_reported(self, mark: int) -> bool:
        """Whether what was collected before `mark` is reported and answered."""
        return self._answered_round >= mark

    def registered(self, next_seq: int) -> None:
        """The server knows us now, and expects this number."""
        if next_seq != self.next_seq:
            self._snapshot_wanted = True
            self.next_seq = max(self.next_seq, next_seq)
        self._told.clear()

    def want_snapshot(self) -> None:
        self._snapshot_wanted = True

    def collect(self) -> None:
        """Take what changed from the node. Cheap, and bounded however long nothing is sent."""
        for change in self._reported.take_changes():
            at = self._pending.setdefault(change.location, {})
            at.update(dict.fromkeys(change.removed, False))
            at.update(dict.fromkeys(change.added, True))
        if sum(len(at) for at in self._pending.values()) > self._pending_keys:
            self._pending.clear()
            self._snapshot_wanted = True

    def next(self, incarnation: str) -> api.Report | None:
        """What to send now: the unanswered batch again, or the next; None if there is nothing."""
        if self._snapshot_wanted:
            self._snapshot_wanted = False
            self._pending.clear()
            self._unsent = _parts(self._cut(_flat(self._reported.snapshot())))
            self._sent, self._cutting = None, True
            self._round += 1
        if self._sent is None:
            self._sent = next(self._unsent, None)
            self._cutting = self._sent is not None
            if not self._cutting:
                self._answered_round = self._round
        if self._sent is None and self._pending:
            pending, self._pending = self._pending, {}
            self._unsent = self._cut(
                (location, key, here)
                for location, at in pending.items()
                for key, here in at.items()
            )
            self._sent, self._cutting = next(self._unsent, None), True
            self._round += 1
        return None if self._sent is None else self._sent.report(incarnation, self.next_seq)

    def answered(self, reply: api.ReportReply) -> None:
        """The batch reached the server: applied now, or before (its answer was lost)."""
        if reply.snapshot_wanted:
            self._snapshot_wanted = True
        if self._sent is not None and (reply.applied or reply.next_seq > self.next_seq):
            self._told.update(self._sent.documents)
            self._sent = None
        self.next_seq = max(self.next_seq, reply.next_seq)

    def refused(self, error: KVStrataError) -> None:
        """The server won't take the batch. Unless it is only busy, begin afresh."""
        if not isinstance(error, Busy):
            self._snapshot_wanted = True

    def _cut(self, changes: Iterable[tuple[str, Key, bool]]) -> Iterator[_Batch]:
        """Batches of at most `batch_keys`, each with the documents its keys need first."""
        documents = self._reported.namespace_documents()
        sent = set(self._told)
        batch, keys = _Batch(), 0
        for location, key, here in changes:
            digest = key[:DIGEST_BYTES]
            if digest not in sent and digest in documents:
                sent.add(digest)
                batch.documents[digest] = documents[digest]
            batch.changes.setdefault(location, {})[key] = here
            keys += 1
            if keys >= self._batch_keys or len(batch.documents) >= _MAX_BATCH_DOCUMENTS:
                yield batch
                batch, keys = _Batch(), 0
        if keys:
            yield batch


def _flat(snapshot: Iterable[PlacementChange]) -> Iterator[tuple[str, Key, bool]]:
    for change in snapshot:
        for key in change.added:
            yield change.location, key, True


def _parts(batches: Iterator[_Batch]) -> Iterator[_Batch]:
    """Batches marked as parts of a snapshot; one empty part if there is nothing at all."""
    batch: _Batch | None = next(batches, None) or _Batch()
    first = True
    while batch is not None:
        following = next(batches, None)
        if following is None:
            batch.part = "only" if first else "last"
        else:
            batch.part = "first" if first else "more"
        yield batch
        batch, first = following, False
