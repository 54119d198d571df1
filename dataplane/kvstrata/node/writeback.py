"""Chunks that must be in a store before this node is stopped, written there now.

Not the cascades' business: those store by policy and when they can, and give up what finds no
room. Here each chunk is one that the control plane asked for, and its outcome is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstrata.api import Outcome
from kvstrata.errors import Malformed, Missing
from kvstrata.keys import Key
from kvstrata.node.reported import WriteBack, Written
from kvstrata.node.store import Store
from kvstrata.tiers import base

__all__ = ["parents_first", "write_back"]

# Chunks that are brought up first are leased meanwhile, so a batch is a small part of the region.
_BATCH_BYTES = 32 << 20
_KEPT = (Outcome.STORED, Outcome.PRESENT)


async def write_back(store: Store, asked: WriteBack, written: Written) -> None:
    """Store chunks, parents before what extends them, each in the first of the stores that takes
    it; outcomes are entered into `written` as they come. What isn't in host memory is brought up
    from where it is. Raises `Malformed` if none of the stores is attached here."""
    cascades = [c for id_ in asked.stores for c in store.cascades if c.guard.store_id == id_]
    if not cascades:
        here = sorted(cascade.guard.store_id for cascade in store.cascades)
        raise Malformed(f"none of the stores {sorted(asked.stores)} is attached here: {here} are")
    keys = parents_first(asked.keys, store.host.parent_of)
    for number, batch in enumerate(_batches(store, keys, written), 1):
        owner = f"order:{asked.order}"
        absent = [key for key in batch if store.host.get(key) is None]
        if absent:
            await store.find(owner, number, absent, "all", store.settings.pending_deadline)
        try:
            left = batch
            for cascade in cascades:
                outcomes = await cascade.keep(left)
                for key, outcome in outcomes.items():
                    written.outcomes[key] = Outcome(outcome.value)
                    if written.outcomes[key] in _KEPT:
                        written.stores[key] = cascade.guard.store_id
                left = [
                    key
                    for key in left
                    if outcomes[key] in (base.Outcome.NO_ROOM, base.Outcome.FAILED)
                ]
                if not left:
                    break
        finally:
            store.abandon(owner, number)


def parents_first(keys: Sequence[Key], parent_of: Callable[[Key], Key | None]) -> list[Key]:
    """Each key once, after those of the others that it extends; else in the order given."""
    wanted = set(keys)
    ordered: dict[Key, None] = {}
    for key in keys:
        chain: dict[Key, None] = {}
        above: Key | None = key
        while above in wanted and above not in ordered and above not in chain:
            chain[above] = None
            above = parent_of(above)
        ordered.update(dict.fromkeys(reversed(chain)))
    return list(ordered)


def _batches(store: Store, keys: Sequence[Key], written: Written) -> Iterator[list[Key]]:
    most = min(_BATCH_BYTES, store.host.slots.capacity // 4)
    batch: list[Key] = []
    size = 0
    for key in keys:
        try:
            nbytes = store.namespaces.size_of(key)
        except Missing:
            written.outcomes[key] = Outcome.MISSING
            continue
        if batch and size + nbytes > most:
            yield batch
            batch, size = [], 0
        batch.append(key)
        size += nbytes
    if batch:
        yield batch
