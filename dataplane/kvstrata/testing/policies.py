"""The contract of an eviction policy as a test suite.

class TestMine(PolicyTests):
    def open_policy(self, capacity):
        return Mine(capacity)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

import pytest

from kvstrata.keys import Key, make_key
from kvstrata.policies import Policy

__all__ = ["PolicyTests", "a_chain"]

PAGE = 4096


def a_chain(first: int, count: int) -> list[Key]:
    """Keys of a chain, numbered from `first`."""
    return [make_key(b"n" * 16, 0, n.to_bytes(8, "big")) for n in range(first, first + count)]


def give_up(policy: Policy, count: int) -> list[Key]:
    """As the host tier does it: walk, then tell."""
    gone = list(islice(policy.victims(), count))
    policy.evict(gone)
    return gone


class PolicyTests:
    """Inherit these tests by subclassing, and say how to open your policy."""

    def open_policy(self, capacity: int) -> Policy:
        """A new policy for a region of `capacity` bytes."""
        raise NotImplementedError

    @pytest.fixture
    def policy(self) -> Policy:
        return self.open_policy(64 * PAGE)

    def test_it_knows_its_capacity(self) -> None:
        assert self.open_policy(7 * PAGE).capacity == 7 * PAGE

    def test_an_empty_one_has_no_victims(self, policy: Policy) -> None:
        assert list(policy.victims()) == []

    def test_the_tail_of_a_chain_goes_first(self, policy: Policy) -> None:
        chain = a_chain(0, 8)
        policy.insert(chain, PAGE)
        assert list(policy.victims()) == chain[::-1]

    def test_a_used_chain_keeps_its_order(self, policy: Policy) -> None:
        chain = a_chain(0, 8)
        policy.insert(chain, PAGE)
        policy.touch(chain)
        assert list(policy.victims()) == chain[::-1]

    def test_a_walk_changes_nothing_that_is_seen(self, policy: Policy) -> None:
        policy.insert(a_chain(0, 8), PAGE)
        policy.insert(a_chain(20, 8), PAGE)
        policy.touch(a_chain(0, 4))
        before = list(policy.victims())
        for stop in (1, 3, 16):
            assert list(islice(policy.victims(), stop)) == before[:stop]
        assert list(policy.victims()) == before

    def test_what_is_skipped_stays_first_in_line(self, policy: Policy) -> None:
        policy.insert(a_chain(0, 8), PAGE)
        first, second, third = islice(policy.victims(), 3)
        policy.evict([third])
        assert list(islice(policy.victims(), 2)) == [first, second]

    def test_an_insert_of_what_is_there_does_not_double_it(self, policy: Policy) -> None:
        policy.insert(a_chain(0, 4), PAGE)
        policy.insert(a_chain(2, 4), PAGE)
        assert sorted(policy.victims()) == a_chain(0, 6)

    def test_unknown_keys_are_ignored(self, policy: Policy) -> None:
        policy.insert(a_chain(0, 2), PAGE, after=a_chain(50, 2))
        policy.touch(a_chain(60, 2))
        policy.remove(a_chain(70, 2))
        policy.evict(a_chain(80, 2))
        assert sorted(policy.victims()) == a_chain(0, 2)

    def test_what_is_gone_is_no_victim_and_may_come_back(self, policy: Policy) -> None:
        for gone in (policy.remove, policy.evict):
            policy.insert(a_chain(0, 4), PAGE)
            gone(a_chain(1, 2))
            assert sorted(policy.victims()) == [*a_chain(0, 1), *a_chain(3, 1)]
            policy.insert(a_chain(1, 2), PAGE)
            assert sorted(policy.victims()) == a_chain(0, 4)

    def test_a_chain_may_grow(self, policy: Policy) -> None:
        policy.insert(a_chain(0, 4), PAGE)
        policy.insert(a_chain(4, 4), PAGE, after=a_chain(0, 4))
        assert sorted(policy.victims()) == a_chain(0, 8)

    def test_chunks_of_any_size(self, policy: Policy) -> None:
        policy.insert(a_chain(0, 2), 1)
        policy.insert(a_chain(2, 2), 1000 * PAGE)
        assert sorted(give_up(policy, 4)) == a_chain(0, 4)
        assert list(policy.victims()) == []

    @pytest.mark.parametrize("seed", range(20))
    def test_victims_are_what_was_inserted_and_is_not_gone(self, seed: int) -> None:
        policy, rng = self.open_policy(16 * PAGE), random.Random(seed)  # noqa: S311
        held: set[Key] = set()

        def some() -> Sequence[Key]:
            return a_chain(rng.randrange(40), rng.randint(0, 5))

        for _ in range(300):
            keys = some()
            match rng.randrange(6):
                case 0 | 1:
                    policy.insert(keys, rng.choice([1, PAGE, 3 * PAGE]), some())
                    held.update(keys)
                case 2:
                    policy.touch(keys)
                case 3:
                    policy.remove(keys)
                    held.difference_update(keys)
                case 4:
                    held.difference_update(give_up(policy, rng.randint(0, 12)))
                case 5:
                    walked = list(islice(policy.victims(), rng.randint(0, 12)))
                    policy.evict(walked[::2])
                    held.difference_update(walked[::2])
            if rng.random() < 0.2:
                assert sorted(policy.victims()) == sorted(held)
        assert sorted(give_up(policy, len(held) + 1)) == sorted(held)
