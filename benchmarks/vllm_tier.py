"""How fast do vLLM's chunks reach disk and come back through KVStrataTier, beside vLLM's own tier?

Run in vLLM's environment. Both are secondary tiers under vLLM's interface, over the same rows of
host memory; a figure is the time from `submit_store` or `submit_load` until the scheduler's polls
have every result. Peer: vLLM's fs tier as it comes (its C extension, 16 threads a direction, no
checksum, no bound). Ours: an fs tier with a bound; stores are checksummed, loads verified and
copied from staging to the rows. Limit: one plain file, O_DIRECT where the file system has it as
both tiers do, in pieces of a chunk by one thread.
All take turns in one run; each figure is its best round, since whatever else the machine does only
adds time. `scheduler` is what a chunk costs the scheduler's thread itself.

Reference: a 2-core AMD EPYC VM, ext4 on virtio, O_DIRECT, Linux 6.18, Python 3.11, vLLM 0.32, while
the machine was busy with some ten other processes (load 11 to 13), so the ratios say more than the
figures, and neither says much of a machine with cores to spare. 15 to 25 rounds, GB/s:

                            ours   peer  limit  ours of the peer
    store 256 KiB, 1 job    0.84   0.79   0.80   106%
    store 256 KiB, 8 jobs   0.79   1.30   1.02    61%
    load  256 KiB, 1 job    0.84   0.99   1.09    85%
    load  256 KiB, 8 jobs   0.82   1.16   1.06    71%
    store 1 MiB, 1 job      1.88   1.55   1.10   121%
    store 1 MiB, 8 jobs     1.72   1.86   1.14    92%
    load  1 MiB, 1 job      1.26   1.64   1.73    77%
    load  1 MiB, 8 jobs     1.18   1.78   1.75    66%
    scheduler                3.6 to 5.9 us a chunk, the peer 2.0 to 4.6

What loads lose is a checksum, a copy and Python threads where the peer has C, on two busy cores.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures import Figure, parser, show

CHUNKS = 64
SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20}
JOBS = (1, 8)
WARM_UP = 1


class Spec:
    """What both tiers are made with: vLLM's own, of a small Llama whose blocks have this size."""

    def __init__(self, folder: Path, size: int) -> None:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
            build_offloading_config,
        )
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
        )
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(LLAMA))
        self.vllm_config = EngineArgs(
            model=str(model), skip_tokenizer_init=True, dtype="bfloat16", block_size=32
        ).create_engine_config()
        self.vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": size * CHUNKS},
        )
        attention = FullAttentionSpec(
            block_size=32, num_kv_heads=2, head_size=64, dtype=self.vllm_config.model_config.dtype
        )
        self.layout = KVCacheConfig(
            8,
            [KVCacheTensor(size * 8, ["0"], size, size)],
            [KVCacheGroupSpec(["0"], attention)],
        )
        self.spec = TieringOffloadingSpec(build_offloading_config(self.vllm_config, self.layout))

    def ours(self, view: memoryview, root: Path, threads: int) -> Any:
        from kvstrata_adapters.engines.vllm import KVStrataTier

        # Where the tier finds them, as in vLLM's connector.
        vllm_config, kv_cache_config = self.vllm_config, self.layout
        options = {"read_threads": threads, "write_threads": threads, "capacity": "16GiB"}
        tiers = [{"type": "fs", "root": str(root), **options}]
        made = KVStrataTier(
            self.spec, view, "KVStrataTier", None, tiers=tiers, revision="1", most_pinned=1
        )
        del vllm_config, kv_cache_config
        return made

    def peer(self, view: memoryview, root: Path) -> Any:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        return FileSystemTierManager(self.spec, view, "fs", str(root))


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}


class Runner:
    """Gives a tier jobs and polls for them as a scheduler does."""

    def __init__(self, tier: Any) -> None:
        self.tier = tier
        self.number = 0
        self.cost = 0.0
        """Seconds of this thread spent inside the tier, of the last run."""

    def run(self, keys: list[Any], jobs: int, is_load: bool) -> float:
        import numpy as np
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        submit = self.tier.submit_load if is_load else self.tier.submit_store
        each = len(keys) // jobs
        given = []
        for at in range(0, len(keys), each):
            self.number += 1
            rows = np.arange(at, at + each, dtype=np.int32)
            context = ReqContext(f"r{self.number}")
            given.append(TransferJob(self.number, keys[at : at + each], rows, is_load, context))
        start = time.perf_counter()
        for job in given:
            submit(job)
        self.cost = time.perf_counter() - start
        waiting = {job.job_id for job in given}
        while waiting:
            before = time.perf_counter()
            finished = list(self.tier.get_finished_jobs())
            self.cost += time.perf_counter() - before if finished else 0
            for result in finished:
                if not result.success:
                    raise SystemExit(f"{type(self.tier).__name__} failed: {result}")
                waiting.discard(result.job_id)
            time.sleep(0.0002)
        return time.perf_counter() - start


