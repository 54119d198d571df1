"""Any order of events must never make an engine read another chunk's bytes.

Two engines share one small node. Requests come and go, copies take as long as they like, the
node lags, evicts, dies and comes back, leases lapse, caches are reset, stores fail. Whatever
happens, what a load has read is either right or not accepted.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm_fakes import NAMESPACE, Clock, FakeNode

from kvstrata.errors import Expired
from kvstrata_adapters.engines.vllm.faults import FaultLine, report_fault
from kvstrata_adapters.engines.vllm.link import NodeLink
from kvstrata_adapters.engines.vllm.manager import KVStrataManager
from kvstrata_adapters.engines.vllm.naming import Naming
from kvstrata_adapters.engines.vllm.pages import ChunkSpec

pytestmark = pytest.mark.vllm

NAMING = Naming(NAMESPACE)
EVENTS = [
    *("time passes", "time passes", "leases expire", "host emptied", "promoted", "reset"),
    *("lag", "caught up", "caught up", "node dies", "node starts", "node starts"),
]
TIMES = [0.1, 1.0, 5.0, 11.0, 25.0, 40.0]
# A few conversations that share their beginnings.
PROMPTS = [[1, 2, 3, 4], [1, 2, 5], [1, 6, 7, 8, 9], [10, 11]]


@dataclass(eq=False)
class Job:
    request: ReqContext
    keys: list[bytes]
    names: list[bytes]
    offsets: list[int]
    region: str
    is_store: bool
    read: list[bytes | None] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    context: ReqContext
    keys: list[bytes]
    state: str = "waiting"  # -> loading -> running
    stored: int = 0


class Engine:
    """What vLLM's connector does with a manager, and what its workers do with the region."""

    def __init__(self, node: FakeNode, clock: Clock, path: Path) -> None:
        self.node = node
        self.path = path
        self.clock = clock
        self.dead = False
        self.requests: list[Request] = []
        self.finished: list[Request] = []
        self.jobs: list[Job] = []
        self.flush: list[Job] = []
        self.flushing: list[Job] = []
        link = NodeLink(node.connect(), node.connect, clock)
        self.manager = KVStrataManager(link, NAMESPACE, FaultLine(path), 10.0, 4, clock)

    def step(self) -> None:
        self._finish_flushed()
        for request in self.requests:
            if request.state == "waiting":
                self._schedule(request)
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        for request in [*self.requests, *self.finished]:
            if request.state == "running" and request.stored < len(request.keys):
                self._store(request)
        for request in self.finished:
            self.manager.on_request_finished(request.context)
        self.finished.clear()
        self.flush, self.flushing = [], self.flush

    def _finish_flushed(self) -> None:
        """What a reset has made vLLM forget, the workers wait for in the step after it."""
        for job in self.flushing:
            self.touch(job)
            self.jobs.remove(job)
        self.flushing = []

    def _schedule(self, request: Request) -> None:
        hits = 0
        for key in request.keys:
            match self.manager.lookup(key, request.context):
                case LookupResult.HIT:
                    hits += 1
                case LookupResult.MISS:
                    break
                case _:
                    return
        request.state, request.stored = "running", hits
        if hits:
            keys = request.keys[:hits]
            spec = self.manager.prepare_load(keys, request.context)
            self._start(request.context, keys, spec, is_store=False)
            request.state = "loading"

    def _store(self, request: Request) -> None:
        out = self.manager.prepare_store(request.keys[request.stored :], request.context)
        if out is None:
            return
        request.stored = len(request.keys)
        if out.keys_to_store:
            self._start(request.context, out.keys_to_store, out.store_spec, is_store=True)

    def _start(
        self, request: ReqContext, keys: list[bytes], spec: ChunkSpec, is_store: bool
    ) -> None:
        job = Job(request, keys, spec.keys, spec.offsets.tolist(), spec.region, is_store)
        self.jobs.append(job)
        self.touch(job)

    def touch(self, job: Job) -> None:
        """Bytes move at any time between the start of a job and its end."""
        if job.region != self.node.region:
            return  # of a node that is gone
        for name, offset in zip(job.names, job.offsets, strict=True):
            if job.is_store:
                self.node.memory[offset] = name
            else:
                job.read.append(self.node.memory.get(offset))

    def end(self, job: Job, fault: bool) -> None:
        if fault and job.is_store:
            if job.region == self.node.region:
                self.node.memory |= dict.fromkeys(job.offsets, b"garbage")
            report_fault(str(self.path), job.names)
        else:
            self.touch(job)
        self.jobs.remove(job)
        if job.is_store:
            self.manager.complete_store(set(job.keys), job.request)
            return
        try:
            self.manager.complete_load(set(job.keys), job.request)
        except Expired:
            self.dead = True
            return
        for i, read in enumerate(job.read):
            assert read == job.names[i % len(job.names)], "another chunk's bytes were accepted"
        for request in self.requests:
            if request.context is job.request:
                request.state = "running"

    def reset(self) -> None:
        self.manager.reset_cache()
        for request in self.requests:
            request.stored = 0
            if request.state == "loading":
                request.state = "running"
        self.flush = [job for job in self.jobs if job not in self.flushing]

    def kill(self) -> None:
        self.manager.shutdown()
        self.jobs.clear()


