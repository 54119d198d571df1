"""The host tier's rules one by one, then a machine that tries to break them all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, islice, pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata import eviction
from kvstrata.chains import Chains
from kvstrata.chunks import is_idle
from kvstrata.host import NO_ROOM, PRESENT, Chunk, HostTier, State, Used
from kvstrata.keys import Key, make_key
from kvstrata.policies import Arc, Lru, Policy, S3Fifo
from kvstrata.slots import ALIGNMENT, Slots

PAGE = ALIGNMENT


COUNTED = {make_key(b"n" * 16, 0, b"x")[:20]: PAGE}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def key(n: int) -> Key:
    return make_key(b"n" * 16, 0, n.to_bytes(4, "big"))


def make(
    pages: int,
    clock: Clock | None = None,
    policy: type[Policy] = Lru,
    slab: int | None = None,
    **kwargs: object,
) -> HostTier:
    slots = Slots(pages * PAGE, slab and slab * PAGE)
    return HostTier(slots, policy(pages * PAGE), clock or Clock(), **kwargs)  # type: ignore[arg-type]


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


def test_a_repeated_key_that_does_not_fit_has_no_room_twice() -> None:
    host = make(1)
    assert host.reserve("a", [(key(1), 4 * PAGE), (key(1), 4 * PAGE)]) == [NO_ROOM, NO_ROOM]


def test_partial_success_when_only_some_fit() -> None:
    host = make(2)
    assert host.reserve("a", [(key(n), PAGE) for n in range(3)]) == [0, PAGE, NO_ROOM]


def test_what_may_not_evict_gets_what_is_free() -> None:
    host = make(3)
    put(host, 1, 2)
    asked = [(key(n), PAGE) for n in (2, 3, 4)]
    assert host.reserve("a", asked, evict=False) == [PRESENT, 2 * PAGE, NO_ROOM]
    assert host.find([key(1), key(2)]) == [State.READY] * 2


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


def test_renewing_for_ever_takes_no_more_memory() -> None:
    clock = Clock()
    host = make(1, clock)
    put(host, 1)
    host.lease("a", 1, [key(1)], 3600)
    for _ in range(1000):
        clock.now += 0.01
        host.renew("a", [1], 3600)
        host.lease("a", 2, [], 3600)
    assert len(host._leases._heap) == 2
    clock.now += 3601
    host.expire()
    assert (host.usage().leases, len(host._leases._heap)) == (0, 0)


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


def test_a_write_that_nobody_waits_for_is_absent_and_keeps_its_slot() -> None:
    gone: list[Chunk] = []
    host = make(4, on_gone=gone.extend)
    offsets = host.reserve("a", [(key(1), PAGE), (key(2), PAGE)])
    host.disown("a", [key(1), key(9)])
    host.disown("b", [key(2)])
    assert host.find([key(1), key(2)]) == [State.ABSENT, State.WRITING]
    assert [chunk.key for chunk in gone] == [key(1)]
    assert host.usage().quarantined == PAGE
    assert host.expired_writes == 0
    assert offsets[0] not in host.reserve("b", [(key(n), PAGE) for n in (1, 3, 4)])
    assert host.commit("a", [key(1)]) == [False]
    assert host.usage().quarantined == 0


def test_writes_that_are_done_are_not_looked_after_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstrata.overdue._MOST_WATCHED", 8)
    clock = Clock()
    host = make(8, clock, reserve_ttl=50)
    host.reserve("slow", [(key(1), PAGE), (key(2), PAGE)])
    for n in range(10, 200):
        put(host, n)
        host.drop()
    watched = host._overdue
    assert watched._watched == sum(len(chunks) for *_, chunks in watched._heap) <= 12
    clock.now += 51
    host.expire()
    assert host.expired_writes == 2
    assert host.find([key(1), key(2)]) == [State.ABSENT] * 2
    assert watched._watched == 0


def test_the_next_victims_are_those_that_go_next() -> None:
    host = make(8)
    put(host, 1, 2, 3, 4)
    put(host, 5, 6, 7, 8)
    host.lease("b", 1, [key(3)], 10)
    told = [chunk.key for chunk in host.next_victims(4 * PAGE)]
    assert told == [key(n) for n in (4, 2, 1, 8)]
    assert host.next_victims(0) == []
    assert len(host.next_victims(100 * PAGE)) == 7
    host.reserve("a", [(key(n), PAGE) for n in range(20, 24)])
    assert host.find([key(n) for n in (4, 2, 1, 8, 7)]) == [State.ABSENT] * 4 + [State.READY]


def test_the_coldest_of_some_go_until_so_many_bytes_are_gone() -> None:
    host = make(8)
    put(host, 1, 2, 3, 4)
    put(host, 5, 6, 7, 8)
    host.lease("b", 1, [key(3)], 10)
    assert [*chain(*host.order({bytes(20)}, 9))] == []
    assert next(host.order(COUNTED, 2)) == [key(4), key(2)]
    odd = [k for k in chain(*host.order(COUNTED, 9)) if k[-1] % 2]
    assert odd == [key(n) for n in (1, 7, 5)]
    assert host.drop_coldest(odd, 0) == []
    assert [c.key for c in host.drop_coldest(odd, PAGE + 1)] == [key(1), key(7)]
    assert [c.key for c in host.drop_coldest(odd, 100 * PAGE)] == [key(5)]
    assert sorted(host.keys()) == [key(n) for n in (2, 3, 4, 6, 8)]


def test_those_that_are_not_among_the_coldest_come_by_when_they_were_used() -> None:
    host = make(1000)
    other = [make_key(b"o" * 16, 0, n.to_bytes(4, "big")) for n in range(300)]
    for start in range(0, 300, 3):
        host.reserve("a", [(k, PAGE) for k in other[start : start + 3]])
        host.commit("a", other[start : start + 3])
        put(host, start)
    for n in (9, 3, 6):
        host.lease("b", n, [key(n)], 10)
        host.release("b", [n])
    mine = {key(0)[:20]}
    # All others were leased by turns, so that every part has some of them.
    host.lease("b", 1, [key(n) for n in range(15, 300, 3)], 10)
    parts = host.order(mine, 2)
    assert next(parts) == []
    empty = list(islice(parts, 200))
    assert set(map(len, empty)) == {0}
    host.lease("b", 2, [key(3)], 10)
    host.release("b", [2])  # in use meanwhile
    assert list(chain(*parts)) == [key(n) for n in (0, 12, 9, 6)]


def test_as_long_as_what_is_coldest_goes_it_is_looked_for_there() -> None:
    host = make(100)
    put(host, *range(40))
    gone: list[Key] = []
    for part in host.order(COUNTED, 8):
        gone += [chunk.key for chunk in host.drop_coldest(part, 100 * PAGE)]
    assert gone == [key(n) for n in reversed(range(40))]
    assert list(chain(*host.order(COUNTED, 8))) == []


def test_of_the_coldest_a_chain_loses_its_tail_first() -> None:
    host = make(8)
    put(host, 1)
    put(host, 2)
    put(host, 3)
    host.lease("b", 1, [key(1), key(2), key(3)], 10, chain=True)
    host.release("b", [1])
    put(host, 4)
    assert next(host.order(COUNTED, 1)) == [key(3)]
    # Asked for its head alone, it gives up what would be of no use without that.
    assert [c.key for c in host.drop_coldest([key(1)], PAGE)] == [key(3)]
    host.lease("b", 2, [key(2)], 10)
    assert host.drop_coldest([key(1), key(2)], PAGE) == []


def test_what_a_chunk_extends_is_what_a_lookup_told() -> None:
    host = make(4)
    host.lease("b", 1, [key(1), key(2)], 10, chain=True)
    assert [host.parent_of(key(n)) for n in (1, 2, 3)] == [None, key(1), None]


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


def test_making_room_for_a_chain_spares_what_is_here_of_it() -> None:
    host = make(4)
    put(host, 1)
    put(host, 2)
    put(host, 3, 4)
    assert host.reserve("a", [(key(1), PAGE), (key(5), PAGE)]) == [PRESENT, PAGE]
    assert host.find([key(1), key(2)]) == [State.READY, State.ABSENT]


# ---------------------------------------------------------------- chains


class HeadFirst(Lru):
    """As wrong as a policy can be: first in, first out, heads before tails."""

    def insert(self, keys: Sequence[Key], nbytes: int, after: Sequence[Key] = ()) -> None:
        super().insert(keys[::-1], nbytes)

    def touch(self, keys: Sequence[Key]) -> None:
        return None


def ask(host: HostTier, *numbers: int, lease: int = 1) -> list[bool]:
    """Look a prefix up as a request does, and let go."""
    found = host.lease("a", lease, [key(n) for n in numbers], 10, chain=True)
    host.release("a", [lease])
    return [chunk is not None for chunk in found]


def evictions(host: HostTier, count: int) -> list[int]:
    """Numbers of the chunks that make way for `count` others, one by one."""
    order = []
    for n in range(100, 100 + count):
        before = set(host.keys())
        put(host, n)
        order += [int.from_bytes(k[20:], "big") for k in before - set(host.keys())]
    return order


@pytest.mark.parametrize("policy", [Lru, Arc, S3Fifo, HeadFirst])
def test_a_tail_that_came_later_goes_before_its_head(policy: type[Policy]) -> None:
    host = make(6, policy=policy)
    ask(host, 1, 2)
    put(host, 1, 2)
    assert ask(host, 1, 2, 3, 4) == [True, True, False, False]
    put(host, 3, 4)
    ask(host, 1, 2, 5)
    put(host, 5)
    put(host, 50)
    gone = [n for n in evictions(host, 8) if n < 10]
    assert len(gone) == 5 or policy in (Arc, S3Fifo), "those keep what was used again"
    where = {n: i for i, n in enumerate(gone)}
    for head, tail in ((1, 2), (2, 3), (3, 4), (2, 5)):
        if head in where:
            assert where[tail] < where[head]


def test_an_lru_takes_a_chain_that_grew_as_a_whole() -> None:
    host = make(5)
    ask(host, 1, 2, 3, 4)
    put(host, 1, 2)
    put(host, 50)
    put(host, 3, 4)
    assert evictions(host, 5)[:5] == [50, 4, 3, 2, 1]


def test_what_comes_before_a_prefix_asked_for_is_used_too() -> None:
    host = make(5)
    ask(host, 1, 2, 3)
    put(host, 1, 2, 3)
    put(host, 50, 51)
    assert ask(host, 3) == [True], "the engine has 1 and 2 itself"
    assert evictions(host, 3)[:3] == [51, 50, 3]


def test_a_chunk_whose_extension_is_leased_or_being_written_stays() -> None:
    host = make(3, policy=HeadFirst)
    ask(host, 1, 2, 3)
    put(host, 1, 2)
    host.lease("b", 7, [key(2)], 1000)
    assert host.reserve("a", [(key(3), PAGE), (key(9), PAGE)]) == [2 * PAGE, NO_ROOM]
    host.release("b", [7])
    assert host.reserve("a", [(key(9), PAGE)]) == [NO_ROOM], "3 is being written"
    host.abort("a", [key(3)])
    put(host, 8)
    assert host.reserve("a", [(key(9), PAGE)]) != [NO_ROOM]
    assert host.find([key(1), key(2)]) == [State.READY, State.ABSENT]


def test_an_engine_that_tells_of_a_circle_harms_nobody() -> None:
    host = make(3, policy=HeadFirst)
    ask(host, 1, 2, 3)
    ask(host, 3, 1)
    ask(host, 2, 2)
    put(host, 1, 2, 3)
    put(host, 4, 5, 6)
    assert host.usage().chunks == 3


def test_links_of_chunks_that_never_came_are_forgotten() -> None:
    chains = Chains()
    for n in range(0, 200_000, 1000):
        chains.learn([key(n + i) for i in range(1000)])
        chains.prune({key(1): None, key(2): None}, 2)
    assert len(chains) < 100_000
    assert chains.before(key(2), {key(1)}) == [key(1)]
    assert chains.extensions(key(1), {key(2)}) == [key(2)]


# ---------------------------------------------------------------- several sizes over slabs


def put_of(host: HostTier, pages: int, *numbers: int) -> list[int]:
    offsets = host.reserve("a", [(key(n), pages * PAGE) for n in numbers])
    host.commit("a", [key(n) for n, o in zip(numbers, offsets, strict=True) if o >= 0])
    return offsets


def test_a_size_without_a_slab_gets_the_one_whose_best_chunk_is_worst() -> None:
    host = make(8, slab=4)
    put_of(host, 1, 1, 2, 3, 4)
    put_of(host, 1, 5, 6, 7, 8)
    for n in (5, 6, 1):  # 5 and 6 were used; then 1, so that the first slab's best is younger
        ask(host, n)
    assert put_of(host, 2, 20) == [4 * PAGE]
    assert host.find([key(n) for n in range(1, 9)]) == [State.READY] * 4 + [State.ABSENT] * 4
    assert host.evicted == 4
    assert put_of(host, 2, 21) == [6 * PAGE], "the slab has room for it"
    assert host.evicted == 4


def test_a_size_with_idle_chunks_of_its_own_takes_those_first() -> None:
    host = make(8, slab=4)
    put_of(host, 1, 1, 2, 3, 4)
    put_of(host, 2, 20, 21)
    put_of(host, 2, 22)
    assert host.find([key(n) for n in (1, 2, 3, 4, 20, 21, 22)]) == [
        *[State.ABSENT] * 4,
        *[State.READY] * 3,
    ], "the older slab goes as a whole: all of it is older than any of the others"
    host = make(8, slab=4)
    put_of(host, 1, 1, 2, 3, 4)
    put_of(host, 2, 20, 21)
    ask(host, 4)
    put_of(host, 2, 22)
    assert host.find([key(n) for n in (1, 2, 3, 4, 20, 21, 22)]) == [
        *[State.READY] * 5,
        State.ABSENT,
        State.READY,
    ]


def test_a_slab_with_a_leased_chunk_is_no_use_and_loses_nothing() -> None:
    host = make(8, slab=4)
    put_of(host, 1, 1, 2, 3, 4)
    put_of(host, 1, 5, 6, 7, 8)
    host.lease("b", 1, [key(1), key(8)], 1000)
    assert put_of(host, 2, 20) == [NO_ROOM]
    assert host.evicted == 0
    host.release("b", [1])
    assert put_of(host, 2, 20) != [NO_ROOM]


def test_a_slab_given_up_takes_what_extends_its_chunks_along() -> None:
    host = make(8, slab=4)
    ask(host, 1, 2, 3, 4, 5)
    put_of(host, 1, 1, 2, 3, 4)
    put_of(host, 1, 5, 6, 7, 8)
    host.lease("b", 1, [key(6)], 1000)
    assert put_of(host, 2, 20, 21) == [0, 2 * PAGE]
    assert host.find([key(n) for n in (5, 6, 7, 8)]) == [State.ABSENT, *[State.READY] * 3]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if eight chunks were many."""
    monkeypatch.setattr(eviction, "_PATIENCE", 8)


