"""`kvstrata fsck` and `du` on an object store."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import pytest
from obj_kit import S3

from kvstrata.check.fs import FsCheckOptions
from kvstrata.check.obj import _Client, _Read, _Store, check_objects, use_of_objects
from kvstrata.check.report import Problem, Report
from kvstrata.cli import main
from kvstrata.errors import ConfigError, Missing
from kvstrata.keys import Key, Namespace
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.tiers import aligned, payload
from kvstrata.tiers.base import Item, Outcome, TierContext
from kvstrata.tiers.obj import ObjTier
from kvstrata.tiers.obj_client import Upload
from kvstrata.tiers.obj_conditions import Condition, Fault, Unsupported
from kvstrata.tiers.obj_format import Header, Names

SIZE = 5000
OURS, THEIRS = a_namespace(model="llama"), a_namespace(model="qwen", tenant="acme")
PREFIX = ""


def key(i: int, namespace: Namespace = OURS) -> Key:
    return namespace.key(0, bytes([i]) * 8)


def item(i: int, namespace: Namespace = OURS) -> Item:
    view = aligned(SIZE)
    view[:] = payload(key(i, namespace), SIZE)
    return Item(key(i, namespace), view)


@pytest.fixture
async def filled(moto: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """Six chunks of two namespaces, under a prefix of this test's own."""
    monkeypatch.setitem(globals(), "PREFIX", f"some/{uuid.uuid4().hex}")
    known = {ns.digest: ns for ns in (OURS, THEIRS)}
    context = TierContext("node", namespace_of=known.get)
    tier = await ObjTier.open(moto.options(PREFIX), context)
    items = [item(i) for i in range(5)] + [item(0, THEIRS)]
    assert await tier.store(items) == [Outcome.STORED] * 6
    await tier.close()
    return moto


@pytest.fixture
def store(filled: S3) -> S3:
    return filled


def check(store: S3, **options: Any) -> Report:
    return check_objects(store.options(PREFIX), FsCheckOptions(**options))


def found(report: Report) -> dict[str, int]:
    return {problem.value: n for problem, n in report.found.items() if n}


def test_a_store_that_is_well(store: S3) -> None:
    report = check(store)
    assert found(report) == {}
    assert (report.chunks, report.namespaces) == (6, 2)
    assert report.stored_bytes == report.verified_bytes == 6 * SIZE


@pytest.mark.parametrize("kind", ["payload", "length", "version"])
def test_damage_is_found_and_set_aside(store: S3, kind: str) -> None:
    content, metadata = store.read(PREFIX, key(1))
    if kind == "payload":
        content = bytes([content[0] ^ 1]) + content[1:]
    elif kind == "length":
        content = content[:-1]
    else:
        metadata["kvstrata-version"] = "9"
    store.write(PREFIX, key(1), content, metadata)
    problem = "payload" if kind == "payload" else "header"
    report = check(store)
    assert found(report) == {problem: 1}
    assert (report.left, key(1) in store.chunks(PREFIX)) == (1, True)
    assert check(store, repair=True).left == 0
    assert key(1) not in store.chunks(PREFIX)
    assert found(check(store)) == {"quarantined": 1}


