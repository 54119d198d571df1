import json

import pytest
from server_kit import Running, join, keys, running

from kvstrata import api
from kvstrata.errors import Malformed
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


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        ("/v1/evictions", {"chunks": {"namespace": "ab" * 16}}, {"chunks"}),
        ("/v1/evictions", {"chunks": {"digests": ["x"]}}, {"chunks.digests.0"}),
        ("/v1/evictions", {"chunks": {"model": "m", "keys": []}}, {"chunks.keys", "chunks.model"}),
        ("/v1/evictions", {"chunks": 5}, {"chunks"}),
        ("/v1/placements:lookup", {}, {""}),
        ("/v1/placements:lookup", [1], {""}),
        ("/v1/placements:lookup", {"keys": "x"}, {"keys"}),
        ("/v1/placements:lookup", {"keys": ["x"], "no": 1}, {"keys.0", "no"}),
        ("/v1/placements:lookup", {"tokens": 5}, {"tokens"}),
        ("/v1/placements:lookup", {"tokens": {"token_ids": [1]}}, {"tokens"}),
        ("/v1/placements:lookup", {"tokens": {"model": "m"}}, {"tokens.token_ids"}),
        (
            "/v1/placements:lookup",
            {"tokens": {"model": "m", "token_ids": [-1]}},
            {"tokens.token_ids.0"},
        ),
        (
            "/v1/placements:lookup",
            {"tokens": {"model": "m", "token_ids": []}},
            {"tokens.token_ids"},
        ),
        (
            "/v1/placements:lookup",
            {"tokens": {"namespace": "?", "token_ids": [1]}},
            {"tokens.namespace"},
        ),
        ("/v1/transfers", {"target": "a"}, {""}),
        ("/v1/transfers", {"keys": keys(0)}, {"target"}),
        ("/v1/leases", {"tokens": {"model": 1, "token_ids": [1]}}, {"node", "tokens.model"}),
        ("/register", {"instance_id": [], "endpoint": "e", "model": "m", "block_size": 1},
         {"instance_id"}),
        ("/v1/nodes/a/evictions/x", {"incarnation": "i", "dropped": {"#": 1}}, {"dropped.#"}),
        ("/v1/nodes/a/evictions/x", {"incarnation": "i", "dropped": {"a": -1}}, {"dropped.a"}),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named_by_its_place_in_the_request(tmp_path, path, body, wrong):
    async with running(tmp_path) as r:
        problem = await ask(r, "POST", path, 422, json=body)
        places = {tuple(map(str, e.loc)) for e in problem.errors}
        assert {".".join(rest) for body, *rest in places} == wrong


async def test_a_body_of_no_known_shape_is_told_what_it_may_have(tmp_path):
    async with running(tmp_path) as r:
        problem = await ask(r, "POST", "/v1/evictions", 422, json={"chunks": {"namespace": "x"}})
        assert problem.errors[0].msg == (
            "an object is wanted that has `keys`, `digests` or `model`"
        )
        with pytest.raises(Malformed, match="has `tokens` or `keys`"):
            await r.control.create_transfer(api.NodeRegistration.model_construct(id="a"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{bad", "Expecting property name enclosed in double quotes, at character 1"),
        (b"\xff\xff", "it is not UTF-8, from byte 0 on"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"9" * 5000, "a number in it has too many digits"),
    ],
)
async def test_what_can_not_be_parsed_is_one_kind_of_mistake(tmp_path, body, said):
    async with running(tmp_path) as r:
        problem = await ask(r, "POST", "/v1/nodes", 422, content=body, headers=JSON)
        assert problem.code == "malformed"
        assert problem.detail == f"the body is not JSON: {said}"
        problem = await ask(r, "POST", "/v1/placements:lookup", 422, content=body,
                            headers={"content-type": "application/msgpack"})  # fmt: skip
        assert problem.code == "malformed"


async def test_a_body_of_another_type_is_told_so(tmp_path):
    async with running(tmp_path) as r:
        headers = {"content-type": "text/plain"}
        problem = await ask(r, "POST", "/v1/nodes", 422, content=b"{}", headers=headers)
        assert "Content-Type is not application/json" in problem.detail


async def test_a_method_that_is_not_possible_is_told_which_are(tmp_path):
    async with running(tmp_path) as r:
        problem = await ask(r, "DELETE", "/v1/nodes", 405)
        assert problem.detail == "DELETE is not possible at /v1/nodes, but GET, POST"
