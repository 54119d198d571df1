"""The parts of the vLLM tier that need no vLLM: jobs that end once, rows, staging, the loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import kvstrata_adapters.engines.vllm as package
from kvstrata.errors import ConfigError, Expired, LinkBroken
from kvstrata_adapters.engines.vllm.tier_jobs import Chunk, Job
from kvstrata_adapters.engines.vllm.tier_loop import LoopThread
from kvstrata_adapters.engines.vllm.tier_options import TierOptions
from kvstrata_adapters.engines.vllm.tier_rows import Rows, Staging, copy_bytes

KEYS = [b"a", b"b"]


def job(is_load: bool = True) -> Job:
    return Job(1, KEYS, [Chunk(k, k, i) for i, k in enumerate(KEYS)], is_load, 10.0)


# ------------------------------------------------------------ jobs


def test_a_job_ends_once() -> None:
    mine = job()
    assert not mine.success
    assert mine.end()
    assert not mine.end()
    assert not mine.end(force=True)


def test_it_does_not_end_while_its_rows_are_touched() -> None:
    mine = job()
    assert mine.touch()
    assert mine.touch()
    assert not mine.end()
    mine.untouch([b"a"])
    assert not mine.end()
    mine.untouch([b"b"])
    assert mine.success
    assert mine.end()


def test_who_waits_for_it_is_told_when_nobody_touches_it_any_more() -> None:
    mine = job()
    assert mine.touch()
    other = threading.Timer(0.05, mine.untouch)
    other.start()
    assert mine.end(seconds=10)
    other.join()


def test_after_its_end_nobody_touches_its_rows_or_changes_its_result() -> None:
    mine = job(is_load=False)
    assert mine.touch()
    assert mine.end(force=True)
    mine.untouch(KEYS)
    assert mine.done == set()
    assert not mine.touch()


# ------------------------------------------------------------ rows and staging


def test_rows_are_the_used_parts_of_vllms() -> None:
    memory = np.zeros((3, 8), np.int8)
    rows = Rows(memoryview(memory), 6)
    with rows.rows([2, 0]) as (last, first):
        last[:] = b"\x01" * 6
        first[:2] = b"\x02\x02"
    assert memory.tolist() == [[2, 2, 0, 0, 0, 0, 0, 0], [0] * 8, [1] * 6 + [0, 0]]
    with pytest.raises(ValueError, match="released"):
        bytes(last)
    rows.release()
    rows.release()


@pytest.mark.parametrize(
    "view",
    [
        memoryview(bytearray(8)),
        memoryview(bytes(8)).cast("b", (2, 4)),
        memoryview(np.zeros((2, 4), np.int16)),
        memoryview(np.zeros((4, 2), np.int8).T),
        memoryview(np.zeros((0, 4), np.int8)),
        memoryview(np.zeros((2, 3), np.int8)),
    ],
    ids=["flat", "read-only", "words", "columns", "empty", "too narrow"],
)
def test_other_memory_is_refused(view: memoryview) -> None:
    with pytest.raises(ConfigError, match="host memory"):
        Rows(view, 4)


async def test_a_buffer_is_lent_to_one_at_a_time() -> None:
    staging = Staging(capacity=4 << 12, size=100)
    taken = [await staging.take(1) for _ in range(4)]
    assert await staging.take(0.01) is None
    seen = set()
    for i, buffer in enumerate(taken):
        assert buffer is not None
        assert len(buffer.views) == staging.chunks == 1
        buffer.views[0][:] = bytes([i]) * 100
        seen.add(id(buffer))
    assert len(seen) == 4
    assert [bytes(b.views[0])[0] for b in taken if b] == [0, 1, 2, 3]
    assert taken[0] is not None
    staging.give(taken[0])
    assert await staging.take(1) is taken[0]


@pytest.mark.parametrize(("capacity", "chunks"), [(1, 1), (128 << 20, 16), (8 << 20, 1)])
async def test_staging_has_at_least_two_buffers(capacity: int, chunks: int) -> None:
    staging = Staging(capacity, 1 << 20)
    assert staging.chunks == chunks
    assert await staging.take(0) is not None
    assert await staging.take(0) is not None


def test_bytes_are_copied() -> None:
    target = bytearray(6)
    view = memoryview(target)
    copy_bytes([(memoryview(b"abc"), view[:3]), (memoryview(b"def"), view[3:])])
    assert target == b"abcdef"


# ------------------------------------------------------------ the loop


def test_the_loop_answers_and_ends() -> None:
    loop = LoopThread("kvstrata-test")

    async def answer() -> int:
        return 42

    ran = threading.Event()

    async def tell() -> None:
        ran.set()

    assert loop.ask(answer(), 10) == 42
    loop.spawn(tell)
    assert ran.wait(10)
    assert loop.stop(10)
    assert loop.stop(10)
    with pytest.raises(LinkBroken):
        loop.ask(answer(), 10)
    with pytest.raises(LinkBroken):
        loop.spawn(tell)


def test_the_loop_ends_what_runs_on_it() -> None:
    loop = LoopThread("kvstrata-test")
    began, ended = threading.Event(), threading.Event()

    async def forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    loop.spawn(forever)
    assert began.wait(10)
    assert loop.stop(10)
    assert ended.is_set()


def test_who_asks_waits_no_longer_than_it_said() -> None:
    loop = LoopThread("kvstrata-test")
    with pytest.raises(Expired):
        loop.ask(asyncio.sleep(60), 0.05)
    free = threading.Event()

    async def block() -> None:
        free.wait(20)

    loop.spawn(block)
    with pytest.raises(Expired):
        loop.ask(asyncio.sleep(0), 0.05)
    assert not loop.stop(0.05)
    free.set()
    assert loop.stop(10)


# ------------------------------------------------------------ options, the package


def test_options_are_human_and_checked() -> None:
    given: dict[str, Any] = {"tiers": [{"type": "fs", "root": "/x"}]}
    options = TierOptions.parse("T", given | {"staging": "1GiB", "load_deadline": "200ms"})
    assert (options.staging, options.load_deadline) == (1 << 30, 0.2)
    with pytest.raises(ConfigError, match=r"secondary_tiers, T: .*most_pinned"):
        TierOptions.parse("T", given | {"most_pinned": 0})


def test_the_package_needs_no_vllm_until_it_is_asked() -> None:
    code = (
        "import sys, kvstrata_adapters.engines.vllm as v; "
        "assert not {'vllm', 'torch'} & {n.split('.')[0] for n in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'KVStrataTire'"):
        _ = package.KVStrataTire
