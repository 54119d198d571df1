"""What nodes hold as Dynamo's router events, asked of the nodes' replay sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvstrata_server.compat import Instance, Instances
from kvstrata_server.hashing import local_hashes

__all__ = ["dump_of"]

_SECONDS = 10.0
_MOST_MESSAGE_BYTES = 64 << 20
_TIERS = {"CPU": "host_pinned", "STORAGE": "disk"}


class _Event(msgspec.Struct):
    """Of either kind; what it lacks is empty."""

    type: str
    block_hashes: list[int] = []
    parent_block_hash: int | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str = ""
    lora_name: str | None = None
    cache_salt: str | None = None


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Event]
    rank: int = 0


_decode = msgspec.msgpack.Decoder(_Batch).decode


async def dump_of(instances: Instances) -> dict[str, Any]:
    """By `model:tenant` the block size and the events of its instances; for a model of which an
    instance doesn't answer, the error."""
    groups: dict[str, list[Instance]] = {}
    for instance in instances.all():
        if instance.id.isdecimal() and instances.is_up(instance):
            groups.setdefault(f"{instance.model}:{instance.tenant}", []).append(instance)
    found: dict[str, Any] = {}
    for name, members in groups.items():
        try:
            parts = await asyncio.gather(*(_events(instance) for instance in members))
        except (TimeoutError, zmq.ZMQError, msgspec.MsgspecError) as e:
            found[name] = {"error": f"a node did not tell what it holds: {e or 'no answer'}"}
            continue
        events = [event for part in parts for event in part]
        for n, event in enumerate(events):
            event["event"]["event_id"] = n
        found[name] = {"block_size": members[0].block_size, "events": events}
    return found


async def _events(instance: Instance) -> list[dict[str, Any]]:
    """Those of one instance that add up to what it holds."""
    blocks: dict[tuple[str, int], dict[str, Any]] = {}
    async with asyncio.timeout(_SECONDS):
        async for batch in _replay(instance.replay):
            for event in batch.events:
                _apply(event, instance, blocks)
    return list(blocks.values())


def _apply(
    event: _Event, instance: Instance, blocks: dict[tuple[str, int], dict[str, Any]]
) -> None:
    if event.type == "AllBlocksCleared":
        blocks.clear()
    elif event.type == "BlockRemoved":
        for block in event.block_hashes:
            blocks.pop((event.medium, block), None)
    elif event.block_size == instance.block_size and event.medium in _TIERS:
        parent = event.parent_block_hash
        for block, own in zip(event.block_hashes, _own(event), strict=False):
            blocks[event.medium, block] = _stored(instance, event.medium, parent, block, own)
            parent = block


def _own(event: _Event) -> Sequence[int]:
    return local_hashes(
        event.token_ids, event.block_size, event.lora_name or "", event.cache_salt or ""
    )


def _stored(
    instance: Instance, medium: str, parent: int | None, block: int, own: int
) -> dict[str, Any]:
    return {
        "worker_id": int(instance.id),
        "storage_tier": _TIERS[medium],
        "residency_domain": "worker",
        "event": {
            "event_id": 0,
            "data": {
                "stored": {
                    "parent_hash": parent,
                    "start_position": None,
                    "blocks": [{"block_hash": block, "tokens_hash": own, "mm_extra_info": None}],
                }
            },
            "dp_rank": instance.rank,
        },
    }


async def _replay(address: str) -> AsyncIterator[_Batch]:
    """All that a publisher still knows. Raises `zmq.ZMQError` for what is no address."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, _MOST_MESSAGE_BYTES)
        dealer.connect(address)
        await dealer.send_multipart([b"", bytes(8)])
        with contextlib.suppress(IndexError):
            while payload := (await dealer.recv_multipart())[3]:
                yield _decode(payload)
