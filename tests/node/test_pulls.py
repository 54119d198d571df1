"""Transfers: what is said of their keys is so when it is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvstrata.api import Outcome
from kvstrata.config import HostSettings
from kvstrata.errors import NamespaceMismatch
from kvstrata.keys import Key, Namespace
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.pulls import Pulls
from kvstrata.node.reported import Pull, PullSource
from kvstrata.node.store import Store
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.clock import FakeClock
from kvstrata.tiers import base
from kvstrata.tiers.base import Item

PAGE = 4096
NAMESPACE = a_namespace(PAGE)
ONE, OTHER = PullSource("one", "tcp://10.0.0.1:1"), PullSource("other", "tcp://10.0.0.2:1")


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


class Links:
    """Sources whose answer is set by address; `between` runs before each answer."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.answers: dict[str, base.Outcome | Exception] = {}
        self.between: Callable[[], None] = lambda: None

    async def fetch(
        self, address: str, namespace: Namespace, items: Sequence[Item], deadline: float
    ) -> list[base.Outcome]:
        answer = self.answers[address]
        self.between()
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return [answer] * len(items)


def make(pages: int = 8) -> tuple[FakeClock, Store, Links, Pulls]:
    clock, links, namespaces = FakeClock(), Links(), Namespaces()
    namespaces.add(NAMESPACE)
    store = Store(memoryview(bytearray(pages * PAGE)), HostSettings(), namespaces, clock)
    return clock, store, links, Pulls(store, links)


def pull(numbers: Sequence[int], *sources: PullSource, hold: float = 60.0) -> Pull:
    return Pull("t", [], [key(n) for n in numbers], sources, 600.0, hold)


async def test_a_source_that_fails_is_named_with_its_reason_and_replaced() -> None:
    _, _, links, pulls = make()
    links.answers = {ONE.address: base.Outcome.FAILED, OTHER.address: base.Outcome.LOADED}
    links.reasons = {ONE.address: "connection refused"}
    result = await pulls.pull(pull([1, 2], ONE, OTHER))
    assert result.outcomes == {key(1): Outcome.STORED, key(2): Outcome.STORED}
    assert result.sources == {key(1): "other", key(2): "other"}
    assert result.detail == "one: connection refused"


async def test_a_source_that_fails_without_a_word() -> None:
    _, _, links, pulls = make()
    links.answers = {ONE.address: base.Outcome.FAILED}
    result = await pulls.pull(pull([1], ONE))
    assert result.outcomes == {key(1): Outcome.FAILED}
    assert result.detail == "one: 1 of 1 chunks did not arrive"


async def test_a_source_of_other_bytes_is_told() -> None:
    _, store, links, pulls = make()
    links.answers = {ONE.address: NamespaceMismatch("namespaces differ in dtype")}
    result = await pulls.pull(pull([1], ONE))
    assert result.outcomes == {key(1): Outcome.FAILED}
    assert "differ in dtype" in result.detail
    assert store.host.usage().used == 0


async def test_what_arrived_is_held_when_it_is_said_to_be_here() -> None:
    clock, store, links, pulls = make(pages=8)
    links.answers = {ONE.address: base.Outcome.LOADED}
    result = await pulls.pull(pull([1, 2], ONE))
    assert result.outcomes == {key(1): Outcome.STORED, key(2): Outcome.STORED}
    clock.advance(59)
    store.host.expire()
    assert store.host.drop() == 0
    clock.advance(2)
    store.host.expire()
    assert store.host.drop() == 2


@pytest.mark.parametrize(("pages", "moved"), [(0, 0), (1, 1), (2, 2), (9, 3)])
async def test_a_budget_is_of_what_has_to_be_moved(pages: int, moved: int) -> None:
    _, _, links, pulls = make(pages=8)
    links.answers = {ONE.address: base.Outcome.LOADED}
    await pulls.pull(pull([1, 3], ONE))
    budget = pages * PAGE + PAGE - 1
    result = await pulls.pull(replace(pull([1, 2, 3, 4, 5], ONE), byte_budget=budget))
    assert result.bytes == moved * PAGE
    brought = dict(zip([2, 4, 5], [Outcome.STORED] * moved + [Outcome.NO_ROOM] * 3, strict=False))
    here = dict.fromkeys([1, 3], Outcome.PRESENT)
    assert result.outcomes == {key(n): o for n, o in (brought | here).items()}


async def test_what_was_evicted_before_the_end_is_not_said_to_be_here() -> None:
    clock, store, links, pulls = make(pages=8)  # two chunks a batch
    links.answers = {ONE.address: base.Outcome.LOADED}

    def slow() -> None:
        clock.advance(store.settings.lease_ttl + 1)
        store.host.expire()
        store.host.drop()

    links.between = slow
    result = await pulls.pull(pull([1, 2, 3, 4], ONE))
    assert result.outcomes == {
        key(1): Outcome.NO_ROOM,
        key(2): Outcome.NO_ROOM,
        key(3): Outcome.STORED,
        key(4): Outcome.STORED,
    }
    assert "evicted" in result.detail


async def test_a_cancelled_pull_ends_with_the_batch_under_way() -> None:
    _, store, links, pulls = make(pages=8)  # two chunks a batch
    links.answers = {ONE.address: base.Outcome.LOADED, OTHER.address: base.Outcome.LOADED}
    fetched = 0

    def cancel() -> None:
        nonlocal fetched
        fetched += 1
        running.cancel()

    links.between = cancel
    running = asyncio.create_task(pulls.pull(pull([1, 2, 3, 4], ONE, OTHER)))
    with pytest.raises(asyncio.CancelledError):
        await running
    await pulls.close()
    assert fetched == 1
    assert store.host.usage().writing == 0


