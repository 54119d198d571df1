import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.keys import Key
from kvstrata_server.placement.index import Added, PlacementIndex, Removed


def k(*numbers: int) -> list[Key]:
    """Keys of two namespaces, with hashes of two sizes."""
    return [
        Key(b"namespace %06d" % (n % 2) + bytes(4) + b"%03d" % n + bytes(n % 2)) for n in numbers
    ]


class Sql:
    """What SQL would have: rows by number, as the changes say."""

    def __init__(self, shared_ids: bool = False) -> None:
        self.index = PlacementIndex(shared_ids)
        self.chunks: dict[int, bytes] = {}
        self.placements: set[tuple[int, int]] = set()

    def apply(self, *changes: Added | Removed) -> None:
        for change in changes:
            pairs = {(change.location, number) for number in change.ids.tolist()}
            if isinstance(change, Removed):
                assert pairs <= self.placements
                self.placements -= pairs
                continue
            for rows in change.chunks:
                ids = change.chunk_ids[rows.positions].tolist()
                assert len(rows.packed) == len(ids) * rows.stride
                for i, number in enumerate(ids):
                    piece = rows.packed[i * rows.stride : (i + 1) * rows.stride]
                    self.chunks[number] = rows.namespace + piece
            assert not pairs & self.placements
            self.placements |= pairs

    @property
    def held(self) -> set[tuple[int, bytes]]:
        return {(location, self.chunks[number]) for location, number in self.placements}


def test_add_and_remove_tell_what_changed():
    index = PlacementIndex()
    assert len(index.add(1, k(1, 2, 2))) == 2
    assert len(index.add(1, k(2, 3))) == 1
    again = index.add(2, k(1))
    assert (len(again), len(again.chunk_ids)) == (1, 0)  # SQL has the chunk's row
    assert (len(index), index.placements, index.count_at(1)) == (3, 4, 3)
    assert len(index.remove(1, k(1, 9))) == 1
    assert index.holders(k(1, 2, 9)) == [(2,), (1,), ()]
    assert len(index.remove(2, k(1))) == 1
    assert len(index) == 2


def test_replace_and_clear():
    index = PlacementIndex()
    index.add(1, k(1, 2))
    added, removed = index.replace(1, k(2, 3))
    assert (len(added), len(removed)) == (1, 1)
    assert sorted(index.keys_at(1)) == sorted(k(2, 3))
    assert len(index.clear(1)) == 2
    assert (len(index), index.placements, index.keys_at(1)) == (0, 0, [])


def test_a_prefix_may_mix_tiers_but_a_tier_counts_its_own():
    index = PlacementIndex()
    index.add(1, k(0, 1, 4))  # host of a
    index.add(2, k(2, 3))  # its store
    reach = {1: [("a", "host")], 2: [("a", "fs")]}
    tallied = index.tally(k(0, 1, 2, 3, 4, 5), reach)["a"]
    assert (tallied.found, tallied.prefix) == (5, 5)
    assert tallied.tiers == {"host": [3, 2], "fs": [2, 0]}


def test_two_stores_of_one_tier_count_a_chunk_once():
    index = PlacementIndex()
    index.add(1, k(0))
    index.add(2, k(0, 1))
    tallied = index.tally(k(0, 1), {1: [("a", "fs")], 2: [("a", "fs")]})["a"]
    assert tallied.tiers == {"fs": [2, 2]}


def test_what_nobody_reaches_is_not_offered():
    index = PlacementIndex()
    index.add(1, k(0))
    assert index.tally(k(0), {}) == {}


@given(
    st.lists(st.sets(st.integers(1, 4)), max_size=12),
    st.sets(st.integers(1, 5)),
    st.sets(st.integers(1, 4)),
    st.integers(1, 5),
)
def test_select_equals_looking_at_each(held, locations, never, size):
    """`held[n]` is where chunk n is; chosen are those at `locations` and nowhere of `never`."""
    index = PlacementIndex()
    for n, at in enumerate(held):
        for location in at:
            index.add(location, k(n))
    parts = index.select(locations, never.isdisjoint, size)
    found = [key for part in parts for key in index.families.keys(*part)]
    assert len(found) == len(set(found))
    wanted = [n for n, at in enumerate(held) if at & locations and not at & never]
    assert sorted(found) == sorted(k(*wanted))


def test_sets_of_holders_do_not_pile_up():
    index = PlacementIndex()
    for location in range(5000):
        index.add(location, k(1))
        index.clear(location)
    assert len(index._sets) <= 1025
    assert len(index._sets._sets) <= 2049


def test_numbers_of_chunks_are_used_again():
    index = PlacementIndex()
    for round_ in range(20):
        numbers = index.add(1, k(*range(1000 * round_, 1000 * round_ + 500))).ids
        assert numbers.max() < 500
        index.clear(1)


