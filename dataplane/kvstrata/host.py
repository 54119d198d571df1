"""The host tier: a cache of chunks in the shared region.

Pure bookkeeping on one thread: no bytes are touched and nothing blocks. Time comes in through
a clock. An *owner* is whoever may write or read: an engine session, a promotion, a peer, a
transfer; owners are told apart by name.

States of a key and what moves it (every transition is a method of `HostTier`):

    absent   --reserve, use-->   writing   a slot is reserved; others see the key as pending
    writing  --commit-->         ready     readable; leases can be taken
    writing  --abort, forget-->  absent    slot freed
    writing  --expire-->         absent    slot quarantined: its owner may still be writing
    ready    --evict, drop-->    absent    slot freed, or quarantined while someone reads it

A slot is in quarantine while no key names it and someone may still touch it. It leaves by the
owner's own word: commit (a late write of a key that is absent becomes ready after all; any
other is freed), abort, the end of the reading, or the owner's end (`forget`). Never by time.

A lease keeps ready chunks from eviction until it is released or its time passes. `begin` and
`end` bracket a read of leased bytes; between them the slot outlives even the lease.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstrata.keys import Key
from kvstrata.policies import Policy
from kvstrata.slots import Slots

__all__ = ["NO_ROOM", "PRESENT", "Chunk", "HostTier", "HostUsage", "State", "Used"]

NO_ROOM = -1
PRESENT = -2


class State(enum.IntEnum):
    """Of a key, as `HostTier.find` sees it."""

    ABSENT = 0
    READY = 1
    WRITING = 2


class Used(enum.IntEnum):
    """What became of naming a granted slot."""

    OWNED = 1  # the slot now belongs to the key: write, then commit or abort
    DUPLICATE = 0  # the chunk is here or being written; the slot waits for commit or abort
    UNKNOWN = -1  # not a slot granted to this owner


@dataclass(slots=True, eq=False)
class Chunk:
    """A slot with a key. `readers` counts leases, `io` reads and writes in flight by others."""

    key: Key
    offset: int
    nbytes: int
    owner: str
    state: State
    expires: float
    readers: int = 0
    io: int = 0
    visible: bool = True
    checksum: int | None = None


@dataclass(slots=True, eq=False)
class _Lease:
    owner: str
    id: int
    expires: float
    held: dict[Key, Chunk] = field(default_factory=dict)
    busy: dict[Key, list[Chunk]] = field(default_factory=dict)


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
        self.expired_leases = 0
        self.expired_writes = 0
        self._policy = policy
        self._clock = clock
        self._reserve_ttl = reserve_ttl
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._chunks: dict[Key, Chunk] = {}
        self._writes: dict[str, dict[Key, Chunk]] = {}
        self._grants: dict[str, dict[int, int]] = {}
        self._leases: dict[tuple[str, int], _Lease] = {}
        self._hidden: set[Chunk] = set()
        self._lease_heap: list[tuple[float, str, int]] = []
        self._write_heap: list[tuple[float, int, Chunk]] = []
        self._sequence = 0
        self._ready_bytes = 0

    # ------------------------------------------------------------ writing

    def reserve(self, owner: str, requests: Sequence[tuple[Key, int]]) -> list[int]:
        """Make room for chunks of given sizes; per request the offset to write to,
        `PRESENT` (here already, or being written), or `NO_ROOM`. Partial success is normal."""
        chunks = self._chunks
        expires = self._clock() + self._reserve_ttl
        placed: dict[Key, int] = {}
        overdue = self._writes.get(owner, {})
        for key, _ in requests:
            if key in overdue and key not in chunks:
                placed[key] = self._resume(overdue[key], expires)
        missing = {
            key: nbytes for key, nbytes in requests if key not in chunks and key not in placed
        }
        offsets = self._allocate(list(missing.values()))
        for (key, nbytes), offset in zip(missing.items(), offsets, strict=True):
            placed[key] = offset
            if offset != NO_ROOM:
                self._start_write(owner, key, offset, nbytes, expires)
        return [placed.pop(key, PRESENT) for key, _ in requests]

    def commit(self, owner: str, keys: Sequence[Key]) -> list[bool]:
        """The bytes are complete. Per key whether the chunk is readable now."""
        writes = self._writes.get(owner, {})
        ready: list[Chunk] = []
        answers = []
        for key in keys:
            chunk = writes.pop(key, None)
            if chunk is not None:
                if not chunk.visible and key not in self._chunks:
                    self._hidden.discard(chunk)
                    chunk.visible = True
                    self._chunks[key] = chunk
                if chunk.visible:
                    chunk.state = State.READY
                    self._ready_bytes += self.slots.rounded(chunk.nbytes)
                    ready.append(chunk)
                else:
                    self._free_hidden(chunk)
            present = self._chunks.get(key)
            answers.append(present is not None and present.state is State.READY)
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
                self.slots.free(chunk.offset)
                gone.append(chunk)
            else:
                self._free_hidden(chunk)
        if gone:
            self._on_gone(gone)

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
                self._start_write(owner, key, offset, nbytes, expires)
                answers.append(Used.OWNED)
        return answers

    def ungrant(self, owner: str, offsets: Iterable[int]) -> None:
        """Take granted slots back. Those not granted to `owner` are ignored."""
        grants = self._grants.get(owner, {})
        for offset in offsets:
            if grants.pop(offset, None) is not None:
                self.slots.free(offset)

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

    def lease(self, owner: str, id: int, keys: Sequence[Key], ttl: float) -> list[Chunk | None]:  # noqa: A002
        """Take (or add to) a lease on those keys that are ready; it then runs for `ttl`
        seconds, or until the time it already had, if that is later."""
        now = self._clock()
        lease = self._leases.get((owner, id))
        if lease is None:
            lease = self._leases[owner, id] = _Lease(owner, id, now)
        self._extend(lease, now + ttl)
        held = lease.held
        found: list[Chunk | None] = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.state is not State.READY:
                found.append(None)
                continue
            if key not in held:
                held[key] = chunk
                chunk.readers += 1
            found.append(chunk)
        self._policy.touch([chunk.key for chunk in found if chunk is not None])
        return found

    def renew(self, owner: str, ids: Iterable[int], ttl: float) -> list[int]:
        """Extend leases; the ids of those that have lapsed."""
        now = self._clock()
        lapsed = []
        for id_ in ids:
            lease = self._leases.get((owner, id_))
            if lease is None or lease.expires < now:
                lapsed.append(id_)
            else:
                self._extend(lease, now + ttl)
        return lapsed

    def release(self, owner: str, ids: Iterable[int]) -> None:
        """End leases. What is being read under them (`begin`) stays until `end`."""
        for id_ in ids:
            lease = self._leases.get((owner, id_))
            if lease is not None:
                self._let_go(lease)

    def begin(self, owner: str, id: int, keys: Sequence[Key]) -> bool:  # noqa: A002
        """Reading starts. False if the lease does not hold all of the keys any more: then
        nothing has begun and their bytes must not be trusted."""
        lease = self._leases.get((owner, id))
        if lease is None or any(key not in lease.held for key in keys):
            return False
        for key in keys:
            chunk = lease.held[key]
            chunk.io += 1
            lease.busy.setdefault(key, []).append(chunk)
        return True

    def end(self, owner: str, id: int, keys: Iterable[Key]) -> None:  # noqa: A002
        """Reading ended. Keys not being read are ignored."""
        lease = self._leases.get((owner, id))
        if lease is None:
            return
        for key in keys:
            reading = lease.busy.get(key)
            if not reading:
                continue
            self.unpin(reading.pop())
            if not reading:
                del lease.busy[key]
        if not lease.held and not lease.busy:
            self._leases.pop((owner, id), None)

    def pin(self, keys: Iterable[Key]) -> list[Chunk]:
        """Ready chunks of `keys`, kept from reuse (not from being dropped) until `unpin`.

        For the node's own reads, such as a cascade; an absent key is left out."""
        pinned = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.state is State.READY:
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
        idle = [
            chunk for key in names if (chunk := self._chunks.get(key)) is not None and _idle(chunk)
        ]
        self._remove(idle)
        return len(idle)

    def forget(self, owner: str) -> None:
        """The owner is gone for certain: nothing of it reads or writes any more."""
        self.abort(owner, list(self._writes.get(owner, ())))
        self._writes.pop(owner, None)
        for offset in self._grants.pop(owner, {}):
            self.slots.free(offset)
        for lease in [lease for lease in self._leases.values() if lease.owner == owner]:
            for reading in lease.busy.values():
                for chunk in reading:
                    self.unpin(chunk)
            lease.busy.clear()
            self._let_go(lease)

    def expire(self) -> None:
        """Act on what the clock has made true: lapsed leases, overdue writes."""
        now = self._clock()
        while self._lease_heap and self._lease_heap[0][0] < now:
            expires, owner, id_ = heapq.heappop(self._lease_heap)
            lease = self._leases.get((owner, id_))
            if lease is not None and lease.expires == expires:
                self.expired_leases += bool(lease.held)
                self._let_go(lease)
        overdue = []
        while self._write_heap and self._write_heap[0][0] < now:
            chunk = heapq.heappop(self._write_heap)[2]
            if chunk.visible and chunk.state is State.WRITING and chunk.expires < now:
                self.expired_writes += 1
                del self._chunks[chunk.key]
                chunk.visible = False
                self._hidden.add(chunk)
                overdue.append(chunk)
        if overdue:
            self._on_gone(overdue)

    # ------------------------------------------------------------ state

    def get(self, key: Key) -> Chunk | None:
        """The ready chunk of a key, if there is one."""
        chunk = self._chunks.get(key)
        return chunk if chunk is not None and chunk.state is State.READY else None

    def keys(self) -> list[Key]:
        return [key for key, chunk in self._chunks.items() if chunk.state is State.READY]

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

    def _start_write(self, owner: str, key: Key, offset: int, nbytes: int, expires: float) -> None:
        chunk = Chunk(key, offset, nbytes, owner, State.WRITING, expires)
        self._chunks[key] = chunk
        self._writes.setdefault(owner, {})[key] = chunk
        self._push_write(chunk, expires)

    def _resume(self, chunk: Chunk, expires: float) -> int:
        """The owner of an overdue write asks again: it gets the same slot, not a second one."""
        self._hidden.discard(chunk)
        chunk.visible = True
        self._chunks[chunk.key] = chunk
        self._push_write(chunk, expires)
        return chunk.offset

    def _push_write(self, chunk: Chunk, expires: float) -> None:
        chunk.expires = expires
        self._sequence += 1
        heapq.heappush(self._write_heap, (expires, self._sequence, chunk))

    def _allocate(self, sizes: Sequence[int]) -> list[int]:
        """Offsets for `sizes`, evicting idle chunks as needed; `NO_ROOM` where that fails."""
        allocate = self.slots.allocate
        offsets: list[int] = []
        for i, nbytes in enumerate(sizes):
            offset = allocate(nbytes)
            if offset is None and self._make_room(sizes[i:], nbytes):
                offset = allocate(nbytes)
            offsets.append(NO_ROOM if offset is None else offset)
            if offset is None and all(n == nbytes for n in sizes[i:]):
                offsets += [NO_ROOM] * (len(sizes) - i - 1)
                break
        return offsets

    def _make_room(self, sizes: Sequence[int], at_least: int) -> bool:
        """Evict until a batch fits, or at least its first; whether that one now does."""
        rounded = self.slots.rounded
        self.expire()
        free = self.slots.capacity - self.slots.used
        wanted = min(sum(map(rounded, sizes)), self.slots.capacity) - free
        victims: list[Chunk] = []
        for key in self._policy.victims():
            if wanted <= 0:
                break
            chunk = self._chunks[key]
            if _idle(chunk):
                victims.append(chunk)
                wanted -= rounded(chunk.nbytes)
        self.evicted += len(victims)
        self._remove(victims)
        # Holes between chunks of other sizes may be too small: go on until one is not.
        while self.slots.largest_free < rounded(at_least):
            victim = next(
                (c for key in self._policy.victims() if _idle(c := self._chunks[key])), None
            )
            if victim is None:
                return False
            self.evicted += 1
            self._remove([victim])
        return True

    def _remove(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            del self._chunks[chunk.key]
            self._policy.remove(chunk.key)
            self._ready_bytes -= self.slots.rounded(chunk.nbytes)
            chunk.visible = False
            self._hidden.add(chunk)
            self._free_hidden(chunk)
        if chunks:
            self._on_gone(chunks)

    def _free_hidden(self, chunk: Chunk) -> None:
        """Free a slot in quarantine, unless someone still reads or writes it."""
        writing = self._writes.get(chunk.owner, {}).get(chunk.key) is chunk
        if chunk.io == 0 and not writing and chunk in self._hidden:
            self._hidden.discard(chunk)
            self.slots.free(chunk.offset)

    def _announce(self, ready: Sequence[Chunk]) -> None:
        if not ready:
            return
        first = 0
        for i in range(1, len(ready) + 1):
            if i == len(ready) or ready[i].nbytes != ready[first].nbytes:
                self._policy.insert([c.key for c in ready[first:i]], ready[first].nbytes)
                first = i
        self._on_ready(ready)

    def _extend(self, lease: _Lease, expires: float) -> None:
        if expires > lease.expires or not lease.held:
            lease.expires = max(expires, lease.expires)
            heapq.heappush(self._lease_heap, (lease.expires, lease.owner, lease.id))

    def _let_go(self, lease: _Lease) -> None:
        for chunk in lease.held.values():
            chunk.readers -= 1
        lease.held.clear()
        if not lease.busy:
            self._leases.pop((lease.owner, lease.id), None)


def _idle(chunk: Chunk) -> bool:
    return chunk.state is State.READY and chunk.readers == 0 and chunk.io == 0
