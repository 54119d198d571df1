"""How fast do chunks come from another node, by transport, and what do lease and checksum add?

`tcp` and `nixl` are a transport's `pull` alone; `fetch` is all of it, as the peer tier does it:
grant, pull, xxh3 of every chunk, release. Source and consumer are two processes of one host, so
the sockets are loopback and NIXL reads by CMA: a network or an RDMA device is not in here.
Peer: the same batch as ZMQ frames, received without a copy and copied to where it belongs, as a
node without a transport of its own would do it. Limit: memcpy of the batch, one thread. All take
turns in one run; each figure is its best round, since what else the machine does only adds time.

Reference (2-core AMD EPYC VM, Linux 6.18, Python 3.11, NIXL 1.5.1, shared with other work; over
sockets the best round halves when the scheduler puts both ends on one core, ours and the peer's):

                            GB/s   peer  limit  of the limit
    tcp 256 KiB             4.66   4.03  11.57     40 %
    nixl 256 KiB            3.94   4.03  11.57     34 %
    tcp 1 MiB               4.10   4.63   9.19     45 %
    fetch over tcp 1 MiB    2.81   4.63   9.19     31 %
    nixl 1 MiB              4.36   4.63   9.19     47 %
    fetch over nixl 1 MiB   3.27   4.63   9.19     36 %
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.connection import Connection

import zmq

from figures import Figure, parser, show
from kvstrata.config import PeerSettings
from kvstrata.errors import ConfigError
from kvstrata.testing.sources import SourceProcess, demo_keys, demo_namespace, pattern
from kvstrata.tiers.base import Item, Outcome
from kvstrata.tiers.peer_links import PeerLinks
from kvstrata.transports import Read, Transport, open_transport

BATCH = 64
SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20}
FETCHED = 1 << 20
WARM_UP = 1
LEASE = bytes(16)
SECONDS_A_PULL = 10.0


def memory(nbytes: int) -> memoryview:
    """As a region is: mapped, every page touched."""
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = bytes(nbytes)
    return view


def serve_zmq(nbytes: int, told: Connection) -> None:
    """The peer's source: a message for each range it is asked for, not copied here."""
    held = memory(nbytes)
    held[:] = pattern(nbytes, 1)
    socket = zmq.Context().socket(zmq.ROUTER)
    told.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        who, asked = socket.recv_multipart()
        ranges = memoryview(asked).cast("Q")
        for at, n in zip(ranges[::2], ranges[1::2], strict=True):
            socket.send(who, zmq.SNDMORE)
            socket.send(held[at : at + n], copy=False)


class ZmqPeer:
    """The peer's consumer."""

    def __init__(self, nbytes: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=serve_zmq, args=(nbytes, theirs), daemon=True)
        self._process.start()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{ours.recv()}")

    def pull(self, into: memoryview, reads: list[Read]) -> None:
        asked = b"".join(
            n.to_bytes(8, "little") for r in reads for n in (r.remote_offset, r.nbytes)
        )
        self._socket.send(asked)
        for read in reads:
            frame = self._socket.recv(copy=False)
            into[read.local_offset : read.local_offset + read.nbytes] = frame.buffer

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._context.destroy(linger=0)


def scattered(size: int) -> list[Read]:
    order = list(range(BATCH))
    random.Random(1).shuffle(order)
    return [Read(i * size, j * size, size) for i, j in enumerate(order)]


async def runnable(names: list[str], into: memoryview) -> list[Transport]:
    found = []
    for name in names:
        try:
            transport = open_transport(name, into, lambda *_: False)
            await transport.start()
        except ConfigError as e:
            print(f"{name} is left out: {e}")
        else:
            found.append(transport)
    return found


