"""One transfer and its rules; `transfers` decides when what happens to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.keys import Key
from kvstrata_server.scheduling.shown import Shown
from kvstrata_server.scheduling.transfer_writes import Outcomes, PutTransfer, final_state

__all__ = ["Transfer"]

# Their targets are told to give up what they brought.
_STOPPED = (TransferState.CANCELLED, TransferState.EXPIRED)


@dataclass(slots=True)
class Transfer:
    """`keys`, `outcomes` and `sources` run in parallel, in request order."""

    id: str
    state: TransferState
    source: str
    target: str
    priority: int
    created: float
    deadline: float
    hold: float
    byte_budget: int | None
    keys: list[Key]
    outcomes: list[Outcome]
    sources: list[str | None]
    idempotency_key: str | None
    request_digest: bytes
    ended: float | None = None
    bytes: int = 0
    detail: str = ""
    hints: dict[str, Any] = field(default_factory=dict)
    free_only: bool = False
    """Whether it may take only what is free at the target."""
    released: bool = False
    """Whether its target was told to hold nothing of it any more."""
    taken_by: str | None = None
    """Incarnation of the target that said it works on this."""
    offered: float | None = None
    offered_to: str | None = None
    waits_for: str = ""
    """The source that it would pull from by its last plan; empty: not planned, or none."""
    planned: float = 0.0
    cost: int = 0
    """About its bytes, once it waits for its target."""
    started: float | None = None
    """When this server heard that the target works on it."""

    @property
    def holds_until(self) -> float:
        """When the target gives up what it keeps leased of this; 0 while it runs, of none, and of
        what it was told to give up."""
        if self.ended is None or not self.hold or self.released or self.state in _STOPPED:
            return 0.0
        held = any(o in (Outcome.STORED, Outcome.PRESENT) for o in self.outcomes)
        return self.ended + self.hold if held else 0.0

    def is_due(self, incarnation: str, now: float, redelivery: float) -> bool:
        """Whether this incarnation should be handed the command (again)."""
        if self.taken_by == incarnation:
            return False
        if self.offered is None or self.offered_to != incarnation:
            return True
        return now - self.offered >= redelivery

    def offer(self, incarnation: str, now: float) -> None:
        self.offered, self.offered_to = now, incarnation

    def record(
        self, outcomes: Iterable[tuple[Key, Outcome]], sources: Mapping[Key, str]
    ) -> list[int]:
        """Set outcomes; returns the positions that changed. Keys not asked for are ignored."""
        position = {key: i for i, key in enumerate(self.keys)}
        changed = []
        for key, outcome in outcomes:
            i = position.get(key)
            if i is not None:
                self.outcomes[i] = outcome
                self.sources[i] = sources.get(key, self.sources[i])
                changed.append(i)
        return changed

    def end(self, state: TransferState | None, detail: str, now: float) -> None:
        """It is over, by its target (None: as its outcomes say) or not; keys without an outcome
        get one."""
        rest = Outcome.FAILED if state is None else Outcome.CANCELLED
        self.outcomes = [rest if o is Outcome.PENDING else o for o in self.outcomes]
        here = sum(o in (Outcome.STORED, Outcome.PRESENT) for o in self.outcomes)
        self.state = state or final_state(len(self.keys), here)
        self.detail, self.ended = detail, now

    # ------------------------------------------------------------ as messages and rows

    def summary(self) -> api.TransferSummary:
        return api.TransferSummary(
            id=self.id,
            state=self.state,
            source=self.source,
            target=self.target,
            priority=self.priority,
            created=self.created,
            deadline=self.deadline,
            ended=self.ended,
            detail=self.detail,
            bytes=self.bytes,
            counts=self._counts(),
        )

    def shown(self, estimate: float | None = None) -> Shown:
        """As it is now."""
        return Shown(
            self.summary(),
            self.keys,
            self.outcomes.copy(),
            self.sources.copy(),
            self.hints,
            self.holds_until,
            estimate,
        )

    def _counts(self) -> dict[Outcome, int]:
        # By identity: an enum's hash takes most of the time where keys are many.
        counts = Counter(map(id, self.outcomes))
        return {outcome: counts[id(outcome)] for outcome in Outcome if id(outcome) in counts}

    def row(self, log_as: str) -> PutTransfer:
        return PutTransfer(
            id=self.id,
            state=self.state.value,
            source=self.source,
            target=self.target,
            priority=self.priority,
            created=self.created,
            deadline=self.deadline,
            hold=self.hold,
            byte_budget=self.byte_budget,
            free_only=self.free_only,
            hints=self.hints,
            idempotency_key=self.idempotency_key,
            request_digest=self.request_digest,
            detail=self.detail,
            keys=self.keys,
            chunks=self.chunks(range(len(self.keys))),
            log_as=log_as,
        )

    def chunks(self, positions: Sequence[int]) -> Outcomes:
        """What became of these."""
        return Outcomes(
            positions, [self.outcomes[i] for i in positions], [self.sources[i] for i in positions]
        )
