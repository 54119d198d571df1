"""The cluster that all examples are of: two nodes, a model, a prompt of two chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from kvstrata import api
from kvstrata.keys import Field, Group, Namespace
from kvstrata_server.lookups.hashing import chunk_keys, local_hashes

__all__ = [
    "CREATED",
    "EVICTION",
    "INCARNATION",
    "KEYS",
    "LEASE",
    "LOCAL_HASHES",
    "MODEL",
    "NAMESPACE",
    "PREFETCH",
    "SOURCE",
    "STORE",
    "TARGET",
    "TOKENS",
    "TRANSFER",
    "Several",
    "outcomes",
]

MODEL = "meta-llama/Llama-3.2-1B"
_LAYERS = tuple(str(n) for n in range(16))
# A chunk is a block of 16 tokens: 8 heads, K and V, 64 values of 2 bytes each.
NAMESPACE = Namespace(
    model=MODEL,
    revision="4e20de36",
    config="9f2c51d07b6a",
    dtype="bfloat16",
    content_format="kv-split",
    groups=(Group(0, "full", _LAYERS, (Field("kv", 8, 16 * 2 * 64 * 2),), 16),),
    blocks_per_chunk=1,
    hash_algorithm="xxh3",
    hash_seed="",
)
TOKENS = [
    *(128000, 128006, 9125, 128007, 271, 2675, 527, 264, 11190, 18328, 13, 128009, 128006),
    *(882, 128007, 271, 9906, 11, 1268, 649, 358, 9985, 264, 8854, 6636, 304, 12366, 30, 128009),
    *(128006, 78191, 128007),
]
KEYS = [key.hex() for key in chunk_keys(NAMESPACE, TOKENS)[0]]
LOCAL_HASHES = local_hashes(TOKENS, 16)

SOURCE, TARGET = "gpu-07", "gpu-11"
INCARNATION = "0c9d3b6e"
STORE = "nvme-gpu-07"
CREATED = 1795969257.8
TRANSFER = "01a2281c112f-ca4b24ee5892ddd9"
PREFETCH = "01a2281c1f70-5be1a4c07d1f93aa"
LEASE = "01a2281c2b58-90ae77d2c4f1b6e3"
EVICTION = "01a2281c3a10-1f0d6c72b3a958e4"


@dataclass(frozen=True, slots=True)
class Several:
    """Requests of an operation that takes several kinds, by what to call them; the answer shown is
    that to the first."""

    requests: Mapping[str, BaseModel]


def outcomes(outcome: api.Outcome, source: str | None = None) -> list[api.KeyOutcome]:
    """The same of every key."""
    return [api.KeyOutcome(key=key, outcome=outcome, source=source) for key in KEYS]
