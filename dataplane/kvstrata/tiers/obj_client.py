"""Single requests to an object store, for one event loop: see `obj_thread`.

Errors of aiobotocore come through as they are; `obj_conditions.meaning` tells what they mean.
Payloads leave in pieces, each copied once: what aiohttp may still hold when a request is cut short
must not be item memory. They arrive in pieces that are copied to their place.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.errors import ConfigError, Corrupt
from kvstrata.keys import Key
from kvstrata.tiers.base import checksum as checksum_of
from kvstrata.tiers.obj_conditions import AlreadyThere, Damaged, NixlFailed, Unsupported, meaning
from kvstrata.tiers.obj_format import Header
from kvstrata.tiers.obj_options import ObjOptions
from kvstrata.tiers.obj_pace import TokenBucket

if TYPE_CHECKING:
    from kvstrata.tiers.obj_nixl import NixlReader

__all__ = ["Found", "ListedObject", "ObjectClient", "Page", "Upload", "same_tag"]

_log = logging.getLogger(__name__)

_PIECE = 256 << 10
_MOST_UPLOAD_PAGES = 100  # of a thousand each


class Found(NamedTuple):
    """An object as its metadata tell."""

    nbytes: int
    header: Header
    tag: str = ""


class ListedObject(NamedTuple):
    """`modified` in seconds since the epoch."""

    name: str
    nbytes: int
    modified: float
    tag: str = ""


class Page(NamedTuple):
    """Part of a listing; `token` asks for the next, None: this is the last."""

    objects: list[ListedObject]
    token: str | None


class Upload(NamedTuple):
    """An upload in parts; `started` in seconds since the epoch."""

    name: str
    id: str
    started: float


class _Payload:
    """A request's body: item memory, in pieces, for as long as its request runs."""

    def __init__(self, view: memoryview, bucket: TokenBucket) -> None:
        self._view: memoryview | None = view
        self._nbytes = view.nbytes
        self._bucket = bucket

    def __len__(self) -> int:
        return self._nbytes

    def read(self) -> bytes:
        """botocore takes for a body what has this; aiohttp iterates."""
        raise NotImplementedError

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, self._nbytes, _PIECE):
            await self._bucket.take(min(_PIECE, self._nbytes - start))
            if self._view is None:
                return
            yield bytes(self._view[start : start + _PIECE])

    def end(self) -> None:
        self._view = None


