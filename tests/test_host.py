"""The host tier's rules one by one, then a machine that tries to break them all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstrata.host import NO_ROOM, PRESENT, Chunk, HostTier, State, Used
from kvstrata.keys import Key, make_key
from kvstrata.policies import Lru
from kvstrata.slots import ALIGNMENT, Slots

PAGE = ALIGNMENT


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def key(n: int) -> Key:
    return make_key(b"n" * 16, 0, n.to_bytes(4, "big"))


def make(pages: int, clock: Clock | None = None, **kwargs: object) -> HostTier:
    return HostTier(Slots(pages * PAGE), Lru(pages * PAGE), clock or Clock(), **kwargs)  # type: ignore[arg-type]


def put(host: HostTier, *numbers: int, owner: str = "a") -> list[int]:
    offsets = host.reserve(owner, [(key(n), PAGE) for n in numbers])
    assert all(host.commit(owner, [key(n) for n in numbers]))
    return offsets


def test_nothing_is_visible_before_commit() -> None:
    host = make(4)
    assert host.reserve("a", [(key(1), PAGE)]) == [0]
    assert host.find([key(1)]) == [State.WRITING]
    assert host.lease("b", 1, [key(1)], 10) == [None]
    assert host.commit("a", [key(1)]) == [True]
    assert host.find([key(1)]) == [State.READY]
    (chunk,) = host.lease("b", 1, [key(1)], 10)
    assert chunk is not None
    assert (chunk.offset, chunk.nbytes) == (0, PAGE)


def test_reserve_of_what_is_here_or_being_written_is_present() -> None:
    host = make(4)
    put(host, 1)
    host.reserve("a", [(key(2), PAGE)])
    assert host.reserve("b", [(key(1), PAGE), (key(2), PAGE), (key(3), PAGE)]) == [
        PRESENT,
        PRESENT,
        2 * PAGE,
    ]


def test_the_same_key_twice_in_one_reserve_gets_one_slot() -> None:
    host = make(4)
    assert host.reserve("a", [(key(1), PAGE), (key(1), PAGE)]) == [0, PRESENT]
    assert host.usage().used == PAGE


def test_partial_success_when_only_some_fit() -> None:
    host = make(2)
    assert host.reserve("a", [(key(n), PAGE) for n in range(3)]) == [0, PAGE, NO_ROOM]


def test_eviction_takes_the_least_recent_and_a_chains_tail_first() -> None:
    gone: list[Key] = []
    host = make(4, on_gone=lambda chunks: gone.extend(c.key for c in chunks))
    put(host, 1, 2, 3, 4)
    host.lease("a", 1, [key(1), key(2)], 10)
    host.release("a", [1])
    put(host, 5)
    assert gone == [key(4)]
    put(host, 6)
    assert gone == [key(4), key(3)]


def test_a_leased_chunk_is_never_evicted() -> None:
    host = make(2)
    put(host, 1, 2)
    host.lease("a", 1, [key(1)], 10)
    assert host.reserve("b", [(key(3), PAGE), (key(4), PAGE)]) == [PAGE, NO_ROOM]
    assert host.find([key(1), key(2)]) == [State.READY, State.ABSENT]


def test_a_lapsed_lease_no_longer_protects() -> None:
    clock = Clock()
    host = make(1, clock)
    put(host, 1)
    host.lease("a", 1, [key(1)], 10)
    clock.now += 11
    assert host.renew("a", [1], 10) == [1]
    assert host.reserve("b", [(key(2), PAGE)]) == [0]
    assert host.begin("a", 1, [key(1)]) is False


def test_renewing_keeps_a_lease() -> None:
    clock = Clock()
    host = make(1, clock)
    put(host, 1)
    host.lease("a", 1, [key(1)], 10)
    clock.now += 9
    assert host.renew("a", [1], 10) == []
    clock.now += 9
    host.expire()
    assert host.reserve("b", [(key(2), PAGE)]) == [NO_ROOM]


def test_a_slot_being_read_outlives_its_lease() -> None:
    clock = Clock()
    host = make(1, clock)
    put(host, 1)
    host.lease("a", 1, [key(1)], 10)
    assert host.begin("a", 1, [key(1)])
    clock.now += 100
    host.expire()
    assert host.reserve("b", [(key(2), PAGE)]) == [NO_ROOM]
    host.end("a", 1, [key(1)])
    assert host.reserve("b", [(key(2), PAGE)]) == [0]


def test_an_overdue_write_is_quarantined_until_its_owner_speaks() -> None:
    clock = Clock()
    gone: list[Key] = []
    host = make(1, clock, reserve_ttl=60, on_gone=lambda cs: gone.extend(c.key for c in cs))
    host.reserve("a", [(key(1), PAGE)])
    clock.now += 61
    host.expire()
    assert gone == [key(1)]
    assert host.find([key(1)]) == [State.ABSENT]
    assert host.usage().quarantined == PAGE
    assert host.reserve("b", [(key(2), PAGE)]) == [NO_ROOM]
    host.abort("a", [key(1)])
    assert host.reserve("b", [(key(2), PAGE)]) == [0]


def test_a_late_commit_of_an_absent_key_is_good_after_all() -> None:
    clock = Clock()
    host = make(2, clock, reserve_ttl=60)
    host.reserve("a", [(key(1), PAGE)])
    clock.now += 61
    host.expire()
    assert host.commit("a", [key(1)]) == [True]
    assert host.find([key(1)]) == [State.READY]
    assert host.usage().quarantined == 0


def test_a_late_commit_of_a_key_written_by_another_frees_the_slot() -> None:
    clock = Clock()
    host = make(2, clock, reserve_ttl=60)
    host.reserve("a", [(key(1), PAGE)])
    clock.now += 61
    host.expire()
    assert host.reserve("b", [(key(1), PAGE)]) == [PAGE]
    assert host.commit("a", [key(1)]) == [False]
    assert host.commit("b", [key(1)]) == [True]
    assert host.usage().used == PAGE


def test_forgetting_an_owner_frees_all_it_had() -> None:
    host = make(4)
    put(host, 1)
    host.reserve("a", [(key(2), PAGE)])
    host.grant("a", PAGE, 1)
    host.lease("a", 7, [key(1)], 1000)
    host.begin("a", 7, [key(1)])
    host.forget("a")
    usage = host.usage()
    assert (usage.used, usage.ready, usage.leases) == (PAGE, PAGE, 0)
    assert host.drop() == 1


def test_a_granted_slot_is_named_once() -> None:
    host = make(4)
    (offset,) = host.grant("a", PAGE, 1)
    assert host.use("b", [(offset, key(1))]) == [Used.UNKNOWN]
    assert host.use("a", [(offset, key(1))]) == [Used.OWNED]
    assert host.use("a", [(offset, key(2))]) == [Used.UNKNOWN]
    assert host.commit("a", [key(1)]) == [True]


def test_a_duplicate_keeps_its_slot_until_the_owner_is_done() -> None:
    host = make(2)
    put(host, 1)
    (offset,) = host.grant("b", PAGE, 1)
    assert host.use("b", [(offset, key(1))]) == [Used.DUPLICATE]
    assert host.usage().quarantined == PAGE
    assert host.commit("b", [key(1)]) == [True]
    assert host.usage().used == PAGE
    assert host.get(key(1)).offset != offset  # type: ignore[union-attr]


def test_ready_and_gone_come_in_batches() -> None:
    ready: list[list[Key]] = []
    host = make(4, on_ready=lambda chunks: ready.append([c.key for c in chunks]))
    put(host, 1, 2, 3)
    assert ready == [[key(1), key(2), key(3)]]


def test_chunks_of_several_sizes_evict_until_a_hole_is_large_enough() -> None:
    host = make(4)
    for n in range(4):
        put(host, n)
    host.lease("a", 1, [key(1)], 10)
    # Page 1 is leased: pages 0 and 2 go first, then 3 to make two in a row.
    assert host.reserve("a", [(key(9), 2 * PAGE)]) == [2 * PAGE]
    assert host.commit("a", [key(9)]) == [True]
    assert host.usage().ready == 3 * PAGE


def test_reserving_again_after_an_overdue_write_gets_the_same_slot() -> None:
    clock = Clock()
    host = make(4, clock, reserve_ttl=60)
    host.reserve("a", [(key(1), PAGE)])
    clock.now += 61
    host.expire()
    assert host.reserve("a", [(key(1), PAGE)]) == [0]
    assert host.commit("a", [key(1)]) == [True]
    assert host.usage().used == PAGE


def test_a_chunk_larger_than_the_region_has_no_room_and_nothing_breaks() -> None:
    host = make(2)
    put(host, 1)
    assert host.reserve("a", [(key(9), 5 * PAGE)]) == [NO_ROOM]
    assert host.reserve("a", [(key(2), PAGE)]) != [NO_ROOM]


OWNERS = st.sampled_from(["a", "b", "c"])
KEYS = st.lists(st.integers(0, 11).map(key), min_size=1, max_size=4, unique=True)
SIZES = st.sampled_from([100, PAGE, 2 * PAGE])


class HostMachine(RuleBasedStateMachine):
    """A model that only knows who may touch which bytes, beside the real thing."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.visible: dict[Key, Chunk] = {}
        self.host = make(8, self.clock, reserve_ttl=50, on_ready=self._ready, on_gone=self._gone)
        # (owner, key) -> offset of a slot its owner may be writing to, and granted slots
        self.writing: dict[tuple[str, Key], tuple[int, int]] = {}
        self.granted: dict[tuple[str, int], int] = {}
        # (owner, lease, key) -> (chunk, valid until), and reads in flight
        self.leased: dict[tuple[str, int, Key], tuple[Chunk, float]] = {}
        self.reading: list[tuple[str, int, Key, Chunk]] = []

    def _ready(self, chunks: Sequence[Chunk]) -> None:
        self.visible |= {c.key: c for c in chunks}

    def _gone(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.visible.pop(chunk.key, None)

    @rule(owner=OWNERS, keys=KEYS, nbytes=SIZES)
    def reserve(self, owner: str, keys: list[Key], nbytes: int) -> None:
        offsets = self.host.reserve(owner, [(k, nbytes) for k in keys])
        for k, offset in zip(keys, offsets, strict=True):
            if offset >= 0:
                # An overdue write that is resumed keeps its slot, whatever its size was.
                before = self.writing.get((owner, k))
                assert before is None or before[0] == offset
                self.writing[owner, k] = before or (offset, nbytes)

    @rule(owner=OWNERS, nbytes=SIZES, count=st.integers(0, 2))
    def grant(self, owner: str, nbytes: int, count: int) -> None:
        for offset in self.host.grant(owner, nbytes, count):
            self.granted[owner, offset] = nbytes

    @rule(data=st.data(), owner=OWNERS, k=st.integers(0, 11).map(key))
    def use(self, data: st.DataObject, owner: str, k: Key) -> None:
        mine = sorted(offset for o, offset in self.granted if o == owner)
        if not mine:
            return
        offset = data.draw(st.sampled_from(mine))
        (used,) = self.host.use(owner, [(offset, k)])
        if used is not Used.UNKNOWN:
            self.writing[owner, k] = (offset, self.granted.pop((owner, offset)))

    @rule(owner=OWNERS, keys=KEYS)
    def commit(self, owner: str, keys: list[Key]) -> None:
        answers = self.host.commit(owner, keys)
        for k, ready in zip(keys, answers, strict=True):
            self.writing.pop((owner, k), None)
            assert ready == (k in self.visible)

    @rule(owner=OWNERS, keys=KEYS)
    def abort(self, owner: str, keys: list[Key]) -> None:
        self.host.abort(owner, keys)
        for k in keys:
            self.writing.pop((owner, k), None)

    @rule(owner=OWNERS, lease=st.integers(1, 2), keys=KEYS, ttl=st.sampled_from([5.0, 60.0]))
    def lease(self, owner: str, lease: int, keys: list[Key], ttl: float) -> None:
        found = self.host.lease(owner, lease, keys, ttl)
        until = self.clock() + ttl
        for name in [n for n in self.leased if n[:2] == (owner, lease)]:
            chunk, before = self.leased[name]
            self.leased[name] = (chunk, max(before, until) if before >= self.clock() else before)
        for k, chunk in zip(keys, found, strict=True):
            assert (chunk is not None) == (k in self.visible)
            if chunk is not None:
                self.leased[owner, lease, k] = (chunk, until)

    @rule(owner=OWNERS, lease=st.integers(1, 2))
    def release(self, owner: str, lease: int) -> None:
        self.host.release(owner, [lease])
        for name in [n for n in self.leased if n[:2] == (owner, lease)]:
            del self.leased[name]

    @rule(owner=OWNERS, lease=st.integers(1, 2), keys=KEYS)
    def begin(self, owner: str, lease: int, keys: list[Key]) -> None:
        if self.host.begin(owner, lease, keys):
            for k in keys:
                chunk = self.host.get(k)
                assert chunk is not None
                self.reading.append((owner, lease, k, chunk))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.reading:
            i = data.draw(st.integers(0, len(self.reading) - 1))
            owner, lease, k, _ = self.reading.pop(i)
            self.host.end(owner, lease, [k])

    @rule(seconds=st.sampled_from([1.0, 10.0, 51.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.host.expire()

    @rule()
    def drop(self) -> None:
        self.host.drop()

    @rule(owner=OWNERS)
    def forget(self, owner: str) -> None:
        self.host.forget(owner)
        self.writing = {n: v for n, v in self.writing.items() if n[0] != owner}
        self.granted = {n: v for n, v in self.granted.items() if n[0] != owner}
        self.leased = {n: v for n, v in self.leased.items() if n[0] != owner}
        self.reading = [r for r in self.reading if r[0] != owner]

    @invariant()
    def no_slot_is_in_two_hands(self) -> None:
        ranges = {c.offset: self.host.slots.rounded(c.nbytes) for c in self.visible.values()}
        hands = [(o, self.host.slots.rounded(n)) for o, n in self.writing.values()]
        hands += [(o, self.host.slots.rounded(n)) for (_, o), n in self.granted.items()]
        read = {c.offset: self.host.slots.rounded(c.nbytes) for *_, c in self.reading}
        taken = sorted([*(ranges | read).items(), *hands])
        for (start, size), (following, _) in pairwise(taken):
            assert start + size <= following

    @invariant()
    def a_leased_chunk_stays(self) -> None:
        for (_, _, k), (chunk, until) in self.leased.items():
            if until >= self.clock():
                assert self.visible.get(k) is chunk

    @invariant()
    def bytes_add_up(self) -> None:
        usage = self.host.usage()
        assert (
            usage.ready + usage.writing + usage.granted + usage.quarantined
            == usage.used
            <= usage.capacity
        )
        assert usage.chunks == len(self.visible) == len(self.host.keys())


HostMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostMachine = HostMachine.TestCase
TestHostMachine = pytest.mark.timeout(120)(TestHostMachine)
