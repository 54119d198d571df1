from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigError
from kvstrata.keys import Key
from kvstrata.policies import Lru, Policy, open_policy


def keys(text: str) -> list[Key]:
    return [Key(letter.encode()) for letter in text]


def order(policy: Policy) -> str:
    return b"".join(policy.victims()).decode()


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


def test_unknown_keys_are_ignored() -> None:
    lru = Lru(0)
    lru.insert(keys("a"), 1)
    lru.touch(keys("zaz"))
    lru.remove(keys("z")[0])
    assert order(lru) == "a"
    lru.remove(keys("a")[0])
    lru.remove(keys("a")[0])
    assert order(lru) == ""


@given(st.lists(st.tuples(st.sampled_from("itr"), st.text("abcdef", max_size=4))))
def test_victims_are_what_was_inserted_and_not_removed(steps: list[tuple[str, str]]) -> None:
    lru, held = Lru(0), set[str]()
    for step, text in steps:
        if step == "i":
            lru.insert(keys(text), 1)
            held |= set(text)
        elif step == "t":
            lru.touch(keys(text))
        else:
            for key in keys(text):
                lru.remove(key)
            held -= set(text)
        youngest = [k for k in dict.fromkeys(text) if k in held]
        assert order(lru)[::-1].startswith("".join(youngest))
        assert sorted(order(lru)) == sorted(held)


class Fifo(Lru):
    """An out-of-tree policy."""

    def touch(self, keys: object) -> None:
        return None


class NoPolicy:
    pass


def test_policies_open_by_name_and_by_class() -> None:
    assert type(open_policy("lru", 7)) is Lru
    own = open_policy(f"{__name__}:Fifo", 7)
    assert type(own) is Fifo
    assert own.capacity == 7


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mru", r"neither one of \['lru'\] nor module:Class"),
        ("", "neither"),
        ("no_such_module:Lru", "neither"),
        ("kvstrata.policies:Mru", "neither"),
        (f"{__name__}:NoPolicy", "is not a kvstrata.policies.Policy"),
        ("kvstrata.policies:open_policy", "is not a kvstrata.policies.Policy"),
    ],
)
def test_policies_that_are_none(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_policy(name, 0)
