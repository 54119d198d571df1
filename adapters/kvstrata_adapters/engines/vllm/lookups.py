"""What the node has said of each request's chunks, and for how long it holds.

A key that is not known is asked for together with all of its group that the request will need,
in the step's one message; until the answer is in, vLLM is told to ask again. Each request has
one lease. It runs from when the node grants it; we count from when we asked, which is earlier,
so ours always ends first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvstrata import wire
from kvstrata.keys import GROUP_BYTES
from kvstrata_adapters.engines.vllm.link import Answered, NodeLink
from kvstrata_adapters.engines.vllm.naming import Naming
from kvstrata_adapters.engines.vllm.slots import Shortage, SlotPool

__all__ = ["Load", "Lookups", "RequestChunks"]

_log = logging.getLogger(__name__)

# States of a key; a value of 0 or more is where the chunk lies in the region.
_MISS = -1
_PENDING = -2  # on its way to host memory
_ASKED = -3  # the node has not answered yet

# A chunk known to be stored is not offered to the node again for this long. If it has been
# evicted since, the next lookup says so and it is stored again.
_KNOWN_SECONDS = 300.0
_MOST_KNOWN = 1 << 18
# A request that waits to be scheduled asks again for what was missing after this long.
_MISS_SECONDS = 2.0
# A node that answers nothing for this long is treated as if it had nothing. A starved machine can
# keep a node from running for two seconds (seen with two ranks that spin on two cores).
_SILENCE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Load:
    """Chunks being read. `held`: whether the node says that it kept them for us."""

    lease: int
    names: list[bytes]
    good_until: float
    held: bool | None = None


@dataclass(slots=True, eq=False)
class RequestChunks:
    """`states` is by vLLM's key. Times are of the scheduler's clock."""

    id: str
    lease: int | None = None
    states: dict[bytes, int] = field(default_factory=dict)
    promoted: set[bytes] = field(default_factory=set)
    """Keys that came from a secondary tier for this request."""
    good_until: float = 0.0
    renewed: float = 0.0
    asked: float = 0.0
    """When vLLM last asked about this request."""
    missed: float = 0.0
    """When the node last said that a chunk is not there."""
    pending_until: float = 0.0
    floor: int = 0
    """Tokens the device has already: chunks up to there are not asked for."""
    expected: dict[int, int] = field(default_factory=dict)
    """By chunk size: chunks that will probably be offered for storing."""
    shortage: Shortage | None = None
    """Its store is being put off for want of slots."""
    load: Load | None = None
    finished: bool = False


class Lookups:
    """`wait` bounds how long a request waits for pending chunks."""

    def __init__(
        self,
        link: NodeLink,
        naming: Naming,
        pool: SlotPool,
        wait: float,
        clock: Callable[[], float],
    ) -> None:
        self.requests: dict[str, RequestChunks] = {}
        self._link = link
        self._naming = naming
        self._pool = pool
        self._wait = wait
        self._clock = clock
        self._silent = False
        self._by_lease: dict[int, RequestChunks] = {}
        self._known: OrderedDict[bytes, float] = OrderedDict()
        groups = naming.namespace.groups
        # Of these vLLM needs the last chunks only, and looks for them from the end.
        self._windowed = {g.id for g in groups if g.window or g.kind == "mamba"}
        self._chunk_tokens = {
            g.id: g.tokens_per_block * naming.namespace.blocks_per_chunk for g in groups
        }

    def of(self, req_context: ReqContext) -> RequestChunks:
        request = self.requests.get(req_context.req_id)
        if request is None:
            request = self.requests[req_context.req_id] = RequestChunks(req_context.req_id)
        return request

    def find(self, key: bytes, req_context: ReqContext) -> LookupResult:
        now = self._clock()
        request = self.of(req_context)
        request.asked = now
        if not self._link.up or self._is_silent():
            return LookupResult.MISS
        state = request.states.get(key)
        if state is not None and state >= 0:
            if now < request.good_until - self._margin:
                return LookupResult.HIT
            self.release(request)
            state = None
        if state is None:
            self._ask(request, key, req_context, now)
            return LookupResult.RETRY
        if state == _ASKED:
            return LookupResult.RETRY
        if state == _PENDING:
            return LookupResult.HIT_PENDING if now < request.pending_until else LookupResult.MISS
        if now > request.missed + _MISS_SECONDS:
            request.missed = now
            self._ask(request, key, req_context, now, again=True)
        return LookupResult.MISS

    def _is_silent(self) -> bool:
        silent = self._link.silent_for() > _SILENCE_SECONDS
        if silent and not self._silent:
            _log.warning(
                "the node has not answered for %g s: until it does, it has nothing for us",
                _SILENCE_SECONDS,
            )
        self._silent = silent
        return silent

    # ------------------------------------------------------------ what is stored for certain

    def is_known(self, key: bytes) -> bool:
        since = self._known.get(key)
        return since is not None and self._clock() < since + _KNOWN_SECONDS

    def know(self, key: bytes) -> None:
        self._known[key] = self._clock()
        self._known.move_to_end(key)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def doubt(self, key: bytes) -> None:
        self._known.pop(key, None)

    # ------------------------------------------------------------ leases

    def renew(self) -> None:
        """Extend the leases of requests that still wait to be scheduled."""
        now, third = self._clock(), self._ttl / 3
        for lease, request in self._by_lease.items():
            waiting = request.load is None and now - request.asked < third
            if waiting and now > request.renewed + third:
                request.renewed = now
                self._link.draft.renews.append(lease)

    def release(self, request: RequestChunks) -> None:
        """Give its lease back and know nothing of its chunks."""
        lease, request.lease = request.lease, None
        request.states.clear()
        request.promoted.clear()
        if lease is not None:
            self._by_lease.pop(lease, None)
            if self._link.up:
                self._link.draft.releases.append(lease)

    def expect(self, request: RequestChunks, size: int, change: int) -> None:
        """`change` more chunks of `size` bytes will probably be offered for storing."""
        before = request.expected.get(size, 0)
        after = max(0, before + change)
        request.expected[size] = after
        self._pool.expected[size] += after - before

    def expect_no_more(self, request: RequestChunks) -> None:
        for size, count in request.expected.items():
            self._pool.expected[size] -= count
        request.expected.clear()

    def drop(self, request: RequestChunks) -> None:
        self.expect_no_more(request)
        self.release(request)
        self.requests.pop(request.id, None)

    def forget(self) -> None:
        """Forget what is stored. Requests stay, with nothing known of their chunks."""
        self._known.clear()
        for request in self.requests.values():
            self.release(request)
            self.expect_no_more(request)

    def lost(self, node_lives: bool) -> None:
        """The session is gone, and its leases with it."""
        now = self._clock()
        for request in self.requests.values():
            request.lease = None
            if request.load is not None and not node_lives and now < request.load.good_until:
                # A dead node gives no slot away, so what is being read stays as it was.
                request.load.held = True
        self._by_lease.clear()
        self.forget()

    # ------------------------------------------------------------ what the node says

    def on_reply(self, event: Answered) -> None:
        lapsed = set(event.reply.lapsed)
        for lease in event.step.renews:
            if lease in lapsed:
                self._lapse(lease)
            else:
                self._extend(lease, event.sent)
        for lease, _ in event.step.begin:
            request = self._by_lease.get(lease)
            if request is not None and request.load is not None and request.load.lease == lease:
                request.load.held = lease not in lapsed
        for ask, found in zip(event.step.lookups, event.reply.found, strict=True):
            request = self._by_lease.get(found.id)
            if request is None:
                continue
            self._extend(found.id, event.sent)
            request.pending_until = event.sent + ask.wait
            self.on_found(found.id, ask.keys, found.states, found.offsets)

    def on_found(
        self,
        lease: int,
        names: Sequence[bytes],
        states: bytes,
        offsets: Sequence[int],
        promoted: bool = False,
    ) -> None:
        request = self._by_lease.get(lease)
        if request is None:
            return
        for name, state, offset in zip(names, states, offsets, strict=True):
            key = self._naming.theirs(name)
            before = request.states.get(key)
            if state == wire.State.HOST:
                request.states[key] = offset
                self.know(key)
                if promoted:
                    request.promoted.add(key)
            elif state == wire.State.PENDING:
                request.states[key] = _PENDING
            else:
                request.states[key] = _MISS
                request.missed = self._clock()
                self.doubt(key)
            # Expected to be stored is what was asked for and is missing.
            was, now = before in (_ASKED, _MISS), request.states[key] == _MISS
            if was != now:
                self.expect(request, self._naming.size(key), now - was)

    def _extend(self, lease: int, sent: float) -> None:
        """The node has extended a lease when it handled a step sent at `sent`.

        If the old time may have passed before, the lease may have lapsed and begun anew without
        what it held: then nothing of it can be relied on.
        """
        request = self._by_lease.get(lease)
        if request is None:
            return
        if self._clock() >= request.good_until:
            self._lapse(lease)
        else:
            request.good_until = max(request.good_until, sent + self._ttl)
            request.renewed = max(request.renewed, sent)

    def _lapse(self, lease: int) -> None:
        request = self._by_lease.get(lease)
        if request is not None:
            self.release(request)

    # ------------------------------------------------------------ inside

    @property
    def _ttl(self) -> float:
        return self._link.welcome.lease_ttl

    @property
    def _margin(self) -> float:
        """How long before its end a lease counts as ended: time to send `begin` in."""
        return self._ttl / 3

    def _ask(
        self,
        request: RequestChunks,
        key: bytes,
        req_context: ReqContext,
        now: float,
        again: bool = False,
    ) -> None:
        if request.lease is not None and now >= request.good_until - self._margin:
            self.release(request)
            again = False
        if request.lease is None:
            request.lease = self._link.new_lease()
            request.good_until = now + self._ttl
            request.renewed = now
            self._by_lease[request.lease] = request
        suffix = key[-GROUP_BYTES:]
        group = int.from_bytes(suffix, "big")
        # vLLM keeps the end of each key's tokens here, for managers to recover the order.
        positions = req_context._offload_key_positions
        if group not in self._windowed:
            # A prefix is looked up from its first chunk on that the device lacks.
            request.floor = positions.get(key, 0) - self._chunk_tokens[group]
        states = request.states
        keys = [
            other
            for other, end in positions.items()
            if end > request.floor
            and other[-GROUP_BYTES:] == suffix
            and (other not in states or (again and states[other] == _MISS))
        ] or [key]
        if not again:
            states.update(dict.fromkeys(keys, _ASKED))
            self.expect(request, self._naming.size(key), len(keys))
        want: Literal["prefix", "all"] = "all" if group in self._windowed else "prefix"
        names = [self._naming.ours(other) for other in keys]
        self._link.draft.lookups.append(wire.Lookup(request.lease, names, want, self._wait))
