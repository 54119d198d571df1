"""Sending large chunks in parts.

An upload that fails is aborted; one whose node died is left over, takes space nobody sees, and is
aborted by whichever node notices that it is too old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

from kvstrata.errors import Missing
from kvstrata.tiers.calls import Call
from kvstrata.tiers.obj_client import ObjectClient
from kvstrata.tiers.obj_conditions import AlreadyThere, meaning
from kvstrata.tiers.obj_format import Header, Names
from kvstrata.tiers.obj_pace import Retry

__all__ = ["PartedUploads"]

_log = logging.getLogger(__name__)

_PARTS_AT_ONCE = 4
_ABORT_SECONDS = 5.0


class PartedUploads:
    def __init__(self, client: ObjectClient, retry: Retry, part_bytes: int) -> None:
        self._client = client
        self._retry = retry
        self._part_bytes = part_bytes
        self._under_way: set[str] = set()

    async def put(
        self, call: Call, name: str, view: memoryview, header: Header, only_if_absent: bool
    ) -> None:
        """Like `ObjectClient.put`."""
        client, retry = self._client, self._retry
        upload = await retry.run(call, lambda: client.begin_upload(name, header))
        self._under_way.add(upload)
        try:
            tags = await self._send(call, name, upload, view)
            try:
                await retry.run(call, lambda: client.end_upload(name, upload, tags, only_if_absent))
            except Missing as e:
                raise AlreadyThere("a try whose answer was lost may have ended it") from e
        except BaseException:
            await self._abort(name, upload)
            raise
        finally:
            self._under_way.discard(upload)

    async def sweep(self, call: Call, names: Names, before: float) -> int:
        """Abort those begun before a time (seconds since the epoch), but ours; how many.

        Only those of chunks: the rest of the bucket, or of the prefix, is somebody else's.
        """
        uploads = await self._retry.run(call, lambda: self._client.uploads(names.root))
        old = [
            u
            for u in uploads
            if u.started < before and u.id not in self._under_way and names.key(u.name) is not None
        ]
        for upload in old:
            with contextlib.suppress(Missing):
                await self._retry.run(
                    call, partial(self._client.abort_upload, upload.name, upload.id)
                )
        return len(old)

    async def _send(self, call: Call, name: str, upload: str, view: memoryview) -> list[str]:
        gate = asyncio.Semaphore(_PARTS_AT_ONCE)

        async def send(number: int, part: memoryview) -> str:
            async with gate:
                return await self._retry.run(
                    call, lambda: self._client.upload_part(name, upload, number, part)
                )

        size = self._part_bytes
        starts = range(0, view.nbytes, size)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(send(n, view[start : start + size]))
                    for n, start in enumerate(starts, 1)
                ]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _abort(self, name: str, upload: str) -> None:
        """In a task of its own, since this one may be at its deadline; briefly."""

        async def abort() -> None:
            try:
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self._client.abort_upload(name, upload)
            except Exception as e:
                error = meaning(e)
                if not isinstance(error, Missing):
                    _log.warning("obj tier: an upload is left to age: %s", error)

        await asyncio.shield(asyncio.ensure_future(abort()))
