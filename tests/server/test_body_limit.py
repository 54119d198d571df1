import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from kvstrata_server.access.body_limit import BodyLimit


async def echo(scope, receive, send):
    request = Request(scope, receive)
    await Response(await request.body())(scope, receive, send)


async def parts(*sizes: int):
    for size in sizes:
        yield b"x" * size


@pytest.fixture
async def http():
    transport = httpx.ASGITransport(BodyLimit(echo, most=1000))
    async with httpx.AsyncClient(base_url="http://test", transport=transport) as client:
        yield client


async def test_a_body_within_the_limit_arrives_whole(http):
    response = await http.post("/", content=parts(400, 0, 600))
    assert (response.status_code, len(response.content)) == (200, 1000)
    assert (await http.get("/")).status_code == 200


@pytest.mark.parametrize("lie", [None, "10", "-1", "many"])
async def test_one_over_it_is_refused_whatever_it_claims(http, lie):
    headers = {} if lie is None else {"content-length": lie}
    response = await http.post("/", content=parts(400, 601), headers=headers)
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["detail"]


async def test_a_claim_over_it_is_refused_before_reading(http):
    async def never():
        raise AssertionError("read")
        yield b""

    response = await http.post("/", content=never(), headers={"content-length": "1001"})
    assert response.status_code == 413