async def measure(names: list[str], budget: float) -> list[Figure]:
    largest = BATCH * max(SIZES.values())
    expected, into, here = memoryview(pattern(largest, 1)), memory(largest), memory(largest)
    here[:] = expected
    async with AsyncExitStack() as stack:
        peer = ZmqPeer(largest)
        stack.callback(peer.close)
        transports = await runnable(names, into)
        sources, ports, links = {}, {}, {}
        for transport in transports:
            stack.push_async_callback(transport.close)
            sources[transport] = SourceProcess("transport", transport.name, str(largest))
            stack.callback(sources[transport].kill)
            ports[transport] = SourceProcess("port", transport.name, str(FETCHED // 4), str(BATCH))
            stack.callback(ports[transport].kill)
            links[transport] = PeerLinks(PeerSettings(secret="s3cret"), "near", "1", [transport])
            stack.push_async_callback(links[transport].close)
        found = []
        for label, size in SIZES.items():
            reads = scattered(size)
            works: dict[str, Callable[[], Awaitable[None]]] = {
                "limit": partial(by_memcpy, here, into, reads),
                "peer": partial(by_zmq, peer, into, reads),
            }
            for t in transports:
                works[t.name] = partial(by_pull, t, bytes.fromhex(sources[t].told), reads)
                if size == FETCHED:
                    works[f"fetch over {t.name}"] = partial(
                        by_fetch, links[t], ports[t].told, items(into)
                    )
            times = await take_turns(works, into, expected, reads, budget / len(SIZES))
            found += figures(label, BATCH * size, times)
    return found


def items(into: memoryview) -> list[Item]:
    keys = demo_keys(demo_namespace(FETCHED // 4), BATCH)
    return [
        Item(key, into[i * FETCHED : (i + 1) * FETCHED], i * FETCHED) for i, key in enumerate(keys)
    ]


async def by_memcpy(here: memoryview, into: memoryview, reads: list[Read]) -> None:
    for r in reads:
        chunk = here[r.remote_offset : r.remote_offset + r.nbytes]
        into[r.local_offset : r.local_offset + r.nbytes] = chunk


async def by_zmq(peer: ZmqPeer, into: memoryview, reads: list[Read]) -> None:
    peer.pull(into, reads)


async def by_pull(transport: Transport, remote: bytes, reads: list[Read]) -> None:
    deadline = time.monotonic() + SECONDS_A_PULL
    if not all(await transport.pull(remote, LEASE, reads, deadline)):
        raise SystemExit(f"{transport.name} failed")


async def by_fetch(links: PeerLinks, address: str, wanted: list[Item]) -> None:
    deadline = time.monotonic() + SECONDS_A_PULL
    namespace = demo_namespace(FETCHED // 4)
    if {*await links.fetch(address, namespace, wanted, deadline)} != {Outcome.LOADED}:
        raise SystemExit(f"a fetch failed: {links.reasons}")


async def take_turns(
    works: dict[str, Callable[[], Awaitable[None]]],
    into: memoryview,
    expected: memoryview,
    reads: list[Read],
    budget: float,
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = defaultdict(list)
    end = time.perf_counter() + budget
    n = 0
    while n < WARM_UP + 1 or time.perf_counter() < end:
        for name, work in works.items():
            start = time.perf_counter()
            await work()
            times[name].append(time.perf_counter() - start)
            if n == 0 and not name.startswith("fetch"):
                for r in reads:
                    got = into[r.local_offset : r.local_offset + r.nbytes]
                    # As bytes: views are compared item by item.
                    right = expected[r.remote_offset : r.remote_offset + r.nbytes]
                    if bytes(got) != bytes(right):
                        raise SystemExit(f"{name}: wrong bytes")
        n += 1
    return times


def figures(label: str, nbytes: int, times: dict[str, list[float]]) -> list[Figure]:
    rate = {name: nbytes / min(each[WARM_UP:]) / 1e9 for name, each in times.items()}
    return [
        Figure(
            name=f"{name} {label}",
            value=value,
            peer=rate["peer"],
            limit=rate["limit"],
            settings={
                "batch": BATCH,
                "rounds": len(times[name]) - WARM_UP,
                "processes": 2,
                "host": "loopback",
                "peer": "ZMQ frames and a landing copy",
                "limit": "memcpy, one thread",
            },
        )
        for name, value in rate.items()
        if name not in ("peer", "limit")
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--transports", default="tcp,nixl", help="names, comma-separated")
    options.add_argument("--seconds", type=float, default=12.0, help="of measuring, about")
    args = options.parse_args()
    names = args.transports.split(",")
    found = asyncio.run(measure(names, args.seconds))
    show(f"transports, batches of {BATCH}, two processes of one host", found, args.json)


if __name__ == "__main__":
    main()
