"""What one publisher has told the world, and so what it has to tell next.

The node knows chunks by key; routers want blocks with their tokens. An engine *tells* the second
for the first (`wire.Told`), before or after the chunk is stored; chunks nobody told of are held
here in silence.

What is announced is closed: a block is announced only while the one that it extends is, at this
medium or another. Readers drop a block whose parent they don't know, so one announced too early
would be lost to them for good; and whoever joins late sees what everybody else sees. Chunks
that overlap announce what they share once, and its removal once, when the last of them goes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvstrata import wire
from kvstrata.keys import AttentionKind, Key, Namespace, split_key
from kvstrata.node.events_format import CPU, STORAGE, Event, Removed, Stored

__all__ = ["EventBook"]

# Of chunks that are not here: an engine tells of a chunk before it commits it.
_MOST_ABSENT = 65_536
_TOKEN_BYTES = 4

_KINDS: dict[AttentionKind, str] = {
    "full": "full_attention",
    "sliding_window": "sliding_window",
    "mla": "mla_attention",
    "sliding_window_mla": "sliding_window_mla",
    "mamba": "mamba",
}

# Engines of two models may number their blocks alike, and so may two groups of one.
_Scope = tuple[bytes, int]
_Block = tuple[_Scope, int]


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk that was told of. `announced`: the media at which its blocks are."""

    told: wire.Told
    scope: _Scope
    kind: str
    window: int | None
    announced: set[str]

    @property
    def parent(self) -> _Block | None:
        return None if self.told.parent is None else (self.scope, self.told.parent)

    def blocks(self) -> list[_Block]:
        return [(self.scope, block) for block in self.told.blocks]


