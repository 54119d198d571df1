"""Fetching chunks from other nodes: links, grants, pulls, and the checksum at the end.

One fetch goes in rounds of up to `ROUND_BYTES`, two at a time, so that the next grant (and the
source's promotions from its own tiers) overlaps the pull, and a lease never has to outlive a
large batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import zmq.asyncio

from kvstrata import peer_wire as wire
from kvstrata.config import PeerSettings
from kvstrata.errors import (
    ConfigError,
    Expired,
    KVStrataError,
    LinkBroken,
    NamespaceMismatch,
    PeerRefused,
)
from kvstrata.keys import Key, Namespace
from kvstrata.tiers.base import Item, Outcome, checksum
from kvstrata.tiers.peer_link import PeerLink
from kvstrata.transports import Read, Transport
from kvstrata.transports.waiting import until_settled

__all__ = ["ROUND_BYTES", "PeerLinks"]

log = logging.getLogger(__name__)

ROUND_BYTES = 64 << 20
_ROUND_KEYS = 1024
_ROUNDS_AT_ONCE = 2
_CONNECT_SECONDS = 5.0
_MOST_WAIT = 10.0
_IDLE_SECONDS = 300.0


class PeerLinks:
    """This node as a consumer: one link per source address, made when first needed.

    `transports` are the started ones, in order of preference. Deadlines are in `clock` seconds.
    """

    def __init__(
        self,
        settings: PeerSettings,
        node: str,
        incarnation: str,
        transports: Sequence[Transport],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._node = node
        self._incarnation = incarnation
        self._transports = list(transports)
        self._clock = clock
        self._context = zmq.asyncio.Context()
        self._links: dict[str, asyncio.Task[PeerLink]] = {}
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="kvstrata-verify")
        self._closed = False
        self.counters: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        """By address, why it last failed; gone after a success."""

    async def fetch(
        self, address: str, namespace: Namespace, items: Sequence[Item], deadline: float
    ) -> list[Outcome]:
        """Fill the items from the node at `address`: `LOADED | MISSING | CORRUPT | FAILED` each.

        Items are region memory. What fails for all of them (an unreachable source, a deadline)
        is `FAILED`, with the reason in `reasons`. Raises `NamespaceMismatch` if the source
        has other bytes under this model's name, `ConfigError` on an address that can't be one.
        """
        if not items:
            return []
        if any(item.offset < 0 for item in items):
            raise ValueError("a peer is read into region memory only")
        until = self._until(deadline)
        outcomes = [Outcome.FAILED] * len(items)
        try:
            link = await self._link(address, until)
            if self._is_us(link) or not await link.open(namespace, until):
                return [Outcome.MISSING] * len(items)
            gate = asyncio.Semaphore(_ROUNDS_AT_ONCE)
            async with asyncio.TaskGroup() as group:
                for start, end in _rounds(items):
                    group.create_task(
                        self._round(link, gate, items[start:end], outcomes, start, until)
                    )
        except (NamespaceMismatch, ConfigError):
            raise
        except KVStrataError as e:
            self._note(address, e)
        else:
            if link.broken:
                self._note(address, LinkBroken(link.broken))
            elif Outcome.FAILED not in outcomes:
                self.reasons.pop(address, None)
        for outcome in outcomes:
            self.counters[outcome.value] += 1
        return outcomes

    async def probe(
        self, address: str, namespace: Namespace, keys: Sequence[Key], deadline: float
    ) -> list[bool]:
        """Which of the keys the node at `address` has. Raises what went wrong."""
        until = self._until(deadline)
        here: list[bool] = []
        try:
            link = await self._link(address, until)
            if self._is_us(link) or not await link.open(namespace, until):
                return [False] * len(keys)
            for start in range(0, len(keys), wire.MAX_KEYS):
                here += await link.probe(keys[start : start + wire.MAX_KEYS], until)
        except KVStrataError as e:
            self._note(address, e)
            raise
        self.reasons.pop(address, None)
        return here

    async def close(self) -> None:
        """Close every link; fetches in flight fail. Close the transports too, for their pulls."""
        self._closed = True
        links, self._links = list(self._links.values()), {}
        for task in links:
            task.cancel()
        for link in await asyncio.gather(*links, return_exceptions=True):
            if isinstance(link, PeerLink):
                await link.close()
        self._context.destroy(linger=0)
        self._workers.shutdown(wait=False)

    # ------------------------------------------------------------ links

    async def _link(self, address: str, until: float) -> PeerLink:
        if self._closed:
            raise LinkBroken("the links to peers are closed")
        task = self._links.get(address)
        if task is not None and task.done() and _useless(task):
            await self._drop(address, task)
            task = self._links.get(address)
        if task is None:
            at = wire.parse_address(address)
            if not at.loopback and not self._settings.secret:
                raise ConfigError(
                    f"{address} is another host: set peers.secret, the same on all nodes"
                )
            task = asyncio.create_task(
                PeerLink.connect(
                    self._context,
                    at,
                    self._settings.secret,
                    self._node,
                    self._incarnation,
                    time.monotonic() + _CONNECT_SECONDS,
                )
            )
            task.add_done_callback(_retrieved)
            self._links[address] = task
            await self._drop_idle()
        try:
            async with asyncio.timeout(until - time.monotonic()):
                # Others may be waiting for the same handshake.
                return await asyncio.shield(task)
        except TimeoutError as e:
            raise Expired(f"no link to {address} in time") from e

    async def _drop(self, address: str, task: asyncio.Task[PeerLink]) -> None:
        if self._links.get(address) is task:
            del self._links[address]
        if not task.cancelled() and task.exception() is None:
            await task.result().close()

    async def _drop_idle(self) -> None:
        oldest = time.monotonic() - _IDLE_SECONDS
        for address, task in list(self._links.items()):
            if task.done() and (
                _useless(task) or (task.result().idle and task.result().used < oldest)
            ):
                await self._drop(address, task)

    def _is_us(self, link: PeerLink) -> bool:
        # A list of all nodes, the same on each of them, is a fine setting.
        return (link.node, link.incarnation) == (self._node, self._incarnation)

    # ------------------------------------------------------------ rounds

    async def _round(
        self,
        link: PeerLink,
        gate: asyncio.Semaphore,
        items: Sequence[Item],
        outcomes: list[Outcome],
        start: int,
        until: float,
    ) -> None:
        """Fetch `items`, whose outcomes begin at `outcomes[start]` and are `FAILED` until set."""
        async with gate:
            try:
                outcomes[start : start + len(items)] = await self._lease_and_pull(
                    link, items, until
                )
            except KVStrataError as e:
                self._note(str(link.address.url), e)

    async def _lease_and_pull(
        self, link: PeerLink, items: Sequence[Item], until: float
    ) -> list[Outcome]:
        asked = time.monotonic()
        remaining = until - asked
        if remaining <= 0:  # no source takes a negative time: it would end the session for all
            raise Expired(f"{link.address} was not asked in time")
        wait = min(remaining / 2, _MOST_WAIT)
        granted = await link.acquire([item.key for item in items], remaining, wait, until)
        try:
            outcomes = [Outcome.MISSING] * len(items)
            wanted: list[int] = []
            for i, (item, chunk) in enumerate(zip(items, granted.chunks, strict=True)):
                if chunk is None:
                    continue
                if chunk.nbytes == len(item.view):
                    wanted.append(i)
                else:
                    outcomes[i] = Outcome.CORRUPT
            reads = [
                Read(chunk.offset, items[i].offset, chunk.nbytes)
                for i in wanted
                if (chunk := granted.chunks[i]) is not None
            ]
            # The lease began at the source after we asked: never read past its end.
            arrived = await self._pull(link, granted.lease, reads, min(until, asked + granted.ttl))
            claimed = [
                (items[i].view, chunk.checksum)
                for i, came in zip(wanted, arrived, strict=True)
                if came and (chunk := granted.chunks[i]) is not None
            ]
            right = iter(await self._verify(claimed))
            for i, came in zip(wanted, arrived, strict=True):
                if came:
                    outcomes[i] = Outcome.LOADED if next(right) else Outcome.CORRUPT
                else:
                    outcomes[i] = Outcome.FAILED
            return outcomes
        finally:
            link.release(granted.lease)

    async def _pull(
        self, link: PeerLink, lease: bytes, reads: Sequence[Read], until: float
    ) -> list[bool]:
        if not reads:
            return []
        usable = [t for t in self._transports if t.name in link.transports]
        if not usable:
            raise PeerRefused(
                f"{link.address} offers transports {sorted(link.transports)}, none of which "
                f"runs here: {[t.name for t in self._transports]}"
            )
        error: KVStrataError = LinkBroken(f"{link.address}: every common transport failed")
        for transport in usable:
            if transport.name in link.failed_transports and transport is not usable[-1]:
                continue
            remote = transport.seen_from(link.transports[transport.name], link.address.host)
            try:
                arrived = await transport.pull(remote, lease, reads, until)
            except PeerRefused:
                raise
            except Exception as e:
                if link.broken:
                    raise LinkBroken(link.broken) from e
                # Its own bug counts as well: the next one may do.
                link.failed_transports.add(transport.name)
                self.counters[f"failed_{transport.name}"] += 1
                log.warning("%s: transport %s failed: %s", link.address, transport.name, e)
                error = e if isinstance(e, KVStrataError) else LinkBroken(f"{link.address}: {e!r}")
            else:
                nbytes = sum(r.nbytes for r, came in zip(reads, arrived, strict=True) if came)
                self.counters[f"bytes_{transport.name}"] += nbytes
                return arrived
        raise error

    async def _verify(self, claimed: Sequence[tuple[memoryview, int]]) -> list[bool]:
        """On a worker: xxh3 runs near memory speed, but a round is megabytes."""

        def work() -> list[bool]:
            return [checksum(view) == told for view, told in claimed]

        if self._closed:
            raise LinkBroken("the links to peers are closed")
        future = asyncio.get_running_loop().run_in_executor(self._workers, work)
        return await until_settled(future, lambda: None)

    def _note(self, address: str, error: KVStrataError) -> None:
        if self.reasons.get(address) != str(error):
            log.warning("peer %s: %s", address, error)
        self.reasons[address] = str(error)

    def _until(self, deadline: float) -> float:
        """A deadline of the injected clock as `time.monotonic` seconds, which waits need."""
        return time.monotonic() + (deadline - self._clock())


def _rounds(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    start, nbytes = 0, 0
    for i, item in enumerate(items):
        if i > start and (i - start >= _ROUND_KEYS or nbytes + len(item.view) > ROUND_BYTES):
            yield start, i
            start, nbytes = i, 0
        nbytes += len(item.view)
    yield start, len(items)


def _useless(task: asyncio.Task[PeerLink]) -> bool:
    return task.cancelled() or task.exception() is not None or bool(task.result().broken)


def _retrieved(task: asyncio.Task[PeerLink]) -> None:
    # Whoever waited for it may have left: nobody needs to be told at exit.
    if not task.cancelled():
        task.exception()
