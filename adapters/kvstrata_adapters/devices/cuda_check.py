"""Does the CUDA device copy the right bytes on this machine, and how fast?

    python -m kvstrata_adapters.devices.cuda_check [--mib 512] [--rounds 5]

For each layout: what is stored must be what the CPU device stores of the same caches, what is
loaded must be what was stored, also into blocks that it did not come from, and with pageable
memory. GB/s are beside those of one plain copy of as many bytes between the GPU and a pinned
tensor, in turns. Exit status 1 if a byte is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvstrata.errors import Corrupt, KVStrataError
from kvstrata.region import Region
from kvstrata_adapters.devices.base import Bytes, Copy, Device
from kvstrata_adapters.devices.cpu import CpuDevice
from kvstrata_adapters.devices.cuda import CudaDevice
from kvstrata_adapters.devices.cuda_driver import TorchDriver
from kvstrata_adapters.devices.samples import GROUP, LAYOUTS, SHARE, Sample

__all__ = ["Speed", "check_layout", "measure_layout"]

_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Speed:
    """GB/s of the best round; `plain` is the copy of a pinned tensor."""

    layout: str
    staged: bool
    store: float
    plain_store: float
    load: float
    plain_load: float


class _PageableDriver(TorchDriver):
    """A GPU whose driver pins nothing."""

    def register(self, address: int, nbytes: int) -> None:
        raise KVStrataError("pinning is off for this check")


def check_layout(layout: str, pinned: bool = True, blocks: int = 48) -> None:
    """Raises `Corrupt` if a store or a load moves wrong bytes."""
    import torch

    sample = Sample.of(layout, blocks)
    random = np.random.default_rng(1)
    was = random.integers(0, 256, sample.nbytes, dtype=np.uint8)
    memory = torch.from_numpy(was.copy()).cuda()
    by_cuda, by_cpu = bytearray(blocks * GROUP.page_bytes), bytearray(blocks * GROUP.page_bytes)
    offsets = random.permutation(blocks) * GROUP.page_bytes
    out = [Copy(0, random.permutation(blocks), offsets)]
    back = [Copy(0, random.permutation(blocks), offsets)]
    device = _open(sample, memory, TorchDriver if pinned else _PageableDriver)
    reference = _reference(sample, was)
    try:
        for target, region in ((device, by_cuda), (reference, by_cpu)):
            target.attach(memoryview(region))
            _run(target.store, target, 1, out)
        if by_cuda != by_cpu:
            raise Corrupt(f"{layout}: a store moved wrong bytes")
        for target in (device, reference):
            _run(target.load, target, 2, back)
        if not np.array_equal(memory.cpu().numpy(), was):
            raise Corrupt(f"{layout}: a load moved wrong bytes")
    finally:
        device.close()
        reference.close()


def measure_layout(layout: str, blocks: int, rounds: int) -> Speed:
    """With a region in shared memory, as a node has it."""
    import torch

    sample = Sample.of(layout, blocks)
    memory = torch.zeros(sample.nbytes, dtype=torch.uint8, device="cuda")
    plain = torch.zeros(sample.nbytes, dtype=torch.uint8).pin_memory()
    random = np.random.default_rng(2)
    copies = [Copy(0, random.permutation(blocks), random.permutation(blocks) * GROUP.page_bytes)]
    device, job = _open(sample, memory, TorchDriver), 0
    took: list[list[float]] = [[], [], [], []]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        region = Region.create("check", "1", blocks * GROUP.page_bytes, Path(folder))
        try:
            device.attach(region.view)
            for _ in range(rounds):
                job += 2
                turns: list[Callable[[], Any]] = [
                    lambda: plain.copy_(memory, non_blocking=True),
                    lambda: _run(device.store, device, job, copies),  # noqa: B023
                    lambda: memory.copy_(plain, non_blocking=True),
                    lambda: _run(device.load, device, job + 1, copies),  # noqa: B023
                ]
                for times, work in zip(took, turns, strict=True):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    work()
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - start)
        finally:
            device.close()
            region.close()
    rates = [sample.nbytes / 1e9 / min(times) for times in took]
    return Speed(layout, device.staged(0), rates[1], rates[0], rates[3], rates[2])


def _open(sample: Sample, memory: Any, driver: type[TorchDriver]) -> CudaDevice:
    device = CudaDevice(driver(memory.device))
    caches = [
        memory.as_strided((c.blocks, c.row_bytes), (c.block_stride, 1), c.offset)
        for c in sample.caches
    ]
    runs, pages = sample.runs, {0: GROUP.page_bytes}
    device.register_caches(caches, {0: runs.load}, pages, {0: runs.store})
    return device


def _reference(sample: Sample, memory: Bytes) -> CpuDevice:
    device = CpuDevice()
    runs, pages = sample.runs, {0: GROUP.page_bytes}
    caches = [cache.view(memory) for cache in sample.caches]
    device.register_caches(caches, {0: runs.load}, pages, {0: runs.store})
    return device


def _run(
    give: Callable[[int, Sequence[Copy]], None], device: Device, job: int, copies: Sequence[Copy]
) -> None:
    give(job, copies)
    device.wait([job], _SECONDS)
    for result in device.finished():
        if result.error is not None:
            raise result.error


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="bytes of one copy")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("torch is not installed: pip install 'kvstrata[torch]'")
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA GPU here")
    out = Table("", "path", "store", "plain", "ratio", "load", "plain", "ratio")
    out.title = f"{torch.cuda.get_device_name()}, GB/s, pages of {SHARE >> 10} KiB"
    for layout in LAYOUTS:
        try:
            check_layout(layout)
            check_layout(layout, pinned=False)
        except KVStrataError as e:
            sys.exit(f"{layout}: {e}")
        s = measure_layout(layout, max((args.mib << 20) // SHARE, 1), args.rounds)
        rates = (s.store, s.plain_store, s.store / s.plain_store, s.load, s.plain_load)
        figures = (*rates, s.load / s.plain_load)
        out.add_row(layout, "staged" if s.staged else "direct", *(f"{f:.2f}" for f in figures))
    Console().print(out)
    Console().print("all layouts: right bytes, pinned and pageable")


if __name__ == "__main__":
    main()