class ObjectClient:
    """Requests to one bucket. `open` it first, in the loop that uses it."""

    def __init__(self, options: ObjOptions) -> None:
        self._options = options
        self._bucket = options.bucket
        self._stack = contextlib.AsyncExitStack()
        self._s3: Any = None
        self._nixl: NixlReader | None = None
        self.by_nixl = 0
        """How many payloads NIXL loaded."""
        self.not_by_nixl = 0
        """How many it failed at, which were then loaded without it."""
        self._up = TokenBucket(options.upload_rate)
        self._down = TokenBucket(options.download_rate)

    async def open(self) -> None:
        """Prepare; asks the store nothing. Again: with credentials looked for anew.

        Raises `ConfigError` if an option can't work.
        """
        import aioboto3
        from aiobotocore.session import AioSession
        from botocore.exceptions import BotoCoreError

        options = self._options
        try:
            raw = AioSession()
            raw.register_component("data_loader", _loader())
            session = aioboto3.Session(botocore_session=raw, profile_name=options.profile)
            stack = contextlib.AsyncExitStack()
            s3 = await stack.enter_async_context(
                session.client(
                    "s3",
                    region_name=options.region or session.region_name or "us-east-1",
                    endpoint_url=options.endpoint,
                    verify=None if options.ca is None else str(options.ca),
                    config=_config(options),
                )
            )
        except (BotoCoreError, ValueError) as e:
            raise ConfigError(f"obj tier: {e}") from e
        s3.meta.events.register_last("before-call.s3", _without_expect)
        self._s3, (before, self._stack) = s3, (self._stack, stack)
        await before.aclose()
        if options.nixl:
            self._end_nixl()
            self._nixl = await _nixl_reader(options, session)

    async def close(self) -> None:
        self._end_nixl()
        await self._stack.aclose()

    def _end_nixl(self) -> None:
        if self._nixl is not None:
            self._nixl.close()
        self._nixl = None

    # ------------------------------------------------------------ objects

    async def head(self, name: str) -> Found:
        """Raises `Corrupt` if it isn't a chunk's object."""
        answer = await self._s3.head_object(Bucket=self._bucket, Key=name)
        header = Header.parse(answer["Metadata"])
        return Found(answer["ContentLength"], header, answer.get("ETag", ""))

    async def load(self, name: str, key: Key, view: memoryview, exact: bool) -> int:
        """Fill `view` with the verified payload, to its end if `exact`; the payload's length.

        Raises `Damaged` if the object isn't this chunk, in this size, intact.
        """
        if self._nixl is not None:
            try:
                loaded = await self._load_by_nixl(self._nixl, name, key, view, exact)
            except (Corrupt, NixlFailed) as e:
                _log.info("obj tier: NIXL failed at %s: %s", name, e)
                self.not_by_nixl += 1
            else:
                self.by_nixl += 1
                return loaded
        answer = await self._s3.get_object(Bucket=self._bucket, Key=name)
        async with answer["Body"] as body:
            try:
                return await self._fill(answer, body, key, view, exact)
            except Corrupt as e:
                raise Damaged(str(e), answer.get("ETag", "")) from e

    async def _fill(
        self, answer: dict[str, Any], body: Any, key: Key, view: memoryview, exact: bool
    ) -> int:
        found = Found(answer["ContentLength"], Header.parse(answer["Metadata"]))
        header = fitting(found, key, view, exact)
        filled = 0
        while piece := await body.content.readany():
            if filled + len(piece) > header.payload_bytes:
                raise Corrupt(f"more than the {header.payload_bytes} bytes it should have")
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
            await self._down.take(len(piece))
        if filled != header.payload_bytes:
            raise ConnectionError(f"{filled} of {header.payload_bytes} bytes came")
        if checksum_of(view[:filled]) != header.checksum:
            raise Corrupt("payload checksum differs")
        return filled

    async def _load_by_nixl(
        self, nixl: NixlReader, name: str, key: Key, view: memoryview, exact: bool
    ) -> int:
        header = fitting(await self.head(name), key, view, exact)
        await self._down.take(header.payload_bytes)
        await nixl.read(name, header.payload_bytes, view)
        if checksum_of(view[: header.payload_bytes]) != header.checksum:
            raise Corrupt("payload checksum differs")
        return header.payload_bytes

    async def put(self, name: str, view: memoryview, header: Header, only_if_absent: bool) -> None:
        body = _Payload(view, self._up)
        condition = {"IfNoneMatch": "*"} if only_if_absent else {}
        try:
            await self._s3.put_object(
                Bucket=self._bucket, Key=name, Body=body, Metadata=header.metadata(), **condition
            )
        finally:
            body.end()

    async def read_small(self, name: str) -> bytes:
        """All of a small object, such as a document."""
        answer = await self._s3.get_object(Bucket=self._bucket, Key=name)
        async with answer["Body"] as body:
            content: bytes = await body.read()
            return content

    async def write_small(self, name: str, content: bytes, only_if_absent: bool) -> None:
        condition = {"IfNoneMatch": "*"} if only_if_absent else {}
        await self._s3.put_object(
            Bucket=self._bucket,
            Key=name,
            Body=content,
            ContentType="application/json",
            **condition,
        )

    async def copy(self, name: str, to: str, tag: str) -> None:
        """With its metadata, inside the store, if it is still what has this tag."""
        condition = {"CopySourceIfMatch": tag} if tag else {}
        source = {"Bucket": self._bucket, "Key": name}
        await self._s3.copy_object(Bucket=self._bucket, Key=to, CopySource=source, **condition)

    async def delete(self, name: str) -> None:
        """No error if it isn't there."""
        await self._s3.delete_object(Bucket=self._bucket, Key=name)

    async def delete_exactly(self, name: str, tag: str) -> None:
        """If it is still what has this tag. Else it raises what `meaning` calls `AlreadyThere`,
        or `Missing` if there is nothing."""
        if not tag:
            await self.delete(name)
            return
        # Also where the service passes over the condition below, as some do.
        found = await self._s3.head_object(Bucket=self._bucket, Key=name)
        if not same_tag(found.get("ETag", ""), tag):
            raise AlreadyThere(f"{name} has been replaced")
        try:
            await self._s3.delete_object(Bucket=self._bucket, Key=name, IfMatch=tag)
        except Exception as e:
            if not isinstance(meaning(e), Unsupported):
                raise
            await self.delete(name)

    async def delete_batch(self, names: Sequence[str]) -> set[str]:
        """Delete up to 1000 at once; those that could not be."""
        objects = [{"Key": name} for name in names]
        answer = await self._s3.delete_objects(
            Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
        )
        errors = answer.get("Errors", [])
        return {error["Key"] for error in errors if error.get("Code") != "NoSuchKey"}

    async def list_page(self, prefix: str, token: str | None) -> Page:
        """Up to 1000 objects, by name."""
        more = {} if token is None else {"ContinuationToken": token}
        answer = await self._s3.list_objects_v2(Bucket=self._bucket, Prefix=prefix, **more)
        objects = [
            ListedObject(o["Key"], o["Size"], o["LastModified"].timestamp(), o.get("ETag", ""))
            for o in answer.get("Contents", [])
        ]
        return Page(objects, answer.get("NextContinuationToken") if answer["IsTruncated"] else None)

    # ------------------------------------------------------------ in parts

    async def begin_upload(self, name: str, header: Header) -> str:
        """The id of the upload."""
        answer = await self._s3.create_multipart_upload(
            Bucket=self._bucket, Key=name, Metadata=header.metadata()
        )
        upload: str = answer["UploadId"]
        return upload

    async def upload_part(self, name: str, upload: str, number: int, view: memoryview) -> str:
        """Part `number`, from 1; its tag."""
        body = _Payload(view, self._up)
        try:
            answer = await self._s3.upload_part(
                Bucket=self._bucket, Key=name, UploadId=upload, PartNumber=number, Body=body
            )
        finally:
            body.end()
        tag: str = answer["ETag"]
        return tag

    async def end_upload(
        self, name: str, upload: str, tags: Sequence[str], only_if_absent: bool
    ) -> None:
        parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(tags, 1)]
        condition = {"IfNoneMatch": "*"} if only_if_absent else {}
        await self._s3.complete_multipart_upload(
            Bucket=self._bucket,
            Key=name,
            UploadId=upload,
            MultipartUpload={"Parts": parts},
            **condition,
        )

    async def abort_upload(self, name: str, upload: str) -> None:
        await self._s3.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload)

    async def uploads(self, prefix: str) -> list[Upload]:
        """The unfinished ones under the prefix; of very many the first."""
        found: list[Upload] = []
        after: dict[str, str] = {}
        for _ in range(_MOST_UPLOAD_PAGES):
            answer = await self._s3.list_multipart_uploads(
                Bucket=self._bucket, Prefix=prefix, **after
            )
            found += (
                Upload(u["Key"], u["UploadId"], u["Initiated"].timestamp())
                for u in answer.get("Uploads", [])
            )
            name, upload = answer.get("NextKeyMarker"), answer.get("NextUploadIdMarker")
            if not answer.get("IsTruncated") or not name:
                break
            after = {"KeyMarker": name} | ({"UploadIdMarker": upload} if upload else {})
        return found