class EventBook:
    """`namespace` gives the document behind a digest; only chunks of `model` are announced
    ("": of every model). `emit` gets events in the order in which they must be read."""

    def __init__(
        self,
        namespace: Callable[[bytes], Namespace | None],
        emit: Callable[[Event], None],
        model: str = "",
    ) -> None:
        self.untold = 0
        """Chunks stored so far that nobody had told of by then."""
        self._namespace = namespace
        self._emit = emit
        self._model = model
        self._held: dict[str, set[Key]] = {}
        self._chunks: dict[Key, _Chunk] = {}
        self._absent: OrderedDict[Key, None] = OrderedDict()
        # (medium, block) -> how many announced chunks have it.
        self._counts: dict[tuple[str, _Block], int] = {}
        # Where a block is announced at all, and the chunks that extend it, announced or not.
        self._media: dict[_Block, int] = {}
        self._children: dict[_Block, dict[Key, None]] = {}

    def __len__(self) -> int:
        """Chunks that somebody told of."""
        return len(self._chunks)

    # ------------------------------------------------------------ what happens

    def tell(self, tells: Iterable[wire.Told]) -> None:
        """What the blocks and tokens of chunks are. The first word on a key counts."""
        for told in tells:
            key = Key(told.key)
            if key not in self._chunks and (chunk := self._described(told)) is not None:
                self._chunks[key] = chunk
                if chunk.parent is not None:
                    self._children.setdefault(chunk.parent, {})[key] = None
                media = self._media_of(key)
                if not media:
                    self._absent[key] = None
                for medium in media:
                    self._announce(chunk, medium)
        while len(self._absent) > _MOST_ABSENT:
            self._forget(self._absent.popitem(last=False)[0])

    def added(self, location: str, keys: Iterable[Key]) -> None:
        """Chunks appeared at `host` or at the store `location`."""
        medium = _medium(location)
        held = self._held.setdefault(location, set())
        for key in keys:
            if key in held:
                continue
            held.add(key)
            self._absent.pop(key, None)
            chunk = self._chunks.get(key)
            if chunk is None:
                self.untold += 1
            elif medium not in chunk.announced:
                self._announce(chunk, medium)

    def removed(self, location: str, keys: Iterable[Key]) -> None:
        """Chunks left `location`."""
        medium = _medium(location)
        held = self._held.get(location, set())
        for key in keys:
            if key not in held:
                continue
            held.remove(key)
            chunk = self._chunks.get(key)
            if chunk is None:
                continue
            media = self._media_of(key)
            if medium not in media and medium in chunk.announced:
                self._retract(chunk, medium)
            if not media:
                self._absent[key] = None

    def state(self) -> Iterator[Event]:
        """Events that give a reader who knows nothing all that is announced now.

        What changes while it is iterated is not in it.
        """
        heads = [chunk for chunk in self._chunks.values() if chunk.parent is None]
        order: dict[_Chunk, tuple[str, ...]] = {}
        queue = deque(heads)
        while queue:
            chunk = queue.popleft()
            if chunk.announced and chunk not in order:
                order[chunk] = tuple(chunk.announced)
                for block in chunk.blocks():
                    queue += [self._chunks[child] for child in self._children.get(block, ())]
        return _once_each(order)

    # ------------------------------------------------------------ announcing

    def _announce(self, chunk: _Chunk, medium: str) -> None:
        """If what it extends is announced; and then those that waited for it, at any medium."""
        ready = [(chunk, medium)]
        while ready:
            chunk, medium = ready.pop()
            if medium in chunk.announced or not self._is_rooted(chunk):
                continue
            chunk.announced.add(medium)
            first = self._count(chunk, medium)
            if first < len(chunk.told.blocks):
                self._emit(_stored(chunk, medium, first))
            for block in chunk.blocks():
                for child in self._children.get(block, ()):
                    waiting = self._chunks[child]
                    ready += [
                        (waiting, at) for at in self._media_of(child) if at not in waiting.announced
                    ]

    def _is_rooted(self, chunk: _Chunk) -> bool:
        parent = chunk.parent
        return parent is None or parent in self._media

    def _count(self, chunk: _Chunk, medium: str) -> int:
        """Number of leading blocks that others have announced at this medium."""
        first = len(chunk.told.blocks)
        for i, block in enumerate(chunk.blocks()):
            n = self._counts.get((medium, block), 0)
            self._counts[medium, block] = n + 1
            if n == 0:
                first = min(first, i)
                self._media[block] = self._media.get(block, 0) + 1
        return first

    def _retract(self, chunk: _Chunk, medium: str) -> None:
        """And what extends it, unless another medium or chunk has that announced."""
        going = [(chunk, medium)]
        while going:
            chunk, medium = going.pop()
            if medium not in chunk.announced:
                continue
            chunk.announced.remove(medium)
            gone, lost = [], []
            for block in chunk.blocks():
                n = self._counts.pop((medium, block)) - 1
                if n:
                    self._counts[medium, block] = n
                    continue
                gone.append(block[1])
                left = self._media.pop(block) - 1
                if left:
                    self._media[block] = left
                else:
                    lost.append(block)
            if gone:
                # Children first would be kinder to a reader that keeps a tree, but none minds.
                self._emit(Removed(medium, gone, chunk.scope[1]))
            for block in lost:
                for child in self._children.get(block, ()):
                    extending = self._chunks[child]
                    going += [(extending, at) for at in extending.announced]

    # ------------------------------------------------------------ inside

    def _media_of(self, key: Key) -> list[str]:
        return list(dict.fromkeys(_medium(at) for at, held in self._held.items() if key in held))

    def _described(self, told: wire.Told) -> _Chunk | None:
        digest, number, _ = split_key(told.key)
        namespace = self._namespace(digest)
        if namespace is None or self._model not in ("", namespace.model):
            return None
        group = next((g for g in namespace.groups if g.id == number), None)
        if group is None or group.kind not in _KINDS:
            return None
        return _Chunk(told, (digest, number), _KINDS[group.kind], group.window or None, set())

    def _forget(self, key: Key) -> None:
        chunk = self._chunks.pop(key)
        if chunk.parent is not None:
            children = self._children[chunk.parent]
            del children[key]
            if not children:
                del self._children[chunk.parent]


def _medium(location: str) -> str:
    return CPU if location == "host" else STORAGE


def _stored(chunk: _Chunk, medium: str, first: int = 0) -> Stored:
    """Of the blocks of a chunk from number `first` on."""
    told = chunk.told
    size = len(told.tokens) // len(told.blocks)
    return Stored(
        medium=medium,
        blocks=told.blocks[first:],
        parent=told.blocks[first - 1] if first else told.parent,
        tokens=told.tokens[first * size :],
        block_size=size // _TOKEN_BYTES,
        group=chunk.scope[1],
        kind=chunk.kind,
        window=chunk.window,
        lora=told.lora,
        salt=told.salt,
    )


def _once_each(order: Mapping[_Chunk, Sequence[str]]) -> Iterator[Stored]:
    """Chunks that share blocks announce them once a medium."""
    said: set[tuple[str, _Block]] = set()
    for chunk, media in order.items():
        blocks = chunk.blocks()
        for medium in media:
            first = 0
            while first < len(blocks) and (medium, blocks[first]) in said:
                first += 1
            said.update((medium, block) for block in blocks)
            if first < len(blocks):
                yield _stored(chunk, medium, first)