@pytest.mark.usefixtures("impatient")
def test_a_walk_that_gets_long_takes_its_own_size_wherever_it_is() -> None:
    host = make(64, slab=4)
    put_of(host, 2, 1, 2)
    put_of(host, 1, *range(10, 70))
    mixed = list(range(10, 70))
    random.Random(0).shuffle(mixed)
    for n in mixed[:14]:
        ask(host, n)
    ask(host, 1)
    ask(host, 2)
    for n in mixed[14:]:
        ask(host, n)
    put_of(host, 2, 3)
    assert host.evicted == 1
    assert host.find([key(1), key(2)]) == [State.ABSENT, State.READY]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("leased", [0, 5])
def test_a_walk_that_gets_long_empties_slabs_that_came_up_in_part(leased: int) -> None:
    host = make(64, slab=4)
    put_of(host, 1, *range(10, 74))
    mixed = list(range(10, 74))
    random.Random(0).shuffle(mixed)
    for n in mixed:
        ask(host, n)
    keys = [key(n) for n in mixed[:leased]]
    host.lease("b", 1, keys, 1000)
    assert NO_ROOM not in put_of(host, 2, *range(4))
    assert host.evicted == 8, "two slabs, no more"
    assert host.find(keys) == [State.READY] * leased


def test_models_of_many_sizes_share_a_region_for_long() -> None:
    host = make(64, slab=8)
    rng = random.Random(1)
    for n in range(600):
        pages = rng.choice([1, 2, 3, 5, 12])
        assert NO_ROOM not in put_of(host, pages, *range(10 * n, 10 * n + rng.randint(1, 4)))
    usage = host.usage()
    assert usage.used == usage.ready > 0.7 * usage.capacity


