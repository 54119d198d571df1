"""What only an object store has: names, conditional puts, parts, listings. On both servers."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trustme
from obj_kit import S3
from obj_proxy import Forward, Proxy, Request, Response, refusal

from kvstrata.errors import ConfigError
from kvstrata.keys import Key
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.tiers import aligned, payload
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import Item, Outcome, TierContext
from kvstrata.tiers.obj import ObjTier
from kvstrata.tiers.obj_conditions import Condition, Fault
from kvstrata.tiers.obj_format import Header, Names

SIZE = 5000
STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
MISSING, CORRUPT = Outcome.MISSING, Outcome.CORRUPT
NO_ROOM, FAILED = Outcome.NO_ROOM, Outcome.FAILED

Open = Callable[..., Any]


def key(i: int) -> Key:
    return a_namespace().key(0, i.to_bytes(4, "little"))


def items(*ids: int, size: int = SIZE) -> list[Item]:
    made = [Item(key(i), aligned(size)) for i in ids]
    for item in made:
        item.view[:] = payload(item.key, size)
    return made


async def load(tier: ObjTier, *ids: int, size: int = SIZE) -> list[Outcome]:
    """That what loads is right is checked."""
    blank = [Item(key(i), aligned(size)) for i in ids]
    outcomes = await tier.load(blank)
    for item, outcome in zip(blank, outcomes, strict=True):
        assert outcome is not LOADED or item.view == payload(item.key, size)
    return outcomes


@pytest.fixture(params=["moto", "seaweedfs"])
def s3(request: pytest.FixtureRequest) -> S3:
    server: S3 = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def removed() -> list[Key]:
    return []


@pytest.fixture
async def opened(tmp_path: Path, removed: list[Key]) -> AsyncIterator[Open]:
    """Opens a tier in a prefix of the test's own, and closes it at the end."""
    tiers: list[ObjTier] = []
    namespace = a_namespace()

    async def open_tier(s3: S3, prefix: str = "", listed: bool = True, **options: Any) -> ObjTier:
        context = TierContext(
            "node", namespace_of={namespace.digest: namespace}.get, on_removed=removed.extend
        )
        tiers.append(await ObjTier.open(s3.options(prefix or tmp_path.name, **options), context))
        if listed:
            await tiers[-1].listed()
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        await tier.close()


# ---------------------------------------------------------------- names


async def test_what_stands_in_the_bucket(s3: S3, opened: Open) -> None:
    tier = await opened(s3, "a/store")
    await tier.store(items(1))
    ns = a_namespace().digest.hex()
    name = Names("a/store").chunk(key(1))
    assert sorted(s3.names("a/store/")) == sorted(
        ["a/store/store.json", f"a/store/{ns}/namespace.json", name]
    )
    body, metadata = s3.read("a/store", key(1))
    assert body == payload(key(1), SIZE)
    assert Header.parse(metadata).key == key(1)
    document = s3.client.get_object(Bucket=s3.bucket, Key=f"a/store/{ns}/namespace.json")["Body"]
    with document:
        assert document.read() == a_namespace().document


async def test_prefixes_are_stores_of_their_own(s3: S3, opened: Open) -> None:
    one, longer, inside = [await opened(s3, p) for p in ("iso", "iso2", "iso/b")]
    assert len({one.store_id, longer.store_id, inside.store_id}) == 3
    assert await longer.store(items(1)) == [STORED]
    assert await inside.store(items(2)) == [STORED]
    assert await one.lookup([key(1), key(2)]) == [False, False]
    again = await opened(s3, "iso")
    assert again.keys() == []
    assert (await opened(s3, "iso/b")).keys() == [key(2)]


async def test_nodes_share_a_store(s3: S3, opened: Open) -> None:
    one, other = await opened(s3), await opened(s3)
    assert one.store_id == other.store_id
    await one.store(items(1, 2))
    assert await other.lookup([key(1), key(2), key(3)]) == [True, True, False]
    assert await load(other, 1, 2) == [LOADED, LOADED]
    await other.evict([key(1)])
    assert await load(one, 1, 2) == [MISSING, LOADED]
    assert one.keys() == [key(2)]


async def test_nodes_that_come_at_once_agree_on_the_store(s3: S3, opened: Open) -> None:
    tiers = await asyncio.gather(*(opened(s3) for _ in range(5)))
    assert len({tier.store_id for tier in tiers}) == 1


