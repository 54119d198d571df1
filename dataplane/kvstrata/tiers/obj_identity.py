"""Which store a bucket and prefix are, asked at the start."""

from __future__ import annotations

import uuid
from typing import NamedTuple

from kvstrata.errors import ConfigError, KVStrataError
from kvstrata.tiers.calls import Call
from kvstrata.tiers.obj_batches import Batches
from kvstrata.tiers.obj_chunks import ChunkObjects
from kvstrata.tiers.obj_conditions import Condition, Fault
from kvstrata.tiers.obj_options import ObjOptions

__all__ = ["Identified", "identify"]

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
    """`fault`: the store could not be asked, and the id is made up from where it is."""

    store_id: str
    fault: Fault | None = None


async def identify(
    batches: Batches, chunks: ChunkObjects, call: Call, options: ObjOptions
) -> Identified:
    """Join the store, or create it. Raises `ConfigError` on what only people can mend."""
    try:
        identity = await batches.one(call, chunks.identity(call))
    except ConfigError:
        raise
    except KVStrataError as e:
        if not (isinstance(e, Fault) and e.condition in _PASSING):
            advice = _ADVICE.get(e.condition) if isinstance(e, Fault) else None
            raise ConfigError(f"obj tier: {e}" + (f": {advice}" if advice else "")) from e
        place = f"{options.endpoint}/{options.bucket}/{options.prefix}"
        return Identified(f"obj-{uuid.uuid5(uuid.NAMESPACE_URL, place)}", e)
    return Identified(f"obj-{identity.id}")
