"""A node without sockets, threads or bytes, for tests of the scheduler's half.

It keeps the real `HostTier`, answers steps as `node.engine_port` does, and remembers which chunk
was last written to each slot, so that a test sees what a reader would have read.
"""

from __future__ import annotations

import itertools

import msgspec

from kvstrata import wire
from kvstrata.errors import Busy, LinkBroken
from kvstrata.host import HostTier, State
from kvstrata.keys import Field, Group, Key, Namespace
from kvstrata.policies import open_policy
from kvstrata.slots import Slots

CHUNK = 4096
TTL = 30.0

NAMESPACE = Namespace(
    model="m",
    revision="1",
    config="c",
    dtype="bfloat16",
    content_format="x",
    groups=(Group(0, "full", ("a",), (Field("kv", 1, CHUNK),), tokens_per_block=16),),
    blocks_per_chunk=1,
    hash_algorithm="sha256",
    hash_seed="0",
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeNode:
    """`lagging`: messages wait until `work`. `welcoming`: whether new clients get an answer.
    `tier`: chunks that a secondary tier has."""

    def __init__(self, clock: Clock, chunks: int, namespace: Namespace = NAMESPACE) -> None:
        self.namespace = namespace
        self.tier: set[bytes] = set()
        self.lagging = False
        self.alive = False
        self.room = True
        self.welcoming = True
        self.refuse: str | None = None
        self.steps: list[wire.Step] = []
        self._clock = clock
        self._chunks = chunks
        self._numbers = itertools.count()
        self._incarnations = itertools.count()
        self.start()

    def start(self) -> None:
        self.alive = True
        self.lagging = False
        self.incarnation = f"i{next(self._incarnations)}"
        self.region = f"kvstrata-{self.incarnation}"
        self.host = HostTier(
            Slots(self._chunks * CHUNK),
            open_policy("lru", self._chunks * CHUNK),
            self._clock,
            on_ready=lambda chunks: self._settle([c.key for c in chunks]),
            on_gone=lambda chunks: self._settle([c.key for c in chunks]),
        )
        self.memory: dict[int, bytes] = {}
        self._queue: list[tuple[FakeClient, wire.Step]] = []
        self._waiting: dict[bytes, list[tuple[FakeClient, int]]] = {}
        self.clients: list[FakeClient] = []

    def die(self) -> None:
        self.alive = False

    def connect(self) -> FakeClient:
        if not self.alive:
            raise LinkBroken("no node")
        client = FakeClient(self, f"session:{next(self._numbers)}")
        self.clients.append(client)
        return client

    def give(self, client: FakeClient, step: wire.Step) -> None:
        self._queue.append((client, step))
        if not self.lagging:
            self.work()

    def work(self) -> None:
        """Handle what has come in."""
        queue, self._queue = self._queue, []
        for client, step in queue:
            if client in self.clients and self.alive:
                self.steps.append(step)
                client.inbox.append(self._answer(client, step))

    def promote(self) -> None:
        """The secondary tier delivers all that is waited for and that it has."""
        for key in [Key(k) for k in self._waiting]:
            if self.host.find([key]) != [State.ABSENT]:
                continue
            offset = self.host.reserve("tier", [(key, CHUNK)])[0] if key in self.tier else -1
            if offset >= 0:
                self.memory[offset] = key
                self.host.commit("tier", [key])
            else:
                self._settle([key])

    def forget(self, client: FakeClient) -> None:
        if client in self.clients:
            self.clients.remove(client)
            self.host.forget(client.owner)

    def _answer(self, client: FakeClient, step: wire.Step) -> wire.StepReply | wire.Failure:
        if self.refuse is not None:
            return wire.Failure(step.seq, self.refuse, "refused")
        host, owner = self.host, client.owner
        host.expire()
        host.release(owner, step.releases)
        lapsed = host.renew(owner, step.renews, TTL)
        for lease, keys in step.begin:
            if not host.begin(owner, lease, [Key(k) for k in keys]):
                lapsed.append(lease)
        for lease, keys in step.end:
            host.end(owner, lease, [Key(k) for k in keys])
        committed = host.commit(owner, [Key(k) for k in step.commits])
        host.abort(owner, [Key(k) for k in step.aborts])
        used = [int(u) for u in host.use(owner, [(u.offset, Key(u.key)) for u in step.uses])]
        found = [self._lookup(client, ask) for ask in step.lookups]
        granted = []
        for group, count in step.credits.items():
            if self.room and (missing := count - len(host.granted(owner))) > 0:
                granted.append(wire.Credits(group, host.grant(owner, CHUNK, missing)))
        return wire.StepReply(
            step.seq, committed=committed, used=used, found=found, credits=granted, lapsed=lapsed
        )

    def _lookup(self, client: FakeClient, ask: wire.Lookup) -> wire.Found:
        keys = [Key(k) for k in ask.keys]
        leased = self.host.lease(client.owner, ask.id, keys, TTL)
        states, offsets = bytearray(), []
        missed = False
        for key, chunk in zip(keys, leased, strict=True):
            offsets.append(chunk.offset if chunk else -1)
            if chunk is not None:
                states.append(wire.State.HOST)
            elif not missed and (key in self.tier or self.host.find([key]) == [State.WRITING]):
                states.append(wire.State.PENDING)
                self._waiting.setdefault(key, []).append((client, ask.id))
            else:
                states.append(wire.State.MISS)
                missed = ask.want == "prefix"
        return wire.Found(ask.id, bytes(states), offsets, TTL)

    def _settle(self, keys: list[Key]) -> None:
        for key in keys:
            for client, lease in self._waiting.pop(key, ()):
                if client in self.clients:
                    (chunk,) = self.host.lease(client.owner, lease, [key], TTL)
                    state = wire.State.HOST if chunk else wire.State.MISS
                    offset = chunk.offset if chunk else -1
                    client.inbox.append(wire.Resolved(lease, [key], bytes([state]), [offset]))


class FakeClient:
    """As much of `kvstrata.client.Client` as the link uses."""

    def __init__(self, node: FakeNode, owner: str) -> None:
        self.owner = owner
        self.inbox: list[wire.StepReply | wire.Resolved | wire.Failure] = []
        self.busy = False
        self.namespace = node.namespace
        self._node = node
        self._incarnation = node.incarnation
        self._seq = 0
        self._lease = 0
        self.welcome = wire.Welcome("n", node.incarnation, "/shm", node.region, 1 << 20, TTL)

    def poll_welcome(self) -> bool:
        self._check()
        return self._node.welcoming

    def new_lease(self) -> int:
        self._lease += 1
        return self._lease

    def send(self, step: wire.Step) -> int:
        self._check()
        if self.busy:
            raise Busy("full")
        self._seq += 1
        self._node.give(self, msgspec.structs.replace(step, seq=self._seq))
        return self._seq

    def receive(self) -> list[wire.StepReply | wire.Resolved | wire.Failure]:
        messages, self.inbox = self.inbox, []
        if not messages:
            self._check()
        return messages

    def close(self) -> None:
        self._node.forget(self)

    def _check(self) -> None:
        if not self._node.alive or self._node.incarnation != self._incarnation:
            raise LinkBroken("gone")