def test_many_keys_through_several_tables():
    """Growth carries entries over a part at a time; everything is found all the while."""
    random = np.random.default_rng(0)
    index = PlacementIndex()
    batches = []
    for step in range(60):
        raw = random.bytes(32 * 700)
        prefix = b"n" * 16 + bytes(4)
        batches.append([Key(prefix + raw[i : i + 32]) for i in range(0, len(raw), 32)])
        assert len(index.add(step % 7, batches[-1])) == 700
        gone = step // 2
        if step % 2:
            assert len(index.remove(gone % 7, batches[gone])) == 700
        for i, batch in enumerate(batches):
            expected = () if i <= gone and (i < gone or step % 2) else (i % 7,)
            assert set(index.holders(batch[::100])) == {expected}, (step, i)
    assert len(index) == 30 * 700
    assert sum(len(part) for _, part in index.dump(1000)) == 30 * 700


@pytest.mark.parametrize("order", ["big", "little"])
@pytest.mark.parametrize("repeated", [1, 4])
def test_keys_that_only_count_are_spread_as_well(order, repeated):
    families = PlacementIndex().families
    prefix = b"n" * 16 + bytes(4)
    batch = families.of_keys(
        [Key(prefix + n.to_bytes(8, order) * repeated) for n in range(1 << 16)]
    )
    # As many entries of a table of twice the size are hit as by chance: 1 - e^-(1/2) of them.
    for bits in (batch.hashes, batch.hashes >> np.uint64(40)):
        hit = len(np.unique(bits & np.uint64((1 << 17) - 1))) / (1 << 17)
        assert 0.38 < hit < 0.41


def test_keys_that_hash_alike_are_told_apart():
    index = PlacementIndex()
    batch = index.families.of_keys(k(*range(0, 400, 2)))
    batch.hashes[:] = 7
    assert len(index.add(1, batch)) == 200
    assert index.keys_at(1) == k(*range(0, 400, 2))
    assert len(index.remove(1, batch)) == 200


@pytest.mark.parametrize("shared_ids", [False, True])
def test_what_was_loaded_from_sql_is_what_was_written(shared_ids):
    sql = Sql(shared_ids)
    sql.apply(sql.index.add(1, k(*range(100))), sql.index.add(2, k(*range(50, 150))))
    sql.apply(sql.index.remove(1, k(*range(70))), sql.index.add(3, k(1, 300, 301)))
    expected = {(location, key) for location, part in sql.index.dump() for key in part}
    assert sql.held == expected
    if shared_ids:
        return
    loaded = PlacementIndex()
    named = np.array(sorted({number for _, number in sql.placements}))
    keys = [sql.chunks[number] for number in named.tolist()]
    loaded.load_chunks(named, loaded.families.of_keys(keys))
    for location in (1, 2, 3):
        ids = [number for at, number in sql.placements if at == location]
        loaded.load_placements(location, np.array(ids))
    loaded.loaded()
    assert {(location, key) for location, part in loaded.dump() for key in part} == expected
    # And numbering goes on without touching what is there.
    sql.index = loaded
    sql.apply(loaded.add(9, k(*range(500, 900))))
    assert sql.held == expected | {(9, key) for key in k(*range(500, 900))}


LOCATIONS = st.integers(0, 4)
BATCHES = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "replace"]), LOCATIONS, st.sets(st.integers(0, 9))),
    max_size=30,
)
REACH = st.dictionaries(
    LOCATIONS,
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["host", "fs"])), unique=True),
)


@given(BATCHES, st.lists(st.integers(0, 9), min_size=1, max_size=15), REACH)
def test_tally_equals_counting_by_hand(batches, asked, reach):
    sql = Sql()
    index = sql.index
    truth: dict[int, set[int]] = {}
    for what, location, numbers in batches:
        there = truth.setdefault(location, set())
        if what == "add":
            sql.apply(index.add(location, k(*numbers)))
            there |= numbers
        elif what == "remove":
            sql.apply(index.remove(location, k(*numbers)))
            there -= numbers
        else:
            sql.apply(*index.replace(location, k(*numbers)))
            truth[location] = set(numbers)
    assert sql.held == {(at, key) for at, numbers in truth.items() for key in k(*numbers)}
    serves = {
        (node, tier): {n for loc in reach if (node, tier) in reach[loc] for n in truth.get(loc, ())}
        for node in "ab"
        for tier in ("host", "fs")
    }
    tallied = index.tally(k(*asked), reach)
    for node in "ab":
        of_any = serves[node, "host"] | serves[node, "fs"]
        found = sum(n in of_any for n in asked)
        if not found:
            assert node not in tallied
            continue
        assert (tallied[node].found, tallied[node].prefix) == (found, _prefix(asked, of_any))
        for tier in ("host", "fs"):
            here = serves[node, tier]
            count = sum(n in here for n in asked)
            assert tallied[node].tiers.get(tier, [0, 0]) == [count, _prefix(asked, here)]
    assert len(index) == len(set().union(*truth.values())) if truth else len(index) == 0


def _prefix(asked: list[int], here: set[int]) -> int:
    length = 0
    for n in asked:
        if n not in here:
            break
        length += 1
    return length
