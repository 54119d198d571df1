"""vLLM's own tiering manager over its own host memory, as its scheduler drives them, with tiers of
kvstrata below; no engine, no device. And a tier that does what a test tells it."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstrata.errors import LinkBroken
from kvstrata.keys import Key
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage, checksum
from kvstrata_adapters.engines.vllm import KVStrataTier

BLOCK = 32
HEADS, HEAD = 2, 64
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
ROW = len(LAYERS) * BLOCK * HEADS * 2 * HEAD * 2
ENTRY = {"type": "KVStrataTier", "module_path": "kvstrata_adapters.engines.vllm"}

_numbers = itertools.count()


def make_config(model: Path, **options: Any) -> VllmConfig:
    """What an engine of this model runs with; takes seconds."""
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        block_size=BLOCK,
        enforce_eager=True,
        **options,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"  # workers resolve it
    return config


def make_layout() -> KVCacheConfig:
    """One group of full attention."""
    blocks = 64
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.bfloat16
    )
    size = attention.page_size_bytes * len(LAYERS)
    return KVCacheConfig(
        blocks,
        [KVCacheTensor(size * blocks, LAYERS, attention.page_size_bytes, size)],
        [KVCacheGroupSpec(LAYERS, attention)],
    )


def make_spec(vllm_config: VllmConfig, extra: dict[str, Any]) -> Any:
    """As vLLM's connector makes it."""
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id=f"test-{os.getpid()}-{next(_numbers)}",
        kv_connector_extra_config={"spec_name": "TieringOffloadingSpec", **extra},
    )
    return TieringOffloadingSpec(build_offloading_config(vllm_config, make_layout()))


def keys(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(n.to_bytes(32, "big"), 0) for n in numbers]


