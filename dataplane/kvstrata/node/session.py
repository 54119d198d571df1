"""One process of an engine at its node, and what its steps do to the store.

All that a session says is untrusted: a step that makes no sense is refused as a whole, before any
part of it has been acted on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstrata import wire
from kvstrata.errors import Malformed
from kvstrata.host import NO_ROOM, PRESENT, Chunk, State
from kvstrata.keys import DIGEST_BYTES, GROUP_BYTES, Key, Namespace, check_keys
from kvstrata.node.store import Store

__all__ = ["MAX_NAME", "Session"]

MAX_NAME = 256
"""Most characters of what a session calls something."""

_PREFIX_BYTES = DIGEST_BYTES + GROUP_BYTES
_TO_WIRE = {State.READY: wire.State.HOST, State.WRITING: wire.State.PENDING}


@dataclass(slots=True, eq=False)
class Session:
    """`owner` is its name in the host tier; `resolved(session, message)` sends what lookups come to
    that were pending."""

    id: bytes
    owner: str
    store: Store
    resolved: Callable[[Session, wire.Resolved], None]
    hello: wire.Hello | None = None
    namespace: Namespace | None = None
    prefixes: dict[bytes, int] = field(default_factory=dict)
    """Namespace digest + group -> chunk bytes: the keys this session may speak of."""

    @property
    def label(self) -> str:
        hello = self.hello
        return f"{hello.engine}/{hello.role}" if hello else "unnamed"

    def begin(self, hello: wire.Hello, namespace: Namespace | None) -> None:
        """It is known who this is, and which chunks it may speak of."""
        self.hello, self.namespace = hello, namespace
        if namespace is not None:
            for group, nbytes in namespace.chunk_bytes.items():
                prefix = namespace.digest + group.to_bytes(GROUP_BYTES, "big")
                self.prefixes[prefix] = nbytes

    def step(self, step: wire.Step) -> wire.StepReply:
        """Do what it asks for. Raises `Malformed`, and does nothing, if it makes no sense."""
        self._check(step)
        self.store.placements.told(step.tells)
        host, owner, ttl = self.store.host, self.owner, self.store.settings.lease_ttl
        for lease in step.releases:
            self.store.abandon(owner, lease)
        lapsed = host.renew(owner, step.renews, ttl)
        for lease, keys in step.begin:
            if not host.begin(owner, lease, _keys(keys)):
                lapsed.append(lease)
        for lease, keys in step.end:
            host.end(owner, lease, _keys(keys))
        committed = self._commit(_keys(step.commits)) if step.commits else []
        if step.aborts:
            host.abort(owner, _keys(step.aborts))
        uses = [(use.offset, Key(use.key)) for use in step.uses]
        return wire.StepReply(
            seq=step.seq,
            committed=committed,
            used=[int(u) for u in host.use(owner, uses)] if uses else [],
            found=[self._lookup(lookup) for lookup in step.lookups],
            reserved=self._reserve(step.reserves),
            credits=self._credit(step.credits),
            lapsed=lapsed,
        )

    # ------------------------------------------------------------ does it make sense

    def _check(self, step: wire.Step) -> None:
        """Refuse a step that is too large, or has a key that is not of this session's namespace
        or would get a slot of another size."""
        parts = len(step.releases) + len(step.renews) + len(step.begin) + len(step.end)
        if parts + len(step.lookups) > wire.MAX_KEYS:
            raise Malformed(f"a step names at most {wire.MAX_KEYS} leases")
        batches = [step.commits, step.aborts, step.reserves]
        batches += [keys for _, keys in (*step.begin, *step.end)]
        batches += [lookup.keys for lookup in step.lookups]
        batches.append([use.key for use in step.uses])
        batches.append([told.key for told in step.tells])
        total = 0
        for batch in batches:
            total += len(batch)
            for key in check_keys(batch):
                if key[:_PREFIX_BYTES] not in self.prefixes:
                    raise Malformed(
                        f"key {key.hex()} is not of this session's namespace and groups"
                    )
        if total > wire.MAX_KEYS:
            raise Malformed(f"a step names at most {wire.MAX_KEYS} keys, this one {total}")
        _check_tells(step.tells)
        granted = self.store.host.granted(self.owner)
        for use in step.uses:
            nbytes = self.prefixes[use.key[:_PREFIX_BYTES]]
            if granted.get(use.offset, nbytes) != nbytes:
                raise Malformed(
                    f"slot {use.offset} has {granted[use.offset]} bytes, "
                    f"key {use.key.hex()} needs {nbytes}"
                )
        groups = {g.id for g in self.namespace.groups} if self.namespace else set()
        if not groups.issuperset(step.credits) or min(step.credits.values(), default=0) < 0:
            raise Malformed("credits are asked by group of this session's namespace, 0 or more")

    # ------------------------------------------------------------ doing it

    def _lookup(self, ask: wire.Lookup) -> wire.Found:
        def settle(settled: Sequence[Key], chunks: Sequence[Chunk | None]) -> None:
            states = bytes(wire.State.HOST if c else wire.State.MISS for c in chunks)
            offsets = [c.offset if c else -1 for c in chunks]
            self.resolved(self, wire.Resolved(ask.id, list(settled), states, offsets))

        settings = self.store.settings
        wait = min(max(ask.wait, 0.0), settings.pending_deadline)
        states, chunks = self.store.lookup(
            self.owner, ask.id, _keys(ask.keys), ask.want, wait, settle
        )
        return wire.Found(
            ask.id,
            bytes(_TO_WIRE.get(state, wire.State.MISS) for state in states),
            [c.offset if c else -1 for c in chunks],
            settings.lease_ttl,
        )

    def _commit(self, keys: Sequence[Key]) -> list[bool]:
        host = self.store.host
        if not self.store.draining:
            return host.commit(self.owner, keys)
        # Slots that were granted or reserved before may be written to, but no chunk comes of it.
        host.abort(self.owner, keys)
        return [host.get(key) is not None for key in keys]

    def _reserve(self, keys: Sequence[bytes]) -> list[int]:
        if not keys:
            return []
        host, sizes = self.store.host, self.prefixes
        if self.store.draining:
            return [NO_ROOM if s is State.ABSENT else PRESENT for s in host.find(_keys(keys))]
        return host.reserve(self.owner, [(Key(key), sizes[key[:_PREFIX_BYTES]]) for key in keys])

    def _credit(self, wanted: dict[int, int]) -> list[wire.Credits]:
        """Top up what the session holds granted, within the node's budget for all sessions."""
        if not wanted or self.namespace is None or self.store.draining:
            return []
        host = self.store.host
        budget = int(host.slots.capacity * self.store.settings.credit_budget)
        left = budget - host.usage().granted
        held = host.granted(self.owner)
        answers = []
        for group, count in wanted.items():
            nbytes = self.namespace.chunk_bytes[group]
            size = host.slots.rounded(nbytes)
            have = sum(n == nbytes for n in held.values())
            grantable = min(count - have, left // size)
            if grantable > 0:
                offsets = host.grant(self.owner, nbytes, grantable)
                left -= len(offsets) * size
                answers.append(wire.Credits(group, offsets))
        return answers


def _check_tells(tells: Sequence[wire.Told]) -> None:
    for told in tells:
        blocks = len(told.blocks)
        if not 1 <= blocks <= wire.MAX_BLOCKS:
            raise Malformed(f"a chunk is told of with 1 to {wire.MAX_BLOCKS} blocks, not {blocks}")
        if not told.tokens or len(told.tokens) % (4 * blocks):
            raise Malformed(
                f"{len(told.tokens)} bytes are not the tokens, 4 bytes each, of {blocks} blocks"
            )
        hashes = [*told.blocks, 0 if told.parent is None else told.parent]
        if min(hashes) < 0 or max(hashes) >= 1 << 64:
            raise Malformed("blocks are told of by 64 bits of their hashes")
        if max(len(told.lora), len(told.salt)) > MAX_NAME:
            raise Malformed(f"a LoRA or salt has at most {MAX_NAME} characters")


def _keys(raw: Sequence[bytes]) -> list[Key]:
    return list(raw)  # type: ignore[arg-type]  # checked before anything is done with them
