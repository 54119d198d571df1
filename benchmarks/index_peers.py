"""The peers of `index`: LMCache's coordinator and Dynamo's indexer, each a process of its own.

Both are asked over HTTP on loopback, alone on the machine's cores. None where the interpreter named
doesn't have them.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import numpy as np
import xxhash
import zmq

__all__ = ["BLOCK", "TOKENS", "dynamo_query_ms", "lmcache_rates"]

_START = 60.0
TOKENS = 8_300
"""Of the request that Dynamo's indexer is asked about, and those of a block."""
BLOCK = 16
_LMCACHE_BATCH = 1_000


def _has(python: str, module: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _serving(command: list[str], port: int, path: str) -> Iterator[http.client.HTTPConnection]:
    """Until it answers at `path`, then a connection to it."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        deadline = time.monotonic() + _START
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                connection.request("GET", path)
                connection.getresponse().read()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{' '.join(command)} did not start") from None
                time.sleep(0.2)
        yield connection
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ask(connection: http.client.HTTPConnection, path: str, message: object) -> dict:
    connection.request(
        "POST", path, json.dumps(message).encode(), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    content = response.read()
    if response.status >= 300:
        raise SystemExit(f"POST {path}: {response.status} {content[:500]!r}")
    return json.loads(content) if content else {}


def dynamo_query_ms(python: str, seconds: float) -> float | None:
    """p50 of `/query` for a request of 8,300 tokens that one worker announced, in ms."""
    if not _has(python, "dynamo.indexer"):
        return None
    port = _free_port()
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    events = publisher.bind_to_random_port("tcp://127.0.0.1")
    command = [python, "-m", "dynamo.indexer", "--port", str(port)]
    try:
        with _serving(command, port, "/health") as connection:
            registration = {
                "instance_id": 1,
                "endpoint": f"tcp://127.0.0.1:{events}",
                "model_name": "m",
                "block_size": BLOCK,
                "dp_rank": 0,
            }
            _ask(connection, "/register", registration)
            tokens = list(range(TOKENS // BLOCK * BLOCK))
            question = {"token_ids": tokens, "model_name": "m"}
            _announce(publisher, connection, tokens, question)
            took, deadline = [], time.perf_counter() + seconds
            while time.perf_counter() < deadline:
                started = time.perf_counter()
                _ask(connection, "/query", question)
                took.append((time.perf_counter() - started) * 1e3)
            return float(np.median(took))
    finally:
        publisher.close(0)
        context.term()


def _announce(
    publisher: zmq.Socket[bytes],
    connection: http.client.HTTPConnection,
    tokens: list[int],
    question: object,
) -> None:
    """Until the indexer has it: subscribers miss what is sent before they are there."""
    hashes = [
        xxhash.xxh3_64_intdigest(np.array(tokens[i : i + BLOCK], "<u4").tobytes(), seed=1337)
        for i in range(0, len(tokens), BLOCK)
    ]
    stored = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK,
        "medium": "GPU",
    }
    for seq in range(100):
        batch = msgspec.msgpack.encode([time.time(), [stored], 0])
        publisher.send_multipart([b"kv@127.0.0.1@m", seq.to_bytes(8, "big"), batch])
        time.sleep(0.1)
        found = _ask(connection, "/query", question)["instances"].values()
        if any(instance["longest_matched"] == len(tokens) for instance in found):
            return
    raise SystemExit("Dynamo's indexer does not take what it was told")


def lmcache_rates(python: str, seconds: float) -> tuple[float, float, float] | None:
    """Placements/s told in batches of 1,000, and p50 and p99 in ms of lookups of 1,000 keys."""
    if not _has(python, "lmcache"):
        return None
    port = _free_port()
    command = [
        python, "-m", "lmcache.v1.mp_coordinator", "--host", "127.0.0.1", "--port", str(port),
        "--disable-metrics",
    ]  # fmt: skip
    with _serving(command, port, "/healthz") as connection:
        registration = {"instance_id": "n0", "ip": "127.0.0.1", "http_port": 1}
        _ask(connection, "/instances", registration)
        told, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            batch = {
                "instance_id": "n0",
                "incarnation": 1,
                "seq": told + 1,
                "event_type": "store",
                "tier": "l1",
                "backend": "dram",
                "entries": [{"key": key, "size_bytes": 1} for key in _lmcache_keys(told)],
            }
            _ask(connection, "/events", {"batches": [batch]})
            told += 1
        rate = told * _LMCACHE_BATCH / (time.perf_counter() - started)
        took, deadline = [], time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            question = {"keys": _lmcache_keys(len(took) % told)}
            started = time.perf_counter()
            _ask(connection, "/directory/lookup", question)
            took.append((time.perf_counter() - started) * 1e3)
    return rate, float(np.median(took)), float(np.quantile(took, 0.99))


def _lmcache_keys(batch: int) -> list[dict[str, object]]:
    raw = np.random.default_rng(batch).bytes(32 * _LMCACHE_BATCH)
    return [
        {"chunk_hash_hex": raw[i : i + 32].hex(), "model_name": "m", "kv_rank": 0}
        for i in range(0, len(raw), 32)
    ]
