"""Real vLLM engines on CPU, offloading to real nodes.

In each case bytes are compared first, then tokens and log-probabilities, with the same engine's
own prefix-cache hit of the same length: that is the same computation without offloading. Before
each reload the device's memory is overwritten, so nothing right can come from there.

The engine of a case takes half a minute to start, so cases share one and build on each other:
they run in the order of the file.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_processes import (
    BLOCK,
    TOKEN,
    Engine,
    Node,
    keys_of,
    make_model,
    make_prompt,
    make_windowed_model,
    read_chunks,
    start,
    tier,
)

from kvstrata.api import (
    LookupRequest,
    NamespaceTokens,
    TokenLookup,
    TransferRequest,
    TransferState,
)
from kvstrata.client import Client
from kvstrata.control import SyncControlPlane
from kvstrata.keys import Key
from kvstrata.testing.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = make_prompt(1)
CHUNKS = len(PROMPT) // BLOCK
CACHED = CHUNKS * BLOCK


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="kv"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_model(folder / "tiny-llama")


class Site:
    """A control plane, a node, and the engine that runs now."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.server = start(
            [
                *("-m", "kvstrata", "server", "--listen", f"127.0.0.1:{port}"),
                *("--database", f"sqlite+aiosqlite:///{folder}/index.sqlite"),
            ],
            folder / "server.log",
            {"KVSTRATA_SERVER_TOKEN": TOKEN},
        )
        self.node = Node(folder, "a", self.url)
        self.node.start()
        self.engine: Engine | None = None
        self.chunks: list[bytes] = []
        self.keys: list[Key] = []
        self.hit: dict[str, Any] = {}

    def run(
        self, name: str, node: Node | None = None, model: Path | None = None, **options: Any
    ) -> Engine:
        """The engine of this name, started if it does not run; another one is ended first."""
        if self.engine is None or self.engine.name != name:
            if self.engine is not None:
                self.engine.quit()
            where = {"node": str((node or self.node).socket)}
            self.engine = Engine(self.folder, model or self.model, name, where, **options)
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.node.kill()
        self.server.kill()


@pytest.fixture(scope="module")
def site(folder: Path, model: Path) -> Iterator[Site]:
    site = Site(folder, model)
    yield site
    site.close()


def same(reloaded: dict[str, Any], hit: dict[str, Any]) -> None:
    """A reload gave what the engine's own cache gives, and both reused as much."""
    assert reloaded["cached"] == hit["cached"] > 0
    assert reloaded["tokens"] == hit["tokens"]
    assert reloaded["logprobs"] == hit["logprobs"]


def close_to(logprobs: list[dict[str, float]], others: list[dict[str, float]]) -> None:
    """Those of engines whose ranks add the same terms in another order."""
    for step, other in zip(logprobs, others, strict=True):
        shared = step.keys() & other.keys()
        assert shared
        assert [step[t] for t in shared] == pytest.approx([other[t] for t in shared], abs=1e-2)


def stored(site: Site, engine: Engine, prompt: list[int], seconds: float = 30.0) -> list[bytes]:
    """The prompt's chunks at the node, once all of them are there and on disk."""
    with site.node.connect(engine.name) as client:
        keys = keys_of(engine, client, prompt)
        eventually(lambda: len(read_chunks(client, keys, wait=0)) == len(keys), seconds)
        files = {key[20:].hex() for key in keys}
        eventually(lambda: files <= {p.name.split(".")[0] for p in site.node.files.rglob("*.kv")})
        return read_chunks(client, keys)


def empty(client: Client, *tiers: str) -> None:
    """Drop everything from these tiers; what is leased or being written goes a moment later."""
    eventually(
        lambda: client.drop(tiers) is not None and not any(tier(client, t).chunks for t in tiers)
    )


def canonical(blocks: list[list[bytes]], numbers: list[int]) -> bytes:
    """What DESIGN calls `page-u1`, from per layer and block `[head][token][k|v]`."""
    half = len(blocks[0][0]) // 2
    return b"".join(
        layer[number][head * half : (head + 1) * half]
        for number in numbers
        for head in range(2)
        for layer in blocks
    )


