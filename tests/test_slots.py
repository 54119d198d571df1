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


# ---------------------------------------------------------------- slabs

SLAB = 8 * ALIGNMENT


def slabs(count: int) -> Slots:
    return Slots(count * SLAB, slab_bytes=SLAB)


def test_a_small_region_has_no_slabs_and_a_large_one_bounded_ones() -> None:
    assert Slots(16 * ALIGNMENT).slab_bytes < ALIGNMENT
    assert Slots(64 << 30).slab_bytes == 64 << 20
    assert Slots(1 << 40).slab_bytes == 64 << 20


def test_slots_of_one_size_share_a_slab_and_sizes_do_not_mix() -> None:
    slots = slabs(4)
    small = slots.allocate_many(ALIGNMENT, 3)
    large = slots.allocate_many(2 * ALIGNMENT, 2)
    assert small == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert large == [SLAB, SLAB + 2 * ALIGNMENT]
    assert slots.slab_of(0) is slots.slab_of(ALIGNMENT)
    assert slots.slab_of(0) is not slots.slab_of(SLAB)
    assert slots.slab_of(0).held == 3
    assert slots.largest_free == 2 * SLAB


def test_an_empty_slab_serves_any_size_again() -> None:
    slots = slabs(2)
    first = slots.allocate_many(ALIGNMENT, 16)
    assert slots.allocate(3 * ALIGNMENT) is None
    slots.free_many(first[::2])
    assert slots.largest_free == 0, "every slab still holds something"
    slots.free_many(first[1:8:2])
    assert slots.largest_free == SLAB
    assert slots.allocate_many(3 * ALIGNMENT, 9) == [0, 3 * ALIGNMENT]


def test_a_chunk_larger_than_a_slab_gets_slabs_in_a_row() -> None:
    slots = slabs(4)
    (small,) = slots.allocate_many(ALIGNMENT, 1)
    assert slots.allocate(2 * SLAB + 1) == SLAB
    assert slots.largest_free == SLAB - ALIGNMENT
    slots.free(SLAB)
    slots.free(small)
    assert slots.allocate(4 * SLAB) == 0


def test_a_slab_is_shorter_where_no_full_one_fits() -> None:
    slots = slabs(2)
    assert slots.allocate(SLAB + ALIGNMENT) == 0
    assert len(slots.allocate_many(ALIGNMENT, 99)) == 7
    assert slots.used == slots.capacity


def test_sizes_taking_turns_leave_no_splinters() -> None:
    slots = slabs(16)
    for pages in (3, 1, 5, 2, 7, 3):
        got = slots.allocate_many(pages * ALIGNMENT, 1000)
        assert len(got) >= 16 * (8 // pages)
        slots.free_many(got)
        assert slots.largest_free == slots.capacity


@pytest.mark.parametrize("nbytes", [1, ALIGNMENT, 3 * ALIGNMENT, SLAB, SLAB + 1, 5 * SLAB])
@pytest.mark.parametrize("taken", [0, 5])
def test_room_is_what_can_be_had(nbytes: int, taken: int) -> None:
    slots = slabs(4)
    slots.free_many(slots.allocate_many(3 * ALIGNMENT, taken)[1:])
    room = slots.room(nbytes, 1000)
    assert slots.room(nbytes, 2) == min(room, 2)
    assert len(slots.allocate_many(nbytes, 1000)) == room
    assert slots.room(nbytes, 1) == 0


class SlotsMachine(RuleBasedStateMachine):
    """Against a model: which pages are taken. Without slabs, so that every hole can be used."""

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


class SlabMachine(RuleBasedStateMachine):
    """With slabs: nothing overlaps, what is refused has no room, an empty region is whole."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.slots = slabs(8)
        self.ranges: dict[int, int] = {}

    @rule(
        target=held,
        nbytes=st.sampled_from([1, 2, 3, 5, 8, 13]).map(lambda pages: pages * ALIGNMENT),
        count=st.integers(1, 9),
    )
    def allocate(self, nbytes: int, count: int) -> object:
        room = self.slots.room(nbytes, count)
        offsets = self.slots.allocate_many(nbytes, count)
        assert len(offsets) >= room
        if len(offsets) < count:
            assert self.slots.largest_free < nbytes
        self.ranges |= dict.fromkeys(offsets, nbytes)
        return multiple(*offsets)

    @rule(offset=consumes(held))
    def free(self, offset: int) -> None:
        self.slots.free(offset)
        del self.ranges[offset]

    @invariant()
    def bytes_add_up(self) -> None:
        end = 0
        for offset, size in sorted(self.ranges.items()):
            assert end <= offset
            end = offset + size
        assert end <= self.slots.capacity
        assert self.slots.used == sum(self.ranges.values())
        assert self.slots.largest_free <= self.slots.capacity - self.slots.used

    @invariant()
    def slabs_hold_what_is_held(self) -> None:
        held = {self.slots.slab_of(offset) for offset in self.ranges}
        assert sum(slab.held for slab in held) == len(self.ranges)

    def teardown(self) -> None:
        self.slots.free_many(list(self.ranges))
        assert (self.slots.used, self.slots.largest_free) == (0, self.slots.capacity)


TestSlabMachine = SlabMachine.TestCase
