"""Query parameters: those that a route takes, and no others; filters of lists."""

from __future__ import annotations

from pathlib import Path

import msgspec
from server_kit import NAMESPACE, join, keys, report, running

from kvstrata import api
from kvstrata.api import TransferState
from kvstrata_server import openapi
from kvstrata_server.routes.parameters import COMPATIBLE

ANYTHING = {"cursor": "zzz"}


async def test_what_no_route_takes_is_refused_by_all_of_them(tmp_path: Path) -> None:
    """But by those for clients that are not ours, and those that probes ask."""
    async with running(tmp_path) as r:
        asked = 0
        for path, operations in openapi.document(r.app)["paths"].items():
            for method, operation in operations.items():
                where = path.replace("{", "").replace("}", "")
                # Of that route, and not of the body that it lacks.
                answer = await r.http.request(method, where, params=ANYTHING)
                named = ["query", "cursor"] in [
                    error["loc"] for error in _problem(answer.content).get("errors", [])
                ]
                open_ = path in ("/healthz", "/readyz") or COMPATIBLE in operation["tags"]
                assert named is not open_, operation["operationId"]
                asked += not open_
                assert open_ or answer.status_code == 422
        assert asked > 25


def _problem(content: bytes) -> dict[str, list[dict[str, object]]]:
    try:
        return msgspec.json.decode(content, type=dict)
    except msgspec.DecodeError:  # metrics and the like
        return {}


async def test_msgpack_is_no_way_around(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        for path in ("/v1/nodes/a/reports", "/v1/placements:lookup"):
            answer = await r.http.post(
                path,
                params=ANYTHING,
                content=b"\x80",
                headers={"content-type": "application/msgpack"},
            )
            assert answer.status_code == 422
            assert api.Problem.model_validate_json(answer.content).errors[0].loc[1] == "cursor"


async def test_the_refusal_says_what_there_is(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        answer = await r.http.get("/v1/nodes?cursor=zzz&limit=5&x=1")
        problem = api.Problem.model_validate_json(answer.content)
        assert (problem.status, problem.code) == (422, "malformed")
        assert [error.loc for error in problem.errors] == [["query", "cursor"], ["query", "x"]]
        assert problem.errors[0].msg == "no such parameter here: there are after, limit"


async def test_clients_of_others_may_say_more_than_we_know(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        assert (await r.http.get("/workers", params=ANYTHING)).status_code == 200
        assert (await r.http.get("/dump", params=ANYTHING)).status_code == 200
        query = {"model": "m", "token_ids": [1], "cache_hint": "new"}
        assert (await r.http.post("/query", params=ANYTHING, json=query)).status_code == 404


async def test_transfers_are_listed_by_state_target_and_tenant(place: Path | str) -> None:
    acme = msgspec.structs.replace(NAMESPACE, tenant="acme")
    async with running(place) as r:
        for node in ("a", "b"):
            await join(r.control, node)
        documents = [acme.document.decode(), NAMESPACE.document.decode()]
        await r.control.report("a", report(0, namespaces=documents))
        made = {}
        for target in ("a", "b"):
            for tenant, of in (("acme", acme), ("default", NAMESPACE)):
                for state in (TransferState.QUEUED, TransferState.CANCELLED):
                    asked = api.TransferRequest(
                        target=target, keys=[of.key(0, bytes([n]) * 8).hex() for n in range(3)]
                    )
                    info = await r.control.create_transfer(asked)
                    if state is TransferState.CANCELLED:
                        await r.control.cancel_transfer(info.id)
                    made[info.id] = (state, target, tenant)
        made = dict(sorted(made.items()))
        both = (TransferState.QUEUED, TransferState.CANCELLED)
        for states, target, tenant in (
            ((), None, None),
            (both[:1], None, None),
            (both, "b", None),
            ((TransferState.FAILED,), None, None),
            ((), "nobody", None),
            ((), None, "acme"),
            ((), None, "stranger"),
            (both[1:], "a", "default"),
        ):
            found = await r.control.transfers(states=states, target=target, tenant=tenant)
            assert [each.id for each in found.transfers] == [
                id_
                for id_, (state, to, of_) in made.items()
                if (not states or state in states)
                and target in (None, to)
                and tenant in (None, of_)
            ]
        # A page is of what passes.
        cancelled = [id_ for id_, (s, *_) in made.items() if s is TransferState.CANCELLED]
        page = await r.control.transfers(limit=3, states=both[1:])
        assert [each.id for each in page.transfers] == cancelled[:3]
        page = await r.control.transfers(page.next, limit=3, states=both[1:])
        assert [each.id for each in page.transfers] == cancelled[3:]
        assert page.next is None
        assert (await r.http.get("/v1/transfers?state=lost")).status_code == 422


async def test_a_state_is_as_fresh_as_it_is_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        await join(r.control, "a")
        made = await r.control.create_transfer(api.TransferRequest(target="a", keys=keys(0)))
        r.clock.advance(3600)  # past its deadline
        [listed] = (await r.control.transfers(states=[TransferState.EXPIRED])).transfers
        assert listed.id == made.id
        assert (await r.control.transfers(states=[TransferState.QUEUED])).transfers == []
