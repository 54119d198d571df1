from hypothesis import given
from hypothesis import strategies as st

from kvstrata.keys import Key
from kvstrata_server.index import PlacementIndex


def k(*numbers: int) -> list[Key]:
    return [Key(b"%03d" % n) for n in numbers]


def test_add_and_remove_tell_what_changed():
    index = PlacementIndex()
    assert index.add(1, k(1, 2, 2)) == k(1, 2)
    assert index.add(1, k(2, 3)) == k(3)
    assert index.add(2, k(1)) == k(1)
    assert (len(index), index.placements) == (3, 4)
    assert index.remove(1, k(1, 9)) == k(1)
    assert index.holders(k(1, 2, 9)) == [frozenset({2}), frozenset({1}), frozenset()]
    assert index.remove(2, k(1)) == k(1)
    assert len(index) == 2


def test_replace_and_clear():
    index = PlacementIndex()
    index.add(1, k(1, 2))
    added, removed = index.replace(1, set(k(2, 3)))
    assert (added, removed) == (k(3), k(1))
    assert sorted(index.clear(1)) == k(2, 3)
    assert (len(index), index.placements) == (0, 0)


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


def test_sets_of_holders_do_not_pile_up():
    index = PlacementIndex()
    for location in range(5000):
        index.add(location, k(1))
        index.clear(location)
    assert len(index._shared) <= 1025


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
    index = PlacementIndex()
    truth: dict[int, set[int]] = {}
    for what, location, numbers in batches:
        there = truth.setdefault(location, set())
        if what == "add":
            index.add(location, k(*numbers))
            there |= numbers
        elif what == "remove":
            index.remove(location, k(*numbers))
            there -= numbers
        else:
            index.replace(location, set(k(*numbers)))
            truth[location] = set(numbers)
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
