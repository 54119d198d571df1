"""The peer tier: other nodes' chunks, asked for on a miss and read under a lease.

It only reads. What to ask is a static list of addresses (`peers.static`); with a control plane
the node is told where to pull from and uses `PeerLinks` directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

from kvstrata.errors import ConfigError, Expired, KVStrataError, LinkBroken, NamespaceMismatch
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata.peer_wire import parse_address
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage
from kvstrata.tiers.peer_links import PeerLinks
from kvstrata.transports.waiting import until_settled

__all__ = ["PeerTier"]

log = logging.getLogger(__name__)

# A lookup that finds nothing costs this at most; a recompute starts meanwhile otherwise.
LOOKUP_SECONDS = 0.25
LOAD_SECONDS = 30.0
COOL_OFF_SECONDS = 5.0
_REMEMBERED = 65_536


class PeerTier(Tier):
    """Reads from the nodes at `addresses`, over links that the node owns and closes.

    A lookup asks all of them at once; one that fails or is late counts as a miss and is left
    alone for a while. A load takes each chunk from a peer that said it has it, spread by bytes,
    and from the next such peer if that fails.
    """

    name = "peer"
    writable: ClassVar[bool] = False

    def __init__(self, links: PeerLinks, addresses: Sequence[str], context: TierContext) -> None:
        """Raises `ConfigError` on an address that can't be one."""
        for address in addresses:
            parse_address(address)
        self.store_id = "peer"
        self._links = links
        self._addresses = list(dict.fromkeys(addresses))
        self._context = context
        self._cooling: dict[str, float] = {}
        # Who said yes, for the load that follows a lookup; a hint that may be stale.
        self._holders: OrderedDict[Key, list[str]] = OrderedDict()
        self._loads: set[asyncio.Task[list[Outcome]]] = set()
        self._closed = False

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> Tier:
        raise ConfigError("peers are not set under `tiers`: list their addresses in peers.static")

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        self._check_open()
        now = self._context.clock()
        until = now + LOOKUP_SECONDS
        if deadline is not None:
            until = min(until, deadline)
        # Without time to answer there is nobody to blame for not answering.
        addresses = self._awake() if until > now else []
        held: dict[Key, list[str]] = defaultdict(list)
        answers = await asyncio.gather(*(self._ask(a, keys, until) for a in addresses))
        for address, here in zip(addresses, answers, strict=True):
            for key in here:
                held[key].append(address)
        for key, holders in held.items():
            self._holders[key] = holders
            self._holders.move_to_end(key)
        while len(self._holders) > _REMEMBERED:
            self._holders.popitem(last=False)
        return [key in held for key in keys]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        """`NO_ROOM`: another node decides by itself what it keeps."""
        self._check_open()
        return [Outcome.NO_ROOM] * len(batch)

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        self._check_open()
        until = self._context.clock() + LOAD_SECONDS if deadline is None else deadline
        task = asyncio.create_task(self._load(batch, until))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        try:
            return await until_settled(task, task.cancel)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._closed and current is not None and not current.cancelling():
                raise LinkBroken("the peer tier is closed") from None
            raise

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        self._check_open()
        return [False] * len(keys)

    def keys(self) -> list[Key]:
        self._check_open()
        return []

    def usage(self) -> Usage:
        self._check_open()
        cooling = [a for a in self._addresses if a not in self._awake()]
        reasons = self._links.reasons
        return Usage(
            used_bytes=0,
            chunks=0,
            capacity_bytes=0,
            healthy=not cooling or len(cooling) < len(self._addresses),
            detail="; ".join(f"{a}: {reasons.get(a, 'failed')}" for a in cooling),
            counters=dict(self._links.counters),
        )

    async def drain(self, deadline: float | None = None) -> None:
        self._check_open()
        seconds = None if deadline is None else max(0.0, deadline - self._context.clock())
        if self._loads:
            _, late = await asyncio.wait(self._loads, timeout=seconds)
            if late:
                raise Expired(f"{len(late)} loads from peers are still running")

    async def close(self) -> None:
        self._closed = True
        loads = list(self._loads)
        for task in loads:
            task.cancel()
        if loads:
            await asyncio.wait(loads)

    # ------------------------------------------------------------ inside

    async def _ask(self, address: str, keys: Sequence[Key], until: float) -> set[Key]:
        here: set[Key] = set()
        for digest, some in _by_namespace(keys).items():
            namespace = self._context.namespace_of(digest)
            if namespace is None:
                continue
            try:
                found = await self._links.probe(address, namespace, some, until)
            except NamespaceMismatch:
                continue  # it serves other namespaces as well as before
            except KVStrataError:
                self._cool(address)
                break
            here.update(key for key, yes in zip(some, found, strict=True) if yes)
        return here

    async def _load(self, batch: Sequence[Item], until: float) -> list[Outcome]:
        in_time = self._context.clock() < until
        outcomes = [Outcome.MISSING if in_time else Outcome.FAILED] * len(batch)
        tried: list[set[str]] = [set() for _ in batch]
        while self._context.clock() < until:
            shares = self._spread(batch, outcomes, tried)
            if not shares:
                break
            async with asyncio.TaskGroup() as group:
                for address, indices in shares.items():
                    group.create_task(self._fetch(address, batch, indices, outcomes, until))
        return outcomes

    def _spread(
        self, batch: Sequence[Item], outcomes: list[Outcome], tried: list[set[str]]
    ) -> dict[str, list[int]]:
        """Who is to give which item next: of those left to try, the one with least to do."""
        awake = self._awake()
        shares: dict[str, list[int]] = defaultdict(list)
        load: dict[str, int] = dict.fromkeys(awake, 0)
        for i, item in enumerate(batch):
            if outcomes[i] is Outcome.LOADED:
                continue
            # Without a hint (no lookup, or long ago) any of them may have it.
            holders = self._holders.get(item.key, awake)
            left = [a for a in holders if a in load and a not in tried[i]]
            if left:
                address = min(left, key=load.__getitem__)
                load[address] += len(item.view)
                shares[address].append(i)
                tried[i].add(address)
        return shares

    async def _fetch(
        self,
        address: str,
        batch: Sequence[Item],
        indices: list[int],
        outcomes: list[Outcome],
        until: float,
    ) -> None:
        for digest, some in _by_namespace([batch[i].key for i in indices]).items():
            wanted = set(some)
            mine = [i for i in indices if batch[i].key in wanted]
            namespace = self._context.namespace_of(digest)
            if namespace is None:
                continue
            try:
                got = await self._links.fetch(address, namespace, [batch[i] for i in mine], until)
            except NamespaceMismatch:
                got = [Outcome.MISSING] * len(mine)
            except KVStrataError:
                got = [Outcome.FAILED] * len(mine)
            in_time = self._context.clock() < until
            if in_time and all(outcome is Outcome.FAILED for outcome in got):
                self._cool(address)
            for i, outcome in zip(mine, got, strict=True):
                outcomes[i] = outcome

    def _awake(self) -> list[str]:
        now = self._context.clock()
        return [a for a in self._addresses if self._cooling.get(a, now) <= now]

    def _cool(self, address: str) -> None:
        self._cooling[address] = self._context.clock() + COOL_OFF_SECONDS

    def _check_open(self) -> None:
        if self._closed:
            raise LinkBroken("the peer tier is closed")


def _by_namespace(keys: Sequence[Key]) -> dict[bytes, list[Key]]:
    groups: dict[bytes, list[Key]] = defaultdict(list)
    for key in keys:
        groups[key[:DIGEST_BYTES]].append(key)
    return groups
