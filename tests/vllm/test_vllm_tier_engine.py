"""A real vLLM engine on the CPU with vLLM's tiering spec, and kvstrata's fs tier below it by one
entry of JSON. See `vllm_tiering_on_cpu` for the one part of vLLM that is replaced.

What is compared is an engine's own prefix-cache hit of the same length: the same computation
without offloading. Before each reload the device's and the host's memory is emptied.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_processes import BLOCK, Engine, make_model, make_prompt

from kvstrata.testing.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = make_prompt(1)
PER_CHUNK = 2
CHUNK = PER_CHUNK * BLOCK
CHUNKS = len(PROMPT) // CHUNK


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kv"))
    yield made
    shutil.rmtree(made)


class Site:
    """The engine that runs now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model(folder / "tiny-llama")
        self.root = folder / "store"
        self.engine: Engine | None = None

    def run(self, name: str, **options: Any) -> Engine:
        if self.engine is None or self.engine.name != name:
            self.close()
            entry = {
                "type": "KVStrataTier",
                "module_path": "kvstrata_adapters.engines.vllm",
                "tiers": [{"type": "fs", "root": str(self.root), "capacity": "256MiB"}],
                **options,
            }
            connector = {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "vllm_tiering_on_cpu",
                "cpu_bytes_to_use": 32 << 20,
                "blocks_per_chunk": PER_CHUNK,
                "secondary_tiers": [entry],
            }
            self.engine = Engine(self.folder, self.model, name, {}, connector=connector)
        return self.engine

    def files(self) -> list[Path]:
        return sorted(p for p in self.root.rglob("*.kv") if p.is_file())

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    site = Site(folder)
    yield site
    site.close()


def same(reloaded: dict[str, Any], hit: dict[str, Any]) -> None:
    assert reloaded["tokens"] == hit["tokens"]
    assert reloaded["logprobs"] == hit["logprobs"]


def test_chunks_come_back_from_disk(site: Site) -> None:
    engine = site.run("first")
    assert engine.generate(PROMPT)["cached"] == 0
    # What an engine reuses ends at a whole chunk, so ask for as much of its own.
    hit = engine.generate(PROMPT[: CHUNKS * CHUNK + 1])
    eventually(lambda: len(site.files()) == CHUNKS)
    engine.reset(connector=True)
    reloaded = engine.generate(PROMPT[: CHUNKS * CHUNK + 1])
    assert reloaded["cached"] == CHUNKS * CHUNK == hit["cached"]
    same(reloaded, hit)


def test_a_damaged_file_costs_what_follows_it_and_is_replaced(site: Site) -> None:
    engine = site.run("first")
    hit = engine.generate(PROMPT)
    victims = {}
    for path in site.files():
        data = bytearray(path.read_bytes())
        data[-2000] ^= 1
        victims[path] = bytes(data)
    # Which file is which chunk's is the engine's to say.
    third = engine.ask("hashes", prompt=PROMPT)[3 * PER_CHUNK - 1]
    (path,) = (p for p in victims if third in str(p).replace("/", ""))
    path.write_bytes(victims[path])
    engine.reset(connector=True)
    damaged = engine.generate(PROMPT)
    assert damaged["cached"] == 2 * CHUNK
    assert damaged["tokens"] == hit["tokens"]
    eventually(lambda: path.is_file() and path.read_bytes() != victims[path])
    engine.reset(connector=True)
    assert engine.generate(PROMPT)["cached"] == CHUNKS * CHUNK


def test_another_engine_finds_them(site: Site) -> None:
    first = site.run("first")
    hit = first.generate(PROMPT)
    second = site.run("second")
    reloaded = second.generate(PROMPT)
    assert reloaded["cached"] == CHUNKS * CHUNK
    assert reloaded["tokens"] == hit["tokens"]


def test_an_engine_of_another_tenant_does_not(site: Site) -> None:
    stranger = site.run("stranger", tenant="other")
    assert stranger.generate(PROMPT)["cached"] == 0
