import pytest
from msgspec.structs import replace
from server_kit import DOCUMENT, NAMESPACE, host, join, keys, report, running

from kvstrata import api
from kvstrata.control import ControlPlane
from kvstrata.errors import ConfigError, Missing, PeerRefused
from kvstrata_server.access import tokens
from kvstrata_server.access.audit import ForgetAudit
from kvstrata_server.access.roles import Identity, Role, needs_of


async def asking(r, *args, **scope):
    """A client with a new token: its own headers, the same server."""
    token = await tokens.create(r.state.database, *args, now=r.clock(), **scope)
    await r.state.tokens.refresh()
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("role", "may"),
    [
        (Role.READ, {Role.READ}),
        (Role.ORCHESTRATE, {Role.READ, Role.ORCHESTRATE}),
        (Role.NODE, {Role.READ, Role.NODE}),
        (Role.ADMIN, set(Role)),
    ],
)
def test_what_a_role_may(role, may):
    assert {each for each in Role if Identity("x", role).may(each)} == may


async def test_nothing_that_changes_state_is_open_to_readers(tmp_path):
    async with running(tmp_path) as r:
        harmless = {"lookup_placements"}
        for path, operations in r.app.openapi()["paths"].items():
            for method, operation in operations.items():
                name = operation["operationId"]
                if method != "get" and name not in harmless and path.startswith("/v1/"):
                    assert needs_of(name, method.upper()).role is not Role.READ, name


def test_an_operation_that_is_not_in_the_table_needs_an_admin():
    assert needs_of("drop_everything", "POST").role is Role.ADMIN
    assert not needs_of("drop_everything", "POST").by_tenant
    assert needs_of("show_everything", "GET").role is Role.READ
    assert not needs_of("show_everything", "GET").by_tenant


async def test_a_token_opens_what_its_role_may_do(tmp_path):
    async with running(tmp_path, token="root") as r:
        read = await asking(r, "dashboards", Role.READ)
        route = await asking(r, "router", Role.ORCHESTRATE)
        await join(r.control, "a")
        assert (await r.http.get("/v1/nodes", headers=read)).status_code == 200
        transfer = {"target": "a", "keys": keys(1)}
        refused = await r.http.post("/v1/transfers", headers=read, json=transfer)
        assert refused.status_code == 403
        assert refused.json()["code"] == "forbidden"
        assert "'dashboards' has the role read" in refused.json()["detail"]
        made = await r.http.post("/v1/transfers", headers=route, json=transfer)
        assert made.status_code == 202
        assert (await r.http.delete("/v1/nodes/a", headers=route)).status_code == 403
        assert (await r.http.get("/v1/audit", headers=route)).status_code == 403


async def test_a_node_token_speaks_for_one_node(tmp_path):
    async with running(tmp_path, token="root") as r:
        mine = await asking(r, "node a", Role.NODE, node="a")
        body = {"id": "a", "incarnation": "i1", "transports": [], "capacity_bytes": 1}
        assert (await r.http.post("/v1/nodes", headers=mine, json=body)).status_code == 200
        body["id"] = "b"
        assert (await r.http.post("/v1/nodes", headers=mine, json=body)).status_code == 403
        await join(r.control, "b")
        beat = {"incarnation": "i1"}
        theirs = await r.http.put("/v1/nodes/b/heartbeat", headers=mine, json=beat)
        assert theirs.status_code == 403
        assert "is for node 'a'" in theirs.json()["detail"]


async def test_expired_and_revoked_tokens_open_nothing(tmp_path):
    async with running(tmp_path, token="root") as r:
        short = await asking(r, "short", Role.READ, expires=r.clock() + 60)
        ended = await asking(r, "ended", Role.READ)
        for headers in (short, ended):
            assert (await r.http.get("/v1/nodes", headers=headers)).status_code == 200
        await tokens.revoke(r.state.database, "ended", r.clock())
        await r.state.tokens.refresh()
        r.clock.advance(60)
        for headers in (short, ended):
            assert (await r.http.get("/v1/nodes", headers=headers)).status_code == 401


