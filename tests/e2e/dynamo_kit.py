"""Dynamo's real indexer and selector, beside a control plane and nodes: all processes on loopback.

They come from the package `ai-dynamo-runtime`, which pins versions of its own and so lives in an
environment of its own: `make dynamo`. Elsewhere: name its Python in
KVSTRATA_DYNAMO_PYTHON. They bind all interfaces; there is no setting for that.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from kvstrata.client import Client
from kvstrata.keys import Field, Group, Key, Namespace
from kvstrata.testing.waiting import eventually
from kvstrata.wire import Told
from kvstrata_server.lookups.hashing import chunk_keys

ROOT = Path(__file__).parents[2]
BLOCK = 4
PER_CHUNK = 2
PAGE = 4096
MODEL = "m"


def dynamo_python() -> str:
    """Its Python, or the test is skipped; where CI says that it must be there, it fails."""
    named = os.environ.get("KVSTRATA_DYNAMO_PYTHON", "")
    python = Path(named) if named else ROOT / ".venv-dynamo" / "bin" / "python"
    if not python.exists():
        if os.environ.get("KVSTRATA_TEST_DYNAMO") == "required":
            pytest.fail(f"{python} is not there: run `make dynamo`")
        pytest.skip("Dynamo's indexer is not installed: run `make dynamo`")
    return str(python)


def a_namespace(pages: int = 1) -> Namespace:
    """Chunks of two blocks, hashed as vLLM does with `sha256_cbor` and its default seed."""
    group = Group(0, "full", ("l",), (Field("kv", 1, pages * PAGE // PER_CHUNK),), BLOCK)
    seed = "af1d66864a65bf053e4b2136699aef08"
    return Namespace(
        *(MODEL, "r", "c", "bf16", "f"), (group,), PER_CHUNK, "sha256_cbor", seed
    ).checked()


NAMESPACE = a_namespace()
# One block a chunk: the same hashes, all of them.
_BLOCKS = Namespace(
    *(MODEL, "r", "c", "bf16", "f"), NAMESPACE.groups, 1, "sha256_cbor", NAMESPACE.hash_seed
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def keys_of(tokens: Sequence[int]) -> list[Key]:
    return chunk_keys(NAMESPACE, tokens)[0]


def tells_of(tokens: Sequence[int]) -> list[Told]:
    """What an engine says of the chunks of a prompt."""
    hashes = [int.from_bytes(key[-8:], "big") for key in chunk_keys(_BLOCKS, tokens)[0]]
    size = BLOCK * PER_CHUNK
    tells = []
    for n, key in enumerate(keys_of(tokens)):
        first = n * PER_CHUNK
        raw = b"".join(t.to_bytes(4, "little") for t in tokens[n * size : (n + 1) * size])
        blocks = hashes[first : first + PER_CHUNK]
        tells.append(Told(key, blocks, raw, hashes[first - 1] if first else None))
    return tells


class Engine:
    """Stores prompts at a node and tells of them, as an engine's adapter does."""

    def __init__(self, path: Path) -> None:
        self.client: Client = eventually(
            lambda: Client.connect(path, "engine", namespace=NAMESPACE)
        )

    def store(self, tokens: Sequence[int]) -> None:
        keys = keys_of(tokens)
        self.client.tell(tells_of(tokens))
        offsets = self.client.reserve(keys)
        fresh = [key for key, offset in zip(keys, offsets, strict=True) if offset >= 0]
        assert all(offset >= 0 or offset == -2 for offset in offsets)
        assert all(self.client.commit(fresh))

    def fetch(self, tokens: Sequence[int]) -> int:
        """Have the node bring a prompt to its host memory; how many chunks it found."""
        found = self.client.lookup(keys_of(tokens), wait=10)
        self.client.release(found.lease)
        return found.prefix

    def drop(self, tiers: Sequence[str], tokens: Sequence[int], first: int = 0) -> None:
        self.client.drop(tiers, keys_of(tokens)[first:])

    def close(self) -> None:
        self.client.close()


