"""Who of those that share a store may evict: one lease, with a fencing token.

    evictor/<token>          one lease each, the highest holds

A lease is taken by linking a file to the next token's name, which at most one can. Its holder
renews it by counting `beat` up in place: that takes no room, so it works on a full disk. Whoever
sees neither token nor beat change for `TTL` by its own clock takes the next token: no clocks are
compared and no locks are needed. A holder that was away notices before it removes anything that
its time is over or that a higher token is there. Should caches of a network file system hide that
for a moment, two evict for that moment: they remove more than was needed, never a wrong chunk.

The lease also says how much of the store is used, so that the others keep within the bound.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import xxhash

from kvstrata.tiers.fs_root import Root, write_all

__all__ = ["EVICTOR", "TTL", "Lease", "LeaseFile", "Use"]

EVICTOR = "evictor"
TTL = 8.0
"""Seconds without a sign of its holder after which a lease is over."""
_MARGIN = 2.0

_FILE_BYTES = 64 << 10  # fixed, so that renewing needs no room
_SEAL_BYTES = 12
_MOST_HEARD = 1000


class Use(msgspec.Struct, frozen=True):
    """What the holder publishes. `heard` has, for each writer, how many bytes of all it ever
    stored `used_bytes` accounts for; the room that is left is shared equally among them."""

    used_bytes: int = 0
    capacity: int | None = None
    heard: dict[str, int] = {}

    def limit(self, writer: str) -> int:
        """All bytes that a writer may ever have stored: its equal share beyond what is heard."""
        if writer not in self.heard:
            return 0
        room = max(0, (self.capacity or 0) - self.used_bytes)
        return self.heard[writer] + room // len(self.heard)


class Lease(msgspec.Struct, frozen=True):
    token: int
    holder: str
    beat: int = 0
    released: bool = False
    use: Use = Use()


class _Seen(NamedTuple):
    token: int
    beat: int
    at: float


class LeaseFile:
    """One writer's view of the lease. Methods block; one thread at a time, but `held`."""

    def __init__(self, root: Root, clock: Callable[[], float]) -> None:
        self._root, self._system, self._clock = root, root.system, clock
        self._mine: Lease | None = None
        self._renewed = self._taken = 0.0
        self._seen = _Seen(-1, -1, 0.0)
        self.latest: Lease | None = None
        """The lease that was read or written last."""
        self.predecessor: Lease | None = None
        """The last lease that was another's."""

    @property
    def held(self) -> bool:
        """Whether this writer may evict, as far as it can tell without a look at the disk."""
        return self._mine is not None and self._clock() - self._renewed < TTL - _MARGIN

    @property
    def silent(self) -> float:
        """Seconds since another's lease was seen to change."""
        return self._clock() - self._seen.at

    @property
    def taken(self) -> float:
        """Seconds since we took it."""
        return self._clock() - self._taken

    def step(self, use: Use, impatient: bool = False) -> bool:
        """Renew ours, or look at another's and take it if it is over; `impatient`: also if its
        holder is known to be dead. Whether it was taken from one that died. Raises `OSError`."""
        mine = self._mine
        if mine is not None and self._highest() == mine.token:
            started = self._clock()
            self._mine = self.latest = self._write(mine, use=use)
            self._renewed = started
            return False
        self._mine = None
        lease = self._observe()
        token = self._seen.token
        over = token < 0 or self.silent >= TTL
        if lease is not None:
            over = over or lease.released or (impatient and self._root.writers.dead(lease.holder))
        if not over or not self._take(use):
            return False
        return token >= 0 and (lease is None or not lease.released)

    def fenced(self) -> bool:
        """Whether this writer may remove a batch of chunks now. Raises `OSError`."""
        return self.held and self._mine is not None and self._highest() == self._mine.token

    def release(self) -> None:
        """Let another take it at once. Raises `OSError`."""
        mine, self._mine = self._mine, None
        if mine is not None and self._highest() == mine.token:
            self._write(mine, released=True)

    def forget(self) -> None:
        """The store was made anew: there is no lease."""
        self._mine = self.latest = None
        self._seen = _Seen(-1, -1, 0.0)

    def _write(self, lease: Lease, use: Use | None = None, released: bool = False) -> Lease:
        lease = Lease(
            lease.token, lease.holder, lease.beat + 1, released, lease.use if use is None else use
        )
        fd = self._system.open(self._path(lease.token), os.O_WRONLY)
        try:
            write_all(self._system, fd, [_packed(lease)])
        finally:
            self._system.close(fd)
        return lease

    def _take(self, use: Use) -> bool:
        """Try for the next token. What counts is what is read back: over a network a link may
        be made and its answer be lost."""
        token = self._highest() + 1
        lease = Lease(token, self._root.writer, 0, False, use)
        started = self._clock()
        directory = self._root.at(EVICTOR)
        with contextlib.suppress(FileExistsError):
            self._system.mkdir(directory)
        temp = self._root.temp(directory)
        try:
            fd = self._system.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                write_all(self._system, fd, [_packed(lease)])
            finally:
                self._system.close(fd)
            with contextlib.suppress(FileExistsError):
                self._system.link(temp, self._path(token))
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._system.unlink(temp)
        there = self._read(token)
        if there is None or there.holder != self._root.writer:
            return False
        self._mine, self._renewed, self._taken, self.latest = lease, started, started, lease
        for entry in self._root.swept(directory):
            if entry.name.isdigit() and int(entry.name) < token:
                with contextlib.suppress(FileNotFoundError):
                    self._system.unlink(entry.path)
        return True

    def _observe(self) -> Lease | None:
        """What the highest lease says, unless it is torn."""
        token = self._highest()
        lease = self._read(token) if token >= 0 else None
        if lease is not None:
            self.latest = self.predecessor = lease
        # A lease that can't be read is being written: a sign of life, if it changes again.
        beat = -1 if lease is None else lease.beat
        if (token, beat) != self._seen[:2]:
            self._seen = _Seen(token, beat, self._clock())
        if token < 0:
            self.latest = None
        return lease

    def _highest(self) -> int:
        try:
            names = [entry.name for entry in self._system.entries(self._root.at(EVICTOR))]
        except FileNotFoundError:
            return -1
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def _path(self, token: int) -> str:
        return self._root.at(f"{EVICTOR}/{token:020d}")

    def _read(self, token: int) -> Lease | None:
        """None: not there, or torn."""
        page = memoryview(bytearray(_FILE_BYTES))
        try:
            fd = self._system.open(self._path(token), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            self._system.preadv(fd, [page], 0)
        finally:
            self._system.close(fd)
        length, seal = int.from_bytes(page[:4], "little"), page[4:_SEAL_BYTES]
        content = page[_SEAL_BYTES : _SEAL_BYTES + length]
        if xxhash.xxh3_64_digest(content) != seal:
            return None
        try:
            return msgspec.json.decode(content, type=Lease)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return None


def _packed(lease: Lease) -> memoryview:
    content = msgspec.json.encode(lease)
    if len(content) > _FILE_BYTES - _SEAL_BYTES:
        # More writers than fit (1,500): those left out have no share.
        heard = dict(list(lease.use.heard.items())[:_MOST_HEARD])
        use = Use(lease.use.used_bytes, lease.use.capacity, heard)
        content = msgspec.json.encode(
            Lease(lease.token, lease.holder, lease.beat, lease.released, use)
        )
    head = len(content).to_bytes(4, "little") + xxhash.xxh3_64_digest(content)
    return memoryview((head + content).ljust(_FILE_BYTES, b"\0"))