def plain(path: Path, view: memoryview, size: int, write: bool) -> None:
    flags = (os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if write else os.O_RDONLY
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    move: Callable[..., int] = os.pwrite if write else (lambda f, v, at: os.preadv(f, [v], at))
    for at in range(0, view.nbytes, size):
        move(fd, view[at : at + size], at)
    os.close(fd)


def measure(root: Path, label: str, budget: float, threads: int) -> Iterator[Figure]:
    import mmap

    import numpy as np
    from vllm.v1.kv_offload.base import make_offload_key

    size = SIZES[label]
    rows = np.frombuffer(mmap.mmap(-1, CHUNKS * size), np.int8).reshape(CHUNKS, size)
    rows[:] = np.frombuffer(os.urandom(CHUNKS * size), np.int8).reshape(CHUNKS, size)
    wanted = rows.copy()
    view = memoryview(rows)
    flat = view.cast("B")
    spec = Spec(root, size)
    ours = Runner(spec.ours(view, root / "ours", threads))
    peer = Runner(spec.peer(view, root / "peer"))
    times: dict[tuple[str, int, str], list[float]] = defaultdict(list)

    def check(who: str) -> None:
        if not np.array_equal(rows, wanted):
            raise SystemExit(f"{who} gave other bytes than it got")
        rows[:] = 0

    end = time.perf_counter() + budget
    n = 0
    while n < WARM_UP + 3 or time.perf_counter() < end:
        for jobs in JOBS:
            rows[:] = wanted
            keys = [make_offload_key(os.urandom(32), 0) for _ in range(CHUNKS)]
            start = time.perf_counter()
            plain(root / "plain", flat, size, write=True)
            times["store", jobs, "limit"].append(time.perf_counter() - start)
            for who, runner in (("peer", peer), ("ours", ours)):
                times["store", jobs, who].append(runner.run(keys, jobs, is_load=False))
                times["store cost", jobs, who].append(runner.cost)
            start = time.perf_counter()
            plain(root / "plain", flat, size, write=False)
            times["load", jobs, "limit"].append(time.perf_counter() - start)
            for who, runner in (("peer", peer), ("ours", ours)):
                rows[:] = 0
                times["load", jobs, who].append(runner.run(keys, jobs, is_load=True))
                times["load cost", jobs, who].append(runner.cost)
                check(who)
            remove(ours.tier, peer.tier, keys)
        n += 1
    yield from figures(label, size, times, threads)
    for runner in (ours, peer):
        runner.tier.shutdown()


def remove(ours: Any, peer: Any, keys: list[Any]) -> None:
    """What this round has stored, so that the disk doesn't fill."""
    for key in keys:
        os.unlink(peer.file_mapper.get_file_name(key))
    (shelf,) = ours._shelves.shelves
    ours._loop.ask(shelf.tier.evict([ours._naming.ours(key) for key in keys]), 60)


def figures(
    label: str, size: int, times: dict[tuple[str, int, str], list[float]], threads: int
) -> Iterator[Figure]:
    for jobs in JOBS:
        settings = {
            "chunks": CHUNKS,
            "jobs": jobs,
            "threads": threads,
            "peer": "vLLM's fs tier, 16 threads a direction",
        }
        for what in ("store", "load"):
            best = {w: min(times[what, jobs, w][WARM_UP:]) for w in ("ours", "peer", "limit")}
            rate = {who: CHUNKS * size / seconds / 1e9 for who, seconds in best.items()}
            rounds = len(times[what, jobs, "ours"]) - WARM_UP
            name = f"{what} {label}, {jobs} job{'s' if jobs > 1 else ''}"
            yield Figure(
                name,
                rate["ours"],
                rate["peer"],
                rate["limit"],
                settings={**settings, "rounds": rounds},
            )
            cost = {
                who: min(times[f"{what} cost", jobs, who][WARM_UP:]) * 1e6 / CHUNKS
                for who in ("ours", "peer")
            }
            yield Figure(
                f"scheduler, {name}",
                cost["ours"],
                cost["peer"],
                None,
                "us/chunk",
                {**settings, "rounds": rounds},
            )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--root", type=Path, help="a directory on the disk to measure")
    options.add_argument("--threads", type=int, default=4, help="of our fs tier, a direction")
    options.add_argument("--seconds", type=float, default=20.0, help="in all, about")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        found = [
            figure
            for label in SIZES
            for figure in measure(
                Path(folder), label, args.seconds / len(SIZES), max(1, args.threads)
            )
        ]
    show(f"vLLM tiers on disk, {CHUNKS} chunks at a time", found, args.json)


if __name__ == "__main__":
    main()
