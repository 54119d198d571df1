"""What does the host tier's bookkeeping cost a key?

Two rows, both in batches of 512 keys over a full region, so that every batch evicts another:
`reserve_commit_us_per_key` is reserve and commit of a chain that was looked up before, and
`lookup_lease_us_per_key` a lookup that finds and leases all of a chain, and the release.
Peer: vLLM's CPUOffloadingManager in this process, where vllm can be imported: `prepare_store` and
`complete_store`; `lookup` key by key, `prepare_load` and `complete_load`. Limit: the most a key may
cost. No byte is moved. All take turns; each figure is its best round, since whatever else the
machine does only adds time.

Reference: a busy 2-core AMD EPYC VM, Linux 6.18, Python 3.11, vLLM 0.32. Microseconds a key, of
several runs the least and the most:

                      ours         peer         limit
    lru     store     1.7 .. 2.2   3.7 .. 5.0   2.5
            find      0.31 .. 0.33 1.8          1.0
    arc     store     2.4 .. 3.1   2.5 .. 2.9   2.5
            find      0.60 .. 0.62 1.4          1.0
    s3fifo  store     2.5 .. 3.1   none         2.5
            find      0.33 .. 0.35 none         1.0
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from figures import Figure, parser, show
from kvstrata.host import NO_ROOM, HostTier
from kvstrata.keys import Key, make_key
from kvstrata.policies import open_policy
from kvstrata.slots import Slots

BATCH = 512
CHUNK = 256 << 10
CHUNKS = 16_384
LIMITS = {"reserve_commit_us_per_key": 2.5, "lookup_lease_us_per_key": 1.0}


class Ours:
    """The host tier, driven as an engine's session does."""

    def __init__(self, policy: str) -> None:
        capacity = CHUNK * CHUNKS
        self.host = HostTier(Slots(capacity), open_policy(policy, capacity), time.monotonic)

    def keys(self) -> list[Key]:
        return [make_key(bytes(16), 0, os.urandom(32)) for _ in range(BATCH)]

    def miss(self, keys: list[Key]) -> None:
        self.host.lease("engine", 1, keys, 30.0, chain=True)
        self.host.release("engine", [1])

    def store(self, keys: list[Key]) -> None:
        offsets = self.host.reserve("engine", [(key, CHUNK) for key in keys])
        if NO_ROOM in offsets or not all(self.host.commit("engine", keys)):
            raise SystemExit("the host tier did not take a batch")

    def find(self, keys: list[Key]) -> None:
        found = self.host.lease("engine", 2, keys, 30.0, chain=True)
        self.host.release("engine", [2])
        if None in found:
            raise SystemExit("the host tier lost a chunk")


class Vllm:
    """vLLM's own manager, driven as its scheduler does."""

    def __init__(self, policy: str) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self._base: Any = base
        self.manager: Any = CPUOffloadingManager(CHUNKS, policy, enable_events=True)
        self._requests = 0

    def keys(self) -> list[Any]:
        return [self._base.make_offload_key(os.urandom(32), 0) for _ in range(BATCH)]

    def miss(self, keys: list[Any]) -> None:
        return None

    def store(self, keys: list[Any]) -> None:
        context = self._context()
        if len(self.manager.prepare_store(keys, context).keys_to_store) != len(keys):
            raise SystemExit("vLLM's manager did not take a batch")
        self.manager.complete_store(keys, context)
        list(self.manager.take_events())

    def find(self, keys: list[Any]) -> None:
        context = self._context()
        for key in keys:
            if self.manager.lookup(key, context) is not self._base.LookupResult.HIT:
                raise SystemExit("vLLM's manager lost a chunk")
        self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)

    def _context(self) -> Any:
        self._requests += 1
        context = self._base.ReqContext(str(self._requests))
        self.manager.on_new_request(context)
        return context


def open_vllm(policy: str) -> Vllm | None:
    """None where vllm can't be imported, or has no such policy."""
    try:
        return Vllm(policy)
    except (ImportError, ValueError):
        return None


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(policy: str, rounds: int) -> list[Figure]:
    sides: list[Ours | Vllm] = [Ours(policy)]
    peer = open_vllm(policy)
    sides += [peer] if peer is not None else []
    best = {(side, name): float("inf") for side in sides for name in LIMITS}
    for n in range(CHUNKS // BATCH + rounds):
        for side in sides:
            keys = side.keys()
            side.miss(keys)
            stored = seconds(lambda: side.store(keys))  # noqa: B023
            found = seconds(lambda: side.find(keys))  # noqa: B023
            if n < CHUNKS // BATCH:
                continue  # there was still room
            for name, took in zip(LIMITS, (stored, found), strict=True):
                best[side, name] = min(best[side, name], took / BATCH * 1e6)
    settings = {
        "batch": BATCH,
        "chunks": CHUNKS,
        "chunk_bytes": CHUNK,
        "policy": policy,
        "rounds": rounds,
        "peer": "vLLM CPUOffloadingManager",
        "limit": "the most a key may cost",
    }
    return [
        Figure(
            name=name,
            value=best[sides[0], name],
            peer=best[peer, name] if peer else None,
            limit=limit,
            unit="us",
            settings=settings,
        )
        for name, limit in LIMITS.items()
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--policy", default="lru", help="lru, arc, s3fifo or module:Class")
    options.add_argument("--rounds", type=int, default=200)
    args = options.parse_args()
    title = f"host tier, {args.policy}, batches of {BATCH}, {CHUNKS} chunks, a key"
    show(title, measure(args.policy, args.rounds), args.json)


if __name__ == "__main__":
    main()
