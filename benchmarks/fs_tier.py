"""How fast does the fs tier store and load a batch of chunks, and what does safety cost?

Peer: file per chunk as vLLM's fs tier does one job: one thread, temporary file and rename, no
checksum, nothing counted or bounded. Limit: one plain file of the same total, written and read in
pieces of a chunk by one thread. All three go through the page cache, or with `--direct` past it,
and take turns in one run; each figure is its best round, since whatever else the machine does only
adds time. The tier checksums every payload both ways; a load verifies key, length and checksum.
Directories exist already, as in a store that has been in use; `--fresh` makes tier and peer create
them.

Reference: a 2-core AMD EPYC VM, ext4 on virtio, Linux 6.18, Python 3.11, 4 threads; three to five
other processes were busy, and with ten every figure that creates files falls by half or more. GB/s:

                        page cache                      O_DIRECT
                    ours   peer  limit  of limit    ours   peer  limit  of limit
    store 256 KiB   1.55   2.74   4.71    33%       0.82   0.69   1.30    63%
    load  256 KiB   5.05  11.13  12.34    41%       1.02   0.91   0.91   112%
    store 1 MiB     2.86   3.42   5.27    54%       2.06   1.16   1.81   114%
    load  1 MiB     7.24  12.85  13.78    53%       1.83   1.58   1.74   105%

Creating the file is what a store of 256 KiB costs: tier and peer are alike there. What health,
ages, news and the lease cost does not show: on tmpfs a chunk of 256 KiB took 183 us of CPU to store
and 108 to load, and 184 and 110 before the tier had them. Before, through the page cache with three
other processes busy: stores 1.37 and 2.47, loads 5.72 and 8.15 GB/s.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure, parser, show
from kvstrata.keys import make_key
from kvstrata.tiers.base import Item, Outcome, TierContext
from kvstrata.tiers.fs import FsTier

BATCH = 64
SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20}
WARM_UP = 2


def memory(size: int) -> list[memoryview]:
    """`BATCH` slots, every page touched."""
    region = mmap.mmap(-1, BATCH * size)
    region.write(os.urandom(1 << 20) * (BATCH * size >> 20))
    view = memoryview(region)
    return [view[i * size : (i + 1) * size] for i in range(BATCH)]


def plain_write(path: Path, views: list[memoryview], flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
    for i, view in enumerate(views):
        os.pwrite(fd, view, i * view.nbytes)
    os.close(fd)


def plain_read(path: Path, views: list[memoryview], flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
    for i, view in enumerate(views):
        os.preadv(fd, [view], i * view.nbytes)
    os.close(fd)


def peer_write(folder: Path, views: list[memoryview], flags: int) -> None:
    for i, view in enumerate(views):
        final = f"{folder}/{i:02x}/{i}"
        os.makedirs(os.path.dirname(final), exist_ok=True)
        fd = os.open(f"{final}.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
        os.write(fd, view)
        os.close(fd)
        os.rename(f"{final}.tmp", final)


def peer_read(folder: Path, views: list[memoryview], flags: int) -> None:
    for i, view in enumerate(views):
        fd = os.open(f"{folder}/{i:02x}/{i}", os.O_RDONLY | flags)
        os.readv(fd, [view])
        os.close(fd)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def hashes(fresh: bool) -> list[bytes]:
    """Of a batch; the first two bytes choose the directory."""
    return [os.urandom(32) if fresh else bytes([i, i]) + os.urandom(30) for i in range(BATCH)]


async def measure(
    root: Path, label: str, budget: float, threads: int, fresh: bool, direct: bool
) -> Iterator[Figure]:
    flags = os.O_DIRECT if direct else 0
    size = SIZES[label]
    source, target = memory(size), memory(size)
    options = {
        "root": root / "tier",
        "capacity": "64GiB",
        "read_threads": threads,
        "write_threads": threads,
        "direct": "on" if direct else "off",
    }
    tier = await FsTier.open(options, TierContext("benchmark"))
    times: dict[str, list[float]] = defaultdict(list)
    end = time.perf_counter() + budget
    n = 0
    while n < WARM_UP + 3 or time.perf_counter() < end:
        keys = [make_key(bytes(16), 0, hash_) for hash_ in hashes(fresh)]
        plain, peer = root / "plain", root / "peer"
        times["limit store"].append(seconds(lambda: plain_write(plain, source, flags)))  # noqa: B023
        times["peer store"].append(seconds(lambda: peer_write(peer, source, flags)))  # noqa: B023

        start = time.perf_counter()
        stored = await tier.store([Item(k, v) for k, v in zip(keys, source, strict=True)])
        times["store"].append(time.perf_counter() - start)

        times["limit load"].append(seconds(lambda: plain_read(plain, target, flags)))  # noqa: B023
        times["peer load"].append(seconds(lambda: peer_read(peer, target, flags)))  # noqa: B023

        target[0][:] = bytes(size)
        start = time.perf_counter()
        loaded = await tier.load([Item(k, v) for k, v in zip(keys, target, strict=True)])
        times["load"].append(time.perf_counter() - start)

        if {*stored} != {Outcome.STORED} or {*loaded} != {Outcome.LOADED} or source != target:
            raise SystemExit(f"the tier failed: {stored} {loaded}")
        await tier.evict(keys)
        plain.unlink()
        for i in range(BATCH):
            (peer / f"{i:02x}" / f"{i}").unlink()
        if fresh:
            shutil.rmtree(peer)
        n += 1
    await tier.close()
    return figures(label, size, times, threads, fresh, direct)


def figures(
    label: str,
    size: int,
    times: dict[str, list[float]],
    threads: int,
    fresh: bool,
    direct: bool,
) -> Iterator[Figure]:
    nbytes = BATCH * size
    for what in ("store", "load"):
        ours, peer, limit = (times[f"{w} {what}".strip()][WARM_UP:] for w in ("", "peer", "limit"))
        yield Figure(
            name=f"fs {what} {label}",
            value=nbytes / min(ours) / 1e9,
            peer=nbytes / min(peer) / 1e9,
            limit=nbytes / min(limit) / 1e9,
            settings={
                "batch": BATCH,
                "threads": threads,
                "rounds": len(ours),
                "cache": "O_DIRECT" if direct else "page cache",
                "directories": "new" if fresh else "there",
                "peer": "one thread, file per chunk, no checksum",
                "limit": "one plain file, one thread",
            },
        )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--root", type=Path, help="a directory on the disk to measure")
    options.add_argument("--threads", type=int, default=4)
    options.add_argument("--direct", action="store_true", help="all three with O_DIRECT")
    options.add_argument("--fresh", action="store_true", help="every chunk makes its directory")
    options.add_argument("--seconds", type=float, default=10.0, help="in all, about")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        found = [
            figure
            for label in SIZES
            for figure in asyncio.run(
                measure(
                    Path(folder),
                    label,
                    args.seconds / len(SIZES),
                    args.threads,
                    args.fresh,
                    args.direct,
                )
            )
        ]
    cache = "O_DIRECT" if args.direct else "page cache"
    title = f"fs tier, batches of {BATCH}, {args.threads} threads, {cache}"
    show(title, found, args.json)


if __name__ == "__main__":
    main()
