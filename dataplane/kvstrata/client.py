"""The engine's side of a session with a node: thin, synchronous, batched.

Two halves over one socket. The non-blocking half (`send`, `receive`) is for an engine's
scheduler thread: one message out and one in per step, nothing waits. The blocking half
(`lookup`, `reserve`, `commit`, ...) is for engines with a simple loop, tools and tests; every
wait has a deadline. Not thread-safe: one thread, one client.
"""

from __future__ import annotations

import os
import select
import socket as sockets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import zmq

from kvstrata import wire
from kvstrata.errors import Busy, Expired, LinkBroken, from_code
from kvstrata.keys import Key, Namespace
from kvstrata.region import Region
from kvstrata.wire import State

__all__ = ["Client", "Found", "lifeline_path"]

SESSION_BYTES = 16
LIFELINE_ACK = b"\x01"
_LONGEST_POLL = 60.0

_T = TypeVar("_T", wire.StepReply, wire.StatusReply, wire.Dropped)


def lifeline_path(socket: Path) -> Path:
    """Where a node listens for the lifelines of the sessions on `socket`."""
    return socket.with_name(socket.name + ".life")


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a blocking lookup: parallel to the keys asked. `offsets[i]` is where the chunk
    lies in the region, -1 unless `states[i]` is `HOST`. `promoted[i]`: it came from a secondary
    tier for this lookup. What was found is held by `lease` for `ttl` seconds from when the node
    answered, which is before it waited."""

    lease: int
    states: list[State]
    offsets: list[int]
    promoted: list[bool]
    ttl: float

    @property
    def prefix(self) -> int:
        """How many leading keys are readable."""
        return next((i for i, s in enumerate(self.states) if s is not State.HOST), len(self.states))


class Client:
    """One session. `connect` waits for the node's welcome, `open` does not."""

    welcome: wire.Welcome

    def __init__(self, socket: Path, hello: wire.Hello, timeout: float) -> None:
        self.socket = socket
        self.namespace = hello.namespace
        self._hello = hello
        self._timeout = timeout
        self._seq = 0
        self._next_lease = 1
        self._welcomed = False
        self._greeted = False
        self._closed = False
        self._inbox: list[wire.StepReply | wire.Resolved | wire.Failure] = []
        self._region: Region | None = None
        # ZMQ reserves identities that start with a zero byte.
        self._id = b"E" + os.urandom(SESSION_BYTES - 1)
        self._lifeline = _open_lifeline(socket, self._id)
        self._alive = select.poll()
        self._alive.register(self._lifeline, select.POLLIN)
        self._dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, self._id)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.connect(f"ipc://{socket}")

    @classmethod
    def open(
        cls,
        socket: Path | str,
        engine: str,
        role: Literal["scheduler", "worker", "tool"] = "scheduler",
        namespace: Namespace | None = None,
        timeout: float = 10.0,
    ) -> Client:
        """Begin a session without waiting; `poll_welcome` tells when it stands.

        Raises `LinkBroken` if no node listens at `socket`. `timeout` bounds every blocking call.
        """
        hello = wire.Hello(wire.PROTOCOL, engine, role, namespace)
        return cls(Path(socket), hello, timeout)

    @classmethod
    def connect(
        cls,
        socket: Path | str,
        engine: str,
        role: Literal["scheduler", "worker", "tool"] = "scheduler",
        namespace: Namespace | None = None,
        timeout: float = 10.0,
    ) -> Client:
        """Begin a session. Raises `LinkBroken` if no node listens or it does not answer within
        `timeout` seconds, `NamespaceMismatch` and others as the node refuses."""
        client = cls.open(socket, engine, role, namespace, timeout)
        try:
            deadline = time.monotonic() + timeout
            while not client.poll_welcome():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkBroken(f"node at {socket} did not answer within {timeout:g} s")
                client._wait(left)
        except BaseException:
            client.close()
            raise
        return client

    def poll_welcome(self) -> bool:
        """Whether the session stands; never blocks. Raises what the node refused with."""
        if self._welcomed:
            return True
        if not self._greeted:
            try:
                ack = self._lifeline.recv(1)
            except BlockingIOError:
                return False
            except OSError as e:
                raise LinkBroken(f"node at {self.socket} is gone: {e.strerror}") from e
            if ack != LIFELINE_ACK:
                raise LinkBroken(f"node at {self.socket} is ending, or has no session to spare")
            self._dealer.send(wire.encode(self._hello), zmq.NOBLOCK)
            self._greeted = True
        message = self._take()
        if message is None:
            if self._alive.poll(0):
                raise LinkBroken(f"node at {self.socket} is gone")
            return False
        if isinstance(message, wire.Failure):
            raise from_code(message.code, message.message)
        if not isinstance(message, wire.Welcome):
            raise LinkBroken(f"node at {self.socket} spoke before its welcome")
        self.welcome = message
        self.namespace = message.namespace
        self._welcomed = True
        return True

    @property
    def region(self) -> Region:
        """The node's region, mapped at first use. Raises `LinkBroken` if it is gone."""
        if self._region is None:
            self._check_open()
            w = self.welcome
            self._region = Region.attach(w.region, w.region_bytes, Path(w.shm_dir))
        return self._region

    def close(self) -> None:
        """End the session: the node takes back all it held. Idempotent. Whatever is asked of
        it afterwards raises `LinkBroken`."""
        self._closed = True
        self._dealer.close()
        self._lifeline.close()
        if self._region is not None:
            self._region.close()
            self._region = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------ non-blocking half

    def new_lease(self) -> int:
        """A lease id not used in this session before."""
        self._next_lease += 1
        return self._next_lease - 1

    def send(self, step: wire.Step) -> int:
        """Send a step; its seq (any that `step` bears is replaced). Raises `LinkBroken` if the
        node is gone, `Busy` if it has not read what was sent before."""
        self._check_alive()
        self._seq += 1
        step = msgspec.structs.replace(step, seq=self._seq)
        self._send(step)
        return self._seq

    def receive(self) -> list[wire.StepReply | wire.Resolved | wire.Failure]:
        """All that has arrived, in order; never blocks. Raises `LinkBroken` once the node is
        gone and everything it said has been received."""
        while (message := self._take()) is not None:
            if isinstance(message, wire.StepReply | wire.Resolved | wire.Failure):
                self._inbox.append(message)
        messages, self._inbox = self._inbox, []
        if not messages:
            self._check_alive()
        return messages

    # ------------------------------------------------------------ blocking half

    def lookup(
        self,
        keys: Sequence[Key],
        want: Literal["prefix", "all"] = "prefix",
        wait: float = 5.0,
        lease: int | None = None,
    ) -> Found:
        """Find and lease chunks; waits up to `wait` seconds for promotions (0: only what is in
        the host tier now counts as found)."""
        lease = self.new_lease() if lease is None else lease
        ask = wire.Lookup(lease, list(keys), want, wait)
        deadline = time.monotonic() + wait + self._timeout
        (answer,) = self._step(wire.Step(0, lookups=[ask])).found
        states = [State(s) for s in answer.states]
        offsets = list(answer.offsets)
        promoted = [False] * len(states)
        waiting: dict[Key, list[int]] = {}
        for i, state in enumerate(states):
            if state is State.PENDING:
                waiting.setdefault(keys[i], []).append(i)
        while waiting:
            settled = self._await(
                lambda m: isinstance(m, wire.Resolved) and m.id == lease, deadline
            )
            assert isinstance(settled, wire.Resolved)  # noqa: S101 - what the predicate chose
            for key, told, offset in zip(
                settled.keys, settled.states, settled.offsets, strict=True
            ):
                for i in waiting.pop(Key(key), ()):
                    states[i], offsets[i] = State(told), offset
                    promoted[i] = states[i] is State.HOST
        return Found(lease, states, offsets, promoted, answer.ttl)

    def reserve(self, keys: Sequence[Key]) -> list[int]:
        """Per key the offset to write to, -1 (no room) or -2 (here, or being written)."""
        return self._step(wire.Step(0, reserves=list(keys))).reserved

    def commit(self, keys: Sequence[Key]) -> list[bool]:
        """The bytes of these keys are complete; per key whether the chunk is readable now."""
        return self._step(wire.Step(0, commits=list(keys))).committed

    def tell(self, tells: Sequence[wire.Told]) -> None:
        """Say what chunks are, before or after they are stored, for the node's KV events."""
        self._step(wire.Step(0, tells=list(tells)))

    def abort(self, keys: Sequence[Key]) -> None:
        """Give reserved slots back. When it returns the node has done so."""
        self._step(wire.Step(0, aborts=list(keys)))

    def begin(self, lease: int, keys: Sequence[Key]) -> None:
        """Start to read leased chunks. Raises `Expired` if the lease no longer holds them."""
        if lease in self._step(wire.Step(0, begin=[(lease, list(keys))])).lapsed:
            raise Expired(f"lease {lease} no longer holds what is to be read")

    def end(self, lease: int, keys: Sequence[Key]) -> None:
        self._step(wire.Step(0, end=[(lease, list(keys))]))

    def renew(self, lease: int) -> None:
        """Extend a lease by the node's lease TTL. Raises `Expired` if it has lapsed."""
        if lease in self._step(wire.Step(0, renews=[lease])).lapsed:
            raise Expired(f"lease {lease} has lapsed")

    def release(self, lease: int) -> None:
        self._step(wire.Step(0, releases=[lease]))

    def status(self) -> wire.StatusReply:
        self._seq += 1
        self._send(wire.Status(self._seq))
        return self._reply(wire.StatusReply)

    def drop(self, tiers: Sequence[str], keys: Sequence[Key] | None = None) -> dict[str, int]:
        """Drop idle chunks from tiers (no keys: all); how many went, by tier."""
        self._seq += 1
        self._send(wire.Drop(self._seq, list(tiers), None if keys is None else list(keys)))
        return self._reply(wire.Dropped).dropped

    # ------------------------------------------------------------ inside

    def _send(self, message: msgspec.Struct) -> None:
        self._check_open()
        try:
            self._dealer.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again as e:
            raise Busy(f"node at {self.socket} is not reading") from e

    def _step(self, step: wire.Step) -> wire.StepReply:
        self.send(step)
        return self._reply(wire.StepReply)

    def _reply(self, kind: type[_T]) -> _T:
        seq = self._seq
        message = self._await(
            lambda m: isinstance(m, kind | wire.Failure) and m.seq == seq,
            time.monotonic() + self._timeout,
        )
        if isinstance(message, wire.Failure):
            raise from_code(message.code, message.message)
        assert isinstance(message, kind)  # noqa: S101 - what the predicate chose
        return message

    def _await(self, wanted: Callable[[wire.FromNode], bool], deadline: float) -> wire.FromNode:
        """The first message that `wanted` accepts; others wait in the inbox."""
        for i, kept in enumerate(self._inbox):
            if wanted(kept):
                return self._inbox.pop(i)
        while True:
            message = self._take()
            if message is None:
                self._check_alive()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Expired(f"node at {self.socket} did not answer in time")
                self._wait(left)
            elif wanted(message):
                return message
            elif isinstance(message, wire.StepReply | wire.Resolved | wire.Failure):
                self._inbox.append(message)

    def _take(self) -> wire.FromNode | None:
        self._check_open()
        try:
            return wire.decode_from_node(self._dealer.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _wait(self, seconds: float) -> None:
        """Until something arrives, the node dies, or the time is over."""
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._lifeline.fileno(), zmq.POLLIN)
        # Callers look at their own deadline again; `wait` may be given as infinity.
        poller.poll(int(min(seconds, _LONGEST_POLL) * 1000) + 1)

    def _check_open(self) -> None:
        if self._closed:
            raise LinkBroken(f"this session with the node at {self.socket} is closed")

    def _check_alive(self) -> None:
        self._check_open()
        if not self._welcomed:
            raise LinkBroken(f"no session with the node at {self.socket} yet")
        if self._alive.poll(0):
            raise LinkBroken(f"node at {self.socket} is gone")


def _open_lifeline(socket: Path, session: bytes) -> sockets.socket:
    lifeline = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        lifeline.settimeout(1.0)
        lifeline.connect(str(lifeline_path(socket)))
        lifeline.sendall(session)
        lifeline.setblocking(False)
    except OSError as e:
        lifeline.close()
        raise LinkBroken(
            f"no node at {socket} ({e.strerror or e}): start one with `kvstrata node`"
        ) from e
    return lifeline
