"""A check of an obj store, and its use, beside the nodes that use it (extra `s3`).

Objects are read in pieces, several at once, so memory is bounded whatever their size. With repair
a damaged object goes to quarantine, if it is still the one that was read; one that stands under
another chunk's name goes under its own; uploads that were given up a day ago are aborted. What is
no node's is left alone: others may use the bucket.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import xxhash

from kvstrata.check.fs import FsCheckOptions
from kvstrata.check.report import Finding, Problem, Report
from kvstrata.check.use import Use, UseReport
from kvstrata.errors import ConfigError, Corrupt, KVStrataError, Malformed, Missing
from kvstrata.keys import DIGEST_BYTES, Key, Namespace
from kvstrata.tiers.calls import Call
from kvstrata.tiers.obj_client import ListedObject, ObjectClient
from kvstrata.tiers.obj_conditions import Fault, Unsupported
from kvstrata.tiers.obj_format import QUARANTINE_OBJECTS, Header, Names, StoreIdentity
from kvstrata.tiers.obj_options import ObjOptions
from kvstrata.tiers.obj_pace import Retry

__all__ = ["check_objects", "use_of_objects"]

_PER_THREAD = 4
_QUEUED = 1000
_ORPHANED_AFTER = 86_400.0
_DESCRIPTION = "/namespace.json"

Progress = Callable[[int, int], None]
T = TypeVar("T")


def check_objects(
    options: Mapping[str, object],
    asked: FsCheckOptions,
    progress: Progress = lambda done, of: None,
    now: Callable[[], float] = time.time,
) -> Report:
    """Check the store that these options of an obj tier name; blocks.

    Raises `ConfigError` if there is none, and what the object store's errors mean.
    """
    return asyncio.run(_Check(ObjOptions.parse(dict(options)), asked, progress, now).run())


def use_of_objects(
    options: Mapping[str, object],
    progress: Progress = lambda done, of: None,
    now: Callable[[], float] = time.time,
) -> UseReport:
    """Use of that store, by one listing; blocks. Ages are of when chunks were stored."""
    return asyncio.run(_use(ObjOptions.parse(dict(options)), progress, now))


class _Read(NamedTuple):
    """An object as it was read; `header` is None where its metadata are damaged."""

    nbytes: int
    tag: str
    header: Header | None
    trouble: str
    checksum: int | None

    @property
    def whole(self) -> bool:
        """Whether what was read of it fits together."""
        header = self.header
        return (
            header is not None
            and header.payload_bytes == self.nbytes
            and self.checksum in (None, header.checksum)
        )


class _Client(ObjectClient):
    async def examine(self, name: str, payload: bool) -> _Read:
        ask = self._s3.get_object if payload else self._s3.head_object
        answer = await ask(Bucket=self._bucket, Key=name)
        header, trouble, checksum = None, "", None
        try:
            header = Header.parse(answer["Metadata"])
        except Corrupt as e:
            trouble = str(e)
        if payload:
            digest = xxhash.xxh3_64()
            async with answer["Body"] as body:
                while piece := await body.content.readany():
                    digest.update(piece)
            checksum = digest.intdigest()
        return _Read(answer["ContentLength"], answer.get("ETag", ""), header, trouble, checksum)


class _Store:
    """One store, and how requests to it are made."""

    def __init__(self, options: ObjOptions) -> None:
        self.names = Names(options.prefix)
        self.place = f"s3://{options.bucket}/{options.prefix}"
        self.client = _Client(options)
        self._retry = Retry(options.attempts)
        self._call = Call(time.monotonic, float("inf"))

    async def ask(self, request: Callable[[], Awaitable[T]]) -> T:
        return await self._retry.run(self._call, request)

    async def identity(self) -> str:
        """Its id. Raises `ConfigError` if there is no store, or it can't be told."""
        name = self.names.identity
        try:
            raw = await self.ask(lambda: self.client.read_small(name))
        except Missing:
            raise ConfigError(
                f"{self.place} is not a store: it has no store.json; name an obj tier's bucket "
                "and prefix"
            ) from None
        return str(StoreIdentity.parse(name, raw).id)

    async def objects(self) -> AsyncIterator[ListedObject]:
        token: str | None = None
        while True:
            page = await self.ask(partial(self.client.list_page, self.names.root, token))
            for listed in page.objects:
                yield listed
            token = page.token
            if token is None:
                return

    def namespace(self, name: str) -> str | None:
        """The namespace (hex) whose document an object is."""
        digest = name.removeprefix(self.names.root).removesuffix(_DESCRIPTION)
        with contextlib.suppress(ValueError):
            if len(bytes.fromhex(digest)) == DIGEST_BYTES and name.endswith(_DESCRIPTION):
                return digest
        return None

    async def document(self, digest: str) -> Namespace:
        """Raises `Malformed` if it isn't the one that its place is named after."""
        name = self.names.namespace(bytes.fromhex(digest))
        found = Namespace.parse(await self.ask(lambda: self.client.read_small(name)))
        if found.digest.hex() != digest:
            raise Malformed(f"describes {found.digest.hex()}")
        return found


