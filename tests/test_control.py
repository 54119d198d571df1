import asyncio
import socket
import subprocess
import sys

import httpx
import pytest

from kvstrata import api
from kvstrata.control import ControlPlane, SyncControlPlane
from kvstrata.errors import (
    Busy,
    ConfigError,
    Expired,
    KVStrataError,
    LinkBroken,
    Malformed,
    Missing,
    PeerRefused,
)

NODES = api.NodeList(nodes=[])


def answering(response: httpx.Response | Exception, seen: list[httpx.Request] | None = None):
    """A transport that gives this answer to everything."""

    def handle(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(request)
        if isinstance(response, Exception):
            raise response
        return httpx.Response(response.status_code, content=response.content)

    return httpx.MockTransport(handle)


def clients(transport: httpx.MockTransport, token: str = ""):
    return (
        ControlPlane("http://test/", token, transport=transport),
        SyncControlPlane("http://test/", token, transport=transport),
    )


async def both(transport: httpx.MockTransport) -> list[object]:
    """What `nodes()` gives or raises, async and sync."""
    found: list[object] = []
    async_one, sync_one = clients(transport)
    async with async_one:
        try:
            found.append(await async_one.nodes())
        except KVStrataError as e:
            found.append(e)
    with sync_one:
        try:
            found.append(sync_one.nodes())
        except KVStrataError as e:
            found.append(e)
    return found


def problem(status: int, code: str, **more: object) -> httpx.Response:
    document = api.Problem(title="No", status=status, code=code, detail="because", **more)
    return httpx.Response(
        status,
        content=document.model_dump_json(),
        headers={"content-type": "application/problem+json"},
    )


async def test_an_answer_is_a_message():
    answer = httpx.Response(200, content=NODES.model_dump_json())
    assert await both(answering(answer)) == [NODES, NODES]


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (problem(404, "missing"), Missing),
        (problem(410, "expired"), Expired),
        (problem(503, "busy"), Busy),
        (problem(422, "malformed"), Malformed),
        (problem(409, "conflict"), PeerRefused),
        (problem(404, "no_route"), PeerRefused),
        (problem(401, "unauthenticated"), PeerRefused),
    ],
)
async def test_a_problem_is_the_error_the_server_meant(response, error):
    for found in await both(answering(response)):
        assert type(found) is error
        assert "because" in str(found)


async def test_a_problem_names_the_first_wrong_part():
    errors = [{"loc": ["body", "keys", 3], "msg": "not a key", "type": "x"}]
    for found in await both(answering(problem(422, "malformed", errors=errors))):
        assert "body.keys.3: not a key" in str(found)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(502, text="<html>Bad gateway</html>"), Busy),
        (httpx.Response(429, text="slow down"), Busy),
        (httpx.Response(403, text="<html>no</html>"), PeerRefused),
        (httpx.Response(200, text="<html>It works!</html>"), PeerRefused),
        (httpx.ConnectError("refused"), LinkBroken),
        (httpx.ReadTimeout("slow"), LinkBroken),
        (httpx.RemoteProtocolError("gone"), LinkBroken),
    ],
)
async def test_what_is_not_ours_is_told_apart(response, error):
    for found in await both(answering(response)):
        assert type(found) is error
        assert "http://test" in str(found)


async def test_nobody_there_is_a_broken_link():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with ControlPlane(url) as control:
            with pytest.raises(LinkBroken, match=url):
                await control.health()


async def test_a_server_that_says_nothing_is_a_broken_link_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with ControlPlane(url, timeout=0.1) as control:
            with pytest.raises(LinkBroken, match="Timeout"):
                await control.nodes()


