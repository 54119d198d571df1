"""A transfer as it is asked for: checked, planned, and not begun."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from typing import Protocol

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.errors import Malformed
from kvstrata.keys import Key
from kvstrata_server.placement.cluster import Cluster, keys_of
from kvstrata_server.scheduling.planning import ANY, OWN, Plan, hints, plan
from kvstrata_server.scheduling.transfer import Transfer

__all__ = ["Admission", "digest_of", "transfer_of"]

# Keys that are read at a time.
_PART = 1 << 14


class Admission(Protocol):
    """Who holds requests to what their tenants may have (`tenancy.admission`)."""

    def budget(self, keys: Sequence[Key], asked: int | None) -> int | None:
        """The byte budget, as far as the tenant of these keys has room for it."""

    def admit(self, transfer: Transfer, planned: Plan, asked: int | None) -> None:
        """A transfer is about to be accepted, planned within `budget`. Raises `NoSpace`."""


def digest_of(asked: api.TransferRequest) -> bytes:
    """By which a request is known again."""
    return hashlib.sha256(asked.model_dump_json().encode()).digest()


async def transfer_of(
    cluster: Cluster,
    asked: api.TransferRequest,
    idempotency_key: str | None,
    digest: bytes,
    now: float,
    admission: Admission | None = None,
) -> Transfer:
    """Queued, or planned if it is a dry run. Raises `Missing` for an unknown target or source,
    `Conflict` for a target that is drained, `Malformed` for a source that serves no peers, and what
    `admission` does. With many keys each step takes some milliseconds, and between them others have
    their turns."""
    target = cluster.require_target(asked.target)
    if asked.source not in (ANY, OWN) and not cluster.require(asked.source).peer_address:
        raise Malformed(
            f"node {asked.source!r} serves no peers: set `peers.listen` there, or ask for "
            f"source {ANY!r}"
        )
    if asked.source == OWN and asked.free_only:
        raise Malformed(f"free_only is for transfers from other nodes, not from {OWN!r}")
    if asked.source == target.id:
        raise Malformed(f"node {asked.source!r} can't be source and target of one transfer")
    texts = list(dict.fromkeys(asked.keys))
    keys: list[Key] = []
    for start in range(0, len(texts), _PART):
        keys += keys_of(texts[start : start + _PART])
        await asyncio.sleep(0)
    budget = asked.byte_budget
    if admission is not None:
        budget = admission.budget(keys, budget)
    planned = plan(cluster, keys, target, asked.source, budget, asked.free_only)
    await asyncio.sleep(0)
    transfer_id = f"{int(now * 1000):012x}-{secrets.token_hex(8)}"
    told = hints(transfer_id, keys, planned.first)
    await asyncio.sleep(0)
    cluster.require_target(asked.target)  # still
    transfer = Transfer(
        id=transfer_id,
        state=TransferState.QUEUED,
        source=asked.source,
        target=target.id,
        priority=asked.priority,
        created=now,
        deadline=now + asked.deadline,
        hold=asked.hold,
        byte_budget=budget,
        keys=keys,
        outcomes=[Outcome.PENDING] * len(keys),
        sources=[None] * len(keys),
        idempotency_key=idempotency_key,
        request_digest=digest,
        hints=told,
        free_only=asked.free_only,
    )
    if asked.dry_run:
        transfer.state = TransferState.PLANNED
        transfer.outcomes = [e.outcome for e in planned.expected]
        transfer.sources = [e.source for e in planned.expected]
        transfer.bytes = planned.arriving if asked.source == OWN else planned.bytes
    if admission is not None:
        admission.admit(transfer, planned, asked.byte_budget)
    return transfer
