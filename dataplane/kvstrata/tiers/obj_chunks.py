"""The chunks of a store: requests made of what the tier wants of one chunk, or of all.

Runs in the loop that talks to the store. A request is tried again where that may help; a chunk
that fails verification is read once more before it is condemned, since what was damaged on its
way is whole in the store.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from kvstrata.errors import Corrupt, Missing
from kvstrata.keys import Key
from kvstrata.tiers.base import Item
from kvstrata.tiers.base import checksum as checksum_of
from kvstrata.tiers.calls import Call
from kvstrata.tiers.obj_client import ListedObject, ObjectClient, fitting
from kvstrata.tiers.obj_conditions import AlreadyThere, Damaged, Unsupported
from kvstrata.tiers.obj_format import Header, Names, StoreIdentity
from kvstrata.tiers.obj_index import Listed
from kvstrata.tiers.obj_options import ObjOptions
from kvstrata.tiers.obj_pace import Retry
from kvstrata.tiers.obj_quarantine import Quarantine
from kvstrata.tiers.obj_upload import PartedUploads

__all__ = ["ChunkObjects", "ChunkPage", "Identity"]


class ChunkPage(NamedTuple):
    """Part of a listing; `token` asks for the next, None: this is the last."""

    chunks: list[Listed]
    token: str | None


class Identity(NamedTuple):
    """`there`: it was written down already."""

    store: StoreIdentity
    there: bool


class ChunkObjects:
    def __init__(self, client: ObjectClient, retry: Retry, options: ObjOptions) -> None:
        self._client = client
        self._retry = retry
        self._options = options
        self._names = Names(options.prefix)
        self._parted = PartedUploads(client, retry, options.part_size)
        self._quarantine = Quarantine(client, retry, self._names)
        self._conditional = True
        self._batches = True
        self.reread = 0
        """How often what had failed verification passed it when read again."""

    # ------------------------------------------------------------ one chunk

    async def probe(self, call: Call, key: Key) -> int | None:
        """Bytes of the chunk's payload; None if there is no object that could be it."""
        name = self._names.chunk(key)
        try:
            found = await self._retry.run(call, lambda: self._client.head(name))
        except (Missing, Corrupt):
            return None
        good = found.header.key == key and found.header.payload_bytes == found.nbytes
        good = good and not self._quarantine.has(name, found.tag)
        return found.nbytes if good else None

    async def store(self, call: Call, item: Item, missing: bool) -> bool:
        """Whether the chunk was written; False: it was there. `missing`: it is known not to be.

        An object whose metadata or size don't fit is replaced.
        """
        name, view = self._names.chunk(item.key), item.view
        conditional = self._conditional  # others may find out meanwhile
        ask = view.nbytes > self._options.head_above and not missing
        if (ask or not conditional) and await self._present(call, name, item):
            return False
        checksum = checksum_of(view) if item.checksum is None else item.checksum
        header = Header(item.key, view.nbytes, checksum)
        try:
            await self._put(call, name, view, header, only_if_absent=conditional)
        except AlreadyThere:
            if await self._present(call, name, item):
                return False
        except Unsupported:
            if not conditional:
                raise
            self._conditional = False
            return await self.store(call, item, missing=False)
        else:
            return True
        await self._put(call, name, view, header, only_if_absent=False)
        return True

    async def load(self, call: Call, item: Item) -> int:
        """Fill the item's memory with its verified payload; the payload's length.

        Raises `Missing`, or `Corrupt`: then the object is in quarantine, and the memory
        meaningless.
        """
        name = self._names.chunk(item.key)

        async def read() -> int:
            return await self._client.load(name, item.key, item.view, item.exact)

        try:
            return await self._retry.run(call, read)
        except Damaged:
            pass
        try:
            length = await self._retry.run(call, read)
        except Damaged as e:
            await self._quarantine.set_aside(call, name, e.tag)
            raise
        self.reread += 1
        return length

    async def _present(self, call: Call, name: str, item: Item) -> bool:
        """Whether there is an object that fits, as far as its metadata tell."""
        try:
            found = await self._retry.run(call, lambda: self._client.head(name))
            fitting(found, item.key, item.view, exact=True)
        except (Missing, Corrupt):
            return False
        return not self._quarantine.has(name, found.tag)

    async def _put(
        self, call: Call, name: str, view: memoryview, header: Header, only_if_absent: bool
    ) -> None:
        if view.nbytes > self._options.multipart_above:
            await self._parted.put(call, name, view, header, only_if_absent)
        else:
            await self._retry.run(
                call, lambda: self._client.put(name, view, header, only_if_absent)
            )
        self._quarantine.replaced(name)

    # ------------------------------------------------------------ many

    async def remove(self, call: Call, keys: Sequence[Key]) -> list[bool]:
        """Delete up to 1000; which are gone now, whether or not they were there."""
        names = [self._names.chunk(key) for key in keys]
        if self._batches:
            try:
                stuck = await self._retry.run(call, lambda: self._client.delete_batch(names))
                return [name not in stuck for name in names]
            except Unsupported:
                self._batches = False
        for name in names:
            await self._retry.run(call, partial(self._client.delete, name))
        return [True] * len(names)

    async def page(self, call: Call, token: str | None) -> ChunkPage:
        """The next chunks of the store, in no useful order."""
        page = await self._retry.run(call, lambda: self._client.list_page(self._names.root, token))
        return ChunkPage([c for o in page.objects if (c := self._chunk(o)) is not None], page.token)

    async def abort_orphans(self, call: Call, before: float) -> int:
        """Of uploads in parts that began before a time (seconds since the epoch)."""
        return await self._parted.sweep(call, self._names, before)

    def _chunk(self, o: ListedObject) -> Listed | None:
        key = self._names.key(o.name)
        if key is None or self._quarantine.has(o.name, o.tag):
            return None
        return Listed(key, o.nbytes, o.modified)

    # ------------------------------------------------------------ documents

    async def identity(self, call: Call, ours: StoreIdentity | None = None) -> Identity:
        """Which store this is, as whoever came first wrote it; `ours` (None: a new one) is
        written where there is none. Raises `ConfigError`."""
        name, there = self._names.identity, True
        try:
            content = await self._retry.run(call, lambda: self._client.read_small(name))
        except Missing:
            there = False
            ours = ours or StoreIdentity(uuid.uuid4())
            await self._write_once(call, name, msgspec.json.encode(ours))
            content = await self._retry.run(call, lambda: self._client.read_small(name))
        return Identity(StoreIdentity.parse(name, content), there)

    async def describe(self, call: Call, digest: bytes, document: bytes) -> None:
        """Write a namespace down, unless it is."""
        await self._write_once(call, self._names.namespace(digest), document)

    async def _write_once(self, call: Call, name: str, content: bytes) -> None:
        async def write(only_if_absent: bool) -> None:
            await self._client.write_small(name, content, only_if_absent)

        conditional = self._conditional
        try:
            await self._retry.run(call, lambda: write(conditional))
        except AlreadyThere:
            return
        except Unsupported:
            if not conditional:
                raise
            self._conditional = False
            # Two that come first at once may both write; all read what stayed.
            try:
                await self._retry.run(call, lambda: self._client.read_small(name))
            except Missing:
                await self._retry.run(call, lambda: write(False))
