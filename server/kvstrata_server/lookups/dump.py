"""What nodes hold as Dynamo's router events, asked of the nodes' replay sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import zmq
import zmq.asyncio

from kvstrata.errors import Busy
from kvstrata_server.lookups.compat import Instance, Instances
from kvstrata_server.lookups.hashing import local_hashes

__all__ = ["Dumps"]

_SECONDS = 10.0
_WHOLE_SECONDS = 60.0
_MOST_AT_ONCE = 16
_MOST_MESSAGE_BYTES = 64 << 20
# Of all instances: 1.2 kB each here, and 0.3 kB in the answer.
_MOST_BLOCKS = 1 << 19
_TIERS = {"CPU": "host_pinned", "STORAGE": "disk"}


class _Event(msgspec.Struct):
    """Of either kind; what it lacks is empty."""

    type: str
    block_hashes: list[int] = []
    parent_block_hash: int | None = None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]] = []
    block_size: int = 0
    medium: str = ""
    lora_name: str | None = None
    cache_salt: str | None = None


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Event]
    rank: int = 0


_decode = msgspec.msgpack.Decoder(_Batch).decode


class _TooMany(Exception):  # noqa: N818 - a limit, told to who asked
    """More blocks than one answer may have."""

    def __str__(self) -> str:
        return f"a dump has at most {_MOST_BLOCKS} blocks: ask the nodes to replay theirs"


@dataclass(slots=True)
class _Room:
    """What one dump may take up: nodes asked at a time, and blocks that may still be kept."""

    nodes: asyncio.Semaphore
    blocks: int

    def take(self, blocks: int) -> None:
        """More of them, or fewer. Raises `_TooMany`, and takes none."""
        if blocks > self.blocks:
            raise _TooMany
        self.blocks -= blocks


class Dumps:
    """What all registered instances hold. One dump at a time, which asks a few nodes at a time and
    keeps so much and no more: each may have gigabytes to tell, and there may be thousands."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self._turn = asyncio.Lock()

    async def take(self) -> dict[str, Any]:
        """By `model:tenant` the block size and the events of its instances; for a model of which
        an instance doesn't answer, or has too much, the error. Raises `Busy` if there was no time
        for it."""
        until = asyncio.get_running_loop().time() + _WHOLE_SECONDS
        try:
            async with asyncio.timeout_at(until):
                await self._turn.acquire()
        except TimeoutError:
            raise Busy("another dump is being made: ask again later") from None
        try:
            return await self._taken(until)
        finally:
            self._turn.release()

    async def _taken(self, until: float) -> dict[str, Any]:
        groups: dict[str, list[Instance]] = {}
        for instance in self._instances.all():
            if instance.id.isdecimal() and self._instances.is_up(instance):
                groups.setdefault(f"{instance.model}:{instance.tenant}", []).append(instance)
        room = _Room(asyncio.Semaphore(_MOST_AT_ONCE), _MOST_BLOCKS)
        # Whatever happens, all sockets are closed before their context is: it would wait for them.
        with zmq.asyncio.Context() as context:
            async with asyncio.TaskGroup() as asking:
                tasks = {
                    name: asking.create_task(_group(context, room, until, members))
                    for name, members in groups.items()
                }
            return {name: task.result() for name, task in tasks.items()}


async def _group(
    context: zmq.asyncio.Context, room: _Room, until: float, members: list[Instance]
) -> dict[str, Any]:
    asking = [asyncio.create_task(_events(context, room, until, each)) for each in members]
    parts: list[list[dict[str, Any]]] | None = None
    try:
        parts = await asyncio.gather(*asking)
    except _TooMany as e:
        return {"error": str(e)}
    except (TimeoutError, zmq.ZMQError, msgspec.MsgspecError) as e:
        return {"error": f"a node did not tell what it holds: {str(e) or 'no answer'}"}
    finally:
        # The others of the group, if one has failed: what they say is of no use any more.
        for task in asking:
            task.cancel()
        told = await asyncio.gather(*asking, return_exceptions=True)
        if parts is None:
            room.take(-sum(len(part) for part in told if isinstance(part, list)))
    events = [event for part in parts for event in part]
    for n, event in enumerate(events):
        event["event"]["event_id"] = n
    return {"block_size": members[0].block_size, "events": events}


async def _events(
    context: zmq.asyncio.Context, room: _Room, until: float, instance: Instance
) -> list[dict[str, Any]]:
    """Those of one instance that add up to what it holds."""
    blocks: dict[tuple[str, int], dict[str, Any]] = {}
    taken = 0
    try:
        async with (
            asyncio.timeout_at(until),
            room.nodes,
            asyncio.timeout(_SECONDS),
            contextlib.aclosing(_replay(context, instance.replay)) as batches,
        ):
            async for batch in batches:
                for event in batch.events:
                    _apply(event, instance, blocks)
                    room.take(len(blocks) - taken)
                    taken = len(blocks)
                await asyncio.sleep(0)  # what has come already is read without a pause
    except BaseException:
        room.take(-taken)
        raise
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


async def _replay(context: zmq.asyncio.Context, address: str) -> AsyncGenerator[_Batch]:
    """All that a publisher still knows. Raises `zmq.ZMQError` for what is no address."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, _MOST_MESSAGE_BYTES)
        dealer.connect(address)
        await dealer.send_multipart([b"", bytes(8)])
        with contextlib.suppress(IndexError):
            while payload := (await dealer.recv_multipart())[3]:
                yield _decode(payload)
