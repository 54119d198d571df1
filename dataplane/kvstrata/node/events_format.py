"""vLLM's KV events as bytes: what `vllm.distributed.kv_events` writes and routers read.

A batch is the msgpack array `[seconds since the epoch, [event, ...], data-parallel rank]`. An event
is a map tagged `type`, with defaults left out; older readers want arrays, tag first. Hashes are
the low 64 bits of the engine's block hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

__all__ = ["CLEARED", "CPU", "STORAGE", "Cleared", "Event", "Removed", "Stored", "encode_batch"]

# Upper case: Dynamo drops every other spelling, and llm-d scores media by these names.
CPU = "CPU"
STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of one chain became readable at `medium`. Block i holds the tokens `[i * block_size,
    (i + 1) * block_size)` of `tokens`, which are little-endian u32."""

    medium: str
    blocks: Sequence[int]
    parent: int | None
    tokens: bytes
    block_size: int
    group: int
    kind: str
    window: int | None = None
    lora: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are no longer readable at `medium`."""

    medium: str
    blocks: Sequence[int]
    group: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing of this publisher is readable at any medium."""


Event = Stored | Removed | Cleared
CLEARED = Cleared()


class _Map(msgspec.Struct, omit_defaults=True, frozen=True, gc=False):
    pass


class _BlockStored(_Map, tag="BlockStored", frozen=True):
    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    # Not vLLM's: Dynamo keeps salted prefixes apart by this name, and not by `extra_keys`.
    cache_salt: str | None = None


class _BlockRemoved(_Map, tag="BlockRemoved", frozen=True):
    block_hashes: Sequence[int]
    medium: str
    group_idx: int | None = None


class _AllBlocksCleared(_Map, tag="AllBlocksCleared", frozen=True):
    pass


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int


_encoder = msgspec.msgpack.Encoder()


def encode_batch(
    ts: float, events: Sequence[Event], rank: int, form: Literal["map", "array"] = "map"
) -> bytes:
    """One payload."""
    shape = _as_map if form == "map" else _as_array
    return _encoder.encode(_Batch(ts, [shape(event) for event in events], rank))


def _as_map(event: Event) -> _Map:
    if isinstance(event, Stored):
        return _BlockStored(
            block_hashes=event.blocks,
            parent_block_hash=event.parent,
            token_ids=_token_ids(event),
            block_size=event.block_size,
            lora_id=None,
            medium=event.medium,
            lora_name=event.lora or None,
            extra_keys=_extra_keys(event),
            group_idx=event.group,
            kv_cache_spec_kind=event.kind,
            kv_cache_spec_sliding_window=event.window,
            cache_salt=event.salt or None,
        )
    if isinstance(event, Removed):
        return _BlockRemoved(event.blocks, event.medium, event.group)
    return _AllBlocksCleared()


def _as_array(event: Event) -> list[Any]:
    if isinstance(event, Stored):
        return [
            *("BlockStored", event.blocks, event.parent, _token_ids(event), event.block_size),
            *(None, event.medium, event.lora or None, _extra_keys(event)),
            *(event.group, event.kind, event.window),
        ]
    if isinstance(event, Removed):
        return ["BlockRemoved", event.blocks, event.medium, event.group]
    return ["AllBlocksCleared"]


def _token_ids(event: Stored) -> list[int]:
    return memoryview(event.tokens).cast("I").tolist()


def _extra_keys(event: Stored) -> list[list[str] | None] | None:
    """What the engine hashed besides tokens, block by block: the LoRA's name into each, the salt
    into the first of a sequence."""
    if not (event.lora or event.salt):
        return None
    each = [event.lora] if event.lora else []
    keys: list[list[str] | None] = [list(each) or None for _ in event.blocks]
    if event.salt and event.parent is None:
        keys[0] = [*each, event.salt]
    return keys