class Cluster:
    """Processes by name; each may be killed and started again as it was."""

    def __init__(self, folder: Path, *event_flags: str, nodes: Sequence[str] = ("a", "b")) -> None:
        self.folder = folder
        self.python = dynamo_python()
        self.server = f"http://127.0.0.1:{free_port()}"
        self.indexer = f"http://127.0.0.1:{free_port()}"
        self.selector = f"http://127.0.0.1:{free_port()}"
        self.events = {node: (free_port(), free_port()) for node in nodes}
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.http = httpx.Client(trust_env=False, timeout=10)
        extra = "".join(f", {flag}" for flag in event_flags)
        self.commands = {
            "server": [
                *(sys.executable, "-m", "kvstrata", "server"),
                *("--listen", self.server.removeprefix("http://")),
                *("--database", f"sqlite+aiosqlite:///{folder}/index.sqlite"),
                *("--heartbeat-ttl", "3s"),
            ],
            "indexer": [self.python, "-m", "dynamo.indexer", "--port", _port(self.indexer)],
            "selector": [
                self.python,
                "-m",
                "dynamo.select_service",
                "--port",
                _port(self.selector),
            ],
        }
        for node, (live, replay) in self.events.items():
            self.commands[node] = [
                *(sys.executable, "-m", "kvstrata", "node", "--id", node),
                *("--socket", str(folder / f"{node}.sock"), "--host.shm-dir", str(folder)),
                *("--host.capacity", str(32 * PAGE), "--peers.transports", '["tcp"]'),
                *("--tiers", f'[{{"type": "fs", "root": "{folder}/fs-{node}"}}]'),
                *("--control.url", self.server, "--control.heartbeat-interval", "0.5"),
                *("--event-memory", str(self.memory(node))),
                "--events",
                f'[{{"listen": "tcp://127.0.0.1:{live}", "replay": "tcp://127.0.0.1:{replay}", '
                f'"repeat": "200ms", "topic": "kv@{node}@{MODEL}"{extra}}}]',
            ]

    def start(self, *names: str) -> None:
        for name in names:
            log = (self.folder / f"{name}.log").open("ab")
            self.children[name] = subprocess.Popen(self.commands[name], stdout=log, stderr=log)
            log.close()

    def end(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        child = self.children.pop(name)
        child.send_signal(how)
        child.wait(30)

    def close(self) -> None:
        for name in list(self.children):
            self.end(name)
        self.http.close()

    def engine(self, node: str) -> Engine:
        return Engine(self.folder / f"{node}.sock")

    def post(self, url: str, **body: Any) -> Any:
        answer = self.http.post(url, json=body)
        assert answer.is_success, f"{url}: {answer.status_code} {answer.text}"
        return answer.json()

    def register(self, node: str, at: str, endpoint: str = "") -> None:
        """As instance 1, 2, ... at Dynamo's indexer or at ours."""
        live, replay = self.events[node]
        body = {
            "instance_id": self.instance(node),
            "endpoint": endpoint or f"tcp://127.0.0.1:{live}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
            "model_name": MODEL,
            "block_size": BLOCK,
        }
        eventually(lambda: tolerant(lambda: self.post(f"{at}/register", **body)))

    def memory(self, node: str) -> Path:
        """Where the node remembers what its engines told."""
        return self.folder / f"told-{node}.sqlite"

    def remembered(self, node: str) -> int:
        """Of how many chunks."""
        database = sqlite3.connect(f"file:{self.memory(node)}?mode=ro", uri=True)
        try:
            (count,) = database.execute("SELECT count(*) FROM told").fetchone()
            return int(count)
        finally:
            database.close()

    def instance(self, node: str) -> int:
        return 1 + list(self.events).index(node)

    def query(self, at: str, tokens: Sequence[int]) -> dict[str, Any]:
        """Instance -> what it has, as this one says; nothing of a model that it never heard of."""
        answer = self.http.post(
            f"{at}/query", json={"token_ids": list(tokens), "model_name": MODEL}
        )
        assert answer.status_code in (200, 404), answer.text
        found = answer.json().get("instances", {})
        return {name: overlap for name, overlap in found.items() if overlap["longest_matched"]}

    def agree(self, prompts: Sequence[Sequence[int]], wanted: Any = None) -> list[dict[str, Any]]:
        """What both say of each prompt, once they say the same (and `wanted`); or an error."""
        said: list[list[dict[str, Any]]] = []

        def same() -> bool:
            said[:] = [[self.query(at, p) for p in prompts] for at in (self.indexer, self.server)]
            return said[0] == said[1] and (wanted is None or said[0] == wanted)

        try:
            eventually(same)
        except Exception as e:
            raise AssertionError(f"Dynamo says {said[0]}, we say {said[1]}, not {wanted}") from e
        return said[0]


def tolerant(call: Callable[[], Any]) -> Any:
    """Falsy while a server is starting."""
    try:
        return call()
    except (httpx.TransportError, AssertionError):
        return None


def has(cpu: int, disk: int) -> dict[str, Any]:
    """An instance's answer, from chunks."""
    size = BLOCK * PER_CHUNK
    shown = {"gpu": 0, "cpu": cpu * size, "disk": disk * size}
    return shown | {"longest_matched": max(cpu, disk) * size, "dp": {"0": 0}}


class Lossy:
    """Stands between a publisher and a reader, and loses messages while `losing`."""

    def __init__(self, source: str) -> None:
        self.losing = False
        self.lost = 0
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(source)
        self._pub = self._context.socket(zmq.PUB)
        self.address = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._run, name="lossy")
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                frames = self._sub.recv_multipart()
                if self.losing:
                    self.lost += 1
                else:
                    self._pub.send_multipart(frames)
        except zmq.ContextTerminated:
            self._sub.close(linger=0)
            self._pub.close(linger=0)

    def close(self) -> None:
        self._context.term()
        self._thread.join(10)


def _port(url: str) -> str:
    return url.rpartition(":")[2]