def test_chunks_hold_the_bytes_of_the_device(site: Site) -> None:
    engine = site.run("first")
    cold = engine.generate(PROMPT)
    assert cold["cached"] == 0
    site.chunks = stored(site, engine, PROMPT)
    with site.node.connect("first") as client:
        site.keys = keys_of(engine, client, PROMPT)
    assert len(site.chunks) == CHUNKS

    (rank,) = engine.ask("read")
    blocks = [[bytes.fromhex(block) for block in layer] for layer in rank]
    pages = {canonical(blocks, [number]) for number in range(len(blocks[0]))}
    assert set(site.chunks) <= pages
    assert len(set(site.chunks)) == CHUNKS


def test_a_after_the_device_cache_is_reset(site: Site) -> None:
    engine = site.run("first")
    hit = engine.generate(PROMPT)
    assert hit["cached"] == CACHED
    engine.reset()
    reloaded = engine.generate(PROMPT)
    same(reloaded, hit)
    (rank,) = engine.ask("read")
    blocks = [[bytes.fromhex(block) for block in layer] for layer in rank]
    pages = {canonical(blocks, [number]) for number in range(len(blocks[0]))}
    assert set(site.chunks) <= pages


def test_the_text_depends_on_the_bytes(site: Site) -> None:
    # What shows that the comparisons of this file can fail.
    engine = site.run("first")
    hit = engine.generate(PROMPT)
    with site.node.connect("first") as client:
        found = client.lookup(site.keys)
        view = client.region.view
        view[found.offsets[3] : found.offsets[3] + 4096] = bytes(4096)
        client.release(found.lease)
        engine.reset()
        wrong = engine.generate(PROMPT)
        assert wrong["cached"] == hit["cached"]
        assert wrong["logprobs"] != hit["logprobs"]
        empty(client, "host")
        engine.reset()
        same(engine.generate(PROMPT), hit)


def test_many_requests_at_once_get_their_own_bytes(site: Site) -> None:
    # More than the device holds, so that they also push each other out.
    engine = site.run("first")
    prompts = [PROMPT[:150] + make_prompt(100 + i, 150) for i in range(8)]
    engine.ask("generate", prompts=prompts, tokens=8)
    for prompt in prompts:
        stored(site, engine, prompt)
    alone = []
    for prompt in prompts:
        engine.generate(prompt, 8)
        alone.append(engine.generate(prompt, 8))
    engine.reset()
    for prompt, hit in zip(prompts, alone, strict=True):
        same(engine.generate(prompt, 8), hit)
        engine.reset()
    together = engine.ask("generate", prompts=prompts, tokens=8)
    assert all(answer["cached"] >= CACHED - BLOCK for answer in together)


def test_b_after_the_engine_is_killed_and_started_again(site: Site) -> None:
    engine = site.run("first")
    before = engine.generate(PROMPT)
    engine.process.kill()
    # Killed in the middle of everything, it holds nothing at the node any more.
    with site.node.connect("probe") as client:
        eventually(lambda: not [s for s in client.status().sessions if s.startswith("first")])
    site.engine = None
    engine = site.run("second")
    reloaded = engine.generate(PROMPT)
    same(reloaded, engine.generate(PROMPT))
    assert reloaded["tokens"] == before["tokens"]
    with site.node.connect("second") as client:
        assert read_chunks(client, keys_of(engine, client, PROMPT)) == site.chunks


def test_c_after_the_host_tier_is_emptied(site: Site) -> None:
    engine = site.run("second")
    hit = engine.generate(PROMPT)
    with site.node.connect("second") as client:
        empty(client, "host")
        loads = tier(client, "fs").counters["loaded"]
        engine.reset()
        same(engine.generate(PROMPT), hit)
        assert tier(client, "fs").counters["loaded"] == loads + CHUNKS
        assert read_chunks(client, site.keys) == site.chunks