def test_what_was_damaged_on_its_way_is_read_again(
    store: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    examine = _Client.examine

    async def once_damaged(self: _Client, name: str, payload: bool) -> _Read:
        reads.append(name)
        read = await examine(self, name, payload)
        return read._replace(checksum=0) if reads.count(name) == 1 else read

    monkeypatch.setattr(_Client, "examine", once_damaged)
    report = check(store, repair=True)
    assert found(report) == {}
    assert len(store.chunks(PREFIX)) == 6


def test_a_chunk_under_anothers_name_goes_home(store: S3) -> None:
    content, metadata = store.read(PREFIX, key(1))
    store.write(PREFIX, key(99), content, metadata)
    store.client.delete_object(Bucket=store.bucket, Key=Names(PREFIX).chunk(key(1)))
    assert found(check(store)) == {"name": 1}
    assert check(store, repair=True).left == 0
    assert found(check(store)) == {}
    again, header = store.read(PREFIX, key(1))
    assert again == payload(key(1), SIZE)
    assert Header.parse(header).key == key(1)


def test_what_is_foreign_is_left_alone(store: S3) -> None:
    store.client.put_object(Bucket=store.bucket, Key=f"{PREFIX}/notes.txt", Body=b"x")
    store.client.put_object(Bucket=store.bucket, Key="some/wherever", Body=b"x")
    report = check(store, repair=True)
    assert found(report) == {"foreign": 1}
    assert report.findings[0].path == "notes.txt"
    assert f"{PREFIX}/notes.txt" in store.names(PREFIX)


def test_namespace_documents(store: S3) -> None:
    name = Names(PREFIX).namespace(OURS.digest)
    store.client.put_object(Bucket=store.bucket, Key=name, Body=THEIRS.document)
    store.client.delete_object(Bucket=store.bucket, Key=Names(PREFIX).namespace(THEIRS.digest))
    assert found(check(store)) == {"description": 1, "undescribed": 1}
    assert check(store, repair=True).left == 0
    assert name not in store.names(PREFIX)


def test_one_document_that_cannot_be_read_ends_no_check(
    store: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = _Store.document

    async def troubled(self: _Store, digest: str) -> Namespace:
        if digest == OURS.digest.hex():
            raise Fault(Condition.SERVER_ERROR, "told to")
        if digest == THEIRS.digest.hex():
            raise Missing("removed since it was listed")
        return await document(self, digest)

    monkeypatch.setattr(_Store, "document", troubled)
    report = check(store)
    assert (found(report), report.gone, report.chunks) == ({"unreadable": 1}, 1, 6)


def test_uploads_that_cannot_be_listed(store: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    error: Exception = Unsupported("not implemented")

    async def uploads(self: _Client, prefix: str) -> list[Upload]:
        raise error

    monkeypatch.setattr(_Client, "uploads", uploads)
    assert found(check(store)) == {}
    error = Fault(Condition.DENIED, "told to")
    report = check(store)
    assert (found(report), report.chunks) == ({"unreadable": 1}, 6)
    assert "ListBucketMultipartUploads" in report.findings[0].detail


def test_uploads_that_were_given_up(store: S3) -> None:
    for name in (Names(PREFIX).chunk(key(7)), f"{PREFIX}/backup.tar"):  # one isn't a node's
        store.client.create_multipart_upload(Bucket=store.bucket, Key=name)
    uploads = store.client.list_multipart_uploads(Bucket=store.bucket, Prefix=PREFIX)["Uploads"]
    began = max(u["Initiated"].timestamp() for u in uploads)  # moto's clock stands still

    def orphans(after: float, repair: bool) -> int:
        options = FsCheckOptions(repair=repair)
        report = check_objects(store.options(PREFIX), options, now=lambda: began + after)
        assert report.wrong == 0
        return report.found[Problem.ORPHAN]

    assert orphans(after=3600.0, repair=True) == 0
    assert orphans(after=2 * 86_400.0, repair=True) == 1
    assert orphans(after=2 * 86_400.0, repair=False) == 0
    left = store.client.list_multipart_uploads(Bucket=store.bucket, Prefix=PREFIX)["Uploads"]
    assert [upload["Key"] for upload in left] == [f"{PREFIX}/backup.tar"]


def test_no_store(store: S3) -> None:
    with pytest.raises(ConfigError, match="is not a store"):
        check_objects(store.options("nowhere"), FsCheckOptions())


def test_use(store: S3) -> None:
    later = time.time() + 2 * 86_400
    report = use_of_objects(store.options(PREFIX), now=lambda: later)
    ours = report.namespaces[OURS.digest.hex()]
    assert (ours.chunks, ours.bytes) == (5, 5 * SIZE)
    assert ours.by_age == [0, 0, 5 * SIZE, 0, 0]
    assert {t: u.chunks for t, u in report.by_tenant().items()} == {"": 5, "acme": 1}
    assert report.other_bytes > len(OURS.document)


def test_the_commands(
    store: S3, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = [f"s3://{store.bucket}/{PREFIX}", "--endpoint", store.endpoint, "--json"]
    assert main(["fsck", *where]) == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == 6
    assert main(["du", *where]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["bytes"] == 6 * SIZE
    content, metadata = store.read(PREFIX, key(1))
    store.write(PREFIX, key(1), content[::-1], metadata)
    assert main(["fsck", *where]) == 3
    assert main(["fsck", *where, "--repair"]) == 4
