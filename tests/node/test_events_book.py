"""What a publisher has to say, checked against readers that know only what they were told."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.keys import Key
from kvstrata.node.events_book import EventBook
from kvstrata.node.events_format import Event, Removed, Stored
from kvstrata.testing.chunks import a_namespace
from kvstrata.wire import Told

NAMESPACE = a_namespace(blocks_per_chunk=2)
OTHER = a_namespace(model="other")
BLOCK = 4  # tokens


def key(name: Sequence[int]) -> Key:
    return NAMESPACE.key(0, bytes(name) + b"\xff")


def told(path: Sequence[int]) -> Told:
    """A chunk of two blocks named by its path in a tree: block = hash of the path to it.

    The last step decides the second block; the first block is shared by two siblings.
    """

    def block(at: Sequence[int]) -> int:
        return hash(("b", *at)) & (1 << 64) - 1

    first = (*path[:-1], "h", path[-1] // 2)
    tokens = b"".join(n.to_bytes(4, "little") for n in [*([len(path)] * 4), *([path[-1]] * 4)])
    parent = block(path[:-1]) if len(path) > 1 else None
    return Told(key(path), [block(first), block(path)], tokens, parent)


class Reader:
    """A router: drops what extends what it doesn't know, counts nothing."""

    def __init__(self) -> None:
        self.media: dict[int, set[str]] = {}
        self.lost = 0
        self.doubled = 0

    def read(self, event: Event) -> None:
        if isinstance(event, Stored):
            assert len(event.tokens) == 4 * event.block_size * len(event.blocks)
            if event.parent is not None and not self.media.get(event.parent):
                self.lost += 1
                return
            for block in event.blocks:
                at = self.media.setdefault(block, set())
                self.doubled += event.medium in at
                at.add(event.medium)
        elif isinstance(event, Removed):
            for block in event.blocks:
                self.media[block].remove(event.medium)

    def held(self) -> dict[int, set[str]]:
        return {block: media for block, media in self.media.items() if media}


def a_book(**kwargs: str) -> tuple[EventBook, list[Event], Reader]:
    events: list[Event] = []
    reader = Reader()

    def emit(event: Event) -> None:
        events.append(event)
        reader.read(event)

    known = {n.digest: n for n in (NAMESPACE, OTHER)}
    return EventBook(known.get, emit, **kwargs), events, reader


def test_a_chunk_is_announced_when_it_is_both_here_and_told_of() -> None:
    book, events, _ = a_book()
    book.tell([told([0])])
    assert events == []
    book.added("host", [key([0])])
    book.added("store-1", [key([1])])
    assert [e.medium for e in events] == ["CPU"]
    assert book.untold == 1
    book.tell([told([1])])
    assert [e.medium for e in events] == ["CPU", "STORAGE"]
    first = events[0]
    assert isinstance(first, Stored)
    assert (first.parent, first.block_size, first.group) == (None, BLOCK, 0)
    assert first.kind == "full_attention"
    assert first.blocks == told([0]).blocks


def test_two_stores_are_one_medium() -> None:
    book, events, reader = a_book()
    book.tell([told([0])])
    for location in ("fs", "obj", "fs"):
        book.added(location, [key([0])])
    book.removed("fs", [key([0])])
    book.removed("fs", [key([0])])
    assert len(events) == 1
    book.removed("obj", [key([0])])
    assert reader.held() == {}


def test_what_chunks_share_is_said_once_and_removed_with_the_last() -> None:
    book, events, reader = a_book()
    book.tell([told([0]), told([1])])
    book.added("host", [key([0]), key([1])])
    second = events[1]
    assert isinstance(second, Stored)
    assert second.blocks == told([1]).blocks[1:]
    assert second.parent == told([1]).blocks[0]
    assert second.tokens == told([1]).tokens[16:]
    book.removed("host", [key([0])])
    assert set(reader.held()) == set(told([1]).blocks)
    book.removed("host", [key([1])])
    assert reader.held() == {}


def test_an_orphan_waits_for_what_it_extends_and_goes_with_it() -> None:
    book, events, reader = a_book()
    chain = [told([0]), told([0, 0]), told([0, 0, 0])]
    book.tell(reversed(chain))
    book.added("host", [key([0, 0]), key([0, 0, 0])])
    assert events == []
    book.added("fs", [key([0])])
    assert [e.medium for e in events] == ["STORAGE", "CPU", "CPU"]
    book.removed("fs", [key([0])])
    assert reader.held() == {}
    book.added("host", [key([0])])
    assert len(reader.held()) == 6
    assert reader.lost == 0


def test_only_chunks_of_the_wanted_model_are_announced() -> None:
    book, events, _ = a_book(model="other")
    book.tell([told([0])])
    book.added("host", [key([0])])
    theirs = OTHER.key(0, b"x")
    book.tell([Told(theirs, [7], b"\0" * 64)])
    book.added("host", [theirs])
    assert [e.blocks for e in events if isinstance(e, Stored)] == [[7]]


def test_what_is_told_of_absent_chunks_is_forgotten_in_the_end() -> None:
    book, _, _ = a_book()
    n = 65_536 + 10
    book.tell(
        Told(NAMESPACE.key(0, i.to_bytes(4, "big")), [i], b"\0" * 64, 1 << 40 | i) for i in range(n)
    )
    assert len(book) == 65_536


PATHS = [(a, *rest) for a in range(2) for rest in [(), (0,), (1,), (0, 0), (0, 1), (1, 3)]]
STEP = st.tuples(
    st.sampled_from(["tell", "add", "remove"]),
    st.sampled_from(["host", "fs", "obj"]),
    st.sampled_from(PATHS),
)


@settings(max_examples=200)
@given(st.lists(STEP, max_size=60))
def test_early_and_late_readers_know_the_truth(
    steps: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    book, _, reader = a_book()
    held: dict[str, set[tuple[int, ...]]] = {"host": set(), "fs": set(), "obj": set()}
    tells: set[tuple[int, ...]] = set()
    for what, where, path in steps:
        if what == "tell":
            book.tell([told(path)])
            tells.add(path)
        elif what == "add":
            book.added(where, [key(path)])
            held[where].add(path)
        else:
            book.removed(where, [key(path)])
            held[where].discard(path)
    truth: dict[int, set[str]] = {}
    for _ in range(3):  # as deep as the tree is
        for where, paths in held.items():
            for path in paths & tells:
                parent = told(path).parent
                if parent is None or parent in truth:
                    for block in told(path).blocks:
                        truth.setdefault(block, set()).add("CPU" if where == "host" else "STORAGE")
    late = Reader()
    for event in book.state():
        late.read(event)
    assert reader.held() == truth
    assert late.held() == truth
    assert reader.lost == late.lost == reader.doubled == late.doubled == 0
