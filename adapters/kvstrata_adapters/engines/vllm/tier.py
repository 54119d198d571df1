"""kvstrata's tiers under vLLM's own host tier: a secondary tier of `TieringOffloadingSpec`.

    "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec",
      "cpu_bytes_to_use": 68719476736,
      "secondary_tiers": [
        {"type": "KVStrataTier", "module_path": "kvstrata_adapters.engines.vllm",
         "tiers": [{"type": "fs", "root": "/var/lib/kvstrata", "capacity": "500GiB"}]}]}

See `TierOptions` for what may stand in the entry, and docs/vllm-tier.md.

vLLM calls all of it on its scheduler's thread, so nothing here waits but `drain_jobs`,
`shutdown` and making it. The tiers run on a loop in a thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstrata.errors import ConfigError, Expired, KVStrataError, LinkBroken
from kvstrata.keys import GROUP_BYTES, MAX_HASH_BYTES
from kvstrata_adapters.engines.vllm.naming import Naming
from kvstrata_adapters.engines.vllm.tier_identity import engine_being_made, row_namespace
from kvstrata_adapters.engines.vllm.tier_jobs import Chunk, Job
from kvstrata_adapters.engines.vllm.tier_loop import LoopThread
from kvstrata_adapters.engines.vllm.tier_metrics import TierStats, definitions
from kvstrata_adapters.engines.vllm.tier_options import TierOptions
from kvstrata_adapters.engines.vllm.tier_rows import Rows
from kvstrata_adapters.engines.vllm.tier_shelf import ShelfState
from kvstrata_adapters.engines.vllm.tier_shelves import Shelves
from kvstrata_adapters.engines.vllm.tier_verdicts import MISSING, Verdicts

__all__ = ["KVStrataTier"]

_log = logging.getLogger(__name__)

# Jobs end on the loop at their deadline; one that has not by now never will.
_GRACE_SECONDS = 1.0
# A copy of rows that is under way ends within milliseconds.
_COPY_SECONDS = 5.0


class _Ends(dict[tuple[bytes, int], bytes]):
    """Of one request: the chunk of a group that ends at a token, as far as it was stored."""


class KVStrataTier(SecondaryTierManager):
    """Raises `ConfigError` when it is made with options, or in an engine, that can't work."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.options = TierOptions.parse(tier_type, options)
        self.locality = Locality(self.options.locality) if self.options.locality else None
        self.namespace = row_namespace(offloading_spec, self.options, engine_being_made())
        self._naming = Naming(self.namespace)
        self._tokens = {
            group.id.to_bytes(GROUP_BYTES, "big"): (
                group.tokens_per_block * self.namespace.blocks_per_chunk
            )
            for group in self.namespace.groups
        }
        self._rows = Rows(primary_kv_view, next(iter(self.namespace.chunk_bytes.values())))
        self._most_pinned = max(1, int(self._rows.count * self.options.most_pinned))
        self._pinned = 0
        self._dropped = 0
        self._jobs: dict[int, Job] = {}
        self._results: list[JobResult] = []
        self._closed = False
        self._stats = TierStats()
        tell = self._tells(offloading_spec)
        engine = offloading_spec.config.engine_id
        self._shelves = Shelves(self.namespace, self._rows, self.options, engine, tell)
        self._verdicts = Verdicts(
            self._ask, self._shelves.found, self.options.lookup_deadline, time.monotonic
        )
        self._loop = LoopThread("kvstrata-vllm-tier")
        try:
            self._open()
        except BaseException:
            self._stop(self.options.drain_deadline)
            raise
        self._loop.spawn(self._shelves.watch)

    # ------------------------------------------------------------ requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._closed or not self._known(key):
            return LookupResult.MISS
        tier = self._verdicts.lookup(key, req_context.req_id)
        if tier is None:
            return LookupResult.RETRY
        return LookupResult.MISS if tier == MISSING else LookupResult.HIT

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._verdicts.forget(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._verdicts.flush()

    # ------------------------------------------------------------ jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        chunks = self._chunks(job_metadata)
        room = max(0, self._most_pinned - self._pinned)
        job = self._job(job_metadata, chunks[:room], is_load=False)
        self._dropped += len(chunks) - len(job.chunks)
        self._pinned += len(job.chunks)
        self._submit(job)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._job(job_metadata, self._chunks(job_metadata), is_load=True))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        while not self._shelves.ended.empty():
            self._finish(self._shelves.ended.get())
        now = time.monotonic()
        for job in [j for j in self._jobs.values() if now > j.deadline + _GRACE_SECONDS]:
            if job.end():
                self._finish(job)
        results, self._results = self._results, []
        return results

    def drain_jobs(self) -> None:
        """Wait for all jobs; at the deadline end them as failed. What a tier may still read of
        rows then is never served: it was given its checksum before."""
        end = time.monotonic() + self.options.drain_deadline
        while self._jobs and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._finish(self._shelves.ended.get(timeout=left))
        for job in list(self._jobs.values()):
            if job.end(_COPY_SECONDS if job.is_load else 0.0, force=not job.is_load):
                _log.warning("a job of %d chunks has not ended, and is given up", len(job.chunks))
                self._finish(job)
        while not self._shelves.ended.empty():
            self._finish(self._shelves.ended.get())

    def shutdown(self) -> None:
        """Bounded; then every job has its result. Raises `LinkBroken` if somebody may still touch
        vLLM's memory, which it must keep then. Idempotent."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + self.options.drain_deadline
        self.drain_jobs()
        if not self._stop(end - time.monotonic()):
            raise LinkBroken(
                "a tier hangs in a call that may still read vLLM's host memory: it stays mapped"
            )

    # ------------------------------------------------------------ what it tells

    def take_events(self) -> Iterable[OffloadingEvent]:
        while self._shelves.changes:
            change = self._shelves.changes.popleft()
            yield OffloadingEvent(
                keys=[OffloadKey(self._naming.theirs(name)) for name in change.names],
                medium=self.medium,
                removed=change.removed,
                locality=self.locality,
                removal_expected=True,
            )

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._stats.take(self.states())

    def states(self) -> list[ShelfState]:
        """Of each tier as it was a moment ago, and of what never reached one."""
        ours = {"lookup_timeouts": self._verdicts.timeouts, "dropped": self._dropped}
        states = [shelf.state for shelf in self._shelves.shelves]
        return [*states[:-1], *(s._replace(counters=s.counters | ours) for s in states[-1:])]

    # ------------------------------------------------------------

    def _open(self) -> None:
        seconds = self.options.open_deadline
        try:
            self._loop.ask(self._shelves.open(), seconds)
        except Expired as e:
            raise ConfigError(
                f"{self.tier_type}: its tiers are not open after {seconds:g} s: mend what keeps "
                "them, or raise `open_deadline`"
            ) from e

    def _tells(self, spec: OffloadingSpec) -> bool:
        if not self.options.enable_kv_events:
            return False
        if not spec.kv_events_config.enable_kv_cache_events:
            _log.warning(
                "%s: enable_kv_events does nothing while vLLM's KV events are off "
                "(--kv-events-config)",
                self.tier_type,
            )
            return False
        return True

    def _known(self, key: bytes) -> bool:
        hash_bytes = len(key) - GROUP_BYTES
        return 0 < hash_bytes <= MAX_HASH_BYTES and key[-GROUP_BYTES:] in self._tokens

    def _ask(self, batch: int, keys: list[bytes]) -> None:
        names = [self._naming.ours(key) for key in keys]
        self._loop.spawn(lambda: self._shelves.lookup(batch, names))

    def _chunks(self, given: TransferJob) -> list[Chunk]:
        """In the order of the chain; without those that can't be right."""
        context, count = given.req_context, self._rows.count
        ends: _Ends = context.get_state(_Ends) or _Ends()
        context.set_state(ends)
        chunks = []
        placed = [
            (key[-GROUP_BYTES:], context.get_offload_key_position(key) or 0, key, int(row))
            for key, row in zip(given.keys, given.chunk_ids, strict=False)
            if self._known(key) and 0 <= row < count
        ]
        for group, end, key, row in sorted(placed, key=lambda p: p[:2]):
            name = self._naming.ours(key)
            parent = ends.get((group, end - self._tokens[group])) if end else None
            if end:
                ends[group, end] = name
            hint = self._verdicts.tier_of(key) if given.is_promotion else 0
            chunks.append(Chunk(key, name, row, parent, hint))
        return chunks

    def _job(self, given: TransferJob, chunks: Sequence[Chunk], is_load: bool) -> Job:
        options = self.options
        patience = options.load_deadline if is_load else options.store_deadline
        job = Job(given.job_id, list(given.keys), chunks, is_load, patience)
        self._jobs[job.id] = job
        return job

    def _submit(self, job: Job) -> None:
        try:
            if job.chunks and not self._closed:
                self._loop.spawn(lambda: self._shelves.run(job))
                return
        except LinkBroken as e:
            _log.warning("a job of %d chunks was not begun: %s", len(job.chunks), e)
        if job.end():
            self._finish(job)

    def _finish(self, job: Job) -> None:
        """Give its result to vLLM, once."""
        if self._jobs.pop(job.id, None) is None:
            return
        if not job.is_load:
            self._pinned -= len(job.chunks)
        done: Collection[bytes] | None = None
        if job.is_load and not job.success:
            done = tuple(key for key in job.keys if key in job.done) or None
            self._verdicts.missing(key for key in job.keys if key not in job.done)
        self._results.append(
            JobResult(
                job.id,
                job.success,
                successful_keys=done,
                transfer_time=time.monotonic() - job.began,
                transfer_bytes=len(job.done) * self._rows.used,
            )
        )

    def _stop(self, seconds: float) -> bool:
        """Close the tiers and end the thread. Whether nobody touches vLLM's memory any more."""
        seconds = max(seconds, _GRACE_SECONDS)
        try:
            self._loop.ask(self._shelves.close(seconds), seconds + _GRACE_SECONDS)
        except KVStrataError as e:
            _log.warning("closing the tiers: %s", e)
        ended = self._loop.stop(_GRACE_SECONDS)
        self._rows.release()
        return ended