def test_e_with_a_damaged_chunk_file(site: Site) -> None:
    engine = site.run("second")
    damaged = 4
    (path,) = site.node.files.rglob(f"{site.keys[damaged][20:].hex()}.*.kv")
    with path.open("r+b") as file:
        file.seek(4096 + 1000)
        byte = file.read(1)
        file.seek(4096 + 1000)
        file.write(bytes([byte[0] ^ 1]))
    with site.node.connect("second") as client:
        corrupt = tier(client, "fs").counters["corrupt"]
        empty(client, "host")
        engine.reset()
        recomputed = engine.generate(PROMPT)
        assert tier(client, "fs").counters["corrupt"] == corrupt + 1
        # The recomputed part is stored anew, and is what it was.
        assert stored(site, engine, PROMPT) == site.chunks

        # The same without offloading: the device has the chunks before it, nobody has the rest.
        empty(client, "host", "fs")
        engine.reset(connector=True)
        before = PROMPT[: damaged * BLOCK + 1]
        engine.generate(before, 1)
        stored(site, engine, before)
        empty(client, "host", "fs")
        hit = engine.generate(PROMPT)
    assert recomputed["cached"] == damaged * BLOCK
    same(recomputed, hit)


def test_the_engine_serves_on_while_its_node_is_dead(site: Site) -> None:
    engine = site.run("second")
    hit = engine.generate(PROMPT)
    site.node.kill()
    assert engine.generate(PROMPT)["tokens"] == hit["tokens"]
    other = make_prompt(7)
    first = engine.generate(other)
    assert first["cached"] == 0
    engine.reset()
    assert engine.generate(other)["tokens"] == first["tokens"]

    site.node.start()
    regions = sorted(p.name for p in Path("/dev/shm").glob(f"kvstrata-{site.node.id}-*"))
    assert len(regions) == 1

    def back() -> bool:
        # The link looks for its node in the engine's steps.
        engine.generate(make_prompt(8, 40), 1)
        with site.node.connect("probe") as client:
            return "second/scheduler" in client.status().sessions

    eventually(back)
    later = make_prompt(9)
    engine.generate(later)
    stored(site, engine, later)
    hit = engine.generate(later)
    engine.reset()
    same(engine.generate(later), hit)


def test_d_on_a_second_node_after_a_transfer(site: Site) -> None:
    engine = site.run("second")
    engine.reset(connector=True)
    engine.generate(PROMPT)
    chunks = stored(site, engine, PROMPT)
    node_b = Node(site.folder, "b", site.url)
    node_b.start()
    try:
        engine = site.run("third", node_b)
        hashes = engine.ask("hashes", prompt=PROMPT)
        with node_b.connect("third") as client, SyncControlPlane(site.url, TOKEN) as control:
            assert client.namespace is not None
            keys = [client.namespace.key(0, bytes.fromhex(h)) for h in hashes]
            assert read_chunks(client, keys) == []
            names = [key.hex() for key in keys]
            asked = LookupRequest(keys=names, nodes=[site.node.id])
            eventually(lambda: control.lookup(asked).nodes[0].prefix == CHUNKS)
            transfer = control.create_transfer(
                TransferRequest(source=site.node.id, target=node_b.id, keys=names)
            )
            ended = eventually(lambda: (t := control.get_transfer(transfer.id)).state.ended and t)
            assert ended.state is TransferState.DONE, ended
            assert read_chunks(client, keys) == chunks
            reloaded = engine.generate(PROMPT)
            same(reloaded, engine.generate(PROMPT))
            assert reloaded["cached"] == CACHED
        engine.quit()
        site.engine = None
    finally:
        node_b.kill()


