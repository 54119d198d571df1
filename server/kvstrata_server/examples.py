"""Examples in the published document. A test checks that each one is a valid message."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from kvstrata import api

__all__ = ["EXAMPLES", "example"]

_KEYS = [
    "3f0c6a1e9b2d48570c1f7ae2d9b4630500000000" + hash_
    for hash_ in ("a1b2c3d4e5f60718", "0f1e2d3c4b5a6978")
]

EXAMPLES: dict[str, tuple[BaseModel | None, BaseModel]] = {
    "register_node": (
        api.NodeRegistration(
            id="gpu-07",
            incarnation="0c9d3b6e",
            peer_address="tcp://10.0.0.7:7801",
            transports=["nixl", "tcp"],
            capacity_bytes=64 << 30,
            stores=[api.StoreRef(id="nvme-gpu-07", tier="fs")],
        ),
        api.RegistrationReply(node="gpu-07", incarnation="0c9d3b6e", heartbeat_ttl=10.0),
    ),
    "put_heartbeat": (
        api.HeartbeatRequest(
            incarnation="0c9d3b6e",
            host=api.HostUse(used_bytes=12 << 30, capacity_bytes=64 << 30, chunks=6144),
            next_seq=42,
        ),
        api.HeartbeatReply(),
    ),
    "post_report": (
        api.Report(
            incarnation="0c9d3b6e",
            seq=42,
            changes=[
                api.Change(location="host", removed=_KEYS[:1]),
                api.Change(location="nvme-gpu-07", added=_KEYS),
            ],
        ),
        api.ReportReply(applied=True, next_seq=43),
    ),
    "lookup_placements": (
        api.LookupRequest(keys=_KEYS),
        api.LookupReply(
            keys=2,
            nodes=[
                api.NodePlacement(
                    node="gpu-07",
                    incarnation="0c9d3b6e",
                    prefix=2,
                    tiers={
                        "fs": api.Tally(found=2, prefix=2),
                        "host": api.Tally(found=1, prefix=0),
                    },
                    age=0.4,
                )
            ],
        ),
    ),
    "create_transfer": (
        api.TransferRequest(target="gpu-11", keys=_KEYS, priority=7, deadline=30, hold=120),
        api.TransferInfo(
            id="01a2281c112f-ca4b24ee5892ddd9",
            state=api.TransferState.QUEUED,
            source="any",
            target="gpu-11",
            priority=7,
            created=1795969257.8,
            deadline=1795969287.8,
            counts={api.Outcome.PENDING: 2},
            keys=[api.KeyOutcome(key=key, outcome=api.Outcome.PENDING) for key in _KEYS],
            kv_transfer_params={
                "remote_kv_source": {
                    "kv_request_id": "01a2281c112f-ca4b24ee5892ddd9",
                    "remote_host": "10.0.0.7",
                    "remote_port": 7801,
                }
            },
            router_hint={
                "source_control_endpoint": "tcp://10.0.0.7:7801",
                "block_hashes": [int(key[-16:], 16) for key in _KEYS],
            },
        ),
    ),
    "create_prefetch": (
        api.PrefetchRequest(node="gpu-07", keys=_KEYS, deadline=10, hold=30),
        api.TransferInfo(
            id="01a2281c1f70-5be1a4c07d1f93aa",
            state=api.TransferState.QUEUED,
            source="own",
            target="gpu-07",
            priority=5,
            created=1795969261.0,
            deadline=1795969271.0,
            counts={api.Outcome.PENDING: 2},
            keys=[api.KeyOutcome(key=key, outcome=api.Outcome.PENDING) for key in _KEYS],
        ),
    ),
    "create_lease": (
        api.LeaseRequest(node="gpu-07", keys=_KEYS, ttl=120),
        api.LeaseInfo(
            id="01a2281c2b58-90ae77d2c4f1b6e3",
            state=api.LeaseState.PENDING,
            node="gpu-07",
            expires=None,
            keys=[api.KeyOutcome(key=key, outcome=api.Outcome.PENDING) for key in _KEYS],
        ),
    ),
    "create_eviction": (
        api.EvictionRequest(
            chunks=api.OfModel(model="meta-llama/Llama-3.1-8B", revision="0e9e39f2"), deadline=30
        ),
        api.EvictionInfo(
            id="01a2281c3a10-1f0d6c72b3a958e4",
            state=api.EvictionState.RUNNING,
            created=1795969268.0,
            deadline=1795969298.0,
            nodes=[api.NodeEviction(node="gpu-07"), api.NodeEviction(node="gpu-11")],
        ),
    ),
}


def example(operation: str, status: int = 200) -> dict[str, Any]:
    """What a route adds to its entry in the document (`openapi_extra`)."""
    request, answer = EXAMPLES[operation]
    extra: dict[str, Any] = {
        "responses": {str(status): {"content": {"application/json": {"example": _json(answer)}}}}
    }
    if request is not None:
        extra["requestBody"] = {"content": {"application/json": {"example": _json(request)}}}
    return extra


def _json(message: BaseModel) -> Any:
    return message.model_dump(mode="json", exclude_none=True)