async def test_requests_carry_the_token_the_key_and_quoted_names():
    seen: list[httpx.Request] = []
    answer = httpx.Response(
        202,
        content=api.TransferInfo(
            id="t", state="queued", source="any", target="b", priority=5, created=0, deadline=1,
            keys=[],
        ).model_dump_json(),
    )  # fmt: skip
    async_one, sync_one = clients(answering(answer, seen), "s3cret")
    asked = api.TransferRequest(target="b", keys=["ab" * 21])
    async with async_one:
        await async_one.create_transfer(asked, "once")
        await async_one.get_transfer("../nodes")
    with sync_one:
        sync_one.create_transfer(asked, "once")
        sync_one.cancel_transfer("t?x=1")
    assert {r.headers["authorization"] for r in seen} == {"Bearer s3cret"}
    assert [r.headers.get("idempotency-key") for r in seen] == ["once", None, "once", None]
    assert [r.url.raw_path for r in seen] == [
        b"/v1/transfers",
        b"/v1/transfers/..%2Fnodes",
        b"/v1/transfers",
        b"/v1/transfers/t%3Fx%3D1",
    ]
    assert api.TransferRequest.model_validate_json(seen[0].content) == asked


async def test_a_long_poll_may_take_as_long_as_it_asked_for():
    seen: list[httpx.Request] = []
    answer = httpx.Response(200, content=api.CommandBatch(commands=[]).model_dump_json())
    async with ControlPlane("http://test", transport=answering(answer, seen)) as control:
        await control.commands("a", "i1", wait=20)
        await control.commands("a", "i1")
    assert [r.extensions["timeout"]["read"] for r in seen] == [30, 10]
    assert dict(seen[0].url.params) == {"incarnation": "i1", "wait": "20"}


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:7800", "tcp://127.0.0.1:7800", "http://127.0.0.1:7800,", "http://a,b"]
)
def test_an_impossible_address_says_what_one_looks_like(url):
    with pytest.raises(ConfigError, match="http://127"):
        ControlPlane(url)


@pytest.mark.parametrize("url", ["http://", "http://h:port", "http://h:99999999", "http://\n"])
def test_an_address_without_host_or_port_is_one_of_them(url):
    with pytest.raises(ConfigError, match="a host and a port"):
        SyncControlPlane(url)


@pytest.mark.parametrize("token", ["smörgås", "trailing ", "line\n"])
def test_a_token_that_no_header_can_carry_is_not_repeated(token):
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        ControlPlane("http://test", token)
    assert token not in str(caught.value)


def test_httpx_is_imported_only_where_it_is_used():
    code = "import sys, kvstrata.control; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Servers:
    """Answers as `down` (by host) says: with an error, or well."""

    def __init__(self) -> None:
        self.down: dict[str, Exception] = {}
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.asked.append(host)
        if host in self.down:
            raise self.down[host]
        return httpx.Response(200, content=NODES.model_dump_json())

    def take(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


@pytest.mark.parametrize("kind", [ControlPlane, SyncControlPlane])
async def test_of_several_servers_the_next_is_asked_where_one_fails(kind):
    servers = Servers()
    control = kind("http://a, http://b/,http://c", transport=httpx.MockTransport(servers))

    async def nodes() -> object:
        found = control.nodes()
        return await found if kind is ControlPlane else found

    await nodes()
    await nodes()
    assert servers.take() == ["a", "a"]
    servers.down["a"] = httpx.ConnectError("refused")
    assert await nodes() == NODES  # none has seen the request: it is sent on at once
    await nodes()
    assert servers.take() == ["a", "b", "b"]
    servers.down["b"] = httpx.ReadError("reset")  # it may have been carried out
    with pytest.raises(LinkBroken, match="http://b:"):
        await nodes()
    await nodes()
    assert servers.take() == ["b", "c"]
    servers.down = dict.fromkeys("abc", httpx.ConnectTimeout("late"))
    with pytest.raises(LinkBroken, match="http://b:"):
        await nodes()
    assert servers.take() == ["c", "a", "b"]
    servers.down = {}
    assert await nodes() == NODES
    assert control.url == "http://c"
    closed = control.close()
    if kind is ControlPlane:
        await closed


async def test_calls_that_fail_together_pass_over_no_server():
    servers = Servers()
    async with ControlPlane("http://a,http://b", transport=httpx.MockTransport(servers)) as control:
        servers.down["a"] = httpx.ConnectError("refused")
        await asyncio.gather(*(control.nodes() for _ in range(3)))
        assert control.url == "http://b"
        assert servers.asked.count("b") == 3
