"""Reports and lookups as msgpack: the same operations, past the JSON schema."""

import msgspec
import pytest
from server_kit import NAMESPACE, host, join, keys, report, running

from kvstrata import api
from kvstrata.bulk import (
    MEDIA_TYPE,
    BulkChange,
    BulkLookup,
    BulkReport,
    KeyRun,
    runs_of,
)
from kvstrata.keys import Key, make_key
from kvstrata_server.access import tokens
from kvstrata_server.access.roles import Role


def raw(*numbers: int) -> list[Key]:
    return [NAMESPACE.key(0, n.to_bytes(8, "big")) for n in numbers]


async def post(r, path: str, message: object, kind: str = MEDIA_TYPE):
    body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return await r.http.post(path, content=body, headers={"Content-Type": kind})


def told(seq: int, *changes: BulkChange, **more) -> BulkReport:
    return BulkReport("i1", seq, list(changes), **more)


def test_runs_keep_the_order_and_the_keys():
    other = make_key(bytes(16), 3, b"abc")
    asked = [*raw(1, 2), other, *raw(3)]
    runs = runs_of(asked)
    assert [len(run) for run in runs] == [2, 1, 1]
    assert [key for run in runs for key in run.each()] == asked


async def test_reports_and_lookups_mean_what_their_json_means(place):
    async with running(place) as r:
        await join(r.control, "a", stores=("s",))
        change = BulkChange("host", runs_of(raw(0, 1, 2)))
        document = NAMESPACE.document.decode()
        reply = await post(r, "/v1/nodes/a/reports", told(0, change, namespaces=[document]))
        assert reply.status_code == 200
        assert api.ReportReply.model_validate_json(reply.content).next_seq == 1
        change = BulkChange("s", runs_of(raw(3)), runs_of(raw(9)))
        gone = BulkChange("host", [], runs_of(raw(0)))
        await post(r, "/v1/nodes/a/reports", told(1, change, gone))
        # JSON and msgpack go on from each other.
        await r.control.report("a", report(2, host(removed=keys(2))))
        asked = BulkLookup(runs_of(raw(1, 3, 2)))
        found = await post(r, "/v1/placements:lookup", asked, "application/x-msgpack")
        assert (
            found.json()
            == (await r.http.post("/v1/placements:lookup", json={"keys": keys(1, 3, 2)})).json()
        )
        [node] = api.LookupReply.model_validate_json(found.content).nodes
        assert (node.node, node.prefix) == ("a", 2)
        both = await post(r, "/v1/placements:lookup", BulkLookup(runs_of(raw(2, 3)), mode="all"))
        assert both.json()["nodes"][0]["keys"] == keys(3)
        only = BulkLookup(runs_of(raw(1)), nodes=["b"])
        assert (await post(r, "/v1/placements:lookup", only)).json()["nodes"] == []


async def test_a_snapshot_in_parts(place):
    async with running(place) as r:
        await join(r.control, "a")
        for seq, part, number in ((4, "first", 0), (5, "more", 1), (6, "last", 2)):
            change = BulkChange("host", runs_of(raw(number)))
            reply = await post(r, "/v1/nodes/a/reports", told(seq, change, snapshot=part))
            assert reply.json()["applied"]
        found = await post(r, "/v1/placements:lookup", BulkLookup(runs_of(raw(0, 1, 2))))
        assert found.json()["nodes"][0]["prefix"] == 3


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"",
        msgspec.msgpack.encode({"incarnation": "i1", "seq": 0, "changes": [], "more": 1}),
        told(0, BulkChange("host", [KeyRun(b"short", 0, 8, bytes(8))])),
        told(0, BulkChange("host", [KeyRun(bytes(16), 0, 8, bytes(9))])),
        msgspec.msgpack.encode(
            {
                "incarnation": "i1",
                "seq": 0,
                "changes": [
                    {
                        "location": "host",
                        "added": [{"namespace": bytes(16), "group": 0, "size": 0, "hashes": b""}],
                    }
                ],
            }
        ),
    ],
)
async def test_what_does_not_follow_the_schema_changes_nothing(tmp_path, body):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        reply = await post(r, "/v1/nodes/a/reports", body)
        problem = api.Problem.model_validate_json(reply.content)
        assert (problem.status, problem.code) == (422, "malformed")
        assert (len(r.state.index), r.state.cluster.nodes["a"].next_seq) == (0, 0)


async def test_who_may_ask_is_the_same_question(tmp_path):
    async with running(tmp_path, token="secret") as r:

        async def status(path: str, message: object, token: str) -> int:
            headers = {"Content-Type": MEDIA_TYPE, "Authorization": f"Bearer {token}"}
            body = msgspec.msgpack.encode(message)
            return (await r.http.post(path, content=body, headers=headers)).status_code

        async def made(name: str, role: Role, **scope) -> str:
            token = await tokens.create(r.state.database, name, role, now=r.clock(), **scope)
            await r.state.tokens.refresh()
            return token

        lookup, reports = "/v1/placements:lookup", "/v1/nodes/a/reports"
        asked = BulkLookup(runs_of(raw(0)))
        assert await status(lookup, asked, "wrong") == 401
        assert await status(lookup, asked, "secret") == 200
        reader = await made("reader", Role.READ)
        assert await status(lookup, asked, reader) == 200
        assert await status(reports, told(0), reader) == 403
        tenant = await made("tenant", Role.READ, tenants=["blue"])
        assert await status(lookup, asked, tenant) == 403
        other = await made("other", Role.NODE, node="b")
        assert await status(reports, told(0), other) == 403


async def test_other_operations_take_json_only(tmp_path):
    async with running(tmp_path) as r:
        reply = await post(r, "/v1/nodes", {"id": "a", "incarnation": "i"})
        assert reply.status_code == 422
