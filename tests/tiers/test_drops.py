"""What crosses a removal is looked at again."""

from __future__ import annotations

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
    drops.note_all()
    assert await drops.gone([B], mark, there) == {B} or asked[-1] == [B]


def test_a_look_from_before_a_store_says_nothing_of_what_was_stored() -> None:
    _, drops = under_way()
    mark = drops.mark()
    assert not drops.held_since(A, mark)
    drops.note_held(A)
    assert drops.held_since(A, mark)
    assert not drops.held_since(A, drops.mark())