@pytest.mark.parametrize("style", ["path", "virtual", "auto"])
async def test_where_the_bucket_stands(
    seaweedfs: S3, opened: Open, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a name under `s3.test`, which the server knows as its own."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        ours = isinstance(host, str) and host.endswith("s3.test")
        return real("127.0.0.1" if ours else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with Proxy(seaweedfs) as proxy:
        there = proxy.s3._replace(endpoint=f"http://s3.test:{proxy.port}")
        tier = await opened(there, addressing=style)
        assert await tier.store(items(1)) == [STORED]
        assert await load(tier, 1) == [LOADED]
        hosts = {request.header("host") for request in proxy.requests}
        paths = {request.target.startswith(f"/{there.bucket}") for request in proxy.requests}
        await tier.close()
    at = f"s3.test:{proxy.port}"
    assert hosts == ({f"{there.bucket}.{at}"} if style == "virtual" else {at})
    assert paths == {style != "virtual"}


async def test_an_authority_of_ones_own(seaweedfs: S3, opened: Open, tmp_path: Path) -> None:
    authority, bundle = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    async with Proxy(seaweedfs, tls=tls) as proxy:
        tier = await opened(proxy.s3, ca=bundle)
        assert await tier.store(items(1)) == [STORED]
        assert await load(tier, 1) == [LOADED]
        with pytest.raises(ConfigError, match=r"certificate not trusted.*`ca`"):
            await opened(proxy.s3)
        await tier.close()


# ---------------------------------------------------------------- configuration that can't work


async def test_a_bucket_that_is_not_there(s3: S3, opened: Open) -> None:
    with pytest.raises(ConfigError, match=r"no such bucket.*create the bucket"):
        await opened(s3._replace(bucket="no-such-bucket-here"))


async def test_a_bucket_that_can_not_be(moto: S3, opened: Open) -> None:
    with pytest.raises(ConfigError, match="obj tier: "):
        await opened(moto._replace(bucket="No_Such.Bucket!"))


async def test_credentials_that_are_refused(
    seaweedfs: S3, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    with pytest.raises(ConfigError, match=r"access denied.*ListBucket"):
        await opened(seaweedfs)


async def test_no_credentials(seaweedfs: S3, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigError, match="access denied: Unable to locate credentials"):
        await opened(seaweedfs)


async def test_a_profile_that_is_not_there(seaweedfs: S3, opened: Open) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        await opened(seaweedfs, profile="nobody")


async def test_a_store_of_another_format(s3: S3, opened: Open) -> None:
    content = json.dumps({"id": "6ff1bd3c-0d43-4ac7-9d5b-1d8a3ac3a9b1", "format": 9}).encode()
    s3.client.put_object(Bucket=s3.bucket, Key="formed/store.json", Body=content)
    with pytest.raises(ConfigError, match="format 9"):
        await opened(s3, "formed")


# ---------------------------------------------------------------- what isn't sent again


async def test_what_another_node_stored_is_present(s3: S3, opened: Open) -> None:
    one, other = await opened(s3), await opened(s3)
    assert await one.store(items(1)) == [STORED]
    assert await other.store(items(1, 2)) == [PRESENT, STORED]
    assert sorted(other.keys()) == sorted([key(1), key(2)])
    assert other.usage().used_bytes == 2 * SIZE


async def test_a_large_chunk_is_asked_for_before_it_is_sent(s3: S3, opened: Open) -> None:
    async with Proxy(s3) as proxy:
        one, other = await opened(s3), await opened(proxy.s3, head_above="1KB")
        await one.store(items(1))
        proxy.requests.clear()
        assert await other.store(items(1)) == [PRESENT]
        chunks = [r for r in proxy.requests if r.target.endswith(".kv")]
        assert [r.method for r in chunks] == ["HEAD"]
        await other.close()


async def test_an_object_that_does_not_fit_is_replaced(s3: S3, opened: Open) -> None:
    tier = await opened(s3)
    prefix = tier._options.prefix
    s3.write(prefix, key(1), b"foreign", {})
    s3.write(prefix, key(2), b"short", Header(key(2), 5, 0).metadata())
    s3.write(prefix, key(3), bytes(SIZE), Header(key(4), SIZE, 0).metadata())
    assert await tier.lookup([key(1), key(3)]) == [False, False]
    assert await tier.store(items(1, 2, 3)) == [STORED] * 3
    assert await load(tier, 1, 2, 3) == [LOADED] * 3


async def test_damaged_objects_are_set_aside_and_bounded(s3: S3, opened: Open) -> None:
    tier = await opened(s3)
    prefix = tier._options.prefix
    count = 70
    await tier.store(items(*range(count), size=100))
    for i in range(count):
        body, metadata = s3.read(prefix, key(i))
        s3.write(prefix, key(i), body[:-1] + bytes([body[-1] ^ 1]), metadata)
    assert await load(tier, *range(count), size=100) == [CORRUPT] * count
    assert tier.usage().counters["corrupt"] == count
    assert s3.chunks(prefix) == []
    aside = s3.names(f"{prefix}/kvstrata-quarantine/")
    assert len(aside) == 64
    metadata = s3.client.head_object(Bucket=s3.bucket, Key=aside[0])["Metadata"]
    assert Header.parse(metadata).key in [key(i) for i in range(count)]


# ---------------------------------------------------------------- parts


PARTS = {"multipart_above": "1MiB", "part_size": "5MiB"}
LARGE = (11 << 20) + 77


async def test_large_chunks_go_in_parts(s3: S3, opened: Open) -> None:
    one, other = await opened(s3, **PARTS), await opened(s3, **PARTS, head_above="1GiB")
    assert await one.store(items(1, size=LARGE)) == [STORED]
    assert await load(one, 1, size=LARGE) == [LOADED]
    assert await other.store(items(1, size=LARGE)) == [PRESENT]
    assert await load(other, 1, size=LARGE) == [LOADED]
    uploads = s3.client.list_multipart_uploads(Bucket=s3.bucket, Prefix=one._options.prefix)
    assert uploads.get("Uploads", []) == []


async def test_an_upload_that_fails_is_aborted(s3: S3, opened: Open) -> None:
    async def no_second_part(request: Request, forward: Forward) -> Response | None:
        if "partNumber=2" in request.target:
            return refusal(403, "AccessDenied")
        return await forward(request)

    async with Proxy(s3, no_second_part) as proxy:
        tier = await opened(proxy.s3, **PARTS)
        assert await tier.store(items(1, size=LARGE)) == [FAILED]
        prefix = tier._options.prefix
        await tier.close()
    uploads = s3.client.list_multipart_uploads(Bucket=s3.bucket, Prefix=prefix)
    assert uploads.get("Uploads", []) == []
    assert s3.chunks(prefix) == []


async def test_an_upload_whose_last_answer_is_lost(s3: S3, opened: Open) -> None:
    lost = []

    async def lose_the_last(request: Request, forward: Forward) -> Response | None:
        response = await forward(request)
        if request.method == "POST" and "uploadId" in request.target and not lost:
            lost.append(request)
            return None
        return response

    async with Proxy(s3, lose_the_last) as proxy:
        tier = await opened(proxy.s3, **PARTS)
        # Some servers answer the repetition as they did before, some know no such upload.
        assert (await tier.store(items(1, size=LARGE)))[0] in (STORED, PRESENT)
        assert await load(tier, 1, size=LARGE) == [LOADED]
        await tier.close()
    assert lost


async def test_uploads_left_by_the_dead_are_aborted(s3: S3, opened: Open, tmp_path: Path) -> None:
    def begin(prefix: str) -> None:
        s3.client.create_multipart_upload(Bucket=s3.bucket, Key=Names(prefix).chunk(key(1)))

    begin("dead")
    begin("deadline")  # another store's
    # Somebody else's, who keeps other things under the prefix.
    s3.client.create_multipart_upload(Bucket=s3.bucket, Key="dead/backup.tar")
    tier = await opened(s3, "dead", orphans_after="1ms", refresh="50ms")
    await until(lambda: tier.usage().counters["orphans"] == 1)
    uploads = s3.client.list_multipart_uploads(Bucket=s3.bucket, Prefix="dead")
    left = {u["Key"] for u in uploads["Uploads"]}
    assert left == {"dead/backup.tar", Names("deadline").chunk(key(1))}


# ---------------------------------------------------------------- listing, bound


async def test_a_listing_finds_what_others_did(s3: S3, opened: Open, removed: list[Key]) -> None:
    one, other = await opened(s3, refresh="100ms"), await opened(s3)
    await one.store(items(1))
    await other.store(items(2))
    await until(lambda: set(one.keys()) == {key(1), key(2)})
    assert one.usage().used_bytes == 2 * SIZE
    await other.evict([key(1)])
    removed.clear()
    await until(lambda: one.keys() == [key(2)])
    assert removed == [key(1)]


async def test_a_long_listing_has_pages(s3: S3, opened: Open) -> None:
    tier = await opened(s3)
    prefix = tier._options.prefix

    def put(i: int) -> None:
        s3.write(prefix, key(i), b"x", {})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(1050)))
    again = await opened(s3, prefix)
    assert len(again.keys()) == again.usage().chunks == again.usage().used_bytes == 1050


async def test_more_than_the_bound_found_at_start_is_evicted(s3: S3, opened: Open) -> None:
    tier = await opened(s3)
    await tier.store(items(*range(10)))
    bounded = await opened(s3, capacity=5 * SIZE)
    await until(lambda: bounded.usage().used_bytes <= 5 * SIZE)
    assert len(s3.chunks(tier._options.prefix)) == len(bounded.keys()) == 4


async def test_what_never_fits_makes_nothing_else_go(s3: S3, opened: Open) -> None:
    tier = await opened(s3, capacity=5 * SIZE)
    await tier.store(items(1, 2, 3))
    assert await tier.store(items(4, size=6 * SIZE)) == [NO_ROOM]
    assert await load(tier, 1, 2, 3) == [LOADED] * 3


async def test_a_store_waits_for_an_eviction_no_longer_than_it_may(s3: S3, opened: Open) -> None:
    tier = await opened(s3, capacity=5 * SIZE)
    async with tier._evicting, asyncio.timeout(10):
        soon = tier._context.clock() + 0.05
        assert await tier.store(items(1), deadline=soon) == [FAILED]
    assert await tier.store(items(1)) == [STORED]


async def test_a_chunk_evicted_while_it_is_stored_is_not_acknowledged(
    s3: S3, opened: Open, removed: list[Key]
) -> None:
    tier = await opened(s3)
    real, written, go_on = tier._chunks.store, threading.Event(), threading.Event()

    async def slow(*args: Any) -> bool:
        was_new: bool = await real(*args)
        written.set()
        await asyncio.to_thread(go_on.wait, 30)
        return was_new

    tier._chunks.store = slow
    store = asyncio.ensure_future(tier.store(items(1)))
    assert await asyncio.to_thread(written.wait, 30)
    assert await tier.evict([key(1)]) == [True]
    assert removed == [key(1)]
    go_on.set()
    assert await store == [FAILED]
    assert tier.keys() == []
    assert await tier.lookup([key(1)]) == [False]
    assert await tier.store(items(1)) == [STORED]


async def test_what_may_have_been_deleted_is_asked_for(s3: S3, opened: Open) -> None:
    tier = await opened(s3)
    await tier.store(items(1, 2))
    real = tier._chunks.remove

    async def lost(*args: Any) -> list[bool]:
        await real(*args)
        raise Fault(Condition.TIMEOUT, "no answer")

    tier._chunks.remove = lost
    assert await tier.evict([key(1)]) == [False]
    await until(lambda: tier.usage().healthy)
    assert await tier.lookup([key(1), key(2)]) == [False, True]


async def test_a_call_that_was_stopped_begins_nothing(s3: S3, opened: Open) -> None:
    """Else closing would wait for what a hung store is still asked after it was cut."""
    tier = await opened(s3)
    await tier.store(items(1))
    with tier._calls.running(None) as call:
        call.stopped = True
        assert await tier._known.remove(call, [key(1)]) == {}
    assert await load(tier, 1) == [LOADED]


async def test_nothing_is_evicted_where_the_buckets_rules_do(s3: S3, opened: Open) -> None:
    tier = await opened(s3, eviction="lifecycle")
    await tier.store(items(*range(10)))
    assert tier.usage().capacity_bytes is None
    assert tier.usage().detail == ""
    s3.client.delete_object(Bucket=s3.bucket, Key=Names(tier._options.prefix).chunk(key(3)))
    assert await load(tier, 3, 4) == [MISSING, LOADED]


async def test_a_node_that_is_alone_asks_no_misses(s3: S3, opened: Open) -> None:
    async with Proxy(s3) as proxy:
        tier = await opened(proxy.s3, exclusive=True)
        proxy.requests.clear()
        assert await tier.lookup([key(i) for i in range(50)]) == [False] * 50
        assert proxy.count("HEAD") == 0
        await tier.close()


# ---------------------------------------------------------------- flipped bits


@pytest.mark.timeout(240)
async def test_a_flipped_bit_anywhere_in_metadata_is_never_served(
    seaweedfs: S3, opened: Open
) -> None:
    tier = await opened(seaweedfs)
    header = Header(key(0), 64, 1).metadata()
    places = [(name, at) for name, value in header.items() for at in range(len(value))]
    ids = range(len(places))
    await tier.store(items(*ids, size=64))

    def damage(i: int) -> None:
        body, metadata = seaweedfs.read(tier._options.prefix, key(i))
        name, at = places[i]
        value = metadata[name]
        at = min(at, len(value) - 1)
        # The lowest bit: what is printed stays printable.
        metadata[name] = value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :]
        seaweedfs.write(tier._options.prefix, key(i), body, metadata)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(damage, ids))
    assert await load(tier, *ids, size=64) == [CORRUPT] * len(ids)
    assert await tier.store(items(*ids, size=64)) == [STORED] * len(ids)
    assert await load(tier, *ids, size=64) == [LOADED] * len(ids)


