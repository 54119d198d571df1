"""What reports to the server that `index` measures: nodes, in a process of their own."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np

from kvstrata import bulk
from kvstrata.bulk import BulkChange, BulkReport, KeyRun

__all__ = ["JSON", "NAMESPACE", "Churned", "Client", "hashes", "reporter"]

NAMESPACE = b"benchmark index "
JSON = "application/json"
_SAMPLE = 0.1
_WINDOW = 10.0


class Client:
    """One connection."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(f"//{address}")
        self._http = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)

    def ask(self, method: str, path: str, body: bytes = b"", kind: str = JSON) -> dict:
        while True:
            try:
                self._http.request(method, path, body, {"Content-Type": kind})
                response = self._http.getresponse()
                content = response.read()
            except ConnectionError:  # it was idle for longer than the server keeps one
                self._http.close()
                continue
            if response.status == 503 and path != "/readyz":
                time.sleep(0.05)  # SQL is behind by all it may be
                continue
            if response.status >= 300:
                raise SystemExit(f"{method} {path}: {response.status} {content[:500]!r}")
            return json.loads(content)

    def post(self, path: str, message: object) -> dict:
        return self.ask("POST", path, msgspec.msgpack.encode(message), bulk.MEDIA_TYPE)


def hashes(batch: int, count: int) -> bytes:
    """The keys of a batch: a chain that one node holds. The first ones are the same for any
    count."""
    return np.random.default_rng(batch).bytes(32 * count)


@dataclass(frozen=True)
class Churned:
    """Placements that came, with as many that left, in so many seconds; the rate over the slowest
    ten of them; the longest that SQL was behind, in seconds, at how many samples; and which
    batches are there now."""

    placements: int
    seconds: float
    slowest: float
    behind: float
    samples: int
    oldest: int
    batches: int


class Nodes:
    """In turns, each reports a batch of chunks that nobody has yet. `database`: the SQLite file of
    the server, which knows how many reports are in it."""

    def __init__(self, address: str, nodes: int, keys: int, database: Path) -> None:
        self.client = Client(address)
        self._keys = keys
        self._seqs = [0] * nodes
        self._owners: list[int] = []
        self._told: list[float] = []
        self._sql = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        self.oldest = 0
        """Batches before it were removed."""
        for n in range(nodes):
            node = {"id": f"n{n}", "incarnation": "i"}
            self.client.ask("POST", "/v1/nodes", json.dumps(node).encode())

    @property
    def batches(self) -> int:
        return len(self._owners)

    def report(self) -> None:
        self._report(self.batches % len(self._seqs), [])

    def replace(self) -> None:
        """The oldest batch that is there goes from its node, and a new one comes."""
        gone = KeyRun(NAMESPACE, 0, 32, hashes(self.oldest, self._keys))
        self._report(self._owners[self.oldest], [gone])
        self.oldest += 1

    def _report(self, node: int, removed: list[KeyRun]) -> None:
        run = KeyRun(NAMESPACE, 0, 32, hashes(self.batches, self._keys))
        report = BulkReport("i", self._seqs[node], [BulkChange("host", [run], removed)])
        self.client.post(f"/v1/nodes/n{node}/reports", report)
        self._seqs[node] += 1
        self._owners.append(node)
        self._told.append(time.perf_counter())

    def report_until(self, placements: int) -> float:
        """Seconds it took."""
        started = time.perf_counter()
        while self.batches * self._keys < placements:
            self.report()
        return time.perf_counter() - started

    def report_at(self, rate: float, pipe: Connection) -> None:
        """Until told to stop; then the rate that came about."""
        started, before = time.perf_counter(), self.batches
        while not pipe.poll():
            done = (self.batches - before) * self._keys
            if (wait := started + done / rate - time.perf_counter()) > 0:
                time.sleep(min(wait, 0.1))
            else:
                self.report()
        pipe.recv()
        pipe.send((self.batches - before) * self._keys / (time.perf_counter() - started))

    def churn(self, seconds: float) -> Churned:
        """As fast as it goes, for so long; the number of placements stays what it is."""
        first, behind = self.batches, [0.0]
        started = sampled = now = time.perf_counter()
        while now - started < seconds:
            self.replace()
            now = time.perf_counter()
            if now - sampled >= _SAMPLE:
                behind.append(self.behind())
                sampled = now
        told = np.array(self._told[first:])
        samples = len(behind)
        behind.append(self.caught_up())
        return Churned(
            placements=len(told) * self._keys,
            seconds=now - started,
            slowest=_slowest(told - started, now - started) * self._keys,
            behind=max(behind),
            samples=samples,
            oldest=self.oldest,
            batches=self.batches,
        )

    def behind(self) -> float:
        """For how many seconds the oldest report that isn't in SQL has been acknowledged."""
        # Committed with the placements, in the order in which they were reported.
        reports = (
            self._sql.execute("SELECT sum(next_seq) FROM nodes WHERE id LIKE 'n%'").fetchone()[0]
            or 0
        )
        return time.perf_counter() - self._told[reports] if reports < self.batches else 0.0

    def caught_up(self) -> float:
        """Seconds until SQL has everything."""
        started = time.perf_counter()
        while self.client.ask("GET", "/healthz")["unwritten_rows"]:
            time.sleep(0.05)
        return time.perf_counter() - started


def _slowest(told: np.ndarray, seconds: float) -> float:
    """Reports a second in the window with the fewest."""
    window = min(_WINDOW, seconds)
    starts = np.arange(0.0, seconds - window + 1e-9, window / 10)
    counts = np.searchsorted(told, starts + window) - np.searchsorted(told, starts)
    return float(counts.min()) / window


def _reporting(pipe: Connection, address: str, nodes: int, keys: int, database: Path) -> None:
    """Takes ("until", n), ("churn", seconds) and ("at", rate), and answers each."""
    told = Nodes(address, nodes, keys, database)
    while (order := pipe.recv()) is not None:
        kind, amount = order
        if kind == "until":
            before = told.batches
            seconds = told.report_until(amount)
            placements = (told.batches - before) * keys
            pipe.send((placements, seconds, told.caught_up(), told.batches))
        elif kind == "churn":
            pipe.send(told.churn(amount))
        else:
            told.report_at(amount, pipe)


@contextmanager
def reporter(address: str, nodes: int, keys: int, database: Path) -> Iterator[Connection]:
    """Where to send orders, and hear what came of them: see `_reporting`."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_reporting, args=(there, address, nodes, keys, database)
    )
    process.start()
    there.close()
    try:
        yield here
        here.send(None)
    finally:
        process.join(30)
