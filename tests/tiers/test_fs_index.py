"""The order in which the fs tier gives chunks up, and the times it keeps in their files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.keys import Key
from kvstrata.tiers.fs_index import Found, Held, Index

HOUR = 3600.0


def key(i: int) -> Key:
    return Key(b"%03d" % i)


def chain(start: int, stop: int) -> list[Held]:
    return [Held(key(i), 10, key(i - 1) if i > start else None) for i in range(start, stop)]


def order(index: Index) -> list[int]:
    return [int(k) for k in index]


def test_the_head_of_a_batch_is_the_youngest() -> None:
    index = Index()
    index.hold(chain(0, 4), HOUR)
    assert order(index) == [3, 2, 1, 0]
    assert index.used == 40


def test_what_grows_a_chain_touches_all_of_it() -> None:
    index = Index()
    index.hold(chain(0, 3), HOUR)
    index.hold([Held(key(9), 10)], HOUR + 1)
    index.hold([Held(key(3), 10, key(2))], HOUR + 2, written=HOUR + 2)
    assert order(index) == [9, 3, 2, 1, 0]
    index.touch([key(9)], HOUR + 3)
    index.touch([key(1)], HOUR + 4)
    assert order(index) == [3, 2, 9, 1, 0]


def test_circles_and_unknown_parents_are_lived_with() -> None:
    index = Index()
    index.hold([Held(key(0), 1, key(1)), Held(key(1), 1, key(0)), Held(key(2), 1, key(7))], HOUR)
    index.hold([Held(key(3), 1, key(3))], HOUR)
    index.touch([key(i) for i in (0, 1, 2, 3, 8)], HOUR)
    assert sorted(order(index)) == [0, 1, 2, 3]


def test_victims_and_bytes() -> None:
    index = Index()
    index.hold(chain(0, 4), HOUR)
    assert index.oldest(0) == []
    assert index.oldest(15) == [key(3), key(2)] == list(index)[:2]
    assert index.oldest(15, keep={key(3)}) == [key(2), key(1)]
    assert index.drop(key(2))
    assert not index.drop(key(2))
    assert (index.used, len(index)) == (30, 3)
    index.hold([Held(key(0), 25)], HOUR)
    assert index.used == 45


def test_the_expired_are_those_not_used_since() -> None:
    index = Index()
    for i in range(3):
        index.hold([Held(key(i), 1)], HOUR * (i + 1))
    assert index.expired(HOUR * 2, 9) == [key(0)]
    assert index.expired(HOUR * 9, 2) == [key(0), key(1)]


def test_a_walk_tells_age_but_what_was_used_since_is_younger() -> None:
    index = Index()
    index.hold([Held(key(0), 1)], 5 * HOUR)
    index.recover([Found(3.0, key(3), 7), Found(1.0, key(1), 7), Found(2.0, key(0), 8)])
    index.order([Found(3.0, key(3), 7), Found(2.0, key(0), 8), Found(1.0, key(1), 7)])
    assert order(index) == [1, 3, 0]
    assert index.used == 22


def test_times_are_written_back_when_they_are_old() -> None:
    index = Index()
    index.recover([Found(HOUR, key(0), 1)])
    index.touch([key(0)], HOUR + 30)
    assert index.take_accesses(9) == []
    index.touch([key(0)], HOUR + 61)
    assert index.take_accesses(9) == [(key(0), HOUR + 61)]
    assert index.take_accesses(9) == []
    index.touch([key(0)], HOUR + 70)
    index.drop(key(0))
    assert index.take_accesses(9) == []


def test_a_new_tail_renews_the_times_of_its_chain() -> None:
    index = Index()
    index.hold(chain(0, 2), HOUR, written=HOUR)
    index.take_accesses(9)
    index.hold([Held(key(2), 1, key(1))], HOUR + 1, written=HOUR + 1)
    times = index.take_accesses(9)
    assert [k for k, _ in times] == [key(2), key(1), key(0)]
    assert times == sorted(times, key=lambda pair: pair[1])


steps = st.lists(
    st.tuples(
        st.sampled_from(["hold", "touch", "drop", "flush"]),
        st.lists(st.integers(0, 15), max_size=4),
        st.floats(0, 100),
    ),
    max_size=30,
)


@given(steps)
def test_nothing_goes_before_what_extends_it(done: list[tuple[str, list[int], float]]) -> None:
    """Chunk i extends i // 2: in memory, and by the times in the files, whatever is done."""
    index, now, disk = Index(), 1000.0, {}
    for what, ids, later in done:
        now += later
        match what:
            case "hold":
                for i in ids:
                    disk[key(i)] = now
                chunks = [Held(key(i), 1, key(i // 2) if i else None) for i in ids]
                index.hold(chunks, now, written=now)
            case "touch":
                index.touch([key(i) for i in ids], now)
            case "drop":
                for i in ids:
                    index.drop(key(i))
            case "flush":
                disk |= dict(index.take_accesses(100))
                for k in index:
                    up = key(int(k) // 2)
                    if int(k) and up in index and _linked_since(index, k, up):
                        assert disk[up] >= disk[k]
        place = {k: n for n, k in enumerate(index)}
        for k in index:
            up = key(int(k) // 2)
            if int(k) and up in index and _linked_since(index, k, up):
                assert place[up] > place[k]
        assert index.used == len(index)


def _linked_since(index: Index, k: Key, up: Key) -> bool:
    """Whether the parent was there when its extension was used last: one that was dropped and
    came back is as old as it came."""
    mine, parents = index.accessed(k), index.accessed(up)
    return mine is not None and parents is not None and index.written(up) <= index.written(k)