def payload(key: bytes) -> bytes:
    """What the device would have computed: one chunk's bytes, told apart from all others."""
    return (key[-8:-4] * (ROW // 4))[:ROW]


class Scheduler:
    """Drives a manager as vLLM's connector does."""

    def __init__(
        self, vllm_config: VllmConfig, entries: list[dict[str, Any]], rows: int = 16, **extra: Any
    ) -> None:
        entries = [{**ENTRY, **entry} for entry in entries]
        self.spec = make_spec(
            vllm_config, {"cpu_bytes_to_use": rows * ROW, "secondary_tiers": entries, **extra}
        )
        kv_cache_config = make_layout()  # a tier finds the two here, as it does in a connector
        self.manager: TieringOffloadingManager = self.spec.get_manager()
        del kv_cache_config
        self.tiers: list[KVStrataTier] = self.manager.secondary_tiers  # type: ignore[assignment]
        self.open = True

    @property
    def tier(self) -> KVStrataTier:
        return self.tiers[0]

    def request(self, chain: Sequence[OffloadKey] = (), **options: Any) -> ReqContext:
        context = ReqContext(f"r{next(_numbers)}", **options)
        for i, key in enumerate(chain):
            context.set_offload_key_position(key, (i + 1) * BLOCK)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        """Step until it holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come to hold"
            self.step()
            time.sleep(0.002)

    def settle(self) -> None:
        self.until(lambda: not self.manager.has_pending_work())

    def offload(self, chain: Sequence[OffloadKey], context: ReqContext | None = None) -> ReqContext:
        """What a device computed goes to host memory, and on to the tiers."""
        context = context or self.request(chain)
        out = self.manager.prepare_store(chain, context)
        assert out is not None
        if not out.keys_to_store:
            return context
        for key, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):  # type: ignore[attr-defined]
            self.write(int(row), payload(key))
        self.manager.complete_store(set(out.keys_to_store), context)
        return context

    def store(self, chain: Sequence[OffloadKey]) -> None:
        """`offload`, all the way, and the request ends."""
        self.manager.on_request_finished(self.offload(chain))
        self.settle()

    def lookup(
        self, chain: Sequence[OffloadKey], context: ReqContext | None = None, seconds: float = 20.0
    ) -> list[bool]:
        """What a request finds once every answer is there: whether in host memory."""
        known = context is not None
        context = context or self.request(chain)
        final = (LookupResult.HIT, LookupResult.MISS)
        found = [self.manager.lookup(key, context) for key in chain]
        end = time.monotonic() + seconds
        while not all(f in final for f in found):
            assert time.monotonic() < end, f"no answer: {found}"
            self.step()
            time.sleep(0.002)
            found = [self.manager.lookup(key, context) for key in chain]
        if not known:
            self.manager.on_request_finished(context)
        return [f is LookupResult.HIT for f in found]

    def until_hit(self, chain: Sequence[OffloadKey]) -> None:
        """A tier that has failed rests for a while."""
        self.until(lambda: all(self.lookup(chain)))
        self.check(chain)

    def read(self, key: OffloadKey) -> bytes:
        context = self.request()
        spec: Any = self.manager.prepare_load([key], context)
        got = bytes(self.row(int(spec.chunk_ids[0])))
        self.manager.complete_load([key], context)
        return got

    def check(self, chain: Sequence[OffloadKey]) -> None:
        """They are in host memory, with the right bytes."""
        assert [self.read(key) for key in chain] == [payload(key) for key in chain]

    def forget(self) -> None:
        """Empty vLLM's host memory, and overwrite it; the tiers keep what they have."""
        self.manager.reset_cache()
        for row in range(self.spec.num_chunks):
            self.write(row, b"\xee" * ROW)

    def row(self, number: int) -> memoryview:
        view = self.manager.primary_tier.get_kv_memoryview().cast("B")
        return view[number * self.spec.kv_bytes_per_chunk :][:ROW]

    def write(self, number: int, data: bytes) -> None:
        self.row(number)[:] = data

    def pins(self, key: OffloadKey) -> int:
        chunk = self.manager.primary_tier._policy.get(key)
        return -2 if chunk is None else chunk.ref_cnt

    def events(self) -> list[OffloadingEvent]:
        return [e for e in self.manager.take_events() if e.medium is KVStrataTier.medium]

    def close(self) -> None:
        if self.open:
            self.open = False
            self.manager.shutdown()


class ToldTier(Tier):
    """In memory. `hold(call)` keeps calls of that name until `let_go`; `outcome` answers for all.

    It goes by its option `id` in `made`. A held call goes on when it is let go, however late.
    """

    name = "told"
    made: ClassVar[dict[str, ToldTier]] = {}

    def __init__(self, context: TierContext) -> None:
        self.store_id = "told"
        self.context = context
        self.loop = asyncio.get_running_loop()
        self.chunks: dict[Key, tuple[bytes, int]] = {}
        self.parents: dict[Key, Key | None] = {}
        self.asked: list[tuple[str, list[Key]]] = []
        self.held: dict[str, asyncio.Event] = {}
        self.answers: dict[str, Outcome | Exception] = {}
        self.bad: set[Key] = set()
        self.blocked = threading.Event()
        self.blocked.set()
        self.closed = False

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> ToldTier:
        tier = cls.made[options["id"]] = cls(context)
        return tier

    def hold(self, call: str) -> None:
        self.held[call] = asyncio.Event()

    def let_go(self, call: str) -> None:
        self.loop.call_soon_threadsafe(self.held.pop(call).set)

    def drop(self, gone: Collection[Key]) -> None:
        """As if evicted."""

        def work() -> None:
            for key in gone:
                self.chunks.pop(key, None)
            self.context.on_removed(list(gone))

        self.loop.call_soon_threadsafe(work)

    def calls(self, name: str) -> int:
        return sum(call == name for call, _ in self.asked)

    async def _begin(self, call: str, names: Sequence[Key]) -> Outcome | None:
        self.asked.append((call, list(names)))
        if not self.blocked.wait(20):
            raise AssertionError("nobody let the loop go")
        if call in self.held:
            await self.held[call].wait()
        if self.closed:
            raise LinkBroken("closed")
        answer = self.answers.get(call)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        await self._begin("lookup", keys)
        return [key in self.chunks for key in keys]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        answer = await self._begin("store", [item.key for item in batch])
        if answer is not None:
            return [answer] * len(batch)
        for item in batch:
            known = checksum(item.view) if item.checksum is None else item.checksum
            self.chunks[item.key] = bytes(item.view), known
            self.parents[item.key] = item.parent
        return [Outcome.STORED] * len(batch)

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        answer = await self._begin("load", [item.key for item in batch])
        if answer is not None:
            return [answer] * len(batch)
        return [self._load(item) for item in batch]

    def _load(self, item: Item) -> Outcome:
        if item.key not in self.chunks:
            return Outcome.MISSING
        data, known = self.chunks[item.key]
        item.view[:] = data
        if item.key in self.bad or checksum(item.view) != known:
            del self.chunks[item.key]
            return Outcome.CORRUPT
        return Outcome.LOADED

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        return [self.chunks.pop(key, None) is not None for key in keys]

    def keys(self) -> list[Key]:
        return list(self.chunks)

    def usage(self) -> Usage:
        return Usage(ROW * len(self.chunks), len(self.chunks))

    async def drain(self, deadline: float | None = None) -> None: ...

    async def close(self) -> None:
        self.closed = True
