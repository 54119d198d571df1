"""A real engine tells its node what its chunks are, and the node publishes it."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm_processes import BLOCK, Engine, Node, keys_of, make_model, make_prompt

from kvstrata.node.events_format import CLEARED, Removed, Stored, encode_batch
from kvstrata.testing.waiting import eventually
from kvstrata_server.lookups.hashing import chunk_keys

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PER_CHUNK = 2
PROMPT = make_prompt(1)
CHUNKS = len(PROMPT) // (BLOCK * PER_CHUNK)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="kv"))
    yield made
    shutil.rmtree(made)


def stored(address: str) -> dict[str, list[dict[str, Any]]]:
    """By medium, the blocks that a publisher announces now."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(address)
        dealer.send_multipart([b"", bytes(8)])
        held: dict[str, list[dict[str, Any]]] = {"CPU": [], "STORAGE": []}
        while payload := dealer.recv_multipart()[3]:
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "AllBlocksCleared":
                    held = {"CPU": [], "STORAGE": []}
                elif event["type"] == "BlockStored":
                    held[event["medium"]].append(event)
        return held


def test_vllm_reads_what_a_node_writes() -> None:
    from vllm.distributed.kv_events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
    )

    tokens = b"".join(n.to_bytes(4, "little") for n in range(8))
    payload = encode_batch(
        1.5,
        [
            CLEARED,
            Stored("CPU", [1, 2], None, tokens, 4, 0, "full_attention", None, "l", "s"),
            Stored("STORAGE", [1 << 63], 2, tokens, 8, 1, "sliding_window", 4096),
            Removed("CPU", [1, 2], 0),
        ],
        3,
    )
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    cleared, stored_, windowed, removed = batch.events
    assert isinstance(cleared, AllBlocksCleared)
    assert stored_ == BlockStored(
        block_hashes=[1, 2],
        parent_block_hash=None,
        token_ids=list(range(8)),
        block_size=4,
        lora_id=None,
        medium="CPU",
        lora_name="l",
        extra_keys=[("l", "s"), ("l",)],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    assert windowed.kv_cache_spec_sliding_window == 4096
    assert windowed.parent_block_hash == 2
    assert removed == BlockRemoved(block_hashes=[1, 2], medium="CPU", group_idx=0)


def test_an_engine_tells_what_it_stores_and_what_it_finds(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        replay = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    events = json.dumps([{"listen": "tcp://127.0.0.1:0", "replay": replay}])
    node = Node(folder, "a", "", "--events", events)
    node.start()
    engine = Engine(
        folder,
        make_model(folder / "tiny-llama"),
        "e",
        {"node": str(node.socket)},
        blocks_per_chunk=PER_CHUNK,
        tells=True,
    )
    try:
        engine.generate(PROMPT)
        eventually(lambda: len(stored(replay)["STORAGE"]) == CHUNKS, 60)
        chain = [int(h, 16) & (1 << 64) - 1 for h in engine.ask("hashes", prompt=PROMPT)]
        for medium, found in stored(replay).items():
            for n, event in enumerate(found):
                first = n * PER_CHUNK
                assert event["block_hashes"] == chain[first : first + PER_CHUNK], medium
                assert event["parent_block_hash"] == (chain[first - 1] if n else None)
                tokens = PROMPT[first * BLOCK : (first + PER_CHUNK) * BLOCK]
                assert event["token_ids"] == tokens
                assert event["block_size"] == BLOCK
                assert event["kv_cache_spec_kind"] == "full_attention"

        # The control plane finds the keys of the same chunks by the tokens alone.
        client = node.connect("e")
        keys = keys_of(engine, client, PROMPT, PER_CHUNK)
        assert client.namespace is not None
        assert chunk_keys(client.namespace, PROMPT)[0] == keys
        client.close()

        # A node that begins anew knows its disk, but not what it holds until it is told again.
        node.kill()
        node.start()
        assert stored(replay)["STORAGE"] == []
        engine.reset()

        def told_again() -> bool:
            engine.reset()
            engine.generate(PROMPT)
            return len(stored(replay)["STORAGE"]) == CHUNKS

        eventually(told_again, 60)
    finally:
        engine.close()
        node.kill()
