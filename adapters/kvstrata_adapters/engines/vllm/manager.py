"""The scheduler's half: which chunks the node has, where to load from and where to store.

Everything here runs on vLLM's scheduler thread and nothing waits. A question about a key is
answered from what the node has said (`Lookups`); slots to store to are granted ahead
(`SlotPool`). Without a node every chunk is a miss and nothing is stored; the engine serves on,
and the link looks for the node again.

Never the wrong bytes: a chunk is offered only while the lease on it surely holds, and a load is
accepted only if it ended while it did, or if the node has confirmed to have kept the chunks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstrata import wire
from kvstrata.errors import Expired
from kvstrata.keys import GROUP_BYTES, Namespace
from kvstrata_adapters.engines.vllm.faults import FaultLine
from kvstrata_adapters.engines.vllm.link import Answered, Lost, NodeLink, Restored
from kvstrata_adapters.engines.vllm.lookups import Load, Lookups, RequestChunks
from kvstrata_adapters.engines.vllm.naming import Naming
from kvstrata_adapters.engines.vllm.pages import ChunkSpec
from kvstrata_adapters.engines.vllm.slots import Shortage, SlotPool

__all__ = ["KVStrataManager"]

_log = logging.getLogger(__name__)

# With nothing else to say, a node without room is asked for slots this often.
_CREDIT_PAUSE = 0.05
# A node that has not answered for this long does not keep an idle engine stepping.
_PATIENCE = 2.0
# Steps until every job that vLLM gave up at a reset has ended: it makes the workers wait for
# them in the first step after, and at most two steps are in flight.
_RESET_STEPS = 4


@dataclass(slots=True, eq=False)
class _Forsaken:
    """Jobs that a reset of the cache has made vLLM forget; workers may still be at them."""

    steps: int
    writes: list[bytes]
    loads: list[Load]


class KVStrataManager(OffloadingManager):
    """See the module. `wait` bounds how long a request waits for chunks on their way to host
    memory, `credits` how many slots are held ahead."""

    def __init__(
        self,
        link: NodeLink,
        namespace: Namespace,
        faults: FaultLine,
        wait: float,
        credits: int,  # noqa: A002
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._faults = faults
        self._clock = clock
        self._naming = Naming(namespace)
        self._pool = SlotPool(namespace, credits)
        self._state_groups = {
            g.id.to_bytes(GROUP_BYTES, "big") for g in namespace.groups if g.kind == "mamba"
        }
        self._lookups = Lookups(link, self._naming, self._pool, wait, clock)
        # By vLLM's key, whose job is writing it. A job of a session that is gone may still end
        # while another one writes the same key anew.
        self._writing: dict[bytes, ReqContext] = {}
        self._unsaid: set[bytes] = set()
        self._failed: set[bytes] = set()
        self._forsaken: list[_Forsaken] = []
        self._heard = False
        self._sessions = 0
        self._credits_asked = float("-inf")
        self._pump()

    # ------------------------------------------------------------ lookup and load

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._lookups.of(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._heard:
            # The answers to the last step's questions, once before this step's first.
            self._heard = True
            self._hear()
        return self._lookups.find(key, req_context)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        if key in self._lookups.of(req_context).promoted:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        request = self._lookups.of(req_context)
        offsets = [request.states.get(key, -1) for key in keys]
        if request.lease is None or min(offsets, default=0) < 0:
            raise Expired(f"request {request.id} loads chunks that it holds no lease on")
        names = [self._naming.ours(key) for key in keys]
        request.load = Load(request.lease, names, request.good_until)
        self._link.draft.begin.append((request.lease, names))
        return self._spec(names, offsets)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        request = self._lookups.of(req_context)
        load, request.load = request.load, None
        if load is None:
            return
        if load.held is False or (load.held is None and self._clock() > load.good_until):
            # The only answer left that can't be wrong text.
            raise Expired(
                f"request {request.id} read {len(load.names)} chunks for longer than its lease on "
                "them, and the node has not confirmed that it kept them: this engine must end"
            )
        if request.lease == load.lease:
            self._link.draft.end.append((load.lease, load.names))
        self._lookups.release(request)
        if request.finished:
            self._lookups.drop(request)

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._lookups.of(req_context)
        request.finished = True
        if request.load is None:
            self._lookups.drop(request)

    # ------------------------------------------------------------ store

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        request = self._lookups.of(req_context)
        if not (self._link.up or self._link.opening):
            request.shortage = None
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        fresh = [k for k in keys if k not in self._writing and not self._lookups.is_known(k)]
        need = Counter(self._naming.size(key) for key in fresh)
        if not self._are_states(keys) and self._puts_off(request, need):
            return None  # vLLM offers the chunks again in its next step
        if not self._link.up:
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        for size, n in need.items():
            self._lookups.expect(request, size, -n)
        chosen: list[OffloadKey] = []
        names: list[bytes] = []
        offsets: list[int] = []
        for key in fresh:
            offset = self._pool.take(self._naming.size(key))
            if offset is None:
                continue
            name = self._naming.ours(key)
            chosen.append(key)
            names.append(name)
            offsets.append(offset)
            self._writing[key] = req_context
            self._unsaid.add(key)
            self._link.draft.uses.append(wire.Use(offset, name))
        return PrepareStoreOutput(chosen, self._spec(names, offsets), [])

    def _are_states(self, keys: Collection[OffloadKey]) -> bool:
        return all(key[-GROUP_BYTES:] in self._state_groups for key in keys)

    def _puts_off(self, request: RequestChunks, need: Counter[int]) -> bool:
        """Whether to wait for slots, which are then asked for."""
        if not self._pool.lacks(need):
            request.shortage = None
            return False
        now, first = self._clock(), request.shortage is None
        shortage = request.shortage = request.shortage or Shortage(self._pool, now)
        if not shortage.waits(need, now):
            request.shortage = None
            return False
        for size, n in need.items():
            self._pool.need(size, n)
        if first:
            self._credits_asked = float("-inf")
            self._pump()
        return True

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        if not self._unsaid.isdisjoint(keys):
            # A store that vLLM hurried through within one step: the node must hear of its slot
            # in an earlier message than of its end.
            self._pump()
        self._failed |= self._faults.drain()
        for key in keys:
            if self._writing.get(key) is not req_context:
                continue
            del self._writing[key]
            name = self._naming.ours(key)
            if success and name not in self._failed:
                self._link.draft.commits.append(name)
                self._lookups.know(key)
            else:
                self._failed.discard(name)
                self._link.draft.aborts.append(name)

    # ------------------------------------------------------------ steps

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._heard = False
        if self._link.up:
            self._lookups.renew()
            self._finish_forsaken()
        self._pump()

    def has_pending_work(self) -> bool:
        if not self._link.up or self._link.silent_for() > _PATIENCE:
            return False
        return self._link.unsent or bool(self._forsaken)

    def reset_cache(self) -> None:
        """Forget what is known of the node. Its chunks stay: other engines use them too."""
        loads = []
        for request in list(self._lookups.requests.values()):
            if request.load is not None:
                loads.append(request.load)
                request.load = None
            if request.finished:
                self._lookups.drop(request)
        self._lookups.forget()
        writes = [key for key in self._writing if not self._is_forsaken(key)]
        if writes or loads:
            self._forsaken.append(_Forsaken(_RESET_STEPS, writes, loads))

    @property
    def tells(self) -> int | None:
        """The number of the session whose node wants to be told what chunks are; None: no node
        does."""
        if self._link.up and self._link.welcome.tells:
            return self._sessions
        return None

    def tell(
        self,
        key: OffloadKey,
        blocks: list[int],
        tokens: bytes,
        parent: int | None,
        lora: str,
        salt: str,
    ) -> None:
        """Say what a chunk is, in the step's message. See `wire.Told`."""
        name = self._naming.ours(key)
        self._link.draft.tells.append(wire.Told(name, blocks, tokens, parent, lora, salt))

    def shutdown(self) -> None:
        self._link.close()
        self._faults.close()

    def _pump(self) -> None:
        """Send what is to be said, act on what has been."""
        rest = self._clock() >= self._credits_asked + _CREDIT_PAUSE
        if self._link.up and (self._link.draft or rest) and (wanted := self._pool.wanted()):
            self._ask_for_slots(wanted)
        self._unsaid.clear()
        self._link.flush()
        self._hear()

    def _ask_for_slots(self, wanted: dict[int, int]) -> None:
        self._credits_asked = self._clock()
        self._pool.asked()
        self._link.draft.credits.update(wanted)

    def _hear(self) -> None:
        for event in self._link.receive():
            if isinstance(event, Answered):
                self._on_reply(event)
            elif isinstance(event, wire.Resolved):
                self._lookups.on_found(
                    event.id, event.keys, event.states, event.offsets, promoted=True
                )
            elif isinstance(event, Lost):
                self._on_lost(event)
            elif isinstance(event, Restored):
                # At once: stores may wait for it.
                self._ask_for_slots(self._pool.wanted())
                self._link.flush()

    def _on_reply(self, event: Answered) -> None:
        step, reply = event.step, event.reply
        for name, committed in zip(step.commits, reply.committed, strict=True):
            if not committed:
                self._lookups.doubt(self._naming.theirs(name))
        for use, used in zip(step.uses, reply.used, strict=True):
            if used < 0:
                _log.error("slot %d is not this engine's: its chunk is not stored", use.offset)
                self._writing.pop(self._naming.theirs(use.key), None)
        if step.credits:
            self._pool.answered()
        for credit in reply.credits:
            self._pool.add(credit.group, credit.offsets)
        self._lookups.on_reply(event)

    def _on_lost(self, event: Lost) -> None:
        self._sessions += 1
        self._lookups.lost(event.node_lives)
        self._pool.clear()
        self._writing.clear()
        self._unsaid.clear()
        self._failed.clear()
        self._forsaken.clear()

    def _is_forsaken(self, key: bytes) -> bool:
        return any(key in forsaken.writes for forsaken in self._forsaken)

    def _finish_forsaken(self) -> None:
        """Once no worker can be at them any more, give their slots back and end their reads."""
        for forsaken in self._forsaken:
            forsaken.steps -= 1
            if forsaken.steps <= 0:
                for key in forsaken.writes:
                    self._writing.pop(key, None)
                    self._link.draft.aborts.append(self._naming.ours(key))
                self._link.draft.end += [(load.lease, load.names) for load in forsaken.loads]
        self._forsaken = [forsaken for forsaken in self._forsaken if forsaken.steps > 0]

    def _spec(self, names: list[bytes], offsets: list[int]) -> ChunkSpec:
        welcome = self._link.welcome
        return ChunkSpec(
            welcome.shm_dir,
            welcome.region,
            welcome.region_bytes,
            names,
            np.array(offsets, dtype=np.int64),
            str(self._faults.path),
        )
