"""Of transfers, prefetches, leases and evictions."""

from __future__ import annotations

from kvstrata import api
from kvstrata.api import Outcome
from kvstrata_server.examples.world import (
    CREATED,
    EVICTION,
    INCARNATION,
    KEYS,
    LEASE,
    MODEL,
    NAMESPACE,
    PREFETCH,
    SOURCE,
    TARGET,
    TOKENS,
    TRANSFER,
    Several,
    outcomes,
)

__all__ = ["EXAMPLES"]

_BYTES = len(KEYS) * NAMESPACE.chunk_bytes[0]
_HINTS = {
    "kv_transfer_params": {
        "remote_kv_source": {
            "kv_request_id": TRANSFER,
            "remote_host": "10.0.0.7",
            "remote_port": 7801,
        }
    },
    "router_hint": {
        "source_control_endpoint": "tcp://10.0.0.7:7801",
        "block_hashes": [int(key[-16:], 16) for key in KEYS],
    },
}


def _transfer(state: api.TransferState, outcome: Outcome, **more: object) -> api.TransferInfo:
    fields = {
        "id": TRANSFER,
        "state": state,
        "source": "any",
        "target": TARGET,
        "priority": 7,
        "created": CREATED,
        "deadline": CREATED + 30,
        "counts": {outcome: len(KEYS)},
        "keys": outcomes(outcome, SOURCE if outcome is Outcome.STORED else None),
        **more,
    }
    return api.TransferInfo.model_validate(fields)


_DONE = _transfer(
    api.TransferState.DONE, Outcome.STORED, ended=CREATED + 0.2, bytes=_BYTES, **_HINTS
)
_SUMMARY = api.TransferSummary.model_validate(
    _DONE.model_dump(exclude={"keys", "kv_transfer_params", "router_hint"})
)


def _lease(state: api.LeaseState, outcome: Outcome, expires: float | None) -> api.LeaseInfo:
    return api.LeaseInfo(
        id=LEASE, state=state, node=SOURCE, expires=expires, keys=outcomes(outcome)
    )


_EVICTION = api.EvictionInfo(
    id=EVICTION,
    state=api.EvictionState.RUNNING,
    created=CREATED,
    deadline=CREATED + 30,
    nodes=[
        api.NodeEviction(node=SOURCE, dropped={"host": 1, "fs": 2}),
        api.NodeEviction(node=TARGET),
    ],
)


def _told(summary: api.TransferSummary) -> str:
    return f"event: transfer\ndata: {summary.model_dump_json()}\n\n"


EXAMPLES = {
    "create_transfer": (
        api.TransferRequest(target=TARGET, keys=KEYS, priority=7, deadline=30, hold=120),
        _transfer(api.TransferState.QUEUED, Outcome.PENDING, **_HINTS),
    ),
    "list_transfers": (None, api.TransferList(transfers=[_SUMMARY], next=TRANSFER)),
    "get_transfer": (None, _DONE),
    "watch_transfer": (
        None,
        _told(
            _SUMMARY.model_copy(
                update={
                    "state": api.TransferState.RUNNING,
                    "ended": None,
                    "bytes": 0,
                    "counts": {Outcome.PENDING: len(KEYS)},
                }
            )
        )
        + _told(_SUMMARY),
    ),
    "cancel_transfer": (
        None,
        _transfer(api.TransferState.CANCELLED, Outcome.CANCELLED, ended=CREATED + 0.1, **_HINTS),
    ),
    "create_prefetch": (
        api.PrefetchRequest(node=SOURCE, keys=KEYS, deadline=10, hold=30),
        api.TransferInfo(
            id=PREFETCH,
            state=api.TransferState.QUEUED,
            source="own",
            target=SOURCE,
            priority=5,
            created=CREATED,
            deadline=CREATED + 10,
            counts={Outcome.PENDING: len(KEYS)},
            keys=outcomes(Outcome.PENDING),
        ),
    ),
    "create_lease": (
        Several(
            {
                "keys": api.LeaseRequest(node=SOURCE, keys=KEYS, ttl=120),
                "tokens": api.TokenLease(
                    node=SOURCE,
                    tokens=api.ModelTokens(model=MODEL, token_ids=TOKENS),
                    ttl=120,
                ),
            }
        ),
        _lease(api.LeaseState.PENDING, Outcome.PENDING, None),
    ),
    "get_lease": (None, _lease(api.LeaseState.HELD, Outcome.PRESENT, CREATED + 120)),
    "release_lease": (None, _lease(api.LeaseState.ENDED, Outcome.PRESENT, CREATED + 40)),
    "create_eviction": (
        Several(
            {
                "model": api.EvictionRequest(
                    chunks=api.OfModel(model=MODEL, revision=NAMESPACE.revision), deadline=30
                ),
                "namespaces": api.EvictionRequest(
                    chunks=api.OfNamespaces(digests=[NAMESPACE.digest.hex()]), deadline=30
                ),
                "keys": api.EvictionRequest(chunks=api.OfKeys(keys=KEYS), nodes=[SOURCE]),
            }
        ),
        _EVICTION.model_copy(
            update={
                "nodes": [api.NodeEviction(node=SOURCE), api.NodeEviction(node=TARGET)],
            }
        ),
    ),
    "list_evictions": (None, api.EvictionList(evictions=[_EVICTION], next=EVICTION)),
    "get_eviction": (None, _EVICTION),
    "post_eviction_result": (
        api.EvictionResult(incarnation=INCARNATION, dropped={"host": 1, "fs": 2}),
        _EVICTION,
    ),
}