class _Check:
    def __init__(
        self,
        options: ObjOptions,
        asked: FsCheckOptions,
        progress: Progress,
        now: Callable[[], float],
    ) -> None:
        self._store = _Store(options)
        self._asked = asked
        self._progress = progress
        self._now = now
        self._report = Report(self._store.place)
        self._seen: set[str] = set()
        self._described: set[str] = set()
        self._listed = self._done = self._places = 0

    async def run(self) -> Report:
        began = time.monotonic()
        await self._store.client.open()
        try:
            self._report.id = await self._store.identity()
            await self._look_at_all()
            await self._look_at_uploads()
        finally:
            await self._store.client.close()
        for digest in sorted(self._seen - self._described):
            self._add(Problem.UNDESCRIBED, digest, "no namespace.json: model unknown")
        self._report.namespaces = len(self._seen | self._described)
        self._report.seconds = time.monotonic() - began
        self._report.findings.sort(key=lambda f: (f.problem, f.path))
        return self._report

    async def _look_at_all(self) -> None:
        queue: asyncio.Queue[ListedObject | None] = asyncio.Queue(_QUEUED)
        width = self._asked.threads * _PER_THREAD

        async def work() -> None:
            while (listed := await queue.get()) is not None:
                await self._look_at(listed)
                self._done += 1
                self._progress(self._done, self._listed)

        async def feed() -> None:
            async for listed in self._store.objects():
                self._listed += 1
                await queue.put(listed)
            for _ in range(width):
                await queue.put(None)

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(feed())
                for _ in range(width):
                    tasks.create_task(work())
        except ExceptionGroup as e:
            raise e.exceptions[0] from None

    async def _look_at(self, listed: ListedObject) -> None:
        store, name = self._store, listed.name
        key = store.names.key(name)
        if key is not None:
            self._seen.add(key[:DIGEST_BYTES].hex())
            await self._look_at_chunk(name, key)
        elif (digest := store.namespace(name)) is not None:
            self._described.add(digest)
            try:
                await store.document(digest)
            except Malformed as e:
                done = await self._set_aside(name, listed.tag)
                self._add(Problem.DESCRIPTION, name, str(e), done)
            except Missing:
                self._report.gone += 1
            except KVStrataError as e:
                self._add(Problem.UNREADABLE, name, str(e))
        elif name.startswith(store.names.aside):
            self._add(Problem.QUARANTINED, name, f"{listed.nbytes} bytes")
        elif name != store.names.identity:
            self._add(Problem.FOREIGN, name, "no node's: it is left alone")

    async def _look_at_chunk(self, name: str, key: Key) -> None:
        store, payload = self._store, self._asked.payloads
        try:
            read = await store.ask(lambda: store.client.examine(name, payload))
            if not read.whole:
                # What was damaged on its way is whole in the store.
                read = await store.ask(lambda: store.client.examine(name, payload))
        except Missing:
            self._report.gone += 1
            return
        except KVStrataError as e:
            self._add(Problem.UNREADABLE, name, str(e))
            return
        self._report.chunks += 1
        self._report.stored_bytes += read.nbytes
        header = read.header
        if header is None:
            self._add(Problem.HEADER, name, read.trouble, await self._set_aside(name, read.tag))
        elif header.payload_bytes != read.nbytes:
            detail = f"{read.nbytes} bytes, its metadata say {header.payload_bytes}"
            self._add(Problem.HEADER, name, detail, await self._set_aside(name, read.tag))
        elif payload and read.checksum != header.checksum:
            done = await self._set_aside(name, read.tag)
            self._add(Problem.PAYLOAD, name, "payload checksum differs", done)
        elif header.key != key:
            done = await self._put_right(name, read.tag, header)
            self._add(Problem.NAME, name, f"it is chunk {header.key.hex()}", done)
        else:
            self._report.verified_bytes += read.nbytes if payload else 0

    async def _look_at_uploads(self) -> None:
        store = self._store
        try:
            uploads = await store.ask(lambda: store.client.uploads(store.names.root))
        except (Missing, Unsupported):
            return  # a service without them
        except Fault as e:
            detail = f"unfinished uploads can't be listed: {e}: allow ListBucketMultipartUploads"
            self._add(Problem.UNREADABLE, "", detail)
            return
        for upload in uploads:
            ours = store.names.key(upload.name) is not None
            if not ours or self._now() - upload.started < _ORPHANED_AFTER:
                continue
            done = ""
            if self._asked.repair:
                abort = partial(store.client.abort_upload, upload.name, upload.id)
                with contextlib.suppress(Missing):
                    await store.ask(abort)
                done = "aborted"
            self._add(Problem.ORPHAN, upload.name, "an upload that was given up", done)

    # ------------------------------------------------------------ repair

    async def _set_aside(self, name: str, tag: str) -> str:
        """To quarantine, if it is still the object that was read; what was done."""
        store = self._store
        place = store.names.quarantine(self._places % QUARANTINE_OBJECTS)
        self._places += 1
        return await self._move(name, place, tag, "moved to quarantine")

    async def _put_right(self, name: str, tag: str, header: Header) -> str:
        """Under its own name, unless there is one."""
        store = self._store
        with contextlib.suppress(Malformed):
            right = store.names.chunk(header.key)
            try:
                await store.ask(lambda: store.client.head(right))
            except Missing:
                return await self._move(name, right, tag, f"moved to {right}")
            except Corrupt:
                pass
        return await self._set_aside(name, tag)

    async def _move(self, name: str, to: str, tag: str, told: str) -> str:
        if not self._asked.repair:
            return ""
        store = self._store
        try:
            await store.ask(lambda: store.client.copy(name, to, tag))
            await store.ask(lambda: store.client.delete_exactly(name, tag))
        except KVStrataError:
            return ""  # replaced or removed since, or the store refuses
        return told

    def _add(self, problem: Problem, path: str, detail: str, done: str = "") -> None:
        path = path.removeprefix(self._store.names.root)
        self._report.add(Finding(problem, path, detail, done))


async def _use(options: ObjOptions, progress: Progress, now: Callable[[], float]) -> UseReport:
    store = _Store(options)
    await store.client.open()
    try:
        report = UseReport(store.place, await store.identity())
        listed = 0
        async for found in store.objects():
            key = store.names.key(found.name)
            if key is None:
                report.other_bytes += found.nbytes
            else:
                use = report.namespaces.setdefault(key[:DIGEST_BYTES].hex(), Use())
                use.add(found.nbytes, max(0.0, now() - found.modified))
            listed += 1
            progress(listed, listed)
        for digest in report.namespaces:
            report.documents[digest] = None
            with contextlib.suppress(Malformed, Missing):
                report.documents[digest] = await store.document(digest)
        return report
    finally:
        await store.client.close()
