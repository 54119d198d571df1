from server_kit import host, join, keys, report, running

from kvstrata import api
from kvstrata.api import Outcome
from kvstrata.errors import Missing


async def ready(r):
    await join(r.control, "n")
    await r.control.report("n", report(0, host(keys(0, 1))))


async def lease(r, *numbers, **more):
    body = {"node": "n", "keys": keys(*numbers), "ttl": 60} | more
    made = await r.http.post("/v1/leases", json=body)
    assert made.status_code == 202
    assert made.headers["location"] == f"/v1/leases/{made.json()['id']}"
    return made.json()


async def obey(r, **outcomes):
    """The node takes what it is asked to do, and says that it has these keys."""
    (command,) = (await r.control.commands("n", "i1")).commands
    found = {key: outcomes.get("rest", Outcome.PRESENT) for key in command.keys}
    done = api.Progress(incarnation="i1", transfer=command.transfer, final=True, outcomes=found)
    await r.control.progress("n", done)
    return command


async def test_from_request_to_its_end(tmp_path):
    async with running(tmp_path) as r:
        await ready(r)
        made = await lease(r, 0, 1)
        at = f"/v1/leases/{made['id']}"
        assert (made["state"], made["expires"]) == ("pending", None)
        command = await obey(r)
        assert (command.kind, command.sources, command.hold) == ("pull", [], 60.0)
        held = (await r.http.get(at)).json()
        assert (held["state"], held["expires"]) == ("held", r.clock() + 60)
        assert {k["outcome"] for k in held["keys"]} == {"present"}
        r.clock.advance(60)
        assert (await r.http.get(at)).json()["state"] == "ended"


async def test_it_ends_early_on_request_and_the_node_is_told(tmp_path):
    async with running(tmp_path) as r:
        await ready(r)
        made = await lease(r, 0)
        await obey(r)
        released = (await r.http.delete(f"/v1/leases/{made['id']}")).json()
        assert released["state"] == "ended"
        (command,) = (await r.control.commands("n", "i1")).commands
        assert (command.kind, command.transfer) == ("cancel", made["id"])
        # The node's answer ends the asking; the transfer itself stays what it was.
        done = api.Progress(incarnation="i1", transfer=made["id"], final=True)
        await r.control.progress("n", done)
        r.clock.advance(6)
        assert (await r.control.commands("n", "i1")).commands == []
        assert (await r.control.get_transfer(made["id"])).state is api.TransferState.DONE


async def test_a_release_outlives_the_server_and_so_does_its_news(tmp_path):
    async with running(tmp_path) as r:
        await ready(r)
        made = await lease(r, 0)
        kept = await lease(r, 1)
        for _ in range(2):
            for command in (await r.control.commands("n", "i1")).commands:
                found = dict.fromkeys(command.keys, Outcome.PRESENT)
                await r.control.progress(
                    "n",
                    api.Progress(
                        incarnation="i1", transfer=command.transfer, final=True, outcomes=found
                    ),
                )
        await r.http.delete(f"/v1/leases/{made['id']}")
        cancelled = await lease(r, 0)
        await r.http.delete(f"/v1/leases/{cancelled['id']}")
        clock = r.clock
    async with running(tmp_path, clock) as r:
        states = [
            (await r.http.get(f"/v1/leases/{each['id']}")).json()["state"]
            for each in (made, kept, cancelled)
        ]
        assert states == ["ended", "held", "ended"]
        told = (await r.control.commands("n", "i1")).commands
        assert {(c.kind, c.transfer) for c in told} == {
            ("cancel", made["id"]),
            ("cancel", cancelled["id"]),
        }


async def test_one_that_got_nothing_holds_nothing(tmp_path):
    async with running(tmp_path) as r:
        await ready(r)
        made = await lease(r, 7)
        await obey(r, rest=Outcome.MISSING)
        assert (await r.http.get(f"/v1/leases/{made['id']}")).json()["state"] == "ended"
        await r.http.delete(f"/v1/leases/{made['id']}")
        assert (await r.control.commands("n", "i1")).commands == []


async def test_one_that_is_pending_is_cancelled(tmp_path):
    async with running(tmp_path) as r:
        await ready(r)
        made = await lease(r, 0)
        gone = (await r.http.delete(f"/v1/leases/{made['id']}")).json()
        assert gone["state"] == "ended"
        assert {k["outcome"] for k in gone["keys"]} == {"cancelled"}
        assert (await r.http.get("/v1/leases/none")).status_code == 404


async def test_unknown_nodes_are_errors(tmp_path):
    async with running(tmp_path) as r:
        answer = await r.http.post("/v1/leases", json={"node": "z", "keys": keys(0)})
        assert answer.status_code == 404
        assert answer.json()["code"] == Missing.code