class Machine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        # Both engines hold four slots ahead, so not all chunks of all prompts fit.
        self.node = FakeNode(self.clock, chunks=16)
        self.names = itertools.count()
        self.engines = [self._engine(), self._engine()]

    def _engine(self) -> Engine:
        return Engine(self.node, self.clock, Path(self.folder.name) / str(next(self.names)))

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for engine in self.engines:
                engine.kill()
            self.folder.cleanup()

    engine_numbers = st.integers(0, 1)

    @rule(n=engine_numbers, prompt=st.sampled_from(PROMPTS))
    def request(self, n: int, prompt: list[int]) -> None:
        context = ReqContext(f"r{next(self.names)}")
        chain = [make_offload_key(i.to_bytes(32, "big"), 0) for i in prompt]
        for i, key in enumerate(chain):
            context.set_offload_key_position(key, 16 * (i + 1))
        self.engines[n].manager.on_new_request(context)
        self.engines[n].requests.append(Request(context, chain))

    @rule(n=engine_numbers)
    def step(self, n: int) -> None:
        self.engines[n].step()

    @rule(
        n=engine_numbers,
        prompt=st.sampled_from(PROMPTS),
        steps=st.integers(1, 6),
        ends=st.sampled_from(["well", "well", "badly", "never"]),
    )
    def serve(self, n: int, prompt: list[int], steps: int, ends: str) -> None:
        """A request, and some steps in which every copy ends at once, or does not end."""
        self.request(n, prompt)
        for _ in range(steps):
            self.step(n)
            for _ in range(len(self.engines[n].jobs) if ends != "never" else 0):
                self.end_job(n, 0, fault=ends == "badly")

    @rule(n=engine_numbers, which=st.integers(0, 5), fault=st.sampled_from([False] * 4 + [True]))
    def end_job(self, n: int, which: int, fault: bool) -> None:
        engine = self.engines[n]
        jobs = [job for job in engine.jobs if job not in (*engine.flush, *engine.flushing)]
        if which < len(jobs):
            engine.end(jobs[which], fault)
            if engine.dead:
                engine.kill()
                self.engines[n] = (
                    Engine(self.node, self.clock, Path(self.folder.name) / str(next(self.names)))
                    if self.node.alive
                    else engine
                )

    @rule(n=engine_numbers, which=st.integers(0, 3))
    def finish(self, n: int, which: int) -> None:
        engine = self.engines[n]
        if which < len(engine.requests):
            engine.finished.append(engine.requests.pop(which))

    @rule(n=engine_numbers, event=st.sampled_from(EVENTS), seconds=st.sampled_from(TIMES))
    def trouble(self, n: int, event: str, seconds: float) -> None:
        node = self.node
        match event:
            case "reset":
                self.engines[n].reset()
            case "time passes":
                self.clock.now += seconds
            case "leases expire":
                node.host.expire()
            case "host emptied":
                node.host.drop()
            case "promoted":
                node.promote()
            case "lag":
                node.lagging = True
            case "caught up":
                node.lagging = False
                node.work()
            case "node dies" if node.alive:
                node.die()
            case "node starts" if not node.alive:
                node.start()

    @rule(prompt=st.sampled_from(PROMPTS))
    def peers_have(self, prompt: list[int]) -> None:
        self.node.tier |= {NAMING.ours(make_offload_key(i.to_bytes(32, "big"), 0)) for i in prompt}


TestEngines = Machine.TestCase
TestEngines.settings = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
