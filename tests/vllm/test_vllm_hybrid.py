"""A model of Mamba 2 and attention layers: states stored by two ranks are reloaded by one.

vLLM's own canonical layout keeps a state to the TP size that wrote it. Bytes are compared first,
then tokens and log-probabilities with the engine's own prefix-cache hit. Prompts end two tokens
after a block, as a state that is wrong shows only right behind its boundary. In float32, where
all TP sizes compute alike up to the order of their sums.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_processes import BLOCK, Engine, Node, eventually, keys_of, make_prompt, read_chunks

from kvstrata.keys import Key

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CACHED = 9 * BLOCK
PROMPT = make_prompt(1, CACHED + 2)
MIXERS, HEADS, DIM, GROUPS, STATE, STEPS = 3, 8, 32, 2, 16, 3
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device_blocks": 100,
    # On a CPU vLLM's scan gives the state at the end of a step only, so a step must end with
    # each block.
    "batched_tokens": BLOCK,
}


def make_hybrid_model(folder: Path) -> Path:
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(0)
    mixer = "linear_attention"
    config = NemotronHConfig(
        vocab_size=512,
        hidden_size=128,
        layers_block_type=[mixer, "mlp", mixer, "full_attention", mixer, "mlp"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        ssm_state_size=STATE,
        mamba_num_heads=HEADS,
        mamba_head_dim=DIM,
        n_groups=GROUPS,
        conv_kernel=STEPS + 1,
        chunk_size=BLOCK,
        max_position_embeddings=2048,
        initializer_range=0.15,
        rescale_prenorm_residual=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    NemotronHForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


class Site:
    """A node, and the engine that runs now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_hybrid_model(folder / "tiny-hybrid")
        self.node = Node(folder, "a")
        self.node.start()
        self.engine: Engine | None = None
        self.keys: dict[int, list[Key]] = {}
        self.chunks: dict[int, list[bytes]] = {}
        self.hit: dict[str, Any] = {}

    def run(self, name: str, **options: Any) -> Engine:
        if self.engine is not None:
            self.engine.quit()
        where = {"node": str(self.node.socket)}
        self.engine = Engine(self.folder, self.model, name, where, **OPTIONS, **options)
        return self.engine

    def stored(self, engine: Engine) -> dict[int, list[bytes]]:
        """By group what a hit of the whole prompt needs, once it is at the node and on disk."""
        with self.node.connect(engine.name) as client:
            assert client.namespace is not None
            for group in client.namespace.groups:
                keys = keys_of(engine, client, PROMPT, group=group.id)
                # Of states only the last one.
                self.keys[group.id] = keys[-1:] if group.kind == "mamba" else keys
            eventually(
                lambda: all(len(read_chunks(client, k, 0)) == len(k) for k in self.keys.values())
            )
            return {group: read_chunks(client, keys) for group, keys in self.keys.items()}

    def close(self) -> None:
        if self.engine is not None:
            self.engine.process.kill()
        self.node.kill()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    site = Site(folder)
    yield site
    site.close()
    shutil.rmtree(folder)


def same(reloaded: dict[str, Any], hit: dict[str, Any]) -> None:
    assert reloaded["cached"] == hit["cached"] == CACHED
    assert reloaded["tokens"] == hit["tokens"]
    assert reloaded["logprobs"] == hit["logprobs"]


def state_pages(engine: Engine) -> set[bytes]:
    """What a page is by DESIGN, of every block of every mixer that the ranks hold."""
    ranks = engine.ask("read")
    tp = len(ranks)
    cut = np.cumsum([HEADS * DIM // tp, GROUPS * STATE // tp, GROUPS * STATE // tp])
    conv_bytes = STEPS * int(cut[-1]) * 4
    ssm_bytes = HEADS // tp * DIM * STATE * 4
    pages = set()
    for layer in (0, 1, 3):  # of those that have a cache
        for blocks in zip(*(rank[layer] for rank in ranks), strict=True):
            fields: list[list[bytes]] = [[], [], [], []]
            for block in map(bytes.fromhex, blocks):
                conv = np.frombuffer(block[:conv_bytes], np.float32).reshape(STEPS, -1)
                parts = zip(np.split(conv, cut[:-1], axis=1), (DIM, STATE, STATE), strict=True)
                for field, (part, unit) in zip(fields, parts, strict=False):
                    units = part.reshape(STEPS, -1, unit).swapaxes(0, 1)
                    field.append(units.tobytes())
                fields[3].append(block[conv_bytes : conv_bytes + ssm_bytes])
            pages.add(b"".join(part for field in fields for part in field))
    return pages


def states(site: Site, chunks: dict[int, list[bytes]]) -> list[bytes]:
    """Those of the mixers, which are the groups with one chunk."""
    found = [c for group in chunks.values() if len(group) == 1 for c in group]
    assert len(found) == len(set(found)) == MIXERS
    return found


def test_two_ranks_store_whole_states(site: Site) -> None:
    two = site.run("two", ranks=2, environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    assert two.generate(PROMPT)["cached"] == 0
    site.chunks = site.stored(two)
    assert set(states(site, site.chunks)) <= state_pages(two)
    site.hit = two.generate(PROMPT)
    two.reset()
    same(two.generate(PROMPT), site.hit)


def test_one_rank_reloads_what_two_stored(site: Site) -> None:
    one = site.run("one")
    reloaded = one.generate(PROMPT)
    assert reloaded["cached"] == CACHED
    assert set(states(site, site.chunks)) <= state_pages(one)
    same(reloaded, one.generate(PROMPT))
    assert reloaded["tokens"] == site.hit["tokens"]
    for mine, theirs in zip(reloaded["logprobs"], site.hit["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_the_text_depends_on_each_state(site: Site) -> None:
    one = site.engine
    assert one is not None
    hit = one.generate(PROMPT)
    with site.node.connect("one") as client:
        for keys in site.keys.values():
            if len(keys) > 1:
                continue
            found = client.lookup(keys)
            at, size = found.offsets[0], len(site.chunks[int.from_bytes(keys[0][16:20], "big")][0])
            right = bytes(client.region.view[at : at + size])
            client.region.view[at : at + size] = bytes(size)
            one.reset()
            wrong = one.generate(PROMPT)
            client.region.view[at : at + size] = right
            client.release(found.lease)
            assert wrong["cached"] == CACHED
            assert wrong["logprobs"] != hit["logprobs"]
    one.reset()
    same(one.generate(PROMPT), hit)


def test_one_rank_stores_resets_and_reloads(site: Site) -> None:
    one = site.engine
    assert one is not None
    with site.node.connect("one") as client:
        eventually(
            lambda: (
                client.drop(["host", "fs"]) is not None
                and not any(t.chunks for t in client.status().tiers)
            )
        )
    one.reset(connector=True)
    assert one.generate(PROMPT)["cached"] == 0
    again = site.stored(one)
    assert set(states(site, again)) <= state_pages(one)
    # The same as two ranks stored, field by field.
    for group, chunks in site.chunks.items():
        for mine, theirs in zip(again[group], chunks, strict=True):
            np.testing.assert_allclose(
                np.frombuffer(mine, np.float32), np.frombuffer(theirs, np.float32), atol=1e-3
            )
    hit = one.generate(PROMPT)
    one.reset()
    same(one.generate(PROMPT), hit)
    # And from the files alone.
    files = {key[20:].hex() for keys in site.keys.values() for key in keys}
    eventually(lambda: files <= {p.name.split(".")[0] for p in site.node.files.rglob("*.kv")})
    with site.node.connect("one") as client:
        client.drop(["host"])
    one.reset()
    same(one.generate(PROMPT), hit)