async def test_the_first_token_ends_free_access(tmp_path):
    async with running(tmp_path) as r:
        assert (await r.http.get("/v1/nodes")).status_code == 200
        await asking(r, "first", Role.READ)
        assert (await r.http.get("/v1/nodes")).status_code == 401
        await tokens.revoke(r.state.database, "first", r.clock())
        await r.state.tokens.refresh()
        assert (await r.http.get("/v1/nodes")).status_code == 401


async def test_the_database_holds_nothing_that_opens(tmp_path):
    async with running(tmp_path) as r:
        headers = await asking(r, "ci", Role.READ)
    token = headers["Authorization"].removeprefix("Bearer ")
    secret = token.split("_", 2)[2]
    for path in tmp_path.iterdir():
        assert secret.encode() not in path.read_bytes()


@pytest.mark.parametrize(
    ("role", "scope", "said"),
    [
        (Role.ADMIN, {"tenants": ["t"]}, "not limited to tenants"),
        (Role.NODE, {"tenants": ["t"]}, "not limited to tenants"),
        (Role.READ, {"node": "a"}, "only tokens with the role node"),
    ],
)
async def test_scopes_that_mean_nothing_are_refused(tmp_path, role, scope, said):
    async with running(tmp_path) as r:
        with pytest.raises(ConfigError, match=said):
            await tokens.create(r.state.database, "x", role, now=0.0, **scope)


async def test_names_are_taken_once_and_revoked_by(tmp_path):
    async with running(tmp_path) as r:
        await tokens.create(r.state.database, "x", Role.READ, now=0.0)
        with pytest.raises(ConfigError, match="already"):
            await tokens.create(r.state.database, "x", Role.READ, now=0.0)
        await tokens.revoke(r.state.database, "x", now=1.0)
        with pytest.raises(Missing):
            await tokens.revoke(r.state.database, "x", now=1.0)
        await tokens.create(r.state.database, "x", Role.READ, now=2.0)


# ---------------------------------------------------------------- tenants


def of_tenant(tenant):
    return replace(NAMESPACE, tenant=tenant)


async def test_tenants_are_kept_apart(tmp_path):
    async with running(tmp_path, token="root") as r:
        red, blue = of_tenant("red"), of_tenant("blue")
        theirs = [blue.key(0, bytes(8)).hex()]
        ours = [red.key(0, bytes(8)).hex()]
        await join(r.control, "a")
        documents = (DOCUMENT, red.document.decode(), blue.document.decode())
        await r.control.report("a", report(0, host(ours + theirs), namespaces=documents))
        headers = await asking(r, "red", Role.ORCHESTRATE, tenants=["red"])

        async def post(path, body):
            return await r.http.post(path, headers=headers, json=body)

        found = await post("/v1/placements:lookup", {"keys": ours})
        assert found.json()["nodes"][0]["prefix"] == 1
        for asked in (theirs, ours + theirs, keys(1), ["00" * 28]):
            refused = await post("/v1/placements:lookup", {"keys": asked})
            assert refused.status_code == 403
            made = await post("/v1/transfers", {"target": "a", "keys": asked})
            assert made.status_code == 403
        listed = await r.http.get("/v1/namespaces", headers=headers)
        assert [n["document"]["tenant"] for n in listed.json()["namespaces"]] == ["red"]
        assert len((await r.control.namespaces()).namespaces) == 3
        for path in ("/v1/nodes", "/v1/transfers", "/metrics"):
            assert (await r.http.get(path, headers=headers)).status_code == 403

        mine = await post("/v1/transfers", {"target": "a", "keys": ours})
        foreign = await r.control.create_transfer(api.TransferRequest(target="a", keys=theirs))
        at = f"/v1/transfers/{mine.json()['id']}"
        assert (await r.http.get(at, headers=headers)).status_code == 200
        assert (await r.http.get(f"/v1/transfers/{foreign.id}", headers=headers)).status_code == 404
        assert (
            await r.http.delete(f"/v1/transfers/{foreign.id}", headers=headers)
        ).status_code == 404
        assert (await r.control.get_transfer(foreign.id)).state is api.TransferState.QUEUED


