"""Which chunks go so that others fit: the policy's order, corrected by what can be of use.

A chunk goes only after all that extends it in the host tier, since that is worth nothing
without it. And giving up a chunk of another size is of use only where it empties a slab. So
chunks of the wanted size go in the policy's order, while those of other sizes are held back
until all of a slab has come up: the first slab to be complete is the one whose best chunk is
worst, and it goes as a whole.

A walk that has held back many chunks and is not done passes over other sizes from then on, and
ends after as many again. If it has not met enough of its own size by then, the slabs are emptied
of which least is left: to look for better ones in a large region would keep everybody waiting.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice
from operator import itemgetter

from kvstrata.chains import Chains
from kvstrata.chunks import Chunk, is_idle
from kvstrata.keys import DIGEST_BYTES, GROUP_BYTES, Key
from kvstrata.policies import Policy
from kvstrata.slots import Slab, Slots

__all__ = ["coldest", "in_parts", "make_room", "next_victims"]

# Chunks of other sizes; some milliseconds.
_PATIENCE = 4096
# Slabs looked into after that.
_TRIES = 256
# Of the coldest chunks, how many must be wanted and go for a second look at them.
_WORTHWHILE = 1 / 64
_PREFIX_BYTES = DIGEST_BYTES + GROUP_BYTES
_USED = itemgetter(0)


def make_room(
    nbytes: int,
    count: int,
    slots: Slots,
    policy: Policy,
    chains: Chains,
    chunks: Mapping[Key, Chunk],
) -> list[Chunk]:
    """Free the slots of idle chunks until `count` chunks of `nbytes` fit, or none is left that
    helps. Returns the chunks that lost theirs; `policy` and `chunks` still hold them."""
    size = slots.rounded(nbytes)
    count = min(count, slots.capacity // size)
    missing = (count - slots.room(nbytes, count)) * size
    if missing <= 0:
        return []
    walk = _Walk(size, slots, chains, chunks)
    gone = walk.gone
    for victim in walk.along(policy.victims()):
        if walk.fits(victim):
            gone[victim.key] = victim
            missing -= size
        else:
            missing -= walk.hold_back(victim)
        if missing <= 0:
            # What was gained may lie in holes that are too small each: count what fits.
            walk.free()
            missing = (count - slots.room(nbytes, count)) * size
            if missing <= 0:
                break
    walk.free()
    return list(gone.values())


def next_victims(
    nbytes: int, slots: Slots, policy: Policy, chains: Chains, chunks: Mapping[Key, Chunk]
) -> list[Chunk]:
    """The idle chunks that are next to go, `nbytes` of them or all; nothing is freed. Sizes are
    taken as equal: which slabs would be emptied shows only when room of a size is wanted."""
    walk = _Walk(0, slots, chains, chunks)
    for victim in walk.along(policy.victims()) if nbytes > 0 else ():
        walk.gone[victim.key] = victim
        nbytes -= slots.rounded(victim.nbytes)
        if nbytes <= 0:
            break
    return list(walk.gone.values())


def in_parts(
    policy: Policy, chunks: Mapping[Key, Chunk], prefixes: Container[bytes], size: int
) -> Iterator[list[Key]]:
    """Idle chunks of some namespaces, first to give up first, in parts. Others may have their
    turns between them: at most `size` chunks are looked at for each, but for one list of all.

    The first parts come in the policy's order, if the caller gives up what they have: each is of
    the `size` chunks that are first by then. Once few of those are wanted, all that is left comes
    by when it was used last, but for what is used meanwhile: no place in a policy's order
    outlasts a turn of others.
    """
    while True:
        near = list(islice(policy.victims(), size))
        found = [k for k in near if k[:_PREFIX_BYTES] in prefixes and is_idle(chunks[k])]
        yield found
        if len(near) < size:
            return
        if sum(key not in chunks for key in found) < size * _WORTHWHILE:
            break
    runs = []
    left = list(chunks.values())
    for start in range(0, len(left), size):
        part = left[start : start + size]
        mine = [c for c in part if c.key[:_PREFIX_BYTES] in prefixes and is_idle(c)]
        if mine:
            runs.append(sorted(((c.used, c) for c in mine), key=_USED))
        yield []
    del left
    ordered = heapq.merge(*runs, key=_USED)
    while rest := list(islice(ordered, size)):
        yield [c.key for used, c in rest if c.used == used and chunks.get(c.key) is c]


def coldest(
    keys: Iterable[Key], nbytes: int, slots: Slots, chains: Chains, chunks: Mapping[Key, Chunk]
) -> list[Chunk]:
    """Of `keys`, which come in the policy's order, the idle chunks that should go first, until
    they have `nbytes` of payload; with them goes what extends them. Nothing is freed."""
    walk = _Walk(0, slots, chains, chunks)
    idle = (key for key in keys if (chunk := chunks.get(key)) is not None and is_idle(chunk))
    for victim in walk.along(idle) if nbytes > 0 else ():
        walk.gone[victim.key] = victim
        nbytes -= victim.nbytes
        if nbytes <= 0:
            break
    return list(walk.gone.values())


class _Walk:
    """What one walk along the policy's order has met, and may give up."""

    def __init__(
        self, size: int, slots: Slots, chains: Chains, chunks: Mapping[Key, Chunk]
    ) -> None:
        self.gone: dict[Key, Chunk] = {}
        self.held_back: dict[Key, Chunk] = {}
        self._freed = 0
        self._size = size
        self._slots = slots
        self._chains = chains
        self._chunks = chunks
        self._parts: dict[Slab, list[Chunk]] = {}
        self._unmet: dict[Slab, int] = {}

    def along(self, keys: Iterable[Key]) -> Iterator[Chunk]:
        """Idle chunks in the order of `keys`, each after all that extends it. The caller puts
        each among `gone` or holds it back before it asks for the next."""
        chunks, gone, held_back = self._chunks, self.gone, self.held_back
        may_extend, fits = self._chains.may_extend, self.fits
        passed = 0
        for key in keys:
            chunk = chunks[key]
            if chunk.readers or chunk.io or key in gone or key in held_back:
                continue
            if len(held_back) >= _PATIENCE and not fits(chunk):
                passed += 1
                if passed >= _PATIENCE:
                    break
                continue
            for child in may_extend(key):
                if child not in gone:
                    yield from self._leaves_first(chunk)
                    break
            else:
                yield chunk
        yield from self._rest_of_slabs()

    def fits(self, chunk: Chunk) -> bool:
        """Whether its slot is of the size wanted."""
        return chunk.nbytes == self._size or self._slots.rounded(chunk.nbytes) == self._size

    def hold_back(self, chunk: Chunk) -> int:
        """A chunk of another size has come up; the bytes gained, which is none until it is the
        last of its slab."""
        slab = self._slots.slab_of(chunk.offset)
        part = self._parts.setdefault(slab, [])
        part.append(chunk)
        self.held_back[chunk.key] = chunk
        self._unmet[slab] = unmet = self._unmet.get(slab, slab.held) - 1
        if unmet:
            return 0
        for member in part:
            self._give_up(member)
        return slab.nbytes

    def free(self) -> None:
        """Give back the slots of those gone since the last time."""
        fresh = list(self.gone.values())[self._freed :] if self._freed else self.gone.values()
        self._slots.free_many([chunk.offset for chunk in fresh])
        self._freed = len(self.gone)

    def _leaves_first(self, chunk: Chunk) -> Iterator[Chunk]:
        """All that extends a chunk, from the leaves up, then itself; ends before the first that
        extends one in use. Without what was met before."""
        extensions, chunks = self._chains.extensions, self._chunks
        stack = [(chunk, iter(extensions(chunk.key, chunks)))]
        path = {chunk.key}
        while stack:
            chunk, children = stack[-1]
            for key in children:
                if key in self.gone or key in self.held_back or key in path:
                    continue
                child = chunks[key]
                if not is_idle(child):
                    return
                path.add(key)
                stack.append((child, iter(extensions(key, chunks))))
                break
            else:
                stack.pop()
                yield chunk

    def _rest_of_slabs(self) -> Iterator[Chunk]:
        """What has not come up of the slabs that can be emptied, those first of which least is
        left. Nothing, unless the walk lost patience: else it has met all that is idle."""
        unmet = self._unmet
        best = heapq.nsmallest(_TRIES, (slab for slab in unmet if unmet[slab]), unmet.__getitem__)
        members: dict[Slab, list[Chunk]] = {slab: [] for slab in best}
        slab_of, gone = self._slots.slab_of, self.gone
        for key, chunk in self._chunks.items() if members else ():
            if key not in gone and (slab := slab_of(chunk.offset)) in members:
                members[slab].append(chunk)
        for slab, found in members.items():
            if len(found) == slab.held and all(map(is_idle, found)):
                for chunk in found:
                    if chunk.key not in gone and chunk.key not in self.held_back:
                        yield from self._leaves_first(chunk)

    def _give_up(self, chunk: Chunk) -> None:
        """With what extends it, which was met before it and is worth nothing without it."""
        above = [chunk]
        while above:
            chunk = above.pop()
            if self.held_back.pop(chunk.key, None) is not None:
                self.gone[chunk.key] = chunk
                above += [self._chunks[k] for k in self._chains.extensions(chunk.key, self._chunks)]