def put(store: Store, *numbers: int) -> None:
    keys = [key(n) for n in numbers]
    store.host.reserve("e", [(k, PAGE) for k in keys])
    assert all(store.host.commit("e", keys))


async def test_what_may_take_only_free_room_evicts_nothing() -> None:
    _, store, links, pulls = make(pages=4)
    put(store, 1, 2, 3)
    links.answers = {ONE.address: base.Outcome.LOADED}
    asked = replace(pull([3, 4, 5], ONE, hold=0), free_only=True)
    result = await pulls.pull(asked)
    assert result.outcomes == {
        key(3): Outcome.PRESENT,
        key(4): Outcome.STORED,
        key(5): Outcome.NO_ROOM,
    }
    assert {key(n) for n in (1, 2, 3, 4)} == set(store.host.keys())


async def test_what_another_writes_in_vain_is_fetched_after_all() -> None:
    _, store, links, pulls = make()
    links.answers = {ONE.address: base.Outcome.FAILED, OTHER.address: base.Outcome.LOADED}
    in_vain = asyncio.create_task(pulls.pull(pull([1], ONE)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert store.host.usage().writing == PAGE
    result = await pulls.pull(pull([1, 2], OTHER))
    assert result.outcomes == {key(1): Outcome.STORED, key(2): Outcome.STORED}
    assert (await in_vain).outcomes == {key(1): Outcome.FAILED}


async def test_what_another_brings_is_here_though_one_source_had_it_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, store, links, pulls = make()
    links.answers = {ONE.address: base.Outcome.MISSING, OTHER.address: base.Outcome.MISSING}
    reserve = store.host.reserve

    def after_an_engine(owner: str, requests: Sequence[tuple[Key, int]], **more: bool) -> list[int]:
        if OTHER.address in owner:
            put(store, 1)
        return reserve(owner, requests, **more)

    monkeypatch.setattr(store.host, "reserve", after_an_engine)
    result = await pulls.pull(pull([1, 2], ONE, OTHER))
    assert result.outcomes == {key(1): Outcome.PRESENT, key(2): Outcome.MISSING}


@pytest.mark.parametrize("order", [(ONE, OTHER), (OTHER, ONE)])
async def test_only_what_no_source_has_is_missing(order: tuple[PullSource, ...]) -> None:
    _, _, links, pulls = make()
    links.answers = {ONE.address: base.Outcome.FAILED, OTHER.address: base.Outcome.MISSING}
    assert (await pulls.pull(pull([1], *order))).outcomes == {key(1): Outcome.FAILED}
    assert (await pulls.pull(pull([1], OTHER))).outcomes == {key(1): Outcome.MISSING}


async def test_who_was_not_asked_in_time_may_have_it() -> None:
    clock, _, links, pulls = make()
    links.answers = {ONE.address: base.Outcome.MISSING}
    links.between = lambda: clock.advance(601)
    result = await pulls.pull(pull([1], ONE, OTHER))
    assert result.outcomes == {key(1): Outcome.FAILED}
    assert "before the deadline" in result.detail


def held(store: Store) -> bool:
    """Whether nobody could evict the one chunk that is there."""
    store.host.expire()
    return store.host.usage().leases > 0


async def test_a_hold_is_as_long_as_asked_for() -> None:
    clock, store, links, pulls = make()
    links.answers = {ONE.address: base.Outcome.LOADED}
    await pulls.pull(pull([1], ONE, hold=2.0))
    pulls.told("t")
    clock.advance(1)
    assert held(store)
    clock.advance(2)
    assert not held(store)


async def test_a_hold_counts_from_when_the_server_knows_of_it() -> None:
    clock, store, links, pulls = make()
    links.answers = {ONE.address: base.Outcome.LOADED}
    await pulls.pull(pull([1], ONE, hold=2.0))
    for _ in range(3):
        clock.advance(50)
        assert held(store)
        pulls.keep("t")
    pulls.told("t")
    clock.advance(1.9)
    assert held(store)
    clock.advance(0.2)
    assert not held(store)


async def test_what_the_server_is_never_told_of_is_given_up() -> None:
    _, store, links, pulls = make()
    links.answers = {ONE.address: base.Outcome.LOADED}
    await pulls.pull(pull([1], ONE, hold=2.0))
    assert held(store)
    pulls.release("t")
    assert not held(store)
    pulls.told("t")  # too late
    assert not held(store)


async def test_what_nobody_wants_any_more_is_not_held() -> None:
    _, store, links, pulls = make(pages=8)
    links.answers = {ONE.address: base.Outcome.LOADED}
    links.between = lambda: running.cancel()
    running = asyncio.create_task(pulls.pull(pull([1, 2, 3], ONE)))
    with pytest.raises(asyncio.CancelledError):
        await running
    await pulls.close()
    assert store.host.usage().chunks == 2
    assert store.host.usage().leases == 0


async def test_a_node_that_is_drained_gives_up_what_is_under_way() -> None:
    _, store, links, pulls = make(pages=8)  # two chunks a batch
    links.answers = {ONE.address: base.Outcome.LOADED, OTHER.address: base.Outcome.LOADED}
    asked = iter(["one batch", "another"])

    def between() -> None:
        store.draining = next(asked) == "another"

    links.between = between
    result = await pulls.pull(pull([1, 2, 3, 4, 5, 6], ONE, OTHER))
    arrived = dict.fromkeys(map(key, (1, 2)), Outcome.STORED)
    assert result.outcomes == arrived | dict.fromkeys(map(key, (3, 4, 5, 6)), Outcome.NO_ROOM)
    assert "drained" in result.detail
    usage = store.host.usage()
    assert (usage.chunks, usage.used) == (2, 2 * PAGE)
    assert next(asked, None) is None  # of the third batch nobody was asked
