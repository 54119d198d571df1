"""Scheduled movements of chunks, and prefetches."""

from __future__ import annotations

import enum
from typing import Annotated, Any

from pydantic import Field

from kvstrata.api.base import MAX_INT, MAX_KEYS, NUMBER, Answer, Flag, HexKey, Name, Request
from kvstrata.api.prompts import Prompt, having, told_by

__all__ = [
    "KeyOutcome",
    "Outcome",
    "Prefetch",
    "PrefetchRequest",
    "TokenPrefetch",
    "TokenTransfer",
    "Transfer",
    "TransferInfo",
    "TransferList",
    "TransferRequest",
    "TransferState",
    "TransferSummary",
]


class TransferState(enum.StrEnum):
    """queued -> running -> done | partial | failed; cancelled and expired from either.

    `running`: the target said that it took it. `done`: every key stored or present. `partial`:
    some. `failed`: none. An ended transfer never changes again.
    """

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PLANNED = "planned"  # a dry run: never executed, not stored

    @property
    def ended(self) -> bool:
        return self not in (TransferState.QUEUED, TransferState.RUNNING)


class Outcome(enum.StrEnum):
    """Of one key of a transfer, at the target.

    What is pending when the transfer is cancelled or expires becomes `cancelled`: whether its
    bytes arrived is not known.
    """

    PENDING = "pending"
    STORED = "stored"
    PRESENT = "present"
    MISSING = "missing"
    CORRUPT = "corrupt"
    NO_ROOM = "no_room"
    FAILED = "failed"
    CANCELLED = "cancelled"


class _Terms(Request):
    """Of all that bring chunks to a node."""

    priority: Annotated[int, Field(ge=0, le=9), NUMBER] = 5
    deadline: Annotated[float, Field(gt=0, le=3600), NUMBER] = 60.0
    hold: Annotated[float, Field(ge=0, le=3600), NUMBER] = 60.0
    byte_budget: Annotated[int, Field(gt=0, le=MAX_INT), NUMBER] | None = None
    dry_run: Flag = False


class TransferRequest(_Terms):
    """POST /v1/transfers. Send an `Idempotency-Key` header to make a retry harmless.

    `source` is a node id or `any`. `deadline` is seconds from now. `hold` is how long the target
    keeps the chunks leased after they arrived, so that the request that needs them finds them.
    `source` may also be `own`: the target promotes from its own tiers, and asks no other node.
    The target's own tiers are asked first in any case, but for `free_only`. `byte_budget` is the
    most bytes to bring into its host memory, from wherever: keys past it end as `no_room`. Of two
    transfers to one node the one of higher `priority` is handed out first. Repeated keys count
    once.
    `free_only`, from other nodes: what finds no free room at the target ends as `no_room`, and
    nothing is evicted.
    """

    target: Name
    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]
    source: Name = "any"
    free_only: Flag = False


class PrefetchRequest(_Terms):
    """POST /v1/prefetches: a transfer from a node's own tiers into its host memory.

    `hold` is how long the chunks stay leased there; the rest is as in `TransferRequest`.
    """

    node: Name
    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]


class TokenTransfer(_Terms):
    """POST /v1/transfers, by token ids: what an engine needs to go on after them, as far as chunks
    of all groups end there. So give as many as `tokens` of a lookup says. The server hashes them
    for one namespace: name it by its digest where a model has several.

    The rest is as in `TransferRequest`.
    """

    target: Name
    tokens: Prompt
    source: Name = "any"
    free_only: Flag = False


class TokenPrefetch(_Terms):
    """POST /v1/prefetches, by token ids, which are as in `TokenTransfer`."""

    node: Name
    tokens: Prompt


Transfer = Annotated[
    Annotated[TokenTransfer, having("tokens")] | Annotated[TransferRequest, having("keys")],
    told_by("tokens", "keys"),
]
Prefetch = Annotated[
    Annotated[TokenPrefetch, having("tokens")] | Annotated[PrefetchRequest, having("keys")],
    told_by("tokens", "keys"),
]


class KeyOutcome(Answer):
    key: str
    outcome: Outcome
    source: str | None = None
    """Node the bytes came from; of a dry run, where they would come from: the target itself, if
    from its own stores."""


class TransferSummary(Answer):
    id: str
    """Sorts by time of creation. Of a dry run it names nothing."""
    state: TransferState
    source: str
    target: str
    priority: int
    created: float
    deadline: float
    ended: float | None = None
    detail: str = ""
    bytes: int = 0
    """Bytes that came from other nodes; of a dry run, that would, or if it is of a prefetch, that
    would come up from the node's own tiers (0 where sizes are unknown)."""
    counts: dict[Outcome, int] = {}
    """How many keys have each outcome."""


class TransferInfo(TransferSummary):
    keys: list[KeyOutcome]
    kv_transfer_params: dict[str, Any] = {}
    """For llm-d: what to paste into the request that will use the chunks."""
    router_hint: dict[str, Any] = {}
    """For Dynamo: likewise."""
    estimate: float | None = None
    """Seconds until it is done, of a dry run or while it is queued: from how fast transfers over
    that link, or else to that target, lately were, and from what waits before it there. A guess:
    it knows nothing of what comes meanwhile. Null: nothing is known."""


class TransferList(Answer):
    transfers: list[TransferSummary]
    next: str | None = None
