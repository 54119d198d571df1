"""How fast does a device move pages between an engine's caches and the region?

GB/s of one store and one load of all blocks in random order, by `CpuDevice`, for each way an engine
may keep its cache. Peer: one memcpy of as many bytes between the same memory and the same region,
in turns with ours. `ratio` is ours over the peer's, both in their best round, since whatever else
the machine does only adds time; `limit` is the least it should be, where there is a target.

Geometry: one of 4 ranks of a model of 32 layers and 8 heads of 128 + 128 bf16 in blocks of 16
tokens. A block is 512 KiB, in fragments of 512 KiB (BHLNC, whose order is the page's own), 8 KiB
(heads before tokens), 512 bytes (tokens before heads) or 256 bytes (K and V apart).

Reference: a 2-core AMD EPYC VM, Linux 6.18, Python 3.11, numpy 2.3, torch 2.13, 128 MiB, on a
machine shared with others; of four runs the least and the most, torch CPU tensors. numpy arrays
are as fast. The memcpy does 9 to 13 GB/s.

                store GB/s     of memcpy      load GB/s     of memcpy      limit
    BHLNC       10.0 .. 11.1   0.97 .. 1.10   9.8 .. 11.1   1.02 .. 1.10   0.85
    LBHNC        8.9 ..  9.3   0.80 .. 0.94   8.3 ..  9.1   0.77 .. 0.84
    BLHNC        5.9 .. 10.4   0.71 .. 1.00   5.6 .. 12.7   0.70 .. 1.13
    LBNHC        3.0 ..  6.3   0.42 .. 0.61   4.0 ..  8.5   0.59 .. 0.82   0.50
    BLNHC        6.5 ..  6.9   0.60 .. 0.67   8.9 .. 11.4   0.90 .. 1.17
    split NHD    4.6 ..  6.9   0.55 .. 0.66   4.4 ..  6.4   0.55 .. 0.62

The memcpy is long enough for glibc to write past the cache, a fragment is not. With
GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x10000 both it and BHLNC gain, the rest stays.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from kvstrata.layout import (
    AttentionContent,
    Packed,
    Pages,
    Ranks,
    Split,
    Tensor,
    plan_rank,
    stage_layers,
)
from kvstrata.region import Region
from kvstrata_adapters.devices.base import Bytes, Copy, as_bytes
from kvstrata_adapters.devices.cpu import CpuDevice

LAYERS, TP, RANK = 32, 4, 1
CONTENT = AttentionContent(heads=8, tokens=16, key=128, value=128, dtype="bfloat16")
HEADS, ELEMENT = CONTENT.heads // TP, 2
GROUP = CONTENT.group(0, "full", tuple(f"layer{i}" for i in range(LAYERS)))
SHARE = GROUP.page_bytes // TP
LAYOUTS = ("BHLNC", "LBHNC", "BLHNC", "LBNHC", "BLNHC", "split NHD")
LIMITS = {"BHLNC": 0.85, "LBNHC": 0.5}
Memory = Literal["numpy", "torch"]


@dataclass(frozen=True)
class Figure:
    """Best rounds in GB/s. `limit` is the least ratio, where there is a target."""

    name: str
    value: float
    peer: float
    limit: float | None

    @property
    def ratio(self) -> float:
        """Ours over the memcpy."""
        return self.value / self.peer

    def line(self, settings: dict[str, object]) -> str:
        return json.dumps(
            {
                "name": self.name,
                "value": round(self.value, 2),
                "unit": "GB/s",
                "peer": round(self.peer, 2),
                "limit": self.limit,
                "ratio": round(self.ratio, 3),
                "settings": settings,
            }
        )


def pages_in(layout: str, blocks: int) -> tuple[Pages, int]:
    """One rank's pages in one allocation, and the bytes of that."""
    if layout == "split NHD":
        strides = (CONTENT.tokens * HEADS * 128, HEADS * 128, 128, 1)
        half = blocks * strides[0]
        size = 2 * LAYERS * half * ELEMENT
        shape = (blocks, CONTENT.tokens, HEADS, 128)
        halves = [tensor(shape, strides, size, i * half) for i in range(2 * LAYERS)]
        k_and_v = list(zip(halves[::2], halves[1::2], strict=True))
        return Split("NHD").pages(CONTENT, k_and_v, TP), size
    sizes = {"L": LAYERS, "B": blocks, "H": HEADS, "N": CONTENT.tokens, "C": 256}
    stride, step = {}, 1
    for axis in reversed(layout):
        stride[axis], step = step, step * sizes[axis]
    size = step * ELEMENT
    shape, steps = (blocks, HEADS, CONTENT.tokens, 256), tuple(stride[a] for a in "BHNC")
    packed = [tensor(shape, steps, size, i * stride["L"]) for i in range(LAYERS)]
    return Packed(layout).pages(CONTENT, packed, TP), size  # type: ignore[arg-type]


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], size: int, at: int) -> Tensor:
    """Strides and offset in elements."""
    return Tensor(shape, tuple(s * ELEMENT for s in strides), ELEMENT, size, at * ELEMENT)


def memory_of(kind: Memory, size: int) -> Bytes:
    """An engine's allocation as bytes, at a multiple of 64: numpy's own ones are at 16 past a page,
    where the processor's copies into them are slower (loads of BHLNC: 0.6 of the memcpy)."""
    if kind == "numpy":
        room = np.zeros(size + 64, dtype=np.uint8)
        return room[-room.ctypes.data % 64 :][:size]
    import torch

    rows = as_bytes(torch.zeros((1, size // ELEMENT), dtype=torch.bfloat16))
    return rows.reshape(-1)


class Engine:
    """A device with a cache in one layout, and the jobs that move all of its blocks."""

    def __init__(self, layout: str, kind: Memory, blocks: int, region: Region) -> None:
        pages, size = pages_in(layout, blocks)
        self.memory = memory_of(kind, size)
        self.region: Bytes = np.frombuffer(region.view, dtype=np.uint8)
        runs = plan_rank(GROUP, Ranks(TP, stage_layers(LAYERS, 1)), 0, RANK, pages)
        caches = [cache.view(self.memory) for cache in pages.caches]
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
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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
    return [
        Figure(f"{direction}_{label}_{kind}".replace(" ", "_"), ours, peer, LIMITS.get(layout))
        for direction, ours, peer in (("store", best[1], best[0]), ("load", best[3], best[2]))
    ]


def kinds() -> Sequence[Memory]:
    try:
        import torch
    except ImportError:
        return ("numpy",)
    torch.set_num_threads(1)  # idle OpenMP threads spin
    return ("numpy", "torch")


def table(figures: Sequence[Figure], settings: dict[str, Any]) -> Table:
    out = Table("", "GB/s", "memcpy", "ratio", "at least")
    out.title = f"pages of {SHARE >> 10} KiB, {settings['mib']} MiB a copy"
    for f in figures:
        limit = "" if f.limit is None else f"{f.limit:.2f}"
        out.add_row(f.name, f"{f.value:.1f}", f"{f.peer:.1f}", f"{f.ratio:.2f}", limit)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--mib", type=int, default=128, help="bytes of one copy")
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    blocks = max((args.mib << 20) // SHARE, 1)
    settings: dict[str, Any] = {
        "mib": args.mib,
        "rounds": args.rounds,
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
    }
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
    if args.json:
        for figure in figures:
            print(figure.line(settings))
    else:
        Console().print(table(figures, settings))


if __name__ == "__main__":
    main()
