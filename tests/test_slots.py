from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvstrata.slots import ALIGNMENT, Slots

CAPACITY = 64 * ALIGNMENT


def test_capacity_is_whole_pages() -> None:
    assert Slots(3 * ALIGNMENT + 5).capacity == 3 * ALIGNMENT


def test_nothing_fits_in_nothing() -> None:
    slots = Slots(ALIGNMENT - 1)
    assert slots.allocate(1) is None
    assert slots.largest_free == 0


@pytest.mark.parametrize(("nbytes", "taken"), [(1, 4096), (4096, 4096), (4097, 8192)])
def test_slots_are_whole_pages(nbytes: int, taken: int) -> None:
    slots = Slots(CAPACITY)
    assert Slots.rounded(nbytes) == taken
    slots.allocate(nbytes)
    assert slots.used == taken
    assert slots.allocate(nbytes) == taken


def test_a_hole_is_filled_first() -> None:
    slots = Slots(CAPACITY)
    offsets = [slots.allocate(ALIGNMENT) for _ in range(8)]
    slots.free(ALIGNMENT * 2)
    assert offsets == [i * ALIGNMENT for i in range(8)]
    assert slots.allocate(ALIGNMENT) == 2 * ALIGNMENT


def test_fragments_are_not_a_large_slot() -> None:
    slots = Slots(4 * ALIGNMENT)
    for _ in range(4):
        slots.allocate(ALIGNMENT)
    slots.free(0)
    slots.free(2 * ALIGNMENT)
    assert slots.allocate(2 * ALIGNMENT) is None
    assert slots.largest_free == ALIGNMENT
    slots.free(ALIGNMENT)
    assert slots.largest_free == 3 * ALIGNMENT


@pytest.mark.parametrize("offset", [0, ALIGNMENT, 17, -1])
def test_freeing_what_is_not_held_is_a_bug(offset: int) -> None:
    slots = Slots(CAPACITY)
    slots.free(slots.allocate(3 * ALIGNMENT) or 0)
    with pytest.raises(KeyError):
        slots.free(offset)


class SlotsMachine(RuleBasedStateMachine):
    """Against a model: which pages are taken."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(CAPACITY)
        self.ranges: dict[int, int] = {}

    @rule(target=held, nbytes=st.integers(1, CAPACITY // 3))
    def allocate(self, nbytes: int) -> object:
        offset = self.slots.allocate(nbytes)
        size = Slots.rounded(nbytes)
        if offset is None:
            assert self.slots.largest_free < size, "refused although it fits"
            return multiple()
        assert offset % ALIGNMENT == 0
        assert 0 <= offset <= CAPACITY - size
        for other, length in self.ranges.items():
            assert offset + size <= other or other + length <= offset, "slots overlap"
        self.ranges[offset] = size
        return offset

    @rule(offset=consumes(held))
    def free(self, offset: int) -> None:
        self.slots.free(offset)
        del self.ranges[offset]

    @invariant()
    def bytes_add_up(self) -> None:
        assert self.slots.used == sum(self.ranges.values())
        assert self.slots.largest_free == self.largest_gap()

    def largest_gap(self) -> int:
        edges = [0, *(e for o in sorted(self.ranges) for e in (o, o + self.ranges[o])), CAPACITY]
        return max(b - a for a, b in zip(edges[::2], edges[1::2], strict=True))

    def teardown(self) -> None:
        for offset in self.ranges:
            self.slots.free(offset)
        assert self.slots.used == 0
        assert self.slots.allocate(CAPACITY) == 0, "free extents were not merged"


TestSlotsMachine = SlotsMachine.TestCase
