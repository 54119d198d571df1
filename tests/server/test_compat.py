"""What clients of Dynamo's indexer and Mooncake's conductor are answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from server_kit import TTL, Running, host, report, running, store

from kvstrata import api
from kvstrata.keys import Field, Group, Namespace
from kvstrata_server.access import tokens
from kvstrata_server.access.roles import Role
from kvstrata_server.lookups.hashing import chunk_keys, local_hashes, sequence_hashes

BLOCK = 4
TOKENS = list(range(100, 140))  # ten blocks, five chunks


def a_namespace(tenant: str = "", kinds: tuple[str, ...] = ("full",)) -> Namespace:
    groups = tuple(
        Group(n, kind, (f"l{n}",), (Field("kv", 1, 8),), BLOCK, window)  # type: ignore[arg-type]
        for n, kind in enumerate(kinds)
        for window in ([9] if kind == "sliding_window" else [0])
    )
    return Namespace(*("m", "r", "c", "bf16", "f"), groups, 2, "xxh3", "", tenant=tenant)


NAMESPACE = a_namespace()


def chunks(*numbers: int, namespace: Namespace = NAMESPACE, group: int = 0) -> list[str]:
    keys = chunk_keys(namespace, TOKENS)[group]
    return [keys[n].hex() for n in numbers]


async def join(here: Running, node: str, *changes: api.Change, **kwargs: Any) -> None:
    """A node with a store that reports, and publishes KV events."""
    number = int(node[1:])
    await here.control.register(
        api.NodeRegistration(
            id=node,
            incarnation="i1",
            capacity_bytes=1 << 20,
            transports=[],
            stores=[api.StoreRef(id=f"s{number}", tier="fs")],
            events=[api.EventsAt(endpoint=f"tcp://10.0.0.{number}:5557")],
        )
    )
    documents = kwargs.get("namespaces", (NAMESPACE,))
    await here.control.report(
        node, report(0, *changes, namespaces=tuple(n.document.decode() for n in documents))
    )


async def post(here: Running, path: str, status: int = 200, **body: Any) -> Any:
    answer: httpx.Response = await here.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def overlap(cpu: int, disk: int, **ranks: int) -> dict[str, Any]:
    dp = ranks or {"0": 0}
    return {"longest_matched": disk, "gpu": 0, "dp": dp, "cpu": cpu, "disk": disk}


async def test_dynamo_asks(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await join(here, "n1", host(chunks(0, 1, 3)), store("s1", chunks(1, 2)))
        await join(here, "n2", store("s2", chunks(0, 1, 2, 3, 4)))
        await join(here, "n3", host(chunks(1, 2)))
        answer = await post(here, "/query", token_ids=TOKENS, model_name="m")
        assert answer["instances"] == {"n1": overlap(16, 24), "n2": overlap(0, 40)}
        assert answer["scores"] == {}
        assert answer["frequencies"] == []
        part = await post(here, "/query", token_ids=[*TOKENS[:15]], model_name="m")
        assert part["instances"] == {"n1": overlap(8, 8), "n2": overlap(0, 8)}
        none = await post(here, "/query", token_ids=[7] * 40, model_name="m")
        assert none["instances"] == {}
        # By hashes of its own, which travel signed.
        local = [h - (1 << 64) if h >> 63 else h for h in local_hashes(TOKENS, BLOCK)]
        assert await post(here, "/query_by_hash", block_hashes=local, model_name="m") == answer


async def test_mooncake_asks(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await join(here, "n1", host(chunks(0, 1)), store("s1", chunks(2)))
        wanted = {
            "default": {
                "n1": {"longest_matched": 24, "GPU": 0, "DP": {"0": 0}, "CPU": 16, "DISK": 24}
            }
        }
        asked = {"model": "m", "token_ids": TOKENS, "block_size": BLOCK, "tenant_id": "default"}
        assert await post(here, "/query", **asked) == wanted
        sequence = sequence_hashes(local_hashes(TOKENS, BLOCK))
        assert await post(here, "/query_by_hash", model="m", seq_hashes=sequence) == wanted
        assert await post(here, "/query", **asked, instance_id="n2") == {"default": {}}
        problem = await post(here, "/query", 422, **{**asked, "block_size": 16})
        assert "blocks of [4] tokens" in problem["detail"]


async def test_registered_instances_have_their_own_names(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await join(here, "n1", host(chunks(0)))
        await join(here, "n2", host(chunks(0, 1)))
        body = {"model_name": "m", "block_size": BLOCK, "endpoint": "tcp://10.0.0.2:5557"}
        assert await post(here, "/register", 201, instance_id=7, **body) == {"status": "ok"}
        await post(here, "/register", 201, instance_id=7, **body)
        await post(here, "/register", 201, instance_id=7, dp_rank=1, **body)
        changed = await post(here, "/register", 409, instance_id=7, **(body | {"block_size": 8}))
        assert "unregister it first" in changed["detail"]
        answer = await post(here, "/query", token_ids=TOKENS, model_name="m")
        assert answer["instances"] == {"7": overlap(16, 16, **{"0": 0, "1": 0})}
        [worker] = (await here.http.get("/workers")).json()
        assert worker == {
            "instance_id": 7,
            "source": "zmq",
            "status": "active",
            "model_name": "m",
            "routing_group": "default",
            "block_size": BLOCK,
            "endpoints": {"0": body["endpoint"], "1": body["endpoint"]},
            "listeners": {
                rank: {"endpoint": body["endpoint"], "status": "active"} for rank in "01"
            },
        }
        assert (await here.http.get("/workers", params={"model_name": "x"})).json() == []
        await post(here, "/unregister", instance_id=7, model_name="m")
        await post(here, "/unregister", 404, instance_id=7, model_name="m")
        answer = await post(here, "/query", token_ids=TOKENS, model_name="m")
        assert set(answer["instances"]) == {"n1", "n2"}


async def test_an_endpoint_where_no_node_publishes(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await join(here, "n1")
        body = {"model_name": "m", "block_size": BLOCK, "endpoint": "tcp://10.0.0.9:5557"}
        problem = await post(here, "/register", 404, instance_id=7, **body)
        assert "tcp://10.0.0.1:5557" in problem["detail"]
        await post(here, "/register", 201, instance_id="n1", **body)  # by its own name


async def test_a_silent_node_is_not_offered(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await join(here, "n1", host(chunks(0)))
        body = {"model_name": "m", "block_size": BLOCK, "endpoint": "tcp://10.0.0.1:5557"}
        await post(here, "/register", 201, instance_id=7, **body)
        here.clock.advance(TTL + 1)
        assert (await post(here, "/query", token_ids=TOKENS, model_name="m"))["instances"] == {}
        [worker] = (await here.http.get("/workers")).json()
        assert worker["status"] == "silent"
        assert (await here.http.get("/dump")).json() == {}


async def test_where_a_node_publishes_is_known_again_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await join(here, "n1", host(chunks(0)))
    async with running(tmp_path, here.clock) as again:
        use = api.HostUse(used_bytes=0, capacity_bytes=1, chunks=0)
        at = api.EventsAt(endpoint="tcp://10.0.0.1:5557")
        beat = api.HeartbeatRequest(incarnation="i1", host=use, events=[at])
        await again.control.heartbeat("n1", beat)
        assert (await again.control.node("n1")).events == [at]
        await again.control.heartbeat("n1", beat.model_copy(update={"events": None}))
        assert (await again.control.node("n1")).events == [at]


async def test_tenants_and_groups(tmp_path: Path) -> None:
    salted = a_namespace("acme")
    hybrid = a_namespace("mixed", ("full", "sliding_window", "mla"))
    changes = host(
        [
            *chunks(0, 1, namespace=salted),
            *chunks(0, 1, 2, namespace=hybrid),
            *chunks(1, namespace=hybrid, group=1),
            *chunks(0, 1, namespace=hybrid, group=2),
        ]
    )
    async with running(tmp_path) as here:
        await join(here, "n1", changes, namespaces=(salted, hybrid))
        for tenant in ("acme", "mixed"):
            answer = await post(
                here, "/query", token_ids=TOKENS, model_name="m", routing_group=tenant
            )
            assert answer["instances"] == {"n1": overlap(16, 16)}
        problem = await post(here, "/query", 404, token_ids=TOKENS, model_name="m")
        assert "no node has reported chunks of m" in problem["detail"]


async def test_a_token_sees_its_tenants_only(tmp_path: Path) -> None:
    async with running(tmp_path, token="root") as here:
        salted = a_namespace("acme")
        await join(here, "n1", host(chunks(0, namespace=salted)), namespaces=(salted,))
        asked = {"model_name": "m", "token_ids": TOKENS, "tenant_id": "acme"}
        for tenant, status in (("acme", 200), ("other", 404)):
            token = await tokens.create(
                here.state.database, tenant, Role.READ, now=here.clock(), tenants=[tenant]
            )
            await here.state.tokens.refresh()
            headers = {"Authorization": f"Bearer {token}"}
            answer = await here.http.post("/query", json=asked, headers=headers)
            assert answer.status_code == status, answer.text
            for path in ("/workers", "/dump", "/v1/snapshot", "/v1/events"):
                assert (await here.http.get(path, headers=headers)).status_code == 403, path
            body = {"instance_id": "n1", "model_name": "m", "block_size": 4, "endpoint": "n1"}
            answer = await here.http.post("/register", json=body, headers=headers)
            assert answer.status_code == 403


async def test_who_asks_by_the_field_of_the_other_is_understood(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await join(here, "n1", host(chunks(0)))
        body = {"modelname": "m", "block_size": BLOCK, "endpoint": "tcp://10.0.0.1:5557"}
        await post(here, "/register", 201, instance_id="n1", additionalsalt="w8a8", **body)
        answer = await post(here, "/query", token_ids=TOKENS, model="m", mooncake=False)
        assert answer["default"]["n1"]["CPU"] == 8


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"block_hashes": [1], "seq_hashes": [1]},
        {"block_hashes": [1 << 65]},
        {"block_hashes": [1] * 65_537},
        {"seq_hashes": [1] * 65_537},
    ],
)
async def test_hashes_of_one_kind(tmp_path: Path, body: dict[str, Any]) -> None:
    async with running(tmp_path) as here:
        await join(here, "n1", host(chunks(0)))
        await post(here, "/query_by_hash", 422, model_name="m", **body)