async def test_idempotency_keys_of_tenants_do_not_meet(tmp_path):
    async with running(tmp_path, token="root") as r:
        red = of_tenant("red")
        await join(r.control, "a")
        await r.control.report("a", report(0, namespaces=(DOCUMENT, red.document.decode())))
        headers = await asking(r, "red", Role.ORCHESTRATE, tenants=["red"])
        theirs = api.TransferRequest(target="a", keys=keys(1))
        await r.control.create_transfer(theirs, idempotency_key="job-1")
        body = {"target": "a", "keys": [red.key(0, bytes(8)).hex()]}
        headers["Idempotency-Key"] = "job-1"
        first = await r.http.post("/v1/transfers", headers=headers, json=body)
        again = await r.http.post("/v1/transfers", headers=headers, json=body)
        assert first.status_code == again.status_code == 202
        assert first.json()["id"] == again.json()["id"]


async def test_idempotency_keys_that_are_long_or_look_alike_do_not_meet(tmp_path):
    async with running(tmp_path, token="root") as r:
        red, blue = of_tenant("red"), of_tenant("blue")
        documents = (red.document.decode(), blue.document.decode())
        await join(r.control, "a")
        await r.control.report("a", report(0, namespaces=documents))
        ci = await asking(r, "ci", Role.ORCHESTRATE, tenants=["red"])
        night = await asking(r, "ci:night", Role.ORCHESTRATE, tenants=["blue"])

        async def ask(headers, name, namespace, number):
            headers = headers | {"Idempotency-Key": name}
            body = {"target": "a", "keys": [namespace.key(0, bytes([number] * 8)).hex()]}
            return (await r.http.post("/v1/transfers", headers=headers, json=body)).status_code

        assert await ask(ci, "night:1", red, 1) == 202
        assert await ask(night, "1", blue, 1) == 202
        assert await ask(ci, "x" * 254 + "1", red, 1) == 202
        assert await ask(ci, "x" * 254 + "2", red, 2) == 202
        assert await ask(ci, "x" * 254 + "2", red, 3) == 409


# ---------------------------------------------------------------- limits and the audit log


async def test_who_asks_too_often_waits(tmp_path):
    async with running(tmp_path, token="root", rate_limit=2) as r:
        statuses = [(await r.http.get("/v1/nodes", headers=bearer("root"))).status_code]
        for _ in range(4):
            last = await r.http.get("/v1/nodes", headers=bearer("root"))
            statuses.append(last.status_code)
        assert statuses == [200, 200, 200, 200, 429]
        assert last.headers["retry-after"] == "1"
        assert last.json()["retryable"] is True
        assert (await r.http.get("/healthz")).status_code == 200
        other = await asking(r, "other", Role.READ)
        assert (await r.http.get("/v1/nodes", headers=other)).status_code == 200
        r.clock.advance(0.5)
        assert (await r.http.get("/v1/nodes", headers=bearer("root"))).status_code == 200


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


async def test_what_changes_state_is_written_down(tmp_path):
    async with running(tmp_path, token="root") as r:
        await join(r.control, "a")
        await r.control.report("a", report(0, host(keys(1))))
        await r.control.lookup(api.LookupRequest(keys=keys(1)))
        route = await asking(r, "router", Role.ORCHESTRATE)
        made = await r.http.post(
            "/v1/transfers", headers=route, json={"target": "a", "keys": keys(1)}
        )
        await r.http.delete("/v1/nodes/a", headers=route)
        await r.control.cancel_transfer(made.json()["id"])
        await r.state.writer.flushed(5)
        log = (await r.http.get("/v1/audit", headers=bearer("root"))).json()["entries"]
        assert [(e["actor"], e["operation"], e["subject"], e["status"]) for e in log] == [
            ("settings", "register_node", "/v1/nodes/a", 200),
            ("router", "create_transfer", f"/v1/transfers/{made.json()['id']}", 202),
            ("router", "deregister_node", "/v1/nodes/a", 403),
            ("settings", "cancel_transfer", f"/v1/transfers/{made.json()['id']}", 200),
        ]
        assert all(e["time"] == r.clock() for e in log)
        second = await r.http.get("/v1/audit?limit=1&after=1", headers=bearer("root"))
        assert second.json()["entries"] == log[1:2]
        assert second.json()["next"] == 2


