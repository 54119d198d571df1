"""How fast does a device move pages between an engine's caches and the region?

GB/s of one store and one load of all blocks in random order, by `CpuDevice`, for each way an engine
may keep its cache (`kvstrata_adapters.devices.samples`). Peer: one memcpy of as many bytes between
the same memory and the same region, in turns with ours, both in their best round. The limit is the
least it should be, where there is a target: 0.85 of the memcpy for BHLNC, 0.5 for LBNHC (NHD).
Seconds are of CPU time: what else the machine runs is not the question, and without that they are
the clock's.

Reference: a busy 2-core AMD EPYC VM with 32 MiB of L3 cache, Linux 6.18, glibc 2.36, Python 3.11,
numpy 2.3, torch 2.13 CPU tensors, 128 MiB a copy; of two runs the least and the most. Arrays of
numpy are as fast or faster. The memcpy does 9.5 to 12.5 GB/s.

                        store                     load              limit
                 GB/s      of memcpy       GB/s      of memcpy
    BHLNC     11.3, 11.5  0.94 .. 1.15  11.3, 11.7  0.96 .. 1.14    0.85
    BLHNC     10.0, 10.3  0.82 .. 1.01  12.1, 12.2  0.99 .. 1.17
    LBHNC      9.1,  9.6  0.77 .. 0.97   8.4,  8.7  0.73 .. 0.86
    LHBNC      8.8,  9.3  0.78 .. 0.94   8.6,  8.9  0.78 .. 0.87
    BLNHC      6.8,  7.0  0.57 .. 0.71  11.0, 11.6  0.95 .. 1.13
    LBNHC      6.0,  6.1  0.52 .. 0.62   7.5,  8.2  0.69 .. 0.81    0.50
    split NHD  6.6,  6.9  0.54 .. 0.70   6.1,  6.2  0.51 .. 0.63

The figures are without GLIBC_TUNABLES. glibc.cpu.x86_non_temporal_threshold=0x10000 makes the
memcpy faster (13 to 14 GB/s) and ours not: BHLNC then is at 0.75, LBNHC at 0.43.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from figures import Figure, parser, show
from kvstrata.region import Region
from kvstrata_adapters.devices.base import Bytes, Copy, as_bytes
from kvstrata_adapters.devices.cpu import CpuDevice
from kvstrata_adapters.devices.samples import GROUP, LAYOUTS, SHARE, Sample

LIMITS = {"BHLNC": 0.85, "LBNHC": 0.5}
Memory = Literal["numpy", "torch"]


def memory_of(kind: Memory, size: int) -> Bytes:
    """An engine's allocation as bytes, at a multiple of 64: numpy's own ones are at 16 past a page,
    where the processor's copies into them are slower (loads of BHLNC: 0.6 of the memcpy)."""
    if kind == "numpy":
        room = np.zeros(size + 64, dtype=np.uint8)
        return room[-room.ctypes.data % 64 :][:size]
    import torch

    rows = as_bytes(torch.zeros((1, size // 2), dtype=torch.bfloat16))
    return rows.reshape(-1)


class Engine:
    """A device with a cache in one layout, and the jobs that move all of its blocks."""

    def __init__(self, layout: str, kind: Memory, blocks: int, region: Region) -> None:
        sample = Sample.of(layout, blocks)
        self.memory = memory_of(kind, sample.nbytes)
        self.region: Bytes = np.frombuffer(region.view, dtype=np.uint8)
        caches, runs = [cache.view(self.memory) for cache in sample.caches], sample.runs
        self.device = CpuDevice()
        self.device.register_caches(caches, {0: runs.load}, {0: GROUP.page_bytes}, {0: runs.store})
        self.device.attach(region.view)
        rng = np.random.default_rng(0)
        self._copies = [
            Copy(0, rng.permutation(blocks), rng.permutation(blocks) * GROUP.page_bytes)
        ]
        self._job = 0

    def store(self) -> None:
        self._job += 1
        self.device.store(self._job, self._copies)
        self._ended()

    def load(self) -> None:
        self._job += 1
        self.device.load(self._job, self._copies)
        self._ended()

    def copy_out(self) -> None:
        np.copyto(self.region[: self.memory.size], self.memory)

    def copy_in(self) -> None:
        np.copyto(self.memory, self.region[: self.memory.size])

    def check(self) -> None:
        """That what was stored comes back."""
        rng = np.random.default_rng(1)
        self.memory[:] = rng.integers(0, 256, self.memory.size, dtype=np.uint8)
        was = self.memory.copy()
        self.store()
        self.memory[:] = 0
        self.load()
        if not np.array_equal(was, self.memory):
            raise SystemExit("what was stored did not come back")

    def _ended(self) -> None:
        self.device.wait([self._job], 60.0)
        (result,) = self.device.finished()
        if result.error is not None or result.nbytes != self.memory.size:
            raise SystemExit(f"a copy failed: {result}")


def seconds(work: Callable[[], None]) -> float:
    """Of CPU time, all threads: only one of them copies, the other waits without spinning."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(layout: str, kind: Memory, blocks: int, rounds: int, region: Region) -> list[Figure]:
    engine = Engine(layout, kind, blocks, region)
    engine.check()
    took: list[list[float]] = [[], [], [], []]
    turns = (engine.copy_out, engine.store, engine.copy_in, engine.load)
    for _ in range(rounds):
        for times, work in zip(took, turns, strict=True):
            times.append(seconds(work))
    engine.device.close()
    best, label = [engine.memory.size / 1e9 / min(times) for times in took], layout.lower()
    least = LIMITS.get(layout)
    return [
        Figure(
            f"{direction}_{label}_{kind}".replace(" ", "_"),
            ours,
            peer,
            None if least is None else least * peer,
            settings={
                "mib": engine.memory.size >> 20,
                "rounds": rounds,
                "peer": "memcpy",
                "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
            },
        )
        for direction, ours, peer in (("store", best[1], best[0]), ("load", best[3], best[2]))
    ]


def kinds() -> Sequence[Memory]:
    try:
        import torch
    except ImportError:
        return ("numpy",)
    torch.set_num_threads(1)  # idle OpenMP threads spin
    return ("numpy", "torch")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=int, default=128, help="bytes of one copy")
    arguments.add_argument("--rounds", type=int, default=25)
    args = arguments.parse_args()
    blocks = max((args.mib << 20) // SHARE, 1)
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        region = Region.create("bench", "1", blocks * GROUP.page_bytes, Path(folder))
        figures = [
            figure
            for kind in kinds()
            for layout in LAYOUTS
            for figure in measure(layout, kind, blocks, args.rounds, region)
        ]
        region.close()
    show(f"pages of {SHARE >> 10} KiB, {args.mib} MiB a copy", figures, args.json)


if __name__ == "__main__":
    main()
