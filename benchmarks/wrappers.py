"""What does it cost to put a wrapper around a tier?

Every wrapper is around the same tier in memory, which copies payloads and verifies nothing. Peer:
that tier with nothing around it. Limit: what the wrapper must do at the least, with one thread
and nothing else: copy and xxh3-64 for `checked`, zstd for `compressed`, AES-256-GCM for
`encrypted`, by the same libraries on the same payloads. All take turns in one run; each figure is
the best round, in GB per second of CPU over all threads, since other processes were busy.

Payloads are normally distributed values in bfloat16, which stand for a KV cache: how much smaller
zstd makes those of a real model is for its counters to tell.

Reference: a 2-core AMD EPYC VM, Linux 6.18, Python 3.11, about nine other processes busy:

                              ours    peer   limit
    store 256 KiB checked       1.25    1.80   25.89
    load 256 KiB checked        3.50    8.66   25.98
    store 256 KiB compressed    0.59    1.66    0.72
    load 256 KiB compressed     1.00    8.44    1.32
    store 256 KiB encrypted     2.97    1.66    9.88
    load 256 KiB encrypted      3.27    8.40   10.30
    store 1 MiB checked         1.57    2.14   11.24
    load 1 MiB checked          4.17    9.65   11.97
    store 1 MiB compressed      0.64    1.97    0.70
    load 1 MiB compressed       1.10   10.24    1.35
    store 1 MiB encrypted       1.53    1.93   10.21
    load 1 MiB encrypted        4.07    9.42   10.25

`compressed` saved 22 % of these payloads at level 1. What is measured holds
the tier within, one copy more and the threads. That `encrypted` stores 256 KiB faster than the bare
tier was seen in every run and is not explained: look at loads rather than at stores.
"""

from __future__ import annotations

import asyncio
import base64
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from figures import Figure, parser, show
from kvstrata.keys import Namespace
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, checksum
from kvstrata.tiers.wrappers.checked import Checked
from kvstrata.tiers.wrappers.compressed import Compressed
from kvstrata.tiers.wrappers.encrypted import Encrypted

BATCH = 32
SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20}


def bfloat16(size: int, seed: int) -> memoryview:
    """Normally distributed values, cut to 16 bits."""
    values = np.random.default_rng(seed).normal(0, 1, size // 2).astype(np.float32)
    view = memoryview(mmap.mmap(-1, size))
    view[:] = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return view


def least(name: str, views: list[memoryview]) -> tuple[Callable[[], None], Callable[[], None]]:
    """The least work of a store and of a load of these payloads."""
    into = memoryview(mmap.mmap(-1, views[0].nbytes))
    if name == "encrypted":
        cipher, nonce = AESGCM(bytes(32)), bytes(12)
        boxes = [memoryview(bytearray(cipher.encrypt(nonce, view, None))) for view in views]
        other = memoryview(bytearray(boxes[0].nbytes))
        return (
            lambda: [cipher.encrypt_into(os.urandom(12), v, None, other) for v in views] and None,
            lambda: [cipher.decrypt_into(nonce, box, None, into) for box in boxes] and None,
        )
    if name == "compressed":
        packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        packed = [packer.compress(view) for view in views]
        return (
            lambda: [packer.compress(view) for view in views] and None,
            lambda: [unpacker.stream_reader(p).readinto(into) for p in packed] and None,
        )

    def copy() -> None:
        for view in views:
            into[:] = view
            checksum(into)

    return copy, copy


def speed(work: Callable[[], None], nbytes: int, rounds: int) -> float:
    return nbytes / min(_seconds(work) for _ in range(rounds)) / 1e9


def _seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


async def measure(tier: Tier, items: list[Item], rounds: int) -> tuple[float, float]:
    """GB of storing and of loading a batch in a second of CPU."""
    total = sum(item.view.nbytes for item in items)
    blank = [Item(item.key, memoryview(mmap.mmap(-1, item.view.nbytes))) for item in items]
    stores, loads = [], []
    for _ in range(rounds):
        began = time.process_time()
        assert await tier.store(items) == [Outcome.STORED] * len(items)
        stored = time.process_time()
        assert await tier.load(blank) == [Outcome.LOADED] * len(items)
        loads.append(time.process_time() - stored)
        stores.append(stored - began)
        await tier.evict([item.key for item in items])
    assert all(b.view == i.view for b, i in zip(blank, items, strict=True))
    return total / min(stores) / 1e9, total / min(loads) / 1e9


def options_of(name: str, folder: Path, namespace: Namespace) -> dict[str, str]:
    if name != "encrypted":
        return {}
    path = folder / "secrets.json"
    secret = base64.b64encode(bytes(32)).decode()
    path.write_text(json.dumps({"tenants": {namespace.tenant: [secret]}}))
    path.chmod(0o600)
    return {"keys": str(path)}


async def run(rounds: int, folder: Path) -> list[Figure]:
    figures = []
    namespace = a_namespace()
    context = TierContext("bench", namespace_of={namespace.digest: namespace}.get)
    for label, size in SIZES.items():
        items = [Item(namespace.key(0, bytes([i]) * 8), bfloat16(size, i)) for i in range(BATCH)]
        views = [item.view for item in items]
        for wrapper in (Checked, Compressed, Encrypted):
            name = wrapper.kind
            tier = wrapper.wrap(
                MemoryTier(context, verify=False), options_of(name, folder, namespace), context
            )
            plain = await measure(MemoryTier(context, verify=False), items, rounds)
            ours = await measure(tier, items, rounds)
            limits = [speed(work, BATCH * size, rounds) for work in least(name, views)]
            settings: dict[str, Any] = {"batch": BATCH, "rounds": rounds}
            if name == "compressed":
                saved = tier.usage().counters["saved_bytes"] / (rounds * BATCH * size)
                settings["saved"] = f"{saved:.0%}"
            for op, value, peer, limit in zip(("store", "load"), ours, plain, limits, strict=True):
                figures.append(
                    Figure(f"{op} {label} {name}", value, peer, limit, "GB/CPU s", settings)
                )
            await tier.close()
    return figures


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(run(chosen.rounds, Path(folder)))
    show("wrappers around a tier in memory", figures, chosen.json)


if __name__ == "__main__":
    main()
