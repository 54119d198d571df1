"""Any order of work and trouble: what a request is told it has is right, and vLLM goes on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm_processes import make_model
from vllm_tier_kit import ROW, Scheduler, ToldTier, keys, make_config, payload

from kvstrata.errors import LinkBroken
from kvstrata.tiers.base import Outcome

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

STEPS = 1500
CALLS = ("lookup", "store", "load")
# Conversations that share their beginnings, together more than host memory holds.
CHAINS = [keys(1, 2, 3, 4), keys(1, 2, 5, 6), keys(7, 8, 9), keys(10), keys(11, 12, 13, 14)]
SOON = {
    "lookup_deadline": 0.05,
    "load_deadline": 0.05,
    "store_deadline": 0.05,
    "drain_deadline": 0.1,
    "most_pinned": 0.8,
}


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(make_model(tmp_path_factory.mktemp("model")))


class Trouble:
    def __init__(self, scheduler: Scheduler, numbers: random.Random) -> None:
        self.scheduler = scheduler
        self.numbers = numbers
        self.waiting: list[tuple[ReqContext, list[OffloadKey]]] = []
        self.hits = 0
        self.did: list[str] = []

    def step(self) -> None:
        names: list[Callable[[], None]] = [
            *[self.compute] * 6,
            *[self.ask] * 10,
            *[self.go_on] * 20,
            *(self.reset, self.hang, self.fail, self.damage, self.forget),
            *[self.mend] * 2,
        ]
        work = self.numbers.choice(names)
        self.did.append(work.__name__)
        work()

    def tier(self) -> ToldTier:
        return ToldTier.made[self.numbers.choice("ab")]

    def compute(self) -> None:
        chain = self.numbers.choice(CHAINS)
        context = self.scheduler.request(chain)
        out = self.scheduler.manager.prepare_store(chain, context)
        if out is not None and out.keys_to_store:
            rows: Any = out.store_spec
            for key, row in zip(out.keys_to_store, rows.chunk_ids, strict=True):
                self.scheduler.write(int(row), payload(key))
            self.scheduler.manager.complete_store(set(out.keys_to_store), context)
        self.scheduler.manager.on_request_finished(context)

    def ask(self) -> None:
        chain = self.numbers.choice(CHAINS)
        self.waiting.append((self.scheduler.request(chain), chain))

    def go_on(self) -> None:
        """A step of the engine: requests look up until each has its answers, then load."""
        manager, left = self.scheduler.manager, []
        for context, chain in self.waiting:
            found = [manager.lookup(key, context) for key in chain]
            if any(f in (LookupResult.RETRY, LookupResult.HIT_PENDING) for f in found):
                left.append((context, chain))
                continue
            hit = [k for k, f in zip(chain, found, strict=True) if f is LookupResult.HIT]
            spec: Any = manager.prepare_load(hit, context)
            for key, row in zip(hit, spec.chunk_ids, strict=True):
                assert bytes(self.scheduler.row(int(row))) == payload(key)
                self.hits += 1
            manager.complete_load(hit, context)
            manager.on_request_finished(context)
        self.waiting = left
        self.scheduler.step()
        time.sleep(0.002)  # what a small step of an engine takes

    def reset(self) -> None:
        self.scheduler.forget()

    def hang(self) -> None:
        tier, call = self.tier(), self.numbers.choice(CALLS)
        if call not in tier.held:
            tier.hold(call)

    def fail(self) -> None:
        trouble = self.numbers.choice([Outcome.FAILED, Outcome.NO_ROOM, LinkBroken("gone")])
        self.tier().answers[self.numbers.choice(("store", "load"))] = trouble

    def damage(self) -> None:
        tier = self.tier()

        def work() -> None:
            for name, (_, known) in list(tier.chunks.items())[:2]:
                tier.chunks[name] = bytes([7]) * ROW, known

        tier.loop.call_soon_threadsafe(work)

    def forget(self) -> None:
        tier = self.tier()
        tier.drop(list(tier.chunks)[:2])

    def mend(self) -> None:
        for tier in ToldTier.made.values():
            for call in list(tier.held):
                tier.let_go(call)
            tier.answers.clear()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_wrong_byte_is_ever_a_hit(vllm_config: Any, seed: int) -> None:
    print(f"seed {seed}")
    kinds = [{"type": "vllm_tier_kit:ToldTier", "id": n, "name": n} for n in "ab"]
    scheduler = Scheduler(vllm_config, [{"tiers": kinds, **SOON}], rows=8)
    trouble = Trouble(scheduler, random.Random(seed))
    try:
        for _ in range(STEPS):
            trouble.step()
        # All of it ends, and what was lost can be had again.
        trouble.mend()
        scheduler.until(lambda: trouble.go_on() or not trouble.waiting)
        scheduler.until(lambda: not any(s.silent for s in scheduler.tier._shelves.shelves))
        scheduler.settle()
        scheduler.forget()
        scheduler.store(CHAINS[0])
        scheduler.forget()
        scheduler.until_hit(CHAINS[0])
    finally:
        trouble.mend()
        scheduler.close()
        ToldTier.made.clear()
    assert trouble.hits > 100
    # Every job ended once: vLLM's own manager ends on one that ends twice.
    assert not scheduler.tier._jobs


def test_chunk_files_cut_anywhere_or_flipped_are_misses(vllm_config: Any, tmp_path: Path) -> None:
    entry = {"tiers": [{"type": "fs", "root": str(tmp_path / "store")}]}
    scheduler, (key,) = Scheduler(vllm_config, [entry]), keys(1)
    try:
        scheduler.store([key])
        (path,) = [p for p in (tmp_path / "store").rglob("*.kv") if p.is_file()]
        whole = path.read_bytes()
        numbers = random.Random(3)
        cuts = [whole[:n] for n in range(0, len(whole), len(whole) // 12)]
        flips = []
        for _ in range(12):
            hurt = bytearray(whole)
            # Bytes that pad the header's page to its end mean nothing.
            hurt[numbers.randrange(len(whole) - ROW, len(whole))] ^= 1 << numbers.randrange(8)
            flips.append(bytes(hurt))
        for data in cuts + flips:
            scheduler.forget()
            path.write_bytes(data)
            assert scheduler.lookup([key]) == [False]
            scheduler.store([key])
            scheduler.forget()
            assert scheduler.lookup([key]) == [True]
            scheduler.check([key])
    finally:
        scheduler.close()
