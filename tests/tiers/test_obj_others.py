"""What others do to a bucket: keep things of their own there, refuse us, empty or replace it."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from obj_kit import S3, Server, connect
from obj_proxy import Forward, Proxy, Request, Response, refusal

from kvstrata.keys import Key
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.tiers import aligned, payload
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import Item, Outcome, TierContext
from kvstrata.tiers.obj import ObjTier
from kvstrata.tiers.obj_client import ObjectClient
from kvstrata.tiers.obj_format import Names
from kvstrata.tiers.obj_options import ObjOptions

SIZE = 5000
STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
MISSING, CORRUPT, FAILED = Outcome.MISSING, Outcome.CORRUPT, Outcome.FAILED

Open = Callable[..., Any]


def key(i: int) -> Key:
    return a_namespace().key(0, i.to_bytes(4, "little"))


def items(*ids: int) -> list[Item]:
    made = [Item(key(i), aligned(SIZE)) for i in ids]
    for item in made:
        item.view[:] = payload(item.key, SIZE)
    return made


async def load(tier: ObjTier, *ids: int) -> list[Outcome]:
    """That what loads is right is checked."""
    blank = [Item(key(i), aligned(SIZE)) for i in ids]
    outcomes = await tier.load(blank)
    for item, outcome in zip(blank, outcomes, strict=True):
        assert outcome is not LOADED or item.view == payload(item.key, SIZE)
    return outcomes


@pytest.fixture(params=["moto", "seaweedfs"])
def s3(request: pytest.FixtureRequest) -> S3:
    """With a bucket that no other test uses."""
    server: S3 = request.getfixturevalue(request.param)
    return connect(Server(server.endpoint, server.pid), server.ca)


@pytest.fixture
def removed() -> list[Key]:
    return []


@pytest.fixture
async def opened(removed: list[Key]) -> AsyncIterator[Open]:
    tiers: list[ObjTier] = []

    async def open_tier(s3: S3, prefix: str = "kv", **options: Any) -> ObjTier:
        context = TierContext("node", on_removed=removed.extend)
        tiers.append(await ObjTier.open(s3.options(prefix, **options), context))
        await tiers[-1].listed()
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        await tier.close()


def damage(s3: S3, prefix: str, *ids: int) -> None:
    for i in ids:
        body, metadata = s3.read(prefix, key(i))
        s3.write(prefix, key(i), body[:-1] + bytes([body[-1] ^ 1]), metadata)


# ---------------------------------------------------------------- damaged objects


async def test_strangers_in_a_bucket_without_a_prefix_are_left_alone(s3: S3, opened: Open) -> None:
    strangers = {f"quarantine/{n:02}": b"theirs %d" % n for n in range(64)}
    for name, body in strangers.items():
        s3.client.put_object(Bucket=s3.bucket, Key=name, Body=body)
    tier = await opened(s3, "")
    await tier.store(items(1, 2))
    damage(s3, "", 1, 2)
    assert await load(tier, 1, 2) == [CORRUPT] * 2
    assert len(s3.names("kvstrata-quarantine/")) == 2
    for name, body in strangers.items():
        assert s3.client.get_object(Bucket=s3.bucket, Key=name)["Body"].read() == body


class Refusing:
    """Copies, and deletions if asked, are refused; before a deletion `meanwhile` happens."""

    def __init__(self, deletions: bool, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.deletions = deletions
        self.meanwhile = meanwhile

    async def __call__(self, request: Request, forward: Forward) -> Response | None:
        if request.header("x-amz-copy-source"):
            self.meanwhile()
            return refusal(400, "InvalidStorageClass")
        if request.method == "DELETE" and self.deletions:
            return refusal(400, "InvalidStorageClass")
        return await forward(request)


async def test_what_can_not_be_set_aside_is_removed(s3: S3, opened: Open) -> None:
    async with Proxy(s3, Refusing(deletions=False)) as proxy:
        tier = await opened(proxy.s3)
        await tier.store(items(1))
        damage(s3, "kv", 1)
        assert await load(tier, 1) == [CORRUPT]
        assert s3.chunks("kv") == []
        await tier.close()


async def test_but_not_what_was_stored_anew_meanwhile(s3: S3, opened: Open) -> None:
    def stored_anew() -> None:
        _, metadata = s3.read("kv", key(1))
        s3.write("kv", key(1), payload(key(1), SIZE), metadata)

    async with Proxy(s3, Refusing(deletions=False, meanwhile=stored_anew)) as proxy:
        tier = await opened(proxy.s3)
        await tier.store(items(1))
        damage(s3, "kv", 1)
        assert await load(tier, 1) == [CORRUPT]
        assert s3.chunks("kv") == [key(1)]
        other = await opened(s3)
        assert await load(other, 1) == [LOADED]
        await tier.close()


async def test_what_can_not_even_be_removed_is_not_believed_and_is_overwritten(
    s3: S3, opened: Open
) -> None:
    async with Proxy(s3, Refusing(deletions=True)) as proxy:
        tier = await opened(proxy.s3, refresh="50ms", known_for="1ms", missing_for="1ms")
        await tier.store(items(1, 2))
        damage(s3, "kv", 1)
        assert await load(tier, 1) == [CORRUPT]
        assert await tier.lookup([key(1), key(2)]) == [False, True]
        await tier._listing.once()
        assert tier.keys() == [key(2)]
        assert await tier.store(items(1)) == [STORED]
        assert await tier.lookup([key(1)]) == [True]
        assert await load(tier, 1) == [LOADED]
        await tier._listing.once()
        assert set(tier.keys()) == {key(1), key(2)}
        await tier.close()


# ---------------------------------------------------------------- the store as a whole


def identity(s3: S3) -> str:
    content = s3.client.get_object(Bucket=s3.bucket, Key="kv/store.json")["Body"].read()
    return str(json.loads(content)["id"])


def empty(s3: S3) -> None:
    for name in s3.names("kv/"):
        s3.client.delete_object(Bucket=s3.bucket, Key=name)


async def test_a_store_that_was_emptied_is_the_same_without_chunks(
    s3: S3, opened: Open, removed: list[Key]
) -> None:
    tier = await opened(s3, refresh="50ms")
    await tier.store(items(1, 2))
    empty(s3)
    await until(lambda: not tier.keys() and "kv/store.json" in s3.names("kv"))
    assert sorted(removed) == sorted([key(1), key(2)])
    assert f"obj-{identity(s3)}" == tier.store_id
    assert await tier.lookup([key(1)]) == [False]
    assert await tier.store(items(1)) == [STORED]
    assert tier.usage().healthy
    assert (await opened(s3)).store_id == tier.store_id


async def test_a_store_without_its_document_still_has_its_chunks(
    s3: S3, opened: Open, removed: list[Key]
) -> None:
    """As a rule in the bucket leaves it that removes what is old."""
    tier = await opened(s3, refresh="50ms")
    await tier.store(items(1, 2))
    before = identity(s3)
    for _ in range(2):
        s3.client.delete_object(Bucket=s3.bucket, Key="kv/store.json")
        await until(lambda: "kv/store.json" in s3.names("kv"))
    # The listing that wrote it has ended when the one after it has seen what is gone.
    s3.client.delete_object(Bucket=s3.bucket, Key=Names("kv").chunk(key(2)))
    await until(lambda: key(2) in removed)
    assert removed == [key(2)]
    assert tier.keys() == [key(1)]
    assert identity(s3) == before


async def test_another_store_in_its_place_is_left_alone(
    s3: S3, opened: Open, removed: list[Key]
) -> None:
    tier = await opened(s3, refresh="50ms", cool_off="20ms")
    await tier.store(items(1))
    before = identity(s3)
    empty(s3)
    theirs = {"id": str(uuid.uuid4()), "format": 1}
    put = {"Bucket": s3.bucket, "Key": "kv/store.json"}
    s3.client.put_object(**put, Body=json.dumps(theirs).encode())
    other = await opened(s3)
    assert await other.store(items(2)) == [STORED]
    await until(lambda: not tier.usage().healthy)
    assert "another store is there" in tier.usage().detail
    assert "restart the node" in tier.usage().detail
    assert tier.keys() == []
    assert removed == [key(1)]
    assert await tier.lookup([key(2)]) == [False]
    assert await load(tier, 2) == [FAILED]
    assert await tier.store(items(3)) == [FAILED]
    assert s3.chunks("kv") == [key(2)]
    s3.client.put_object(**put, Body=json.dumps(theirs | {"id": before}).encode())
    await until(lambda: tier.usage().healthy and tier.keys() == [key(2)])


async def test_a_bucket_that_is_made_anew_is_the_same_store(
    s3: S3, opened: Open, removed: list[Key]
) -> None:
    tier = await opened(s3, refresh="50ms", cool_off="20ms")
    await tier.store(items(1))
    empty(s3)
    s3.client.delete_bucket(Bucket=s3.bucket)
    await until(lambda: not tier.usage().healthy)
    s3.client.create_bucket(Bucket=s3.bucket)
    await until(lambda: tier.usage().healthy and not tier.keys())
    assert f"obj-{identity(s3)}" == tier.store_id
    assert removed == [key(1)]


# ---------------------------------------------------------------- unfinished uploads


class Pages:
    """A service that lists two uploads at a time."""

    def __init__(self, names: list[str], marks: bool = True) -> None:
        self._names = names
        self._marks = marks
        self.asked = 0

    async def list_multipart_uploads(self, **asked: str) -> dict[str, Any]:
        self.asked += 1
        start = self._names.index(asked["KeyMarker"]) + 1 if "KeyMarker" in asked else 0
        page = self._names[start : start + 2]
        answer: dict[str, Any] = {
            "IsTruncated": start + 2 < len(self._names) or not self._marks,
            "Uploads": [
                {
                    "Key": name,
                    "UploadId": f"u-{name}",
                    "Initiated": datetime(2026, 1, 1, tzinfo=UTC),
                }
                for name in page
            ],
        }
        if answer["IsTruncated"] and self._marks:
            answer |= {"NextKeyMarker": page[-1], "NextUploadIdMarker": f"u-{page[-1]}"}
        return answer


@pytest.mark.parametrize("marks", [True, False])
async def test_unfinished_uploads_are_listed_page_by_page(marks: bool) -> None:
    client = ObjectClient(ObjOptions.parse({"bucket": "bbb"}))
    client._s3 = pages = Pages(list("abcde"), marks)
    found = [upload.name for upload in await client.uploads("")]
    assert found == (list("abcde") if marks else ["a", "b"])
    assert pages.asked == (3 if marks else 1)


def test_names_of_the_quarantine_are_bounded(tmp_path: Path) -> None:
    names = Names("")
    assert {names.quarantine(n) for n in range(200)} == {
        f"kvstrata-quarantine/{n:02}" for n in range(64)
    }
