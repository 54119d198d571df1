"""A router and two nodes, by the generated Python client alone: `exercise.py URL TOKEN`.

It runs where kvstrata isn't installed, and mypy checks it together with the client.
"""

import sys
from http import HTTPStatus

from kvstrata_client import AuthenticatedClient
from kvstrata_client.api.audit import list_audit
from kvstrata_client.api.events import take_snapshot
from kvstrata_client.api.evictions import create_eviction, get_eviction
from kvstrata_client.api.health import get_health, get_metrics
from kvstrata_client.api.leases import create_lease
from kvstrata_client.api.nodes import (
    get_node,
    list_nodes,
    poll_commands,
    post_progress,
    post_report,
    put_heartbeat,
    register_node,
)
from kvstrata_client.api.placements import list_namespaces, lookup_placements
from kvstrata_client.api.quotas import get_quota, put_quota
from kvstrata_client.api.transfers import (
    cancel_transfer,
    create_transfer,
    get_transfer,
    list_transfers,
)
from kvstrata_client.models import (
    AuditList,
    Change,
    CommandBatch,
    EvictionInfo,
    EvictionRequest,
    EvictionState,
    Health,
    HeartbeatReply,
    HeartbeatRequest,
    HostUse,
    LeaseInfo,
    LeaseRequest,
    LeaseState,
    LookupReply,
    LookupRequest,
    NamespaceList,
    NodeInfo,
    NodeList,
    NodeRegistration,
    NodeState,
    OfNamespaces,
    Outcome,
    Problem,
    Progress,
    ProgressOutcomes,
    ProgressReply,
    QuotaInfo,
    QuotaRequest,
    RegistrationReply,
    Report,
    ReportReply,
    StoreRef,
    TransferInfo,
    TransferList,
    TransferRequest,
    TransferState,
)

DIGEST = "00112233445566778899aabbccddeeff"
KEYS = [f"{DIGEST}00000000{n:016x}" for n in range(3)]
LIFE = "i1"


def nodes_come(client: AuthenticatedClient) -> None:
    for node in ("a", "b"):
        came = register_node.sync(
            client=client,
            body=NodeRegistration(
                id=node,
                incarnation=LIFE,
                peer_address=f"tcp://{node}.test:7801",
                transports=["tcp"],
                stores=[StoreRef(id=f"s-{node}", tier="fs")],
            ),
        )
        assert isinstance(came, RegistrationReply)
        assert (came.node, came.next_seq) == (node, 0)
    use = HostUse(used_bytes=1, capacity_bytes=2, chunks=3)
    beat = put_heartbeat.sync(
        "a", client=client, body=HeartbeatRequest(incarnation=LIFE, host=use, next_seq=0)
    )
    assert isinstance(beat, HeartbeatReply)
    assert not beat.snapshot_wanted
    told = post_report.sync(
        "a",
        client=client,
        body=Report(
            incarnation=LIFE,
            seq=0,
            changes=[Change("host", added=KEYS[:2]), Change("s-a", added=KEYS)],
        ),
    )
    assert isinstance(told, ReportReply)
    assert (told.applied, told.next_seq) == (True, 1)
    one = get_node.sync("a", client=client)
    assert isinstance(one, NodeInfo)
    assert (one.state, one.host, one.stores[0].tier) == (NodeState.UP, use, "fs")


def who_holds_what(client: AuthenticatedClient) -> None:
    found = lookup_placements.sync(client=client, body=LookupRequest(keys=KEYS))
    assert isinstance(found, LookupReply)
    [node] = found.nodes
    assert (node.node, node.prefix, node.keys) == ("a", 3, None)
    assert (node.tiers["host"].prefix, node.tiers["fs"].prefix) == (2, 3)
    known = list_namespaces.sync(client=client)
    assert isinstance(known, NamespaceList)
    assert [(n.digest, n.document) for n in known.namespaces] == [(DIGEST, None)]


def a_transfer(client: AuthenticatedClient) -> None:
    plan = create_transfer.sync_detailed(
        client=client, body=TransferRequest(target="b", keys=KEYS, dry_run=True)
    )
    assert plan.status_code == HTTPStatus.OK
    assert isinstance(plan.parsed, TransferInfo)
    assert plan.parsed.state is TransferState.PLANNED
    assert {key.source for key in plan.parsed.keys} == {"a"}

    asked = TransferRequest(target="b", keys=KEYS, priority=7)
    made = create_transfer.sync_detailed(client=client, body=asked, idempotency_key="once")
    assert made.status_code == HTTPStatus.ACCEPTED
    first = made.parsed
    assert isinstance(first, TransferInfo)
    again = create_transfer.sync(client=client, body=asked, idempotency_key="once")
    assert isinstance(again, TransferInfo)
    assert (again.id, first.ended) == (first.id, None)
    assert first.counts[Outcome.PENDING] == 3

    due = poll_commands.sync("b", client=client, incarnation=LIFE, wait=5.0)
    assert isinstance(due, CommandBatch)
    [command] = due.commands
    assert (command.kind, command.transfer, command.keys) == ("pull", first.id, KEYS)
    assert [source.address for source in command.sources] == ["tcp://a.test:7801"]
    done = post_progress.sync(
        "b",
        client=client,
        body=Progress(
            incarnation=LIFE,
            transfer=first.id,
            final=True,
            outcomes=ProgressOutcomes.from_dict(dict.fromkeys(KEYS, "stored")),
        ),
    )
    assert isinstance(done, ProgressReply)
    ended = get_transfer.sync(first.id, client=client)
    assert isinstance(ended, TransferInfo)
    assert (done.state, ended.state) == (TransferState.DONE, TransferState.DONE), (done, ended)
    assert [key.outcome for key in ended.keys] == [Outcome.STORED] * 3
    assert ended.ended is not None


