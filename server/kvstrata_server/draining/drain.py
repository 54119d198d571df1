"""One drain: what is known of it, what is under way for it, and how it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstrata import api
from kvstrata.api import DrainState, LeftReason
from kvstrata.keys import Key

__all__ = ["Attempt", "Drain", "Move", "Order"]

# Each chunk is tried that often, and then left to those who look at what could not be done.
_STORES, _MOVES = 2, 3


@dataclass(slots=True)
class Attempt:
    """What was tried for one chunk. It is tried again at `again` at the earliest."""

    stores: int = 0
    moves: int = 0
    again: float = 0.0
    why: LeftReason = LeftReason.WAITING

    @property
    def may_store(self) -> bool:
        return self.stores < _STORES

    def stored_nowhere(self, why: LeftReason) -> None:
        """No store takes it."""
        self.stores, self.why = _STORES, why


@dataclass(slots=True)
class Move:
    """A transfer under way. Its `keys` are not known where an earlier process began it."""

    target: str
    keys: Sequence[Key] | None
    bytes: int


@dataclass(slots=True)
class Order:
    """Keys that the node was asked to store, until when it may say so."""

    id: str
    keys: Sequence[Key]
    stores: Sequence[str]
    until: float
    offered: tuple[float, str] | None = None
    """When, and to which incarnation."""


@dataclass(slots=True)
class Drain:
    id: str
    node: str
    incarnation: str
    purpose: api.DrainPurpose
    created: float
    deadline: float
    targets: Sequence[str] | None
    state: DrainState = DrainState.DRAINING
    in_force: bool = True
    ended: float | None = None
    detail: str = ""
    settled: bool = False
    chunks: int = 0
    """Only at the node, when they were last counted, and their bytes."""
    bytes: int = 0
    left: dict[LeftReason, int] = field(default_factory=dict)
    stored: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    moved_bytes: int = 0
    moves: dict[str, Move] = field(default_factory=dict)
    order: Order | None = None
    attempts: dict[Key, Attempt] = field(default_factory=dict)
    """Of chunks that are only at the node still; see `emptying` for how many."""
    trouble: str = ""
    """What went wrong last."""
    active: float = 0.0
    """When something last came of it."""

    def attempt(self, key: Key) -> Attempt:
        return self.attempts.setdefault(key, Attempt())

    def busy(self) -> set[Key]:
        """Keys that something is under way for."""
        keys = {key for move in self.moves.values() for key in move.keys or ()}
        return keys if self.order is None else keys.union(self.order.keys)

    def to_try_again(self, now: float, busy: Container[Key]) -> Iterator[Key]:
        """What was tried, and may be once more."""
        for key, attempt in self.attempts.items():
            if attempt.moves < _MOVES and attempt.again <= now and key not in busy:
                yield key

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.attempts.pop(key, None)

    def tried(self, keys: Iterable[Key]) -> Counter[LeftReason]:
        """How many of these were tried, and don't just wait."""
        found = (self.attempts[key].why for key in keys if key in self.attempts)
        return Counter(why for why in found if why is not LeftReason.WAITING)

    def count_left(
        self, tried: Counter[LeftReason], waiting_is: LeftReason = LeftReason.WAITING
    ) -> None:
        """Sort what remains by reason; what nothing was tried for waits, or what that is now."""
        rest = self.chunks - tried.total()
        self.left = {why: count for why, count in tried.items() if count}
        if rest > 0:
            self.left[waiting_is] = self.left.get(waiting_is, 0) + rest

    def info(
        self, remaining: api.Amount | None = None, advice: str = "", is_known: bool = True
    ) -> api.DrainInfo:
        """`remaining` is what is only at the node now, where that was counted; `is_known`: whether
        the node may be stopped if that is nothing."""
        now = remaining or api.Amount(chunks=self.chunks, bytes=self.bytes)
        left = self.left if now.chunks else {}
        return api.DrainInfo(
            id=self.id,
            node=self.node,
            incarnation=self.incarnation,
            for_=self.purpose,
            state=self.state,
            in_force=self.in_force,
            may_stop=self.in_force
            and self.state is DrainState.DRAINED
            and self.settled
            and not now.chunks
            and is_known,
            created=self.created,
            deadline=self.deadline,
            ended=self.ended,
            settled=self.settled,
            remaining=now,
            stored=dict(self.stored),
            moved=dict(self.moved),
            moved_bytes=self.moved_bytes,
            left=[
                api.DrainLeft(why=why, chunks=chunks, detail=_ADVICE[why])
                for why, chunks in left.items()
            ],
            detail=" ".join(filter(None, (self.detail, advice))),
        )


_ADVICE = {
    LeftReason.WAITING: "under way, or not their turn yet",
    LeftReason.NO_ROOM: (
        "no store took them and no node had free host memory: make room, attach a store that "
        "other nodes have too, and drain again, or lose them: they are computed again when they "
        "are asked for"
    ),
    LeftReason.NO_WAY: (
        "no store can take them, and no other node that is up can fetch them from here: start "
        "another node, set `peers.listen` at this one, or attach a store that others have too"
    ),
    LeftReason.FAILED: "tried in vain, or not, since so many were: the logs of the nodes say more",
    LeftReason.LATE: "the deadline came before their turn: drain again to go on",
}
