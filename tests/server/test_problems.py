import json

import pytest
from server_kit import Running, join, keys, running

from kvstrata import api
from kvstrata_server.problems import MEDIA_TYPE


async def ask(r: Running, method: str, path: str, status: int, **more: object) -> api.Problem:
    response = await r.http.request(method, path, **more)
    assert response.status_code == status
    assert response.headers["content-type"] == MEDIA_TYPE
    problem = api.Problem.model_validate_json(response.content)
    assert problem.status == status
    assert problem.title
    assert problem.detail
    return problem


async def test_every_error_is_a_problem_document(tmp_path):
    async with running(tmp_path) as r:
        assert (await ask(r, "GET", "/v1/nodes/zz", 404)).code == "missing"
        assert (await ask(r, "GET", "/nowhere", 404)).code == "no_route"
        response = await r.http.delete("/v1/nodes")
        assert response.headers["allow"]
        assert (await ask(r, "DELETE", "/v1/nodes", 405)).code == "method_not_allowed"


async def test_a_malformed_request_names_its_parts(tmp_path):
    async with running(tmp_path) as r:
        problem = await ask(r, "POST", "/v1/nodes", 422, json={"id": "a b", "surprise": 1})
        assert problem.code == "malformed"
        assert sorted(tuple(e.loc) for e in problem.errors) == [
            ("body", "id"),
            ("body", "incarnation"),
            ("body", "surprise"),
        ]
        assert (await ask(r, "POST", "/v1/nodes", 422, content=b"{")).code == "malformed"
        assert (await ask(r, "GET", "/v1/nodes?limit=0", 422)).errors[0].loc[1] == "limit"


@pytest.mark.parametrize("key", ["", "zz" * 21, "ab" * 20, "ab" * 53, "abc" * 15])
async def test_keys_are_checked(tmp_path, key):
    async with running(tmp_path) as r:
        await ask(r, "POST", "/v1/placements:lookup", 422, json={"keys": [key]})


async def test_many_errors_are_cut_short(tmp_path):
    async with running(tmp_path) as r:
        problem = await ask(r, "POST", "/v1/placements:lookup", 422, json={"keys": ["x"] * 5000})
        assert len(problem.errors) == 20


async def test_a_defect_tells_nothing_of_our_insides(tmp_path, monkeypatch):
    async with running(tmp_path) as r:

        def fail(*args: object) -> None:
            raise RuntimeError("password=hunter2")

        monkeypatch.setattr(r.state.cluster, "page", fail)
        problem = await ask(r, "GET", "/v1/nodes", 500)
        assert not problem.retryable
        assert "hunter2" not in problem.model_dump_json()


async def test_a_request_too_large_is_not_read(tmp_path):
    async with running(tmp_path) as r:
        claimed = {"content-type": "application/json", "content-length": str(65 << 20)}
        problem = await ask(r, "POST", "/v1/nodes", 413, content=b"{}", headers=claimed)
        assert problem.code == "too_large"


async def test_busy_is_retryable_and_says_when(tmp_path, monkeypatch):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        monkeypatch.setattr(r.state.writer, "_max_rows", 0)
        body = {"incarnation": "i1", "seq": 0, "changes": [{"location": "host", "added": keys(1)}]}
        problem = await ask(r, "POST", "/v1/nodes/a/reports", 503, content=json.dumps(body),
                            headers={"content-type": "application/json"})  # fmt: skip
        assert (problem.code, problem.retryable) == ("busy", True)
        response = await r.http.post("/v1/nodes/a/reports", json=body)
        assert response.headers["retry-after"] == "1"