def same_tag(one: str, other: str) -> bool:
    """With quotes around them or not: services differ, and so do the answers of one."""
    return one.strip('"') == other.strip('"')


def fitting(found: Found, key: Key, view: memoryview, exact: bool) -> Header:
    """Its header, if that is this chunk's and of a size that fits. Raises `Corrupt`."""
    header = found.header
    if header.key != key:
        raise Corrupt(f"object holds another chunk, {header.key.hex()}")
    if header.payload_bytes != found.nbytes:
        raise Corrupt(f"{found.nbytes} bytes, its metadata say {header.payload_bytes}")
    if found.nbytes > view.nbytes or (exact and found.nbytes != view.nbytes):
        raise Corrupt(f"{found.nbytes} bytes for a chunk of {view.nbytes}")
    return header


async def _nixl_reader(options: ObjOptions, session: Any) -> NixlReader:
    from kvstrata.tiers.obj_nixl import NixlReader

    credentials: list[str] = []
    if options.profile is not None:  # which NIXL can't be told
        found = await session.get_credentials()
        frozen = await found.get_frozen_credentials()
        credentials = [frozen.access_key, frozen.secret_key, frozen.token or ""]
    return NixlReader(options, credentials)


@functools.cache
def _loader() -> Any:
    """Of the description of S3, which takes a quarter of a second to read."""
    from botocore.loaders import create_loader

    return create_loader()


def _config(options: ObjOptions) -> Any:
    from botocore.config import Config

    width = options.load_concurrency + options.store_concurrency + options.lookup_concurrency
    return Config(
        connect_timeout=options.connect_timeout,
        read_timeout=max(options.deadline, 1.0),
        max_pool_connections=width + 8,
        retries={"total_max_attempts": 1},  # ours know the deadline
        # The payload has its own checksum; another, and a signed digest, would cost more CPU
        # than all the rest.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={
            "addressing_style": "virtual" if options.bucket_in_host else "path",
            "payload_signing_enabled": False,
        },
    )


def _without_expect(params: dict[str, Any], **_: Any) -> None:
    """A round trip before every body, to services that may not answer it."""
    params["headers"].pop("Expect", None)
