"""What crosses a removal is looked at again."""

from __future__ import annotations

import pytest

from kvstrata.keys import Key
from kvstrata.tiers.calls import Calls
from kvstrata.tiers.drops import Drops

A, B = Key(b"a"), Key(b"b")


def under_way(count: int = 2) -> tuple[Calls, Drops]:
    """With so many calls under way."""
    calls = Calls("test", lambda: 0.0, 10.0)
    for _ in range(count):
        calls.running(None).__enter__()
    return calls, Drops(calls)


async def test_what_goes_while_others_are_looked_for_is_looked_for_too() -> None:
    _, drops = under_way()
    mark = drops.mark()
    drops.note(A)
    asked = []

    async def there(keys: list[Key]) -> list[bool]:
        asked.append(keys)
        if len(asked) == 1:
            drops.note(B)  # it was in no doubt until now
            return [True]
        return [False] * len(keys)

    assert await drops.gone([A, B], mark, there) == {B}
    assert asked == [[A], [B]]


async def test_what_goes_again_and_again_counts_as_gone() -> None:
    _, drops = under_way()
    mark = drops.mark()
    drops.note(A)
    asked = []

    async def there(keys: list[Key]) -> list[bool]:
        asked.append(keys)
        drops.note(A)
        return [True]

    assert await drops.gone([A, B], mark, there) == {A}
    assert 2 <= len(asked) <= 10


def test_a_look_from_before_a_store_says_nothing_of_what_was_stored() -> None:
    _, drops = under_way()
    mark = drops.mark()
    assert not drops.held_since(A, mark)
    drops.note_held(A)
    assert drops.held_since(A, mark)
    assert not drops.held_since(A, drops.mark())


def test_what_is_remembered_is_bounded_and_what_is_forgotten_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstrata.tiers.drops._MOST", 10)
    _, drops = under_way()
    mark = drops.mark()
    for n in range(25):
        drops.note(Key(bytes([n])))
        drops.note_held(Key(bytes([n])))
    assert max(len(drops._last), len(drops._held)) <= 10
    for n in range(25):
        assert drops.since(Key(bytes([n])), mark)
        assert drops.held_since(Key(bytes([n])), mark)
    assert not drops.since(A, drops.mark())
    assert not drops.held_since(A, drops.mark())
