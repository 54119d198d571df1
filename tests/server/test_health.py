import sqlite3

from server_kit import database_url, host, join, keys, report, running

from kvstrata import api
from kvstrata.config import ServerSettings
from kvstrata_server import plane
from kvstrata_server.app import create_app
from kvstrata_server.sql.database import Database


async def test_a_healthy_server_says_so(tmp_path):
    async with running(tmp_path) as r:
        health = await r.control.health()
        assert (health.status, health.restarts) == ("ok", 0)
        assert {task.name for task in health.tasks} == {
            *("writer", "sweep", "tokens"),
            *("drains", "usage", "quotas", "shedding"),
        }
        assert (await r.http.get("/readyz")).status_code == 200


async def test_a_database_that_takes_no_writes_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(plane, "Database", lambda url: Database(url, busy_timeout=0.01))
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await r.state.writer.flushed(5)
        blocker = sqlite3.connect(tmp_path / "control.sqlite", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        await r.control.report("a", report(0, host(keys(0))))
        assert not await written_within(r, 0.3)
        health = api.Health.model_validate_json((await r.http.get("/healthz")).content)
        assert health.status == "degraded"
        assert health.unwritten_rows > 0
        assert any("locked" in task.detail for task in health.tasks)
        assert (await r.http.get("/readyz")).status_code == 503
        # Lookups need no SQL.
        reply = await r.control.lookup(api.LookupRequest(keys=keys(0)))
        assert [n.node for n in reply.nodes] == ["a"]
        blocker.execute("ROLLBACK")
        blocker.close()
        assert await written_within(r, 10)
        assert (await r.control.health()).status == "ok"


async def written_within(r, seconds: float) -> bool:
    try:
        await r.state.writer.flushed(seconds)
    except Exception:
        return False
    return True


async def test_before_it_is_open_it_is_not_ready(tmp_path):
    import httpx

    app = create_app(ServerSettings(database=database_url(tmp_path)))
    async with httpx.AsyncClient(
        base_url="http://test", transport=httpx.ASGITransport(app)
    ) as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 503
    await app.state.control.database.close()


async def test_metrics_count_what_happened(tmp_path):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await r.control.report("a", report(0, host(keys(0, 1))))
        await r.control.report("a", report(0, host(keys(0, 1))))
        await r.control.report("a", report(5, host(keys(2))))
        await r.control.lookup(api.LookupRequest(keys=keys(0, 1, 2)))
        asked = api.TransferRequest(target="a", keys=keys(3))
        await r.control.cancel_transfer((await r.control.create_transfer(asked)).id)
        await r.http.get("/nowhere")
        response = await r.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        values = dict(
            line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#")
        )
    expected = {
        'kvstrata_reports_total{result="applied"}': 1,
        'kvstrata_reports_total{result="repeated"}': 1,
        'kvstrata_reports_total{result="gap"}': 1,
        "kvstrata_lookup_keys_total": 3,
        "kvstrata_lookup_prefix_keys_total": 2,
        'kvstrata_transfers_total{state="cancelled"}': 1,
        "kvstrata_active_transfers": 0,
        'kvstrata_nodes{state="up"}': 1,
        "kvstrata_index_chunks": 2,
        "kvstrata_index_placements": 2,
        "kvstrata_dropped_writes": 0,
        'kvstrata_http_request_seconds_count{method="POST",route="/v1/transfers",status="202"}': 1,
        'kvstrata_http_request_seconds_count{method="GET",route="none",status="404"}': 1,
    }
    assert {name: float(values[name]) for name in expected} == expected
