"""Nodes that are to be stopped, and what of theirs is safe elsewhere."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from kvstrata.api.base import MAX_KEYS, NUMBER, Answer, Detail, HexKey, Name, Request
from kvstrata.api.transfers import Outcome

__all__ = [
    "Amount",
    "DrainInfo",
    "DrainLeft",
    "DrainPurpose",
    "DrainRequest",
    "DrainState",
    "LeftReason",
    "OrderReply",
    "StoreResult",
]

DrainPurpose = Literal["restart", "removal"]
"""What the node is stopped for, and so where its chunks must be: after a `restart` it has its
stores again; after its `removal` others must be able to serve them."""


class DrainState(enum.StrEnum):
    """draining -> drained | partial | cancelled, by its deadline at the latest. `drained`: nothing
    was left that only the node holds. `partial`: something was, and `left` says why."""

    DRAINING = "draining"
    DRAINED = "drained"
    PARTIAL = "partial"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self is not DrainState.DRAINING


class LeftReason(enum.StrEnum):
    """Why chunks are still only at the node."""

    WAITING = "waiting"  # under way, or not their turn yet
    NO_ROOM = "no_room"  # neither a store nor a node had room
    NO_WAY = "no_way"  # there is neither a store nor a node that could take them
    FAILED = "failed"  # tried in vain, or not, since so many others were
    LATE = "late"  # the deadline came before their turn


class DrainRequest(Request):
    """POST /v1/nodes/{id}/drain: make it safe to stop a node.

    `for` is `removal` if the node doesn't come back with its stores: what only it holds is written
    to a store that another node that is up has too, or moved to the host memory of such nodes
    (`targets`, by default any), as far as that is free. For a `restart` it is enough that what host
    memory holds is in one of the node's own stores. `deadline` is seconds from now.
    """

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    for_: Annotated[DrainPurpose, Field(alias="for")] = "removal"
    deadline: Annotated[float, Field(gt=0, le=86_400), NUMBER] = 600.0
    targets: Annotated[list[Name], Field(min_length=1, max_length=10_000)] | None = None


class Amount(Answer):
    chunks: int
    bytes: int
    """As namespaces say; chunks of unknown namespaces count with none."""


class DrainLeft(Answer):
    why: LeftReason
    chunks: int
    detail: str = ""
    """What can be done about it."""


class DrainInfo(Answer):
    """The latest drain of a node. The numbers are of a moment ago while it goes on, and of this
    moment after its end, as long as it is in force."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    id: str
    """Sorts by time of creation."""
    node: str
    incarnation: str
    for_: Annotated[DrainPurpose, Field(alias="for")]
    state: DrainState
    in_force: bool
    """Whether the node takes no new chunks for it. Ends when it is cancelled, also after it is
    drained, and when the node leaves or starts anew."""
    may_stop: bool
    """Nothing would be lost."""
    created: float
    deadline: float
    ended: float | None = None
    settled: bool
    """The node says that it takes no new chunks, and has told of all that it holds. It may take
    that back: see `may_stop`."""
    remaining: Amount
    """What is only here; once the drain isn't in force any more, what was then."""
    stored: dict[str, int]
    """Chunks written back, by store."""
    moved: dict[str, int]
    """Chunks moved, by node."""
    moved_bytes: int
    left: list[DrainLeft]
    """`remaining` by reason, as of a moment ago."""
    detail: str = ""


class StoreResult(Request):
    """POST /v1/nodes/{id}/orders/{order}: what became of the keys of a command `store`."""

    incarnation: Name
    outcomes: Annotated[dict[HexKey, Outcome], Field(max_length=MAX_KEYS)] = {}
    stores: Annotated[dict[HexKey, Name], Field(max_length=MAX_KEYS)] = {}
    """Which store each one is in that is `stored` or `present`."""
    detail: Detail = ""


class OrderReply(Answer):
    wanted: bool
    """False: nobody waits for it any more."""
