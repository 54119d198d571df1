from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from kvstrata_server.scheduling.turns import Turn, Turns


def turns_of(*asked):
    """(tenant, priority, cost) in order of arrival."""
    return [Turn(f"t{i}", tenant, p, (i, ""), cost) for i, (tenant, p, cost) in enumerate(asked)]


def order(turns, waiting):
    return [turn.id for turn in turns.in_order(waiting)]


def test_higher_priority_first_then_the_older():
    waiting = turns_of(("a", 5, 1), ("a", 9, 1), ("a", 5, 1), ("a", 0, 1))
    assert order(Turns(8, 8), waiting) == ["t1", "t0", "t2", "t3"]


def test_a_tenant_with_much_to_do_waits_behind_itself():
    waiting = turns_of(*[("busy", 5, 10)] * 4, ("quiet", 5, 10))
    assert order(Turns(8, 8), waiting) == ["t0", "t4", "t1", "t2", "t3"]


def test_turns_are_by_bytes_and_not_by_transfers():
    waiting = turns_of(("large", 5, 40), ("large", 5, 40), *[("small", 5, 10)] * 6)
    # One of 40 is worth four of 10.
    assert order(Turns(8, 8), waiting) == ["t0", "t2", "t3", "t4", "t5", "t1", "t6", "t7"]


def test_what_was_started_counts_later():
    turns = Turns(8, 8)
    first, second, other = turns_of(("a", 5, 10), ("a", 5, 10), ("b", 5, 10))
    assert turns.start(first, "s", "n")
    assert order(turns, [second, other]) == ["t2", "t1"]


def test_silence_saves_nothing_up():
    turns = Turns(1000, 1000)
    number = count()

    def turn(tenant):
        return Turn(f"{tenant}{next(number)}", tenant, 5, (next(number), ""), 10)

    for _ in range(50):
        assert turns.start(turn("busy"), "s", "n")
    late, busy = [turn("late") for _ in range(4)], [turn("busy") for _ in range(4)]
    given_to = [t.tenant for t in turns.in_order(late + busy)]
    assert given_to[0] == "late"
    assert set(given_to[1:5]) == {"late", "busy"}  # and not the 50 it could have had


def test_node_and_link_have_room_for_so_many():
    turns = Turns(per_node=3, per_link=2)
    waiting = turns_of(*[("a", 5, 1)] * 6)
    assert [turns.start(t, "s1", "n") for t in waiting[:3]] == [True, True, False]
    assert turns.start(waiting[0], "s1", "n")  # it runs already
    assert turns.has_room("n")
    assert turns.start(waiting[3], "s2", "n")
    assert not turns.has_room("n")
    assert not turns.start(waiting[4], "s3", "n")
    assert turns.start(waiting[4], "s1", "m")  # another node
    turns.end("t0")
    turns.end("t0")
    assert turns.start(waiting[2], "s1", "n")
    assert not turns.start(waiting[5], "s1", "n")


def test_links_are_not_counted_where_no_source_is_known():
    turns = Turns(per_node=3, per_link=1)
    assert [turns.start(t, "", "n") for t in turns_of(*[("a", 5, 1)] * 4)] == [True] * 3 + [False]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 100)), max_size=30)
)
def test_everyone_gets_a_turn_once_and_priorities_hold(asked):
    waiting = turns_of(*asked)
    given_ = list(Turns(8, 8).in_order(waiting))
    assert sorted(given_, key=lambda t: t.id) == sorted(waiting, key=lambda t: t.id)
    assert [t.priority for t in given_] == sorted((t.priority for t in waiting), reverse=True)
    for tenant in "abc":
        for priority in range(3):
            mine = [t.age for t in given_ if (t.tenant, t.priority) == (tenant, priority)]
            assert mine == sorted(mine)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), min_size=2, max_size=40))
def test_no_tenant_is_ahead_by_more_than_one_transfer(asked):
    waiting = turns_of(*[(tenant, 5, cost) for tenant, cost in asked])
    left = {t: sum(x.cost for x in waiting if x.tenant == t) for t in "ab"}
    got = dict.fromkeys("ab", 0)
    most = max(cost for _, cost in asked)
    for turn in Turns(100, 100).in_order(waiting):
        got[turn.tenant] += turn.cost
        if all(got[t] < left[t] for t in "ab"):  # both still wait
            assert abs(got["a"] - got["b"]) <= 2 * most


