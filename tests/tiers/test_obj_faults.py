"""A store that refuses, stalls, lies or goes away, and comes back: on SeaweedFS behind a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from obj_kit import S3
from obj_proxy import Forward, Proxy, Request, Response, refusal
from test_obj_store import FAILED, LOADED, MISSING, NO_ROOM, PRESENT, STORED, items, key, load

from kvstrata.errors import ConfigError
from kvstrata.keys import Key
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.obj import ObjTier

Answer = Callable[[Request, Forward], Any]


@dataclass
class Turn:
    """Fate of requests: `answers` in turn for those that `concerns` picks, then honest ones."""

    concerns: Callable[[Request], bool] = lambda request: True
    answers: list[Any] = field(default_factory=list)
    always: Any = None

    async def __call__(self, request: Request, forward: Forward) -> Response | None:
        answer = None
        if self.concerns(request):
            answer = self.answers.pop(0) if self.answers else self.always
        if answer is None:
            return await forward(request)
        result: Response | None = await answer(request, forward)
        return result


def gives(response: Response | None) -> Answer:
    async def answer(request: Request, forward: Forward) -> Response | None:
        return response

    return answer


async def cut(request: Request, forward: Forward) -> Response:
    """The connection ends in the middle of the body."""
    response = await forward(request)
    response.cut = len(response.head) + len(response.body) // 2
    return response


async def shorten(request: Request, forward: Forward) -> Response:
    """A well-formed answer without its second half."""
    response = await forward(request)
    body = response.body[: len(response.body) // 2]
    old, new = (f"Content-Length: {len(b)}".encode() for b in (response.body, body))
    assert old in response.head
    return Response(response.head.replace(old, new), body)


async def flip(request: Request, forward: Forward) -> Response:
    response = await forward(request)
    return Response(response.head, response.body[:-1] + bytes([response.body[-1] ^ 1]))


async def lose(request: Request, forward: Forward) -> None:
    """Done, but nobody hears of it."""
    await forward(request)


async def hang(request: Request, forward: Forward) -> Response:
    await asyncio.sleep(3600)
    raise AssertionError


def a_chunk(method: str) -> Callable[[Request], bool]:
    return lambda r: r.method == method and r.target.endswith(".kv")


@pytest.fixture
def fate() -> Turn:
    return Turn()


@pytest.fixture
async def proxy(seaweedfs: S3, fate: Turn) -> AsyncIterator[Proxy]:
    async with Proxy(seaweedfs, fate) as proxy:
        yield proxy


@pytest.fixture
def removed() -> list[Key]:
    return []


@pytest.fixture
async def opened(
    proxy: Proxy, tmp_path: Path, removed: list[Key]
) -> AsyncIterator[Callable[..., Any]]:
    tiers: list[ObjTier] = []

    async def open_tier(s3: S3 | None = None, **options: Any) -> ObjTier:
        context = TierContext("node", on_removed=removed.extend)
        there = (s3 or proxy.s3).options(tmp_path.name, cool_off="50ms", **options)
        tiers.append(await ObjTier.open(there, context))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        await tier.close()


@pytest.fixture
async def tier(opened: Callable[..., Any]) -> ObjTier:
    """With chunks 0 to 3 in it."""
    made: ObjTier = await opened()
    await made.listed()
    assert await made.store(items(0, 1, 2, 3)) == [STORED] * 4
    return made


# ---------------------------------------------------------------- passing faults

PASSING = [
    gives(refusal(503, "SlowDown")),
    gives(refusal(500, "InternalError")),
    gives(refusal(429, "Throttling")),
    gives(refusal(400, "RequestTimeout")),
    gives(None),
]


@pytest.mark.parametrize("answer", PASSING)
async def test_what_passes_is_tried_again(tier: ObjTier, fate: Turn, answer: Answer) -> None:
    fate.answers = [answer] * 2
    fate.concerns = a_chunk("GET")
    assert await load(tier, 0) == [LOADED]
    fate.answers = [answer] * 2
    fate.concerns = a_chunk("PUT")
    assert await tier.store(items(7)) == [STORED]
    fate.answers = [answer] * 2
    fate.concerns = lambda request: request.method == "POST"
    assert await tier.evict([key(7)]) == [True]
    # aiohttp repeats by itself what a connection that had been used before was reset for.
    assert 3 <= tier.usage().counters["retries"] <= 6
    assert tier.usage().healthy


@pytest.mark.parametrize("damage", [cut, shorten, flip])
async def test_bytes_hurt_on_their_way_are_read_again(
    tier: ObjTier, fate: Turn, damage: Answer
) -> None:
    fate.answers = [damage]
    fate.concerns = a_chunk("GET")
    assert await load(tier, 0, 1) == [LOADED] * 2
    assert tier.usage().counters["corrupt"] == 0


async def test_a_store_whose_answer_is_lost_counts(tier: ObjTier, fate: Turn) -> None:
    fate.answers = [lose]
    fate.concerns = a_chunk("PUT")
    assert await tier.store(items(7)) == [PRESENT]  # as the second try found it
    assert await load(tier, 7) == [LOADED]


async def test_a_store_that_stays_overloaded_is_left_alone_for_a_while(
    tier: ObjTier, fate: Turn, proxy: Proxy
) -> None:
    fate.always = gives(refusal(503, "SlowDown"))
    for _ in range(3):
        assert await load(tier, 0) == [FAILED]
    assert not tier.usage().healthy
    assert "asked to slow down" in tier.usage().detail
    fate.concerns = a_chunk("GET")
    proxy.requests.clear()
    await until(lambda: tier.usage().healthy)
    fate.always = None
    assert await load(tier, 0) == [LOADED]


# ---------------------------------------------------------------- lasting faults


async def test_a_store_that_goes_away_and_comes_back(tier: ObjTier, proxy: Proxy) -> None:
    await proxy.stop()
    assert await load(tier, 0) == [FAILED]
    usage = tier.usage()
    assert not usage.healthy
    assert usage.detail.startswith("unreachable: ")
    assert usage.chunks == 4
    # Now nobody waits for it.
    async with asyncio.timeout(1):
        for _ in range(100):
            assert await tier.lookup([key(0), key(9)]) == [False, False]
            assert await tier.store(items(9)) == [FAILED]
            assert await load(tier, 0) == [FAILED]
    await proxy.start()
    await until(lambda: tier.usage().healthy)
    assert await tier.lookup([key(0), key(9)]) == [True, False]
    assert await load(tier, 0, 1, 2, 3) == [LOADED] * 4
    assert await tier.store(items(9)) == [STORED]


async def test_a_store_that_is_away_at_the_start(
    opened: Callable[..., Any], proxy: Proxy, tier: ObjTier
) -> None:
    await proxy.stop()
    late = await opened(attempts=2)
    assert not late.usage().healthy
    assert late.store_id.startswith("obj-")
    assert await late.lookup([key(0)]) == [False]
    await proxy.start()
    await until(lambda: late.usage().healthy)
    await late.listed()
    assert set(late.keys()) == {key(i) for i in range(4)}
    assert await load(late, 0) == [LOADED]


async def test_a_store_that_is_overloaded_at_the_start(
    opened: Callable[..., Any], fate: Turn, seaweedfs: S3, tmp_path: Path
) -> None:
    fate.always = gives(refusal(503, "SlowDown"))
    late = await opened(attempts=2)
    assert not late.usage().healthy
    assert seaweedfs.names(tmp_path.name) == []
    fate.always = None
    await until(lambda: late.usage().healthy)
    assert seaweedfs.names(tmp_path.name) == [f"{tmp_path.name}/store.json"]
    assert await late.store(items(0)) == [STORED]


async def test_a_store_that_goes_away_while_nobody_asks(
    opened: Callable[..., Any], proxy: Proxy
) -> None:
    tier = await opened(refresh="50ms")
    await proxy.stop()
    await until(lambda: not tier.usage().healthy)
    assert await tier.evict([key(0)]) == [False]
    await proxy.start()
    await until(lambda: tier.usage().healthy)
    await until(lambda: not tier.usage().detail.startswith("listing"))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (refusal(403, "AccessDenied"), "access denied"),
        (refusal(403, "ExpiredToken"), "access denied"),
        (refusal(404, "NoSuchBucket"), "no such bucket"),
    ],
)
async def test_a_store_that_refuses_us_for_a_while(
    tier: ObjTier, fate: Turn, answer: Response, says: str, opened: Callable[..., Any]
) -> None:
    fate.always = gives(answer)
    assert await load(tier, 0) == [FAILED]
    assert says in tier.usage().detail
    assert await tier.lookup([key(0)]) == [False]
    with pytest.raises(ConfigError, match=says):
        await opened()
    fate.always = None
    await until(lambda: tier.usage().healthy)
    assert tier.usage().counters["retries"] == 0
    assert await load(tier, 0) == [LOADED]


async def test_a_full_store_has_no_room(tier: ObjTier, fate: Turn) -> None:
    fate.always = gives(refusal(507, "XMinioStorageFull"))
    fate.concerns = a_chunk("PUT")
    assert await tier.store(items(7)) == [NO_ROOM]
    assert await load(tier, 0) == [LOADED]
    assert tier.usage().healthy


async def test_a_store_that_hangs_is_given_up_at_the_deadline(tier: ObjTier, fate: Turn) -> None:
    fate.always = hang
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for _ in range(3):
        blank = items(0, 1)
        now = tier._context.clock()
        assert await tier.load(blank, deadline=now + 0.1) == [FAILED] * 2
        for item in blank:
            item.view[:] = b"\x55" * item.view.nbytes
    assert loop.time() - begun < 5
    assert "timed out" in tier.usage().detail
    assert await tier.lookup([key(9)]) == [False]
    assert all(item.view == b"\x55" * item.view.nbytes for item in blank)
    fate.always = None
    await until(lambda: tier.usage().healthy)
    assert await load(tier, 0) == [LOADED]


async def test_closing_does_not_wait_for_a_store_that_hangs(tier: ObjTier, fate: Turn) -> None:
    fate.always = hang
    calls = [
        asyncio.ensure_future(call)
        for call in (load(tier, 0, 1), tier.store(items(7)), tier.lookup([key(8)]))
    ]
    await asyncio.sleep(0)
    async with asyncio.timeout(15):
        await tier.close()
    outcomes = await asyncio.gather(*calls)
    assert outcomes == [[FAILED] * 2, [FAILED], [False]]


# ---------------------------------------------------------------- services that know less


async def test_a_service_without_conditional_puts(
    opened: Callable[..., Any], fate: Turn, proxy: Proxy
) -> None:
    fate.always = gives(refusal(501, "NotImplemented"))
    fate.concerns = lambda request: bool(request.header("if-none-match"))
    one = await opened()
    await one.listed()
    assert await one.store(items(0, 1)) == [STORED] * 2
    other = await opened(refresh="1h")
    assert other.store_id == one.store_id
    assert await one.store(items(2)) == [STORED]
    assert await other.store(items(2, 3)) == [PRESENT, STORED]
    assert await load(other, 0, 1, 2, 3) == [LOADED] * 4
    refused = [r for r in proxy.requests if r.header("if-none-match")]
    assert len(refused) < 10


async def test_a_service_without_batches_of_deletes(tier: ObjTier, fate: Turn) -> None:
    fate.always = gives(refusal(501, "NotImplemented"))
    fate.concerns = lambda request: request.method == "POST"
    assert await tier.evict([key(0), key(1), key(9)]) == [True, True, False]
    assert await load(tier, 0, 2) == [MISSING, LOADED]


async def test_a_service_that_can_not_copy(
    tier: ObjTier, fate: Turn, seaweedfs: S3, tmp_path: Path
) -> None:
    body, metadata = seaweedfs.read(tmp_path.name, key(0))
    seaweedfs.write(tmp_path.name, key(0), body[::-1], metadata)
    fate.always = gives(refusal(501, "NotImplemented"))
    fate.concerns = lambda request: bool(request.header("x-amz-copy-source"))
    assert [o.value for o in await load(tier, 0)] == ["corrupt"]
    assert key(0) not in seaweedfs.chunks(tmp_path.name)


# ---------------------------------------------------------------- races


async def test_what_was_stored_anew_is_not_set_aside(
    tier: ObjTier, fate: Turn, seaweedfs: S3, tmp_path: Path
) -> None:
    """Another node replaces a damaged object between our reading it and setting it aside."""
    body, metadata = seaweedfs.read(tmp_path.name, key(0))
    seaweedfs.write(tmp_path.name, key(0), body[::-1], metadata)

    async def replaced(request: Request, forward: Forward) -> Response:
        await asyncio.to_thread(seaweedfs.write, tmp_path.name, key(0), body, metadata)
        return await forward(request)

    fate.answers = [replaced]
    fate.concerns = lambda request: bool(request.header("x-amz-copy-source"))
    assert [o.value for o in await load(tier, 0)] == ["corrupt"]
    assert key(0) in seaweedfs.chunks(tmp_path.name)


async def test_bytes_are_sent_at_the_rate(opened: Callable[..., Any]) -> None:
    tier = await opened(upload_rate="1MB", download_rate="2MB")
    await tier.listed()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    assert await tier.store(items(0, 1, size=300_000)) == [STORED] * 2
    assert loop.time() - begun > 0.45
    begun = loop.time()
    assert await load(tier, 0, 1, size=300_000) == [LOADED] * 2
    assert loop.time() - begun > 0.2
