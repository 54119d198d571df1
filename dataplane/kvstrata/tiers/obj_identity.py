"""Which store a bucket and prefix are: asked at the start, and again before each listing.

A bucket may be emptied, or given to another store, while nodes run. Emptied, it is the same store,
with the chunks that are listed next, if any. Another store's chunks are none of this one's, though
they would load: until it is gone, or the node starts again, the tier leaves it alone.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import NamedTuple

from kvstrata.errors import ConfigError, KVStrataError
from kvstrata.tiers.calls import Call
from kvstrata.tiers.obj_batches import Batches
from kvstrata.tiers.obj_chunks import ChunkObjects
from kvstrata.tiers.obj_conditions import Condition, Fault
from kvstrata.tiers.obj_format import StoreIdentity
from kvstrata.tiers.obj_options import ObjOptions

__all__ = ["Confirming", "Identified", "identify"]

_log = logging.getLogger(__name__)

_ADVICE = {
    Condition.DENIED: "allow GetObject, PutObject, DeleteObject, AbortMultipartUpload, ListBucket "
    "and ListBucketMultipartUploads, and check credentials and clock",
    Condition.UNTRUSTED: "give its authority as `ca`, and the name it is made out to in `endpoint`",
    Condition.NO_BUCKET: "create the bucket, or correct `bucket`, `endpoint` or `region`",
}
# All of these can end by themselves.
_PASSING = frozenset(
    {Condition.UNREACHABLE, Condition.TIMEOUT, Condition.SLOW_DOWN, Condition.SERVER_ERROR}
)


class Identified(NamedTuple):
    """`fault`: the store could not be asked, and the id is made up from where it is; then
    `identity` is None."""

    store_id: str
    identity: StoreIdentity | None
    fault: Fault | None = None


async def identify(
    batches: Batches, chunks: ChunkObjects, call: Call, options: ObjOptions
) -> Identified:
    """Join the store, or create it. Raises `ConfigError` on what only people can mend."""
    try:
        identity = (await batches.one(call, chunks.identity(call))).store
    except ConfigError:
        raise
    except KVStrataError as e:
        if not (isinstance(e, Fault) and e.condition in _PASSING):
            advice = _ADVICE.get(e.condition) if isinstance(e, Fault) else None
            raise ConfigError(f"obj tier: {e}" + (f": {advice}" if advice else "")) from e
        place = f"{options.endpoint}/{options.bucket}/{options.prefix}"
        return Identified(f"obj-{uuid.uuid5(uuid.NAMESPACE_URL, place)}", None, e)
    return Identified(f"obj-{identity.id}", identity)


class Confirming:
    """Sees to it that the store is still the one that it was: `known`, or what is found first.
    `forget` is called for what is known of its chunks, when others are there, and `describe_again`
    when what says whose chunks they are is gone. The chunks may be there all the same, as when a
    rule in the bucket removes what is old: listings tell."""

    def __init__(
        self,
        batches: Batches,
        chunks: ChunkObjects,
        known: StoreIdentity | None,
        forget: Callable[[], None],
        describe_again: Callable[[], None],
    ) -> None:
        self._batches = batches
        self._chunks = chunks
        self.known = known
        self._forget = forget
        self._describe_again = describe_again

    async def confirm(self, call: Call) -> None:
        """If it was emptied, it is made this store again. Raises `Fault` if another is there."""
        try:
            found = await self._batches.one(call, self._chunks.identity(call, self.known))
        except ConfigError as e:
            self._forget()
            raise Fault(Condition.REPLACED, str(e)) from e
        self.known = self.known or found.store
        if found.store.id != self.known.id:
            self._forget()
            raise Fault(
                Condition.REPLACED,
                f"obj-{found.store.id}, and this was obj-{self.known.id}: restart the node to "
                "use that one",
            )
        if not found.there:
            _log.warning("obj tier: its store was emptied, or has lost what says which it is")
            self._describe_again()