def test_a_tenant_has_so_many_under_way_and_so_many_bytes():
    limits = {"few": (2, None), "small": (None, 10)}
    turns = Turns(9, 9, lambda tenant: limits.get(tenant, (None, None)))
    few = turns_of(*[("few", 5, 100)] * 3)
    assert [turns.start(t, "s", "n") for t in few] == [True, True, False]
    assert (turns.of_tenant("few"), turns.allows(few[2])) == ((2, 200), False)
    turns.end(few[0].id)
    assert turns.start(few[2], "s", "n")
    small = [Turn(f"s{i}", "small", 5, (i, ""), cost) for i, cost in enumerate((4, 6, 1, 99))]
    assert [turns.start(t, "s", "m") for t in small] == [True, True, False, False]
    for ended in small[:3]:
        turns.end(ended.id)
    assert turns.start(small[3], "s", "m")  # or it would never be its turn
    assert not turns.start(small[2], "s", "m")
    free = turns_of(("free", 5, 1 << 40))[0]
    assert turns.start(Turn("f", *(free.tenant, 5, (0, ""), free.cost)), "s", "m")
    assert (turns.is_limited("free"), turns.is_limited("few")) == (False, True)


def test_a_large_one_is_not_passed_by_all_that_are_small():
    now = [0.0]
    turns = Turns(9, 9, lambda tenant: (None, 100), lambda: now[0])
    large = Turn("large", "a", 5, (0, ""), 80)
    small = [Turn(f"s{i}", "a", 5, (i + 1, ""), 30) for i in range(9)]
    urgent, other = Turn("u", "a", 6, (99, ""), 30), Turn("o", "b", 5, (99, ""), 30)
    assert turns.start(small[0], "s", "n")
    assert turns.start(small[1], "s", "n")
    assert not turns.start(large, "s", "n")
    assert not turns.start(small[2], "s", "m")
    assert turns.start(urgent, "s", "m")
    assert turns.start(other, "s", "m")
    for ended in ("s0", "s1", "u"):
        assert not turns.allows(large)
        turns.end(ended)
    assert not turns.allows(small[2])
    assert turns.start(large, "s", "n")
    assert not turns.allows(small[2])  # which does not fit
    turns.end("large")
    assert turns.start(small[2], "s", "m")


def test_one_that_is_cancelled_or_not_asked_for_any_more_holds_nobody_up():
    now = [0.0]
    turns = Turns(9, 9, lambda tenant: (None, 100), lambda: now[0])
    large, larger = Turn("l1", "a", 5, (0, ""), 80), Turn("l2", "a", 5, (1, ""), 90)
    small = [Turn(f"s{i}", "a", 5, (i + 2, ""), 30) for i in range(3)]
    assert turns.start(small[0], "s", "n")
    assert not turns.allows(large)
    assert not turns.allows(small[1])
    turns.end("l1")
    assert turns.allows(small[1])
    assert not turns.allows(larger)
    now[0] = 9
    assert not turns.allows(small[1])
    now[0] = 11
    assert turns.start(small[1], "s", "n")


@given(st.lists(st.tuples(st.sampled_from("se"), st.integers(0, 5), st.integers(0, 2))))
def test_what_a_tenant_has_under_way_is_what_was_started_and_did_not_end(steps):
    turns = Turns(4, 4, lambda tenant: (2, 20) if tenant == "a" else (None, None))
    all_of = [Turn(f"t{i}", "ab"[i % 2], 5, (i, ""), 3 * i + 1) for i in range(6)]
    running: dict[str, Turn] = {}
    for act, i, target in steps:
        turn = all_of[i]
        if act == "e":
            turns.end(turn.id)
            running.pop(turn.id, None)
        elif turns.start(turn, "s", f"n{target}"):
            running[turn.id] = turn
        for tenant in "ab":
            mine = [t.cost for t in running.values() if t.tenant == tenant]
            assert turns.of_tenant(tenant) == (len(mine), sum(mine))
        assert len([t for t in running.values() if t.tenant == "a"]) <= 2
