"""How fast does the obj tier store and load a batch of chunks, and what does safety cost?

Peer: plain aioboto3 with its defaults, `put_object` and `get_object` in one `gather` of the same
width on the same kind of loop; no metadata, nothing verified, counted or bounded, and a copy of
the bytes at either end. Limit: the same bytes as one object, put and got by http.client on one
connection. They take turns in one run; each figure is its best round, since whatever else the
machine does only adds time. Without `--endpoint` the store is SeaweedFS on loopback (extra `dev`),
which shares the cores with its clients: on a network of its own it would not.

Reference: a 2-core AMD EPYC VM, Linux 6.18, Python 3.11, 8 at once, SeaweedFS 4.48 on the same two
cores, on which about ten other processes were busy all the time: the store is the bottleneck, and
between two runs figures differ by half. GB/s:

                    ours   peer  limit  ours of the peer
    store 256 KiB   0.05   0.05   0.08   97%
    load  256 KiB   0.12   0.14   0.72   89%
    store 1 MiB     0.07   0.08   0.07   97%
    load  1 MiB     0.34   0.49   0.84   70%
    store 4 MiB     0.05   0.03   0.05  164%
    load  4 MiB     0.26   0.31   0.28   85%

With `--nixl` loads of 256 KiB, 1 MiB and 4 MiB ran at 48 %, 74 % and 92 % of the peer: a request
for metadata goes before each, and the work in Python that it saves is not what takes the time here.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import mmap
import os
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from figures import Figure, parser, show
from kvstrata.keys import make_key
from kvstrata.tiers.base import Item, Outcome, TierContext
from kvstrata.tiers.obj import ObjTier

BATCH = 16
SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
WARM_UP = 1


def memory(size: int) -> list[memoryview]:
    """`BATCH` slots, every page touched."""
    region = mmap.mmap(-1, BATCH * size)
    region.write(os.urandom(1 << 18) * (BATCH * size >> 18))
    view = memoryview(region)
    return [view[i * size : (i + 1) * size] for i in range(BATCH)]


@contextlib.contextmanager
def a_store(endpoint: str | None, bucket: str) -> Iterator[Any]:
    """An `S3` of the tests: SeaweedFS, unless there is an endpoint."""
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "tiers"))
    import obj_kit

    if endpoint is None:
        os.environ |= obj_kit.CREDENTIALS
        with tempfile.TemporaryDirectory() as folder, obj_kit.seaweedfs(Path(folder)) as server:
            yield obj_kit.connect(server)
    else:
        import boto3

        yield obj_kit.S3(endpoint, bucket, boto3.client("s3", endpoint_url=endpoint))


def one_object(s3: Any, name: str, view: memoryview) -> tuple[float, float]:
    """Seconds to put and to get it."""
    where = urlsplit(s3.endpoint)
    secure = where.scheme == "https"
    connection = (http.client.HTTPSConnection if secure else http.client.HTTPConnection)(
        where.netloc
    )
    took = []
    for method, operation in (("PUT", "put_object"), ("GET", "get_object")):
        url = s3.client.generate_presigned_url(
            operation, Params={"Bucket": s3.bucket, "Key": name}, HttpMethod=method
        )
        start = time.perf_counter()
        connection.request(method, url, body=view if method == "PUT" else None)
        answer = connection.getresponse()
        if method == "PUT":
            answer.read()
        else:
            filled = 0
            while filled < view.nbytes and (
                n := answer.readinto(view[filled : filled + (1 << 20)])
            ):
                filled += n
        took.append(time.perf_counter() - start)
        if answer.status != 200:
            raise SystemExit(f"the store answered {answer.status} to {method}")
    connection.close()
    return took[0], took[1]


async def measure(
    s3: Any, prefix: str, label: str, budget: float, width: int, nixl: bool
) -> list[Figure]:
    import aioboto3

    size = SIZES[label]
    source, target = memory(size), memory(size)
    whole = memoryview(mmap.mmap(-1, BATCH * size))
    options = s3.options(
        f"{prefix}/tier", load_concurrency=width, store_concurrency=width, nixl=nixl
    )
    tier = await ObjTier.open(options, TierContext("benchmark"))
    times: dict[str, list[float]] = defaultdict(list)
    gate = asyncio.Semaphore(width)
    async with aioboto3.Session().client("s3", endpoint_url=s3.endpoint) as plain:

        async def put(i: int) -> None:
            async with gate:
                await plain.put_object(
                    Bucket=s3.bucket, Key=f"{prefix}/peer/{i}", Body=bytes(source[i])
                )

        async def get(i: int) -> None:
            async with gate:
                answer = await plain.get_object(Bucket=s3.bucket, Key=f"{prefix}/peer/{i}")
                async with answer["Body"] as body:
                    target[i][:] = await body.read()

        end = time.perf_counter() + budget
        n = 0
        while n < WARM_UP + 3 or time.perf_counter() < end:
            keys = [make_key(bytes(16), 0, os.urandom(32)) for _ in range(BATCH)]
            put_one, get_one = await asyncio.to_thread(one_object, s3, f"{prefix}/limit", whole)
            times["limit store"].append(put_one)
            times["limit load"].append(get_one)
            for what, peer in (("store", put), ("load", get)):
                start = time.perf_counter()
                await asyncio.gather(*(peer(i) for i in range(BATCH)))
                times[f"peer {what}"].append(time.perf_counter() - start)
            start = time.perf_counter()
            stored = await tier.store([Item(k, v) for k, v in zip(keys, source, strict=True)])
            times["store"].append(time.perf_counter() - start)
            target[0][:] = bytes(size)
            start = time.perf_counter()
            loaded = await tier.load([Item(k, v) for k, v in zip(keys, target, strict=True)])
            times["load"].append(time.perf_counter() - start)
            if {*stored} != {Outcome.STORED} or {*loaded} != {Outcome.LOADED} or source != target:
                raise SystemExit(f"the tier failed: {stored} {loaded} {tier.usage().detail}")
            await tier.evict(keys)
            n += 1
    await tier.close()
    return figures(label, size, times, width, nixl)


def figures(
    label: str, size: int, times: dict[str, list[float]], width: int, nixl: bool
) -> list[Figure]:
    nbytes = BATCH * size
    found = []
    for what in ("store", "load"):
        ours, peer, limit = (times[f"{w} {what}".strip()][WARM_UP:] for w in ("", "peer", "limit"))
        found.append(
            Figure(
                name=f"obj {what} {label}",
                value=nbytes / min(ours) / 1e9,
                peer=nbytes / min(peer) / 1e9,
                limit=nbytes / min(limit) / 1e9,
                settings={
                    "batch": BATCH,
                    "concurrency": width,
                    "rounds": len(ours),
                    "nixl": nixl,
                    "peer": "plain aioboto3, no metadata, nothing verified",
                    "limit": "one object, http.client, one connection",
                },
            )
        )
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--endpoint", help="of a store; with credentials in the usual places")
    options.add_argument("--bucket", default="kvstrata-benchmark", help="of that store")
    options.add_argument("--concurrency", type=int, default=8)
    options.add_argument("--nixl", action="store_true", help="load through NIXL")
    options.add_argument("--seconds", type=float, default=15.0, help="in all, about")
    args = options.parse_args()
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    prefix = f"benchmark-{uuid.uuid4().hex}"
    with a_store(args.endpoint, args.bucket) as s3:
        found = [
            figure
            for label in SIZES
            for figure in asyncio.run(
                measure(s3, prefix, label, args.seconds / len(SIZES), args.concurrency, args.nixl)
            )
        ]
        for name in s3.names(f"{prefix}/"):
            s3.client.delete_object(Bucket=s3.bucket, Key=name)
    show(f"obj tier, batches of {BATCH}, {args.concurrency} at once", found, args.json)


if __name__ == "__main__":
    main()
