"""KVStrataTier under vLLM's real tiering manager and host memory: what vLLM's tests ask of its own
tiers, and what they don't: damage, hangs, deadlines.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    TierFilter,
    TierMatcher,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm_processes import make_model
from vllm_tier_kit import ROW, Scheduler, ToldTier, keys, make_config, payload

from kvstrata.errors import ConfigError, LinkBroken
from kvstrata.tiers.base import Outcome
from kvstrata_adapters.engines.vllm import KVStrataTier
from kvstrata_adapters.engines.vllm.tier_metrics import definitions
from kvstrata_adapters.engines.vllm.tier_options import TierOptions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

# Long beside what a scheduler's thread may ever wait; short beside the deadlines of a user.
SOON = {"lookup_deadline": 0.3, "load_deadline": 0.3, "store_deadline": 0.3, "drain_deadline": 0.5}


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(make_model(tmp_path_factory.mktemp("model")))


Run = Callable[..., Scheduler]


@pytest.fixture
def run(vllm_config: Any) -> Iterator[Run]:
    made: list[Scheduler] = []

    def start(*entries: dict[str, Any], **extra: Any) -> Scheduler:
        made.append(Scheduler(vllm_config, list(entries), **extra))
        return made[-1]

    yield start
    for tier in ToldTier.made.values():
        for call in list(tier.held):
            tier.let_go(call)
        tier.blocked.set()
    ToldTier.made.clear()
    for scheduler in made:
        scheduler.close()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """An entry with an fs tier."""
    return {"tiers": [{"type": "fs", "root": str(tmp_path / "store"), "capacity": "64MiB"}]}


def told(*names: str, **options: Any) -> dict[str, Any]:
    """An entry with tiers that do as they are told."""
    kinds = [{"type": "vllm_tier_kit:ToldTier", "id": name, "name": name} for name in names]
    return {"tiers": kinds, **SOON, **options}


def chunk_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store").rglob("*.kv"))


def counters(scheduler: Scheduler) -> dict[str, int]:
    """Of the last tier, fresh."""
    tier = scheduler.tier

    async def look() -> None:
        for shelf in tier._shelves.shelves:
            shelf.look()

    tier._loop.ask(look(), 10)
    return tier.states()[-1].counters


# ------------------------------------------------------------ chunks go and come


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_what_was_stored_comes_back(run: Run, files: dict[str, Any], count: int) -> None:
    scheduler, chain = run(files), keys(*range(1, count + 1))
    scheduler.store(chain)
    scheduler.forget()
    assert scheduler.lookup(chain) == [True] * count
    scheduler.check(chain)


def test_more_chunks_than_staging_holds_at_once(run: Run, files: dict[str, Any]) -> None:
    scheduler = run(files | {"staging": 2 * ROW, "most_pinned": 1.0}, rows=40)
    chain = keys(*range(1, 38))
    scheduler.store(chain)
    scheduler.forget()
    assert scheduler.lookup(chain) == [True] * len(chain)
    scheduler.check(chain)


def test_jobs_of_nothing_end_at_once(run: Run, files: dict[str, Any]) -> None:
    scheduler = run(files)
    for number, is_load in enumerate((True, False)):
        context = scheduler.request()
        job = TransferJob(number, (), np.array([], dtype=np.int32), is_load, context)
        (scheduler.tier.submit_load if is_load else scheduler.tier.submit_store)(job)
        (result,) = scheduler.tier.get_finished_jobs()
        assert (result.job_id, result.success) == (number, True)


def test_a_promotion_is_retry_then_pending_then_hit(run: Run) -> None:
    scheduler, chain = run(told("a")), keys(1)
    scheduler.store(chain)
    scheduler.forget()
    context, tier = scheduler.request(chain), ToldTier.made["a"]
    assert scheduler.manager.lookup(chain[0], context) is LookupResult.RETRY
    tier.hold("load")
    scheduler.until(lambda: scheduler.manager.lookup(chain[0], context) is LookupResult.HIT_PENDING)
    scheduler.until(lambda: tier.calls("load"))
    assert scheduler.manager.lookup(chain[0], context) is LookupResult.HIT_PENDING
    tier.let_go("load")
    scheduler.until(lambda: scheduler.manager.lookup(chain[0], context) is LookupResult.HIT)
    scheduler.check(chain)


def test_rows_are_pinned_until_every_tier_has_them(run: Run) -> None:
    scheduler = run(told("a", store_deadline=30), told("b", store_deadline=30))
    tiers, (key,) = [ToldTier.made[name] for name in "ab"], keys(1)
    for tier in tiers:
        tier.hold("store")
    scheduler.offload([key])
    scheduler.until(lambda: all(tier.calls("store") for tier in tiers))
    assert scheduler.pins(key) == 2
    tiers[0].let_go("store")
    scheduler.until(lambda: scheduler.pins(key) == 1)
    tiers[1].let_go("store")
    scheduler.until(lambda: scheduler.pins(key) == 0)
    assert [tier.calls("store") for tier in tiers] == [1, 1]


def test_heads_are_stored_first_each_beside_what_it_extends(run: Run) -> None:
    scheduler, chain = run(told("a")), keys(9, 4, 7, 1)
    context = scheduler.request(chain)
    for part in (chain[:2], chain[2:]):
        scheduler.offload(part, context)
        scheduler.settle()
    tier = ToldTier.made["a"]
    names = [scheduler.tier._naming.ours(key) for key in chain]
    assert [name for call, batch in tier.asked if call == "store" for name in batch] == names
    assert [tier.parents[name] for name in names] == [None, *names[:-1]]


def test_a_restarted_engine_finds_what_the_last_one_stored(run: Run, files: dict[str, Any]) -> None:
    first, chain = run(files), keys(1, 2, 3)
    first.store(chain)
    first.close()
    second = run(files)
    assert second.lookup([*chain, *keys(4)]) == [True, True, True, False]
    second.check(chain)


def test_wrapped_tiers_come_back_too(run: Run, files: dict[str, Any]) -> None:
    (fs,) = files["tiers"]
    wrappers = [f"kvstrata.tiers.wrappers.{w}" for w in ("checked:Checked", "metered:Metered")]
    scheduler = run({"tiers": [{**fs, "wrap": [{"type": name} for name in wrappers]}]})
    chain = keys(1, 2)
    scheduler.store(chain)
    scheduler.forget()
    assert scheduler.lookup(chain) == [True, True]
    scheduler.check(chain)


def test_of_several_tiers_the_first_that_has_a_chunk_gives_it(run: Run) -> None:
    scheduler, chain = run(told("a", "b")), keys(1, 2, 3)
    a, b = ToldTier.made["a"], ToldTier.made["b"]
    scheduler.store(chain)
    names = [scheduler.tier._naming.ours(key) for key in chain]
    assert set(a.chunks) == set(b.chunks) == set(names)
    del a.chunks[names[1]]  # only the second has it
    a.bad.add(names[2])  # the first has it damaged
    scheduler.forget()
    assert scheduler.lookup(chain) == [True, True, True]
    scheduler.check(chain)
    assert [batch for call, batch in a.asked if call == "load"] == [[names[0], names[2]]]
    assert sorted(n for call, batch in b.asked if call == "load" for n in batch) == names[1:]


# ------------------------------------------------------------ damage


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "gone"])
def test_a_damaged_file_is_a_miss_and_stored_anew(
    run: Run, files: dict[str, Any], tmp_path: Path, damage: str
) -> None:
    scheduler, chain = run(files), keys(1, 2, 3)
    scheduler.store(chain)
    scheduler.forget()
    hurt = next(p for p in chunk_files(tmp_path) if f"{2:064x}" in str(p).replace("/", ""))
    data = bytearray(hurt.read_bytes())
    data[-1000] ^= 1
    if damage == "gone":
        hurt.unlink()
    else:
        hurt.write_bytes({"flipped": data, "short": data[:-512], "empty": b""}[damage])
    context = scheduler.request(chain)
    assert scheduler.lookup(chain, context) == [True, False, True]
    assert scheduler.lookup(chain, context) == [True, False, True]
    scheduler.check([chain[0], chain[2]])
    if damage != "gone":
        assert counters(scheduler)["load_corrupt"] == 1
    scheduler.store(chain)
    scheduler.forget()
    assert scheduler.lookup(chain) == [True] * 3
    scheduler.check(chain)


def test_what_failed_to_load_stays_a_miss_for_its_request_only(run: Run) -> None:
    scheduler, chain = run(told("a")), keys(1, 2)
    tier = ToldTier.made["a"]
    scheduler.store(chain)
    scheduler.forget()
    tier.answers["load"] = Outcome.MISSING
    first = scheduler.request(chain)
    assert scheduler.lookup(chain, first) == [False, False]
    asked = tier.calls("lookup"), tier.calls("load")
    assert scheduler.lookup(chain, first) == [False, False]
    assert (tier.calls("lookup"), tier.calls("load")) == asked
    scheduler.manager.on_request_finished(first)
    del tier.answers["load"]
    assert scheduler.lookup(chain) == [True, True]
    scheduler.check(chain)


def test_a_load_that_half_succeeds_keeps_its_half(run: Run) -> None:
    scheduler, chain = run(told("a")), keys(1, 2, 3)
    scheduler.store(chain)
    scheduler.forget()
    ToldTier.made["a"].bad.add(scheduler.tier._naming.ours(chain[0]))
    assert scheduler.lookup(chain) == [False, True, True]
    scheduler.check(chain[1:])
    assert [scheduler.pins(key) for key in chain] == [-2, 0, 0]


@pytest.mark.parametrize("call", ["lookup", "store", "load"])
def test_a_tier_that_raises_is_a_miss_and_recovers(run: Run, call: str) -> None:
    scheduler, chain = run(told("a")), keys(1)
    tier = ToldTier.made["a"]
    if call != "store":
        scheduler.store(chain)
    tier.answers[call] = LinkBroken("gone")
    if call == "store":
        scheduler.store(chain)
    scheduler.forget()
    assert scheduler.lookup(chain) == [False]
    counters(scheduler)
    assert "gone" in scheduler.tier.states()[0].detail
    del tier.answers[call]
    scheduler.until(lambda: not scheduler.tier._shelves.shelves[0].silent)
    if call == "store":
        scheduler.store(chain)
        scheduler.forget()
    scheduler.until_hit(chain)
    counters(scheduler)
    assert scheduler.tier.states()[0].detail == ""


def test_a_tier_that_answers_too_little_is_a_miss(run: Run) -> None:
    scheduler, chain = run(told("a")), keys(1, 2)
    tier = ToldTier.made["a"]
    scheduler.store(chain)
    scheduler.forget()

    async def short(*_: object) -> list[Outcome]:
        return [Outcome.LOADED]

    tier.load = short  # type: ignore[method-assign,assignment]
    assert scheduler.lookup(chain) == [False, False]


# ------------------------------------------------------------ hangs


def test_a_hung_lookup_is_a_miss_at_its_deadline(run: Run) -> None:
    scheduler, chain = run(told("a")), keys(1)
    ToldTier.made["a"].hold("lookup")
    began = time.monotonic()
    assert scheduler.lookup(chain) == [False]
    assert time.monotonic() - began < 5
    # While it hangs, others need not wait.
    scheduler.until(lambda: scheduler.tier._shelves.shelves[0].silent)
    began = time.monotonic()
    assert scheduler.lookup(keys(2)) == [False]
    assert time.monotonic() - began < 0.25
    assert ToldTier.made["a"].calls("lookup") == 1


def test_a_hung_tier_does_not_keep_another_from_answering(run: Run) -> None:
    scheduler, chain = run(told("a", "b", lookup_deadline=2)), keys(1, 2)
    scheduler.store(chain)
    scheduler.forget()
    ToldTier.made["a"].hold("lookup")
    assert scheduler.lookup(chain) == [True, True]
    scheduler.check(chain)


def test_a_hung_load_is_a_miss_and_never_writes_to_a_row_again(run: Run) -> None:
    scheduler, chain = run(told("a", most_pinned=1), rows=2), keys(1, 2)
    tier = ToldTier.made["a"]
    scheduler.store(chain)
    scheduler.forget()
    tier.hold("load")
    assert scheduler.lookup(chain) == [False, False]
    assert scheduler.lookup(keys(3)) == [False]
    # Its rows are now other chunks'.
    other = keys(8, 9)
    scheduler.offload(other)
    tier.let_go("load")
    scheduler.until(lambda: not scheduler.tier._shelves.shelves[0].silent)
    scheduler.settle()
    scheduler.check(other)
    scheduler.forget()
    scheduler.until_hit(chain)


def test_a_hung_store_keeps_its_rows_and_harms_no_other_work(run: Run) -> None:
    scheduler = run(told("a"), rows=8)
    tier, chain = ToldTier.made["a"], keys(1)
    tier.hold("store")
    scheduler.offload(chain)
    scheduler.until(lambda: scheduler.tier._shelves.shelves[0].silent)
    assert scheduler.pins(chain[0]) == 1
    # More is not even tried, and its rows are free at once.
    began = time.monotonic()
    scheduler.offload(keys(2, 3))
    scheduler.until(lambda: [scheduler.pins(key) for key in keys(2, 3)] == [0, 0])
    assert time.monotonic() - began < 0.25
    assert tier.calls("store") == 1
    tier.let_go("store")
    scheduler.settle()
    assert scheduler.pins(chain[0]) == 0


def test_stores_beyond_a_part_of_host_memory_are_dropped(run: Run) -> None:
    scheduler = run(told("a", most_pinned=0.25, store_deadline=30), rows=8)
    tier, chain = ToldTier.made["a"], keys(1, 2, 3, 4, 5)
    tier.hold("store")
    scheduler.offload(chain)
    scheduler.until(lambda: tier.calls("store"))
    tier.let_go("store")
    scheduler.settle()
    # The head of the chain is what was kept.
    assert list(tier.chunks) == [scheduler.tier._naming.ours(key) for key in chain[:2]]
    assert counters(scheduler)["dropped"] == 3
    scheduler.store(chain)
    assert len(tier.chunks) == 2  # all are in host memory, so none is offered


def test_reset_ends_a_hung_store_and_its_late_bytes_are_never_served(run: Run) -> None:
    scheduler, chain = run(told("a", most_pinned=1), rows=2), keys(1, 2)
    tier = ToldTier.made["a"]
    tier.hold("store")
    context = scheduler.offload(chain)
    scheduler.until(lambda: tier.calls("store"))
    began = time.monotonic()
    scheduler.forget()
    assert time.monotonic() - began < 5
    assert not scheduler.manager.has_pending_work()
    scheduler.manager.on_request_finished(context)
    # Other bytes are in those rows when the tier reads them at last.
    tier.let_go("store")
    scheduler.until(lambda: len(tier.chunks) == 2)
    assert tier.chunks[scheduler.tier._naming.ours(chain[0])][0] != payload(chain[0])
    scheduler.until(lambda: not scheduler.tier._shelves.shelves[0].silent)
    assert scheduler.lookup(chain) == [False, False]
    assert tier.calls("load") == 1


def test_reset_waits_for_what_ends(run: Run, files: dict[str, Any]) -> None:
    scheduler, chain = run(files), keys(1, 2, 3)
    scheduler.offload(chain)
    scheduler.forget()
    assert not scheduler.manager.has_pending_work()
    assert scheduler.lookup(chain) == [True] * 3
    scheduler.check(chain)


def test_a_tier_that_blocks_the_loop_blocks_no_scheduler(run: Run) -> None:
    scheduler, chain = run(told("a")), keys(1)
    tier = ToldTier.made["a"]
    scheduler.store(chain)
    scheduler.forget()
    context = scheduler.request(chain)
    scheduler.until(
        lambda: (
            scheduler.manager.lookup(chain[0], context) is LookupResult.HIT_PENDING
            and not tier.blocked.clear()
        )
    )
    # The load that follows blocks; so does every question.
    assert scheduler.lookup(chain, context) == [False]
    assert scheduler.lookup(keys(2)) == [False]
    scheduler.offload(keys(3))
    scheduler.settle()
    assert counters_are_told(scheduler)
    tier.blocked.set()
    scheduler.forget()
    scheduler.until_hit(chain)


def counters_are_told(scheduler: Scheduler) -> bool:
    return scheduler.tier.states()[-1].counters["lookup_timeouts"] > 0


# ------------------------------------------------------------ ending


def ours() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("kvstrata"))


def test_shutdown_ends_every_thread(run: Run, files: dict[str, Any]) -> None:
    before = ours()
    scheduler = run(files)
    scheduler.store(keys(1, 2))
    scheduler.offload(keys(3, 4))
    assert ours() != before
    scheduler.close()
    end = time.monotonic() + 10
    while ours() != before and time.monotonic() < end:
        time.sleep(0.01)
    assert ours() == before


def test_shutdown_is_bounded_and_keeps_memory_that_a_hung_store_may_read(run: Run) -> None:
    scheduler = run(told("a"))
    tier = ToldTier.made["a"]

    async def deaf(*_: object) -> list[Outcome]:
        import asyncio

        stop = asyncio.Event()
        tier.held["store"] = stop
        while not stop.is_set():
            try:
                await stop.wait()
            except asyncio.CancelledError:
                continue
        return [Outcome.FAILED]

    tier.store = deaf  # type: ignore[method-assign,assignment]
    scheduler.offload(keys(1))
    scheduler.until(lambda: "store" in tier.held)
    began = time.monotonic()
    with pytest.raises(LinkBroken, match="may still read"):
        scheduler.manager.shutdown()
    assert time.monotonic() - began < 10
    assert scheduler.row(0)  # vLLM has kept it
    tier.let_go("store")
    scheduler.tier._loop._thread.join(10)
    scheduler.open = False
    scheduler.manager.primary_tier.shutdown()


def test_after_shutdown_all_is_a_miss(run: Run, files: dict[str, Any]) -> None:
    scheduler, chain = run(files), keys(1)
    scheduler.store(chain)
    scheduler.forget()
    tier, context = scheduler.tier, scheduler.request()
    tier.shutdown()
    tier.shutdown()
    assert tier.lookup(chain[0], context) is LookupResult.MISS
    tier.submit_load(TransferJob(77, chain, np.array([0], dtype=np.int32), True, context))
    (result,) = tier.get_finished_jobs()
    assert (result.job_id, result.success, result.successful_keys) == (77, False, None)


# ------------------------------------------------------------ input that can't be right


def test_rows_and_keys_that_are_none_fail_alone(run: Run, files: dict[str, Any]) -> None:
    scheduler = run(files)
    tier, context = scheduler.tier, scheduler.request()
    scheduler.write(1, payload(keys(1)[0]))
    given = [
        *keys(1, 2, 3),
        make_offload_key(b"x" * 32, 5),
        b"short",
        make_offload_key(b"y" * 40, 0),
    ]
    rows = np.array([1, 10_000, -1, 2, 3, 4], dtype=np.int32)
    tier.submit_store(TransferJob(1, given, rows, False, context))
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert (result.success, result.transfer_bytes) == (False, ROW)
    assert [tier.lookup(key, context) for key in given[3:]] == [LookupResult.MISS] * 3
    scheduler.write(1, bytes(ROW))
    tier.submit_load(TransferJob(2, given, rows, True, context))
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert (result.success, result.successful_keys) == (False, (given[0],))
    assert bytes(scheduler.row(1)) == payload(given[0])


# ------------------------------------------------------------ what it tells


def test_requests_choose_what_they_load_from(run: Run) -> None:
    scheduler, chain = run(told("a", locality="REMOTE")), keys(1)
    assert scheduler.tier.locality is Locality.REMOTE
    scheduler.store(chain)
    scheduler.forget()

    def only(*matchers: TierMatcher) -> Any:
        return scheduler.request(chain, load_tier_filter=TierFilter(matchers))

    assert scheduler.lookup(chain, only()) == [False]
    assert scheduler.lookup(chain, only(TierMatcher(Medium.STORAGE, Locality.LOCAL))) == [False]
    assert ToldTier.made["a"].calls("lookup") == 0
    assert scheduler.lookup(chain, only(TierMatcher(Medium.STORAGE, Locality.REMOTE))) == [True]


def test_events_tell_what_was_stored_and_what_is_gone(vllm_config: Any, run: Run) -> None:
    from vllm.config import KVEventsConfig

    vllm_config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)
    try:
        scheduler = run(told("a", "b", enable_kv_events=True), told("c"))
    finally:
        vllm_config.kv_events_config = None
    chain, a, b = keys(1, 2), ToldTier.made["a"], ToldTier.made["b"]
    b.answers["store"] = Outcome.NO_ROOM
    scheduler.store(chain)
    (stored,) = scheduler.events()
    assert (stored.keys, stored.removed, stored.removal_expected) == (chain, False, True)
    a.answers["store"] = Outcome.NO_ROOM
    scheduler.store(keys(3))
    scheduler.forget()
    assert scheduler.lookup(chain) == [True, True]
    assert scheduler.events() == []
    # A chunk that both have is gone when neither has it.
    del a.answers["store"], b.answers["store"]
    scheduler.store(keys(4))
    assert [e.keys for e in scheduler.events()] == [keys(4), keys(4)]
    name = scheduler.tier._naming.ours(keys(4)[0])
    foreign = bytes(16) + name[16:]
    a.drop([name, foreign])
    b.drop([foreign])
    scheduler.until(lambda: name not in a.chunks)
    assert scheduler.events() == []
    b.drop([name])
    gone: list[Any] = []
    scheduler.until(lambda: gone.extend(scheduler.events()) or gone)
    assert [(e.keys, e.removed) for e in gone] == [(keys(4), True)]


def test_metrics_are_declared_and_count_up(run: Run, files: dict[str, Any]) -> None:
    scheduler = run(files)
    declared = scheduler.spec.build_metric_definitions(scheduler.spec.extra_config)
    assert definitions().keys() <= declared.keys()
    scheduler.store(keys(1, 2))
    counters(scheduler)
    first = scheduler.tier.get_stats()
    assert first is not None
    assert first.data["data"].keys() <= declared.keys()
    events = first.data["data"]["vllm:kvstrata_tier_events"]
    assert events["fs", "store_stored"] == 2
    assert first.data["data"]["vllm:kvstrata_tier_chunks"] == {("fs",): 2}
    assert first.data["data"]["vllm:kvstrata_tier_healthy"] == {("fs",): 1}
    again = scheduler.tier.get_stats()
    assert again is not None
    assert "vllm:kvstrata_tier_events" not in again.data["data"]
    for name, labels in ((n, v) for n, values in first.data["data"].items() for v in values):
        assert len(labels) == len(declared[name].labelnames)


# ------------------------------------------------------------ making it


def test_a_root_that_cannot_be_is_told_when_the_engine_starts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = ours()
    with pytest.raises(ConfigError, match="file"):
        run({"tiers": [{"type": "fs", "root": str(tmp_path / "file" / "store")}]})
    assert ours() == before


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({}, "tiers: this must be set"),
        ({"tiers": []}, "tiers"),
        ({"tiers": [{"type": "no"}]}, "neither one of"),
        ({"tiers": [{"type": "fs", "rot": "/x"}]}, "rot"),
        ({"tiers": [{"type": "fs", "root": "/x"}], "root_dir": "/x"}, "root_dir: there is no such"),
        ({"tiers": [{"type": "fs", "root": "/x"}], "locality": "local"}, "locality"),
        ({"tiers": [{"type": "fs", "root": "/x", "cascade": "on_evict"}]}, "write_through"),
        ({"tiers": [{"type": "fs", "root": "/x"}], "load_deadline": "soon"}, "load_deadline"),
    ],
)
def test_options_that_cannot_be_are_named(run: Run, entry: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        run(entry)


def test_a_tier_that_does_not_open_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    async def never(*_: object) -> ToldTier:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(ToldTier, "open", never)
    with pytest.raises(ConfigError, match="open_deadline"):
        run(told("a", open_deadline=0.2))


def test_backpressure_is_vllms_own(run: Run) -> None:
    entry = told("a") | {"backpressure": {"backpressure_cls": "EMABackpressureDetector"}}
    scheduler = run(entry)
    assert scheduler.tier.bp_detector is not None
    scheduler.store(keys(1))


def test_the_page_about_it_shows_what_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm-tier.md").read_text()
    shown = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    (entry,) = shown["kv_connector_extra_config"]["secondary_tiers"]
    tier_class = SecondaryTierFactory.get_tier_class(entry)
    assert tier_class is KVStrataTier
    options = {k: v for k, v in entry.items() if k not in ("type", "module_path")}
    TierOptions.parse("KVStrataTier", options)
    told = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE)
    assert [name for name, _ in told] == list(TierOptions.model_fields)


def test_naming_the_package_imports_no_vllm() -> None:
    code = (
        "import sys, kvstrata_adapters.engines.vllm as v; assert 'vllm' not in sys.modules; "
        "assert 'torch' not in sys.modules; assert v.__all__ == ['KVStrataTier']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert KVStrataTier.__module__ == "kvstrata_adapters.engines.vllm.tier"
