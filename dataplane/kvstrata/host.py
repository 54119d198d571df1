"""The host tier: a cache of chunks in the shared region.

Pure bookkeeping on one thread: no bytes are touched and nothing blocks. Time comes in through
a clock. An *owner* is whoever may write or read: an engine session, a promotion, a peer, a
transfer; owners are told apart by name.

States of a key and what moves it (every transition is a method of `HostTier`):

    absent   --reserve, use-->   writing   a slot is reserved; others see the key as pending
    writing  --commit-->         ready     readable; leases can be taken
    writing  --abort, forget-->  absent    slot freed
    writing  --expire, disown--> absent    slot quarantined: its owner may still be writing
    ready    --evict, drop-->    absent    slot freed, or quarantined while someone reads it

A slot is in quarantine while no key names it and someone may still touch it. It leaves by the
owner's own word: commit (a late write of a key that is absent becomes ready after all; any
other is freed), abort, the end of the reading, or the owner's end (`forget`). Never by time.

A lease keeps ready chunks from eviction until it is released or its time passes. `begin` and
`end` bracket a read of leased bytes; between them the slot outlives even the lease.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvstrata.chains import Chains
from kvstrata.chunks import Chunk, State, is_idle
from kvstrata.eviction import coldest, in_parts, make_room, next_victims
from kvstrata.keys import Key
from kvstrata.leases import Leases
from kvstrata.overdue import Overdue
from kvstrata.policies import Policy
from kvstrata.slots import Slots

__all__ = ["NO_ROOM", "PRESENT", "Chunk", "HostTier", "HostUsage", "State", "Used"]

NO_ROOM = -1
PRESENT = -2

# A member looked up in its class costs as much as the test it is for; these stand in hot loops.
_READY = State.READY
_WRITING = State.WRITING


class Used(enum.IntEnum):
    """What became of naming a granted slot."""

    OWNED = 1  # the slot now belongs to the key: write, then commit or abort
    DUPLICATE = 0  # the chunk is here or being written; the slot waits for commit or abort
    UNKNOWN = -1  # not a slot granted to this owner


@dataclass(frozen=True, slots=True)
class HostUsage:
    """Bytes by what they are used for; `used` = ready + writing + granted + quarantined."""

    capacity: int
    used: int
    ready: int
    writing: int
    granted: int
    quarantined: int
    largest_free: int
    chunks: int
    leases: int


def _ignore(chunks: Sequence[Chunk]) -> None:
    return None


class HostTier:
    """See the module docstring. `on_ready` and `on_gone` get batches of chunks that became
    readable, or stopped to be; they are called after the state has changed."""

    def __init__(
        self,
        slots: Slots,
        policy: Policy,
        clock: Callable[[], float],
        reserve_ttl: float = 60.0,
        on_ready: Callable[[Sequence[Chunk]], None] = _ignore,
        on_gone: Callable[[Sequence[Chunk]], None] = _ignore,
    ) -> None:
        self.slots = slots
        self.evicted = 0
        self.expired_writes = 0
        self._policy = policy
        self._clock = clock
        self._reserve_ttl = reserve_ttl
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._chunks: dict[Key, Chunk] = {}
        self._writes: dict[str, dict[Key, Chunk]] = {}
        self._grants: dict[str, dict[int, int]] = {}
        self._leases = Leases(self.unpin)
        self._hidden: set[Chunk] = set()
        self._overdue = Overdue()
        self._chains = Chains()
        self._ready_bytes = 0
        self._uses = itertools.count(1)

    # ------------------------------------------------------------ writing

    def reserve(
        self, owner: str, requests: Sequence[tuple[Key, int]], evict: bool = True
    ) -> list[int]:
        """Make room for chunks of given sizes; per request the offset to write to,
        `PRESENT` (here already, or being written), or `NO_ROOM`. Partial success is normal.
        Without `evict` they get what is free, and nothing goes for them."""
        chunks = self._chunks
        expires = self._clock() + self._reserve_ttl
        resumed = self._resume(owner, requests, expires) if self._hidden else {}
        missing = {key: nbytes for key, nbytes in requests if key not in chunks}
        # Making room for the rest of a chain must not take the part that is here.
        kept = self.pin(key for key, _ in requests) if len(missing) < len(requests) else []
        offsets = self._allocate(list(missing.values()), evict)
        for chunk in kept:
            self.unpin(chunk)
        self._start_writes(owner, missing, offsets, expires)
        if len(missing) == len(requests):
            return offsets
        placed = resumed | dict(zip(missing, offsets, strict=True))
        answers = []
        for key, _ in requests:
            answers.append(placed.get(key, PRESENT))
            if answers[-1] >= 0:
                placed[key] = PRESENT  # a repetition gets no second slot
        return answers

    def commit(self, owner: str, keys: Sequence[Key]) -> list[bool]:
        """The bytes are complete. Per key whether the chunk is readable now."""
        chunks = self._chunks
        writes = self._writes.get(owner, {})
        ready: list[Chunk] = []
        answers = []
        now = next(self._uses)
        for key in keys:
            chunk = writes.pop(key, None)
            if chunk is not None and not chunk.visible:
                if key in chunks:
                    self._free_hidden(chunk)
                    chunk = None
                else:
                    self._hidden.discard(chunk)
                    chunk.visible = True
                    chunks[key] = chunk
            if chunk is None:
                answers.append(self.get(key) is not None)
            else:
                chunk.state, chunk.used = _READY, now
                ready.append(chunk)
                answers.append(True)
        self._announce(ready)
        return answers

    def abort(self, owner: str, keys: Iterable[Key]) -> None:
        """The bytes will never be complete. Keys that owner isn't writing are ignored."""
        writes = self._writes.get(owner, {})
        gone = []
        for key in keys:
            chunk = writes.pop(key, None)
            if chunk is None:
                continue
            if chunk.visible:
                del self._chunks[key]
                chunk.visible = False
                gone.append(chunk)
            else:
                self._free_hidden(chunk)
        if gone:
            self.slots.free_many([chunk.offset for chunk in gone])
            self._on_gone(gone)

    def disown(self, owner: str, keys: Iterable[Key]) -> None:
        """Nobody waits for these writes any more, though the owner may be at them: as if they
        had expired. Keys that owner isn't writing are ignored."""
        writes = self._writes.get(owner, {})
        self._hide([c for key in keys if (c := writes.get(key)) is not None and c.visible])

    def grant(self, owner: str, nbytes: int, count: int) -> list[int]:
        """Hand out up to `count` free slots of `nbytes`, to be named later by `use`."""
        if count <= 0:
            return []
        offsets = [o for o in self._allocate([nbytes] * count) if o != NO_ROOM]
        self._grants.setdefault(owner, {}).update(dict.fromkeys(offsets, nbytes))
        return offsets

    def use(self, owner: str, names: Sequence[tuple[int, Key]]) -> list[Used]:
        """Name the chunk each granted slot (offset, key) will hold."""
        grants = self._grants.get(owner, {})
        writes = self._writes.setdefault(owner, {})
        expires = self._clock() + self._reserve_ttl
        answers = []
        fresh: list[Chunk] = []
        for offset, key in names:
            nbytes = grants.pop(offset, None)
            if nbytes is None:
                answers.append(Used.UNKNOWN)
            elif key in writes:
                # Named twice by one owner: a later commit could not tell the slots apart. The
                # slot stays granted, so that a write already under way harms nobody.
                grants[offset] = nbytes
                answers.append(Used.UNKNOWN)
            elif key in self._chunks:
                chunk = Chunk(key, offset, nbytes, owner, State.WRITING, expires, visible=False)
                writes[key] = chunk
                self._hidden.add(chunk)
                answers.append(Used.DUPLICATE)
            else:
                chunk = Chunk(key, offset, nbytes, owner, _WRITING, expires)
                self._chunks[key] = writes[key] = chunk
                fresh.append(chunk)
                answers.append(Used.OWNED)
        if fresh:
            self._overdue.watch(fresh, expires)
        return answers

    def ungrant(self, owner: str, offsets: Iterable[int]) -> None:
        """Take granted slots back. Those not granted to `owner` are ignored."""
        grants = self._grants.get(owner, {})
        self.slots.free_many([o for o in offsets if grants.pop(o, None) is not None])

    def granted(self, owner: str) -> dict[int, int]:
        """Offset -> bytes of the slots granted to `owner` and not named yet."""
        return self._grants.get(owner, {})

    # ------------------------------------------------------------ reading

    def find(self, keys: Sequence[Key]) -> list[State]:
        """The state of each key. A probe: it renews nothing and counts as no use."""
        chunks = self._chunks
        return [
            chunk.state if (chunk := chunks.get(key)) is not None else State.ABSENT for key in keys
        ]

    def lease(
        self,
        owner: str,
        id: int,  # noqa: A002
        keys: Sequence[Key],
        ttl: float,
        chain: bool = False,
    ) -> list[Chunk | None]:
        """Take (or add to) a lease on those keys that are ready; it then runs for `ttl`
        seconds, or until the time it already had, if that is later. `chain` says that each key
        extends the one before it: eviction goes by that, when the absent ones come too."""
        lease = self._leases.open(owner, id, self._clock() + ttl)
        if chain:
            self._chains.learn(keys)
        held, chunks, now = lease.held, self._chunks, next(self._uses)
        found: list[Chunk | None] = []
        used = []
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None or chunk.state is not _READY:
                found.append(None)
                continue
            if key not in held:
                held[key] = chunk
                chunk.readers += 1
            chunk.used = now
            found.append(chunk)
            used.append(key)
        if chain and used:
            # An engine asks from where its own cache ends; what comes before was used no less.
            before = self._chains.before(used[0], chunks)
            for key in before:
                chunks[key].used = now
            used = before + used
        self._policy.touch(used)
        return found

    def renew(self, owner: str, ids: Iterable[int], ttl: float) -> list[int]:
        """Extend leases; the ids of those that have lapsed."""
        now = self._clock()
        return self._leases.renew(owner, ids, now, now + ttl)

    def release(self, owner: str, ids: Iterable[int]) -> None:
        """End leases. What is being read under them (`begin`) stays until `end`."""
        self._leases.release(owner, ids)

    def begin(self, owner: str, id: int, keys: Sequence[Key]) -> bool:  # noqa: A002
        """Reading starts. False if the lease does not hold all of the keys any more: then
        nothing has begun and their bytes must not be trusted."""
        return self._leases.begin(owner, id, keys)

    def end(self, owner: str, id: int, keys: Iterable[Key]) -> None:  # noqa: A002
        """Reading ended. Keys not being read are ignored."""
        self._leases.end(owner, id, keys)

    def pin(self, keys: Iterable[Key]) -> list[Chunk]:
        """Ready chunks of `keys`, kept from reuse (not from being dropped) until `unpin`.

        For the node's own reads, such as a cascade; an absent key is left out."""
        pinned = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.state is _READY:
                chunk.io += 1
                pinned.append(chunk)
        return pinned

    def unpin(self, chunk: Chunk) -> None:
        chunk.io -= 1
        if not chunk.visible:
            self._free_hidden(chunk)

    # ------------------------------------------------------------ leaving

    def drop(self, keys: Iterable[Key] | None = None) -> int:
        """Remove ready chunks nobody leases or reads (None: all such); how many went."""
        names = list(self._chunks) if keys is None else keys
        idle = {
            key: chunk
            for key in names
            if (chunk := self._chunks.get(key)) is not None and is_idle(chunk)
        }
        before = self.slots.used
        self._policy.remove(list(idle))
        self.slots.free_many([chunk.offset for chunk in idle.values()])
        self._leave(list(idle.values()), before - self.slots.used)
        return len(idle)

    def drop_coldest(self, keys: Sequence[Key], nbytes: int) -> list[Chunk]:
        """Of `keys`, a part of what `order` told, remove what should go first, each chunk after
        all that extends it, until `nbytes` of payload are gone. Returns what went."""
        victims = coldest(keys, nbytes, self.slots, self._chains, self._chunks)
        self.drop([chunk.key for chunk in victims])
        return victims

    def forget(self, owner: str) -> None:
        """The owner is gone for certain: nothing of it reads or writes any more."""
        self.abort(owner, list(self._writes.get(owner, ())))
        self._writes.pop(owner, None)
        self.slots.free_many(self._grants.pop(owner, {}))
        self._leases.forget(owner)

    def expire(self) -> None:
        """Act on what the clock has made true: lapsed leases, overdue writes."""
        now = self._clock()
        self._leases.expire(now)
        overdue = self._overdue.due(now)
        self.expired_writes += len(overdue)
        self._hide(overdue)
        self._chains.prune(self._chunks, len(self._chunks))

    # ------------------------------------------------------------ state

    def parent_of(self, key: Key) -> Key | None:
        """The chunk that this one extends, where a lookup has told so; it may be absent."""
        return self._chains.parent_of(key)

    def next_victims(self, nbytes: int) -> list[Chunk]:
        """The idle chunks, `nbytes` of them, that would go next if room were wanted now."""
        return next_victims(nbytes, self.slots, self._policy, self._chains, self._chunks)

    @property
    def expired_leases(self) -> int:
        return self._leases.expired

    def get(self, key: Key) -> Chunk | None:
        """The ready chunk of a key, if there is one."""
        chunk = self._chunks.get(key)
        return chunk if chunk is not None and chunk.state is State.READY else None

    def keys(self) -> list[Key]:
        return [key for key, chunk in self._chunks.items() if chunk.state is State.READY]

    def order(self, prefixes: Container[bytes], size: int) -> Iterator[list[Key]]:
        """Idle chunks whose keys begin (namespace and group) as one of `prefixes`, first to give
        up first, in parts for each of which at most `size` chunks are looked at: others may have
        their turns between them. See `eviction.in_parts`."""
        return in_parts(self._policy, self._chunks, prefixes, size)

    def usage(self) -> HostUsage:
        rounded = self.slots.rounded
        writes = [c for writes in self._writes.values() for c in writes.values() if c.visible]
        return HostUsage(
            capacity=self.slots.capacity,
            used=self.slots.used,
            ready=self._ready_bytes,
            writing=sum(rounded(chunk.nbytes) for chunk in writes),
            granted=sum(rounded(n) for grants in self._grants.values() for n in grants.values()),
            quarantined=sum(rounded(chunk.nbytes) for chunk in self._hidden),
            largest_free=self.slots.largest_free,
            chunks=len(self._chunks) - len(writes),
            leases=len(self._leases),
        )

    # ------------------------------------------------------------ inside

    def _start_writes(
        self, owner: str, missing: dict[Key, int], offsets: Sequence[int], expires: float
    ) -> None:
        fresh = {
            key: Chunk(key, offset, nbytes, owner, _WRITING, expires)
            for (key, nbytes), offset in zip(missing.items(), offsets, strict=True)
            if offset != NO_ROOM
        }
        if fresh:
            self._chunks.update(fresh)
            self._writes.setdefault(owner, {}).update(fresh)
            self._overdue.watch(list(fresh.values()), expires)

    def _resume(
        self, owner: str, requests: Sequence[tuple[Key, int]], expires: float
    ) -> dict[Key, int]:
        """The owner of an overdue write asks again: it gets the same slot, not a second one."""
        writes = self._writes.get(owner, {})
        resumed = {}
        for key, _ in requests:
            chunk = writes.get(key)
            if chunk is not None and key not in self._chunks:
                self._hidden.discard(chunk)
                chunk.visible = True
                chunk.expires = expires
                self._chunks[key] = resumed[key] = chunk
        if resumed:
            self._overdue.watch(list(resumed.values()), expires)
        return {key: chunk.offset for key, chunk in resumed.items()}

    def _allocate(self, sizes: Sequence[int], evict: bool = True) -> list[int]:
        """Offsets for `sizes`, evicting idle chunks as needed; `NO_ROOM` where that fails."""
        offsets: list[int] = []
        for nbytes, count in _runs(sizes):
            got = self.slots.allocate_many(nbytes, count)
            if evict and len(got) < count:
                self._make_room(nbytes, count - len(got))
                got += self.slots.allocate_many(nbytes, count - len(got))
            offsets += got
            offsets += [NO_ROOM] * (count - len(got))
        return offsets

    def _make_room(self, nbytes: int, count: int) -> None:
        self.expire()
        before = self.slots.used
        victims = make_room(nbytes, count, self.slots, self._policy, self._chains, self._chunks)
        self.evicted += len(victims)
        self._policy.evict([chunk.key for chunk in victims])
        self._leave(victims, before - self.slots.used)

    def _leave(self, chunks: Sequence[Chunk], nbytes: int) -> None:
        """Chunks that were ready are gone; their slots and the policy know already."""
        for chunk in chunks:
            del self._chunks[chunk.key]
            chunk.visible = False
        self._ready_bytes -= nbytes
        if chunks:
            self._on_gone(chunks)

    def _hide(self, writes: Sequence[Chunk]) -> None:
        """Writes that were given up: their slots are in quarantine."""
        for chunk in writes:
            del self._chunks[chunk.key]
            chunk.visible = False
            self._hidden.add(chunk)
        if writes:
            self._on_gone(writes)

    def _free_hidden(self, chunk: Chunk) -> None:
        """Free a slot in quarantine, unless someone still reads or writes it."""
        writing = self._writes.get(chunk.owner, {}).get(chunk.key) is chunk
        if chunk.io == 0 and not writing and chunk in self._hidden:
            self._hidden.discard(chunk)
            self.slots.free(chunk.offset)

    def _announce(self, ready: Sequence[Chunk]) -> None:
        if not ready:
            return
        for nbytes, run in itertools.groupby(ready, attrgetter("nbytes")):
            keys = [chunk.key for chunk in run]
            self._ready_bytes += len(keys) * self.slots.rounded(nbytes)
            self._policy.insert(keys, nbytes, self._chains.extended(keys, self._chunks))
        self._on_ready(ready)


def _runs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Equal sizes in a row, and how many. A batch mostly has one."""
    if sizes and sizes.count(sizes[0]) == len(sizes):
        return [(sizes[0], len(sizes))]
    return [(nbytes, len(list(run))) for nbytes, run in itertools.groupby(sizes)]
