"""Of what nodes say and are told."""

from __future__ import annotations

from kvstrata import api
from kvstrata_server.examples.world import (
    EVICTION,
    INCARNATION,
    KEYS,
    NAMESPACE,
    SOURCE,
    STORE,
    TRANSFER,
)

__all__ = ["EXAMPLES"]

_EVENTS = api.EventsAt(endpoint="tcp://10.0.0.7:5557", replay="tcp://10.0.0.7:5558")
_STORE = api.StoreRef(id=STORE, tier="fs")
_USE = api.HostUse(used_bytes=12 << 30, capacity_bytes=64 << 30, chunks=24_576)


def _node(state: api.NodeState, age: float) -> api.NodeInfo:
    return api.NodeInfo(
        id=SOURCE,
        incarnation=INCARNATION,
        state=state,
        peer_address="tcp://10.0.0.7:7801",
        transports=["nixl", "tcp"],
        host=_USE,
        stores=[_STORE],
        healthy=True,
        detail="",
        heartbeat_age=age,
        events=[_EVENTS],
        version="0.1.0",
    )


EXAMPLES = {
    "register_node": (
        api.NodeRegistration(
            id=SOURCE,
            incarnation=INCARNATION,
            peer_address="tcp://10.0.0.7:7801",
            transports=["nixl", "tcp"],
            capacity_bytes=64 << 30,
            stores=[_STORE],
            events=[_EVENTS],
            version="0.1.0",
        ),
        api.RegistrationReply(node=SOURCE, incarnation=INCARNATION, heartbeat_ttl=10.0),
    ),
    "list_nodes": (None, api.NodeList(nodes=[_node(api.NodeState.UP, 0.4)], next=SOURCE)),
    "get_node": (None, _node(api.NodeState.UP, 0.4)),
    "deregister_node": (None, _node(api.NodeState.GONE, 1.2)),
    "put_heartbeat": (
        api.HeartbeatRequest(incarnation=INCARNATION, host=_USE, next_seq=1),
        api.HeartbeatReply(),
    ),
    "post_report": (
        api.Report(
            incarnation=INCARNATION,
            seq=0,
            changes=[
                api.Change(location="host", added=KEYS[:1], removed=KEYS[1:]),
                api.Change(location=STORE, added=KEYS),
            ],
            namespaces=[NAMESPACE.document.decode()],
        ),
        api.ReportReply(applied=True, next_seq=1),
    ),
    "poll_commands": (
        None,
        api.CommandBatch(
            commands=[
                api.Command(
                    kind="pull",
                    transfer=TRANSFER,
                    namespaces=[NAMESPACE.document.decode()],
                    keys=KEYS,
                    sources=[api.SourceRef(node=SOURCE, address="tcp://10.0.0.7:7801")],
                    deadline_in=29.6,
                    hold=120.0,
                ),
                api.Command(
                    kind="evict",
                    transfer=EVICTION,
                    deadline_in=30.0,
                    digests=[NAMESPACE.digest.hex()],
                ),
            ]
        ),
    ),
    "post_progress": (
        api.Progress(
            incarnation=INCARNATION,
            transfer=TRANSFER,
            final=True,
            outcomes=dict.fromkeys(KEYS, api.Outcome.STORED),
            sources=dict.fromkeys(KEYS, SOURCE),
            bytes=len(KEYS) * NAMESPACE.chunk_bytes[0],
        ),
        api.ProgressReply(state=api.TransferState.DONE),
    ),
}