def pages(client: AuthenticatedClient) -> None:
    second = create_transfer.sync(client=client, body=TransferRequest(target="b", keys=KEYS[:1]))
    assert isinstance(second, TransferInfo)
    seen = []
    after: str | None = None
    for _ in range(10):
        page = (
            list_transfers.sync(client=client, limit=1)
            if after is None
            else list_transfers.sync(client=client, limit=1, after=after)
        )
        assert isinstance(page, TransferList)
        seen += page.transfers
        after = page.next_
        if after is None:
            break
    assert [transfer.id for transfer in seen][-1] == second.id
    assert len(seen) == 2
    stopped = cancel_transfer.sync(second.id, client=client)
    assert isinstance(stopped, TransferInfo)
    assert stopped.state is TransferState.CANCELLED


def other_work(client: AuthenticatedClient) -> None:
    lease = create_lease.sync(client=client, body=LeaseRequest(node="a", keys=KEYS, ttl=30.0))
    assert isinstance(lease, LeaseInfo)
    assert lease.state is LeaseState.PENDING
    made = create_eviction.sync(
        client=client, body=EvictionRequest(chunks=OfNamespaces([DIGEST]), nodes=["a"])
    )
    assert isinstance(made, EvictionInfo)
    read = get_eviction.sync(made.id, client=client)
    assert isinstance(read, EvictionInfo)
    assert read.state is EvictionState.RUNNING
    assert [(node.node, node.dropped) for node in read.nodes] == [("a", None)]
    allowed = put_quota.sync("acme", client=client, body=QuotaRequest(max_transfers=8))
    assert isinstance(allowed, QuotaInfo)
    known = get_quota.sync("acme", client=client)
    assert isinstance(known, QuotaInfo)
    assert (known.max_transfers, known.max_bytes, known.use.chunks) == (8, None, 0)
    lines = take_snapshot.sync(client=client)
    assert isinstance(lines, str)
    assert lines.endswith('{"end":true}\n')
    metrics = get_metrics.sync(client=client)
    assert isinstance(metrics, str)
    assert "kvstrata_index_chunks 3.0" in metrics
    health = get_health.sync(client=client)
    assert isinstance(health, Health)
    assert all(task.healthy for task in health.tasks)
    acts = list_audit.sync(client=client, limit=1000)
    assert isinstance(acts, AuditList)


def what_is_refused(client: AuthenticatedClient, url: str) -> None:
    with AuthenticatedClient(base_url=url, token="wrong") as stranger:
        refused = list_nodes.sync_detailed(client=stranger)
    assert refused.status_code == HTTPStatus.UNAUTHORIZED
    assert isinstance(refused.parsed, Problem)
    assert (refused.parsed.code, refused.parsed.retryable) == ("unauthenticated", False)
    assert isinstance(list_nodes.sync(client=client), NodeList)

    nowhere = create_transfer.sync(client=client, body=TransferRequest(target="z", keys=KEYS))
    assert isinstance(nowhere, Problem)
    assert (nowhere.status, nowhere.code) == (404, "missing")
    other = TransferRequest(target="a", keys=KEYS[:1])
    twice = create_transfer.sync(client=client, body=other, idempotency_key="once")
    assert isinstance(twice, Problem)
    assert (twice.status, twice.code) == (409, "conflict")
    report = Report(incarnation=LIFE, seq=1, changes=[Change("host", added=["zz"])])
    wrong = post_report.sync("a", client=client, body=report)
    assert isinstance(wrong, Problem)
    assert wrong.errors[0].loc == ["body", "changes", 0, "added", 0]


def main(url: str, token: str) -> None:
    with AuthenticatedClient(base_url=url, token=token) as client:
        nodes_come(client)
        who_holds_what(client)
        a_transfer(client)
        pages(client)
        other_work(client)
        what_is_refused(client, url)
    print("all of it")


if __name__ == "__main__":
    main(*sys.argv[1:])