async def test_the_log_names_what_was_made(tmp_path):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        chunks = {"node": "a", "keys": keys(1), "deadline": 5}
        instance = {"instance_id": 7, "model_name": "m/x\0", "endpoint": "tcp://a:1"}
        asked = {
            "create_prefetch": ("/v1/prefetches", chunks, "/v1/transfers/{id}"),
            "create_lease": ("/v1/leases", chunks | {"ttl": 5}, "/v1/leases/{id}"),
            "create_eviction": (
                "/v1/evictions", {"chunks": {"keys": keys(1)}}, "/v1/evictions/{id}",
            ),
            "create_transfer": (
                "/v1/transfers", {"target": "a", "keys": keys(1), "dry_run": True}, "/v1/transfers",
            ),
            "register_instance": (
                "/register", instance | {"block_size": 4, "dp_rank": 1},
                "/workers?model_name=m%2Fx%00&instance_id=7&dp_rank=1",
            ),
            "unregister_instance": (
                "/unregister", instance, "/workers?model_name=m%2Fx%00&instance_id=7",
            ),
        }  # fmt: skip
        wanted = []
        for operation, (path, body, subject) in asked.items():
            answer = (await r.http.post(path, json=body)).json()
            wanted.append((operation, subject.format(id=answer.get("id"))))
        await r.state.writer.flushed(5)
        log = (await r.http.get("/v1/audit")).json()["entries"]
        assert [(e["operation"], e["subject"]) for e in log[1:]] == wanted


async def test_nothing_is_done_that_the_log_has_no_room_for(tmp_path, monkeypatch):
    async with running(tmp_path, token="root") as r:
        await join(r.control, "a")
        read = await asking(r, "dashboards", Role.READ)
        await r.state.writer.flushed(5)
        put = r.state.writer.position
        monkeypatch.setattr(r.state.writer, "_max_rows", 0)
        instance = {"instance_id": "a", "endpoint": "tcp://a:1", "model_name": "m", "block_size": 1}
        asked = await r.http.post("/register", headers=bearer("root"), json=instance)
        assert (asked.status_code, asked.json()["code"]) == (503, "busy")
        assert r.state.instances.all() == []
        # Nor does asking for what is refused fill the memory.
        for _ in range(3):
            refused = await r.http.post("/register", headers=read, json=instance)
            assert refused.status_code == 403
        assert r.state.writer.position == put


@pytest.mark.parametrize("name", ["settings", "anyone"])
async def test_no_token_is_called_as_the_log_calls_others(tmp_path, name):
    async with running(tmp_path, token="root") as r:
        with pytest.raises(ConfigError, match="another name"):
            await tokens.create(r.state.database, name, Role.READ, now=r.clock())


async def test_the_audit_log_is_kept_for_as_long_as_asked(tmp_path):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        r.clock.advance(100)
        await join(r.control, "b")
        r.state.writer.put(ForgetAudit(r.clock() - 50))
        await r.state.writer.flushed(5)
        log = (await r.http.get("/v1/audit")).json()["entries"]
        assert [e["actor"] for e in log] == ["anyone"]


async def test_refusals_reach_clients_as_such(tmp_path):
    async with running(tmp_path, token="root") as r:
        read = await asking(r, "dashboards", Role.READ)
        token = read["Authorization"].removeprefix("Bearer ")
        async with ControlPlane("http://test", token, transport=r.http._transport) as reader:
            with pytest.raises(PeerRefused, match="needs node"):
                await join(reader, "a")
