from __future__ import annotations

import pytest

from kvstrata.errors import ConfigError
from kvstrata.keys import Key
from kvstrata.policies import Arc, Lru, Policy, S3Fifo, open_policy
from kvstrata.testing import PolicyTests


class TestLru(PolicyTests):
    def open_policy(self, capacity: int) -> Policy:
        return Lru(capacity)


class TestArc(PolicyTests):
    def open_policy(self, capacity: int) -> Policy:
        return Arc(capacity)


class TestS3Fifo(PolicyTests):
    def open_policy(self, capacity: int) -> Policy:
        return S3Fifo(capacity)


def keys(text: str) -> list[Key]:
    return [Key(letter.encode()) for letter in text]


def order(policy: Policy) -> str:
    return b"".join(policy.victims()).decode()


def fill(policy: Policy, text: str, nbytes: int = 1) -> str:
    """Insert one by one, giving up what exceeds the capacity; what that was."""
    gone = ""
    for letter in text:
        if len(order(policy)) * nbytes >= policy.capacity:
            victim = next(policy.victims())
            policy.evict([victim])
            gone += victim.decode()
        policy.insert(keys(letter), nbytes)
    return gone


# ---------------------------------------------------------------- lru


def test_the_oldest_goes_first_and_the_head_of_a_chain_last() -> None:
    lru = Lru(0)
    lru.insert(keys("abc"), 1)
    lru.insert(keys("xy"), 1)
    assert order(lru) == "cbayx"


def test_a_touch_makes_young_in_the_order_of_the_chain() -> None:
    lru = Lru(0)
    lru.insert(keys("abcd"), 1)
    lru.touch(keys("ab"))
    assert order(lru) == "dcba"
    lru.touch(keys("cd"))
    assert order(lru) == "badc"


def test_an_insert_again_is_a_touch() -> None:
    lru = Lru(0)
    lru.insert(keys("ab"), 1)
    lru.insert(keys("b"), 1)
    assert order(lru) == "ab"


def test_a_chain_that_grows_stays_younger_than_its_new_tail() -> None:
    lru = Lru(0)
    lru.insert(keys("ab"), 1)
    lru.insert(keys("x"), 1)
    lru.insert(keys("cd"), 1, after=keys("ab"))
    assert order(lru) == "xdcba"


# ---------------------------------------------------------------- arc


def test_arc_gives_up_what_was_used_once_before_what_was_used_again() -> None:
    arc = Arc(4)
    arc.insert(keys("abcd"), 1)
    arc.touch(keys("cd"))
    assert order(arc) == "badc"


def test_arc_learns_that_recent_chunks_come_back() -> None:
    arc = Arc(4)
    fill(arc, "ab")
    arc.touch(keys("ab"))
    assert fill(arc, "xyz") == "x"
    assert arc.target == 0
    fill(arc, "x")  # a ghost of `recent`: it should have been longer
    assert arc.target == 1
    assert order(arc) == "baxz", "z may stay, as `recent` may have one byte"


def test_arc_learns_that_frequent_chunks_come_back() -> None:
    arc = Arc(4)
    arc.target = 4.0
    arc.insert(keys("ab"), 1)
    arc.touch(keys("ab"))
    arc.insert(keys("xy"), 1)
    assert fill(arc, "z") == "b"
    fill(arc, "b")  # a ghost of `frequent`
    assert arc.target == 3


def test_arc_survives_a_scan() -> None:
    arc = Arc(8)
    arc.insert(keys("abcd"), 1)
    arc.touch(keys("abcd"))
    fill(arc, "0123456789" * 3)
    assert set(order(arc)) > set("abcd")


def test_a_chain_that_grows_was_not_used_again() -> None:
    arc = Arc(8)
    arc.insert(keys("ab"), 1)
    arc.insert(keys("x"), 1)
    arc.insert(keys("c"), 1, after=keys("ab"))
    assert order(arc) == "xcba"
    arc.touch(keys("x"))
    assert order(arc) == "cbax"


# ---------------------------------------------------------------- s3fifo


def test_s3fifo_forgets_a_scan_and_keeps_what_is_used() -> None:
    policy = S3Fifo(20)
    policy.insert(keys("abcd"), 1)
    policy.touch(keys("abcd"))
    scan = "".join(map(chr, range(ord("0"), ord("0") + 40)))
    fill(policy, scan)
    assert set("abcd") < set(order(policy))
    lru = Lru(20)
    lru.insert(keys("abcd"), 1)
    lru.touch(keys("abcd"))
    fill(lru, scan)
    assert not set("abcd") & set(order(lru)), "the scan would be too short to show anything"


def test_s3fifo_admits_to_main_what_comes_back() -> None:
    policy = S3Fifo(10)
    gone = fill(policy, "abcdefghijkl")
    assert gone == "ab"
    fill(policy, "b")
    fill(policy, "mnopqrstuv")
    assert "b" in order(policy)
    assert "l" not in order(policy)


def test_s3fifo_lets_main_go_round_as_often_as_it_was_used() -> None:
    policy = S3Fifo(4)
    for letter in "ax":  # into `main`, as they come back
        policy.insert(keys(letter), 1)
        policy.evict(keys(letter))
        policy.insert(keys(letter), 1)
    policy.touch(keys("a" * 9))
    gone = ""
    while "a" not in gone:
        victim = next(policy.victims())
        policy.evict([victim])
        policy.insert([victim], 1)
        gone += victim.decode()
    assert gone == "xxxa"


def test_a_walk_that_gave_up_nothing_has_turned_nothing() -> None:
    policy = S3Fifo(10)
    policy.insert(keys("abcd"), 1)
    policy.touch(keys("d"))
    assert order(policy) == "cbad"
    policy.evict([])
    assert order(policy) == "cbad"
    policy.evict([next(policy.victims())])
    policy.insert(keys("e"), 1)
    assert order(policy) == "bade", "d was passed over, and is in `main` now; `small` may have e"


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_what_is_remembered_of_the_gone_is_bounded(name: str) -> None:
    policy = open_policy(name, 100)
    for n in range(2000):
        if n >= 100:
            policy.evict([next(policy.victims())])
        policy.insert([Key(b"%d" % n)], 1)
        policy.touch([Key(b"%d" % (n // 3 * 3))])
    ghosts = [getattr(policy, attr) for attr in vars(policy) if "ghosts" in attr]
    assert 0 < sum(len(g) for g in ghosts) <= 200
    assert all(g.nbytes == len(g) for g in ghosts)


# ---------------------------------------------------------------- opening


class Fifo(Lru):
    """An out-of-tree policy."""

    def touch(self, keys: object) -> None:
        return None


class NoPolicy:
    pass


def test_policies_open_by_name_and_by_class() -> None:
    for name, kind in (("lru", Lru), ("arc", Arc), ("s3fifo", S3Fifo)):
        assert type(open_policy(name, 7)) is kind
    own = open_policy(f"{__name__}:Fifo", 7)
    assert type(own) is Fifo
    assert own.capacity == 7


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mru", r"neither one of \['arc', 'lru', 's3fifo'\] nor module:Class"),
        ("", "neither"),
        ("no_such_module:Lru", "neither"),
        ("kvstrata.policies:Mru", "neither"),
        (f"{__name__}:NoPolicy", "is not a kvstrata.policies.base.Policy"),
        ("kvstrata.policies:open_policy", "is not a kvstrata.policies.base.Policy"),
    ],
)
def test_policies_that_are_none(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_policy(name, 0)