OWNERS = st.sampled_from(["a", "b", "c"])
KEYS = st.lists(st.integers(0, 11).map(key), min_size=1, max_size=4, unique=True)
SIZES = st.sampled_from([100, PAGE, 2 * PAGE, 3 * PAGE])


class HostMachine(RuleBasedStateMachine):
    """A model that only knows who may touch which bytes, beside the real thing."""

    @initialize(
        policy=st.sampled_from([Lru, Arc, S3Fifo, HeadFirst]),
        slab=st.sampled_from([None, 2, 4]),
        patience=st.sampled_from([1, 3, 1000]),
    )
    def open(self, policy: type[Policy], slab: int | None, patience: int) -> None:
        self.patience, eviction._PATIENCE = eviction._PATIENCE, patience
        self.clock = Clock()
        self.visible: dict[Key, Chunk] = {}
        self.parent: dict[Key, Key] = {}
        self.making_room = False
        self.host = make(
            12,
            self.clock,
            policy,
            slab,
            reserve_ttl=50,
            on_ready=self._ready,
            on_gone=self._gone,
        )
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
        if self.making_room:
            # What is evicted is extended by nothing that stays.
            gone = {chunk.key for chunk in chunks if chunk.state is State.READY}
            assert gone.isdisjoint(self.parent[k] for k in self.visible if k in self.parent)

    @rule(owner=OWNERS, keys=KEYS, nbytes=SIZES)
    def reserve(self, owner: str, keys: list[Key], nbytes: int) -> None:
        self.making_room = True
        offsets = self.host.reserve(owner, [(k, nbytes) for k in keys])
        self.making_room = False
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

    @rule(owner=OWNERS, keys=KEYS)
    def disown(self, owner: str, keys: list[Key]) -> None:
        # Who wrote may still be at it: the slots stay in its hands.
        self.host.disown(owner, keys)

    @rule(pages=st.integers(0, 14))
    def next_victims(self, pages: int) -> None:
        before = self.host.usage()
        victims = self.host.next_victims(pages * PAGE)
        assert self.host.usage() == before
        assert all(self.visible[c.key] is c and is_idle(c) for c in victims)
        assert len({c.key for c in victims}) == len(victims)
        size = sum(self.host.slots.rounded(c.nbytes) for c in victims)
        assert size >= pages * PAGE or size == before.ready - sum(
            self.host.slots.rounded(c.nbytes) for c in self.visible.values() if c not in victims
        )

    @rule(pages=st.integers(0, 6), keys=KEYS)
    def drop_coldest(self, pages: int, keys: list[Key]) -> None:
        order = list(dict.fromkeys(chain(*self.host.order(COUNTED, 3))))
        assert sorted(order) == sorted(k for k, c in self.visible.items() if is_idle(c))
        some = [k for k in order if k in keys]
        before, self.making_room = dict(self.visible), True
        gone = self.host.drop_coldest(some, pages * PAGE)
        self.making_room = False
        assert {c.key: c for c in gone} == {
            k: c for k, c in before.items() if k not in self.visible
        }
        sizes = [c.nbytes for c in gone]
        assert sum(sizes[:-1]) < pages * PAGE or not sizes
        if sum(sizes) < pages * PAGE:
            left = [k for k in some if k in self.visible and is_idle(self.visible[k])]
            extended = {self.parent[k] for k in self.visible if k in self.parent}
            assert extended.issuperset(left)  # by a chunk in use, itself or further on

    @rule(
        owner=OWNERS,
        lease=st.integers(1, 2),
        keys=KEYS,
        ttl=st.sampled_from([5.0, 60.0]),
        chain=st.booleans(),
    )
    def lease(self, owner: str, lease: int, keys: list[Key], ttl: float, chain: bool) -> None:
        if chain:
            # The truth: each number extends the one before it.
            first = min(keys)
            keys = [key(n) for n in range(int.from_bytes(first[20:], "big"), 12)][:4]
            self.parent |= {b: a for a, b in pairwise(keys)}
        found = self.host.lease(owner, lease, keys, ttl, chain)
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

    def teardown(self) -> None:
        eviction._PATIENCE = self.patience

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
        assert usage.used + usage.largest_free <= usage.capacity
        assert usage.chunks == len(self.visible) == len(self.host.keys())


HostMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostMachine = HostMachine.TestCase
TestHostMachine = pytest.mark.timeout(240)(TestHostMachine)