def test_two_ranks_and_one_share_chunks(site: Site) -> None:
    # In float32, where both compute alike up to the order of their sums.
    one = site.run("one-rank", dtype="float32")
    one.generate(PROMPT)
    chunks = stored(site, one, PROMPT)
    hit = one.generate(PROMPT)
    two = site.run(
        "two-ranks",
        dtype="float32",
        ranks=2,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    reloaded = two.generate(PROMPT)
    same(reloaded, two.generate(PROMPT))
    assert reloaded["cached"] == CACHED
    assert reloaded["tokens"] == hit["tokens"]

    # And what two ranks store together is a chunk like any other.
    with site.node.connect("two-ranks") as client:
        empty(client, "host", "fs")
        two.reset(connector=True)
        computed = two.generate(PROMPT)
        assert computed["cached"] == 0
        assert computed["tokens"] == hit["tokens"]
        again = stored(site, two, PROMPT)
    for mine, theirs in zip(again, chunks, strict=True):
        np.testing.assert_allclose(
            np.frombuffer(mine, np.float32), np.frombuffer(theirs, np.float32), atol=1e-3
        )

    site.chunks, site.hit = again, hit


def test_one_rank_reloads_what_two_stored(site: Site) -> None:
    one = site.run("one-rank-again", dtype="float32")
    reloaded = one.generate(PROMPT)
    # The very bytes, and then what it computes itself from them.
    with site.node.connect("one-rank-again") as client:
        assert read_chunks(client, keys_of(one, client, PROMPT)) == site.chunks
    (rank,) = one.ask("read")
    blocks = [[bytes.fromhex(block) for block in layer] for layer in rank]
    pages = {canonical(blocks, [number]) for number in range(len(blocks[0]))}
    assert set(site.chunks) <= pages
    assert len(set(site.chunks)) == CHUNKS
    same(reloaded, one.generate(PROMPT))
    assert reloaded["cached"] == CACHED
    assert reloaded["tokens"] == site.hit["tokens"]
    close_to(reloaded["logprobs"], site.hit["logprobs"])


def test_layers_with_windows_are_groups_of_their_own(site: Site) -> None:
    model = make_windowed_model(site.folder / "tiny-gemma")
    engine = site.run("windows", model=model, device_blocks=400)
    engine.generate(PROMPT)
    with site.node.connect("windows") as client:
        assert client.namespace is not None
        kinds = [group.kind for group in client.namespace.groups]
        assert sorted(kinds) == ["full"] + ["sliding_window"] * 5
        full = kinds.index("full")
        keys = keys_of(engine, client, PROMPT, group=full)
        eventually(lambda: len(read_chunks(client, keys, wait=0)) == CHUNKS)
        # The control plane hashes the prompt as vLLM did, and sees what a hit takes: of windows the
        # last chunks alone, and there were never more.
        namespace = client.namespace.digest.hex()
        prompt = NamespaceTokens(namespace=namespace, token_ids=PROMPT)
        asked = TokenLookup(tokens=prompt, nodes=[site.node.id], return_keys=True)
        with SyncControlPlane(site.url, TOKEN) as control:
            eventually(lambda: [n.tokens for n in control.lookup(asked).nodes] == [CACHED])
            needed = control.lookup(asked).nodes[0].keys or []
        assert {key.hex() for key in keys} < set(needed)
        hit = engine.generate(PROMPT)
        engine.reset()
        same(engine.generate(PROMPT), hit)
        eventually(lambda: len(list(site.node.files.rglob("*.kv"))) >= tier(client, "host").chunks)
        empty(client, "host")
        engine.reset()
        same(engine.generate(PROMPT), hit)


def test_the_scheduler_of_an_idle_engine_rests(site: Site) -> None:
    engine = site.engine
    assert engine is not None
    engine.generate(PROMPT)
    before = engine.process.cpu_seconds("VLLM::EngineCor")
    assert before > 0
    time.sleep(2)
    assert engine.process.cpu_seconds("VLLM::EngineCor") - before < 0.3


def test_an_engine_without_a_node_starts_its_own(folder: Path, model: Path) -> None:
    run = folder / "run"
    prompt = PROMPT[: CHUNKS // 2 * 2 * BLOCK + 5]
    engine = Engine(
        folder,
        model,
        "alone",
        {"host_capacity": "32MiB"},
        blocks_per_chunk=2,
        environment={"XDG_RUNTIME_DIR": str(run)},
    )
    try:
        engine.generate(prompt)
        (path,) = (run / "kvstrata").glob("own-*/node.sock")
        with Client.connect(path, "alone", "tool") as client:
            keys = keys_of(engine, client, prompt, blocks_per_chunk=2)
            eventually(lambda: len(read_chunks(client, keys, wait=0)) == len(keys) == CHUNKS // 2)
        (region,) = Path("/dev/shm").glob(f"kvstrata-{path.parent.name}-*")
        hit = engine.generate(prompt)
        engine.reset()
        same(engine.generate(prompt), hit)
    finally:
        engine.process.kill()
    # The node is not of the engine's process group: the kernel told it that the engine is gone.
    eventually(lambda: not region.exists() and not path.exists())