@pytest.mark.timeout(240)
async def test_a_flipped_bit_anywhere_in_the_payload_is_never_served(
    seaweedfs: S3, opened: Open
) -> None:
    tier = await opened(seaweedfs, load_concurrency=32, deadline="200s")
    rng = random.Random(4)
    ids = range(1000)
    places = rng.sample(range(8 * SIZE), len(ids))
    await tier.store(items(*ids))

    def damage(i: int) -> None:
        body, metadata = seaweedfs.read(tier._options.prefix, key(i))
        flipped = bytearray(body)
        flipped[places[i] // 8] ^= 1 << places[i] % 8
        seaweedfs.write(tier._options.prefix, key(i), bytes(flipped), metadata)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(damage, ids))
    assert await load(tier, *ids) == [CORRUPT] * len(ids)


# ---------------------------------------------------------------- a node that dies

_STORE_UNTIL_KILLED = """
import asyncio, json, sys
sys.path.insert(0, {folder!r})
from test_obj_store import ObjTier, TierContext, items, STORED

async def main():
    tier = await ObjTier.open(json.loads(sys.argv[1]), TierContext("node"))
    for start in range(0, 10_000, 8):
        ids = range(start, start + 8)
        outcomes = await tier.store(items(*ids, size=int(sys.argv[2])))
        assert outcomes == [STORED] * 8, outcomes
        print(start, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("size", [20_000, 6 << 20])
async def test_what_was_acknowledged_survives_a_kill(
    seaweedfs: S3, opened: Open, tmp_path: Path, size: int
) -> None:
    options = seaweedfs.options(tmp_path.name, **PARTS)
    process = subprocess.Popen(  # noqa: ASYNC220
        [
            *(sys.executable, "-c", _STORE_UNTIL_KILLED.format(folder=str(Path(__file__).parent))),
            *(json.dumps(options), str(size)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        batches = 2 if size > 1 << 20 else 12
        acknowledged = [
            int(await asyncio.to_thread(process.stdout.readline)) for _ in range(batches)
        ]
    finally:
        process.send_signal(signal.SIGKILL)  # in the middle of the next batch
        process.stdout.close()
        process.wait()
    tier = await opened(seaweedfs)
    ids = [i for start in acknowledged for i in range(start, start + 8)]
    assert {key(i) for i in ids} <= set(tier.keys())
    assert await load(tier, *ids, size=size) == [LOADED] * len(ids)
    rest = set(tier.keys()) - {key(i) for i in ids}
    blank = [Item(k, aligned(size)) for k in rest]
    for item, outcome in zip(blank, await tier.load(blank), strict=True):
        assert outcome is LOADED
        assert item.view == payload(item.key, size)
