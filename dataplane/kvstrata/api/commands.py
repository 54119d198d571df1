"""What nodes are asked to do, and say of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstrata.api.base import MAX_INT, NUMBER, Answer, Detail, Flag, HexKey, Name, Request
from kvstrata.api.transfers import Outcome, TransferState

__all__ = ["Command", "CommandBatch", "Progress", "ProgressReply", "SourceRef"]


class SourceRef(Answer):
    node: str
    address: str


class Command(Answer):
    """What a node is asked to do; it polls for these, so it needs no open port for them.

    `pull`: fetch `keys` from `sources` (best first) before `deadline_in` seconds have passed,
    hold them leased for `hold` seconds, and post `Progress`; `free_only`: evict nothing for them.
    `cancel`: stop pulling `transfer`, or release what it holds if it has ended.
    `evict`: drop `keys`, or what is of the namespaces `digests`, from `tiers` (none named: all),
    and post `EvictionResult`.
    `shed`: give up the coldest chunks of those whose keys begin with one of `sizes`, until such
    `amounts` of bytes are gone, by location, and post `EvictionResult`.
    `store`: put `keys` into the first of `stores` that takes each, and post `StoreResult`.
    `beat`: send a heartbeat now, for there is something to learn from its answer.
    A command is repeated until the node answers it, so executing one is idempotent. A node ignores
    kinds it doesn't know.
    """

    kind: str
    transfer: str
    """Id of the transfer, the eviction or the order."""
    namespaces: list[str] = []
    keys: list[str] = []
    sources: list[SourceRef] = []
    deadline_in: float = 0.0
    hold: float = 0.0
    byte_budget: int | None = None
    free_only: bool = False
    tiers: list[str] = []
    digests: list[str] = []
    sizes: dict[str, int] = {}
    """Namespace and group in hex, as keys begin -> bytes that a chunk counts."""
    amounts: dict[str, int] = {}
    """`host`, or the id of a store -> bytes."""
    stores: list[str] = []
    """Ids, best first."""


class CommandBatch(Answer):
    """GET /v1/nodes/{id}/commands?incarnation=...&wait=SECONDS (long poll, `MAX_WAIT` at most)"""

    commands: list[Command]


class Progress(Request):
    """POST /v1/nodes/{id}/progress: what became of the keys so far; `final` ends the transfer.

    A node posts one without outcomes when it takes a command. `bytes` is the total so far.
    """

    incarnation: Name
    transfer: Name
    final: Flag
    outcomes: dict[HexKey, Outcome] = {}
    sources: dict[HexKey, Name] = {}
    bytes: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER] = 0
    detail: Detail = ""


class ProgressReply(Answer):
    state: TransferState
    """An ended state: stop working on it."""
