"""How fast is the control plane's index told and asked over HTTP, and what does it weigh?

Nodes report batches of new chunks as msgpack until the index has `--placements`: that is the rate
of ingestion, and how long SQL (a SQLite file) then needs to catch up. Then lookups of 1,000 keys,
one after the other, while reports go on at half the rate asked for; and lookups of an index of
100,000 placements and of the full one, with nothing beside them. The server is a process of its
own, one for ingestion and one that looks up are others: all on this machine's cores. At last the
server is started again, and loads the index from SQL.

Limits are what was asked for on 2 cores: 100,000 placements/s, 3 ms, 10 ms, 2 GB, SQL within 10 s,
and at the full size at most 1.5 times the 3 ms' worth of the small one. Peers, where they are
installed (`--lmcache-python`, `--dynamo-python`: interpreters that have them): LMCache's
coordinator, told and asked in the same way in its own words; Dynamo's indexer, asked for the
prefix of a request of 8,300 tokens that one worker announced.

Reference: a 2-core AMD EPYC VM, Linux 6.18, Python 3.11, SQLite 3.40, 10 M placements, reports of
4,096, nothing else running. LMCache 0.5.6 was measured in another run, in which other processes
were busy; there ours ingested 330,336/s, and 64 ms was the p99.

                                ours      LMCache    limit
    ingest_placements_per_s     418,879   26,631     100,000
    ingest_sql_behind_s         0.9       -          10
    lookup_1000_p50_ms          0.91      15.3       3       Dynamo 1.6.1, `/query`: 0.83
    lookup_1000_p99_ms          4.7       31.6       10
    lookup_1000_alone_p50_ms    1.01      15.3       3
    lookup_1000_json_p50_ms     2.22      15.3       3
    lookup_p50_full_to_100k     1.39      -          1.5
    resident_gb                 0.73      -          2
    restart_s                   23        -          -
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np

from figures import Figure, parser, show
from index_peers import dynamo_query_ms, lmcache_rates
from kvstrata import bulk
from kvstrata.bulk import BulkChange, BulkLookup, BulkReport, KeyRun

NAMESPACE = b"benchmark index "
SMALL = 100_000
ASKED = 1_000
JSON = "application/json"
PROGRAM = "import sys; from kvstrata_server.app import main; sys.exit(main(sys.argv[1:]))"


class Server:
    """`kvstrata server` on a new SQLite file."""

    def __init__(self, folder: Path) -> None:
        database = f"sqlite+aiosqlite:///{folder / 'index.sqlite'}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--listen", "127.0.0.1:0", "--database", database],
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("w"),
            text=True,
            env={**os.environ, "KVSTRATA_SERVER_HEARTBEAT_TTL": "3600"},
        )
        line = self.process.stdout.readline() if self.process.stdout else ""
        found = re.search(r"http://(\S+)", line)
        if found is None:
            raise SystemExit(f"the server did not start: {(folder / 'log').read_text()}")
        self.address = found[1]

    @property
    def resident_gb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1e6  # type: ignore[index]

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


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


class Nodes:
    """What reports: in turns, each a batch of chunks that nobody has yet."""

    def __init__(self, address: str, nodes: int, keys: int) -> None:
        self.client = Client(address)
        self._nodes, self._keys = nodes, keys
        self.batches = 0
        for n in range(nodes):
            node = {"id": f"n{n}", "incarnation": "i"}
            self.client.ask("POST", "/v1/nodes", json.dumps(node).encode())

    def report(self) -> None:
        node, seq = self.batches % self._nodes, self.batches // self._nodes
        run = KeyRun(NAMESPACE, 0, 32, hashes(self.batches, self._keys))
        report = BulkReport("i", seq, [BulkChange("host", [run])])
        self.client.post(f"/v1/nodes/n{node}/reports", report)
        self.batches += 1

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

    def caught_up(self) -> float:
        """Seconds until SQL has everything."""
        started = time.perf_counter()
        while self.client.ask("GET", "/healthz")["unwritten_rows"]:
            time.sleep(0.05)
        return time.perf_counter() - started


def reporting(pipe: Connection, address: str, nodes: int, keys: int) -> None:
    """The process that reports: takes ("until", n) and ("at", rate), and answers each."""
    told = Nodes(address, nodes, keys)
    while (order := pipe.recv()) is not None:
        kind, amount = order
        if kind == "until":
            before = told.batches
            seconds = told.report_until(amount)
            placements = (told.batches - before) * keys
            pipe.send((placements, seconds, told.caught_up(), told.batches))
        else:
            told.report_at(amount, pipe)


def lookups(address: str, batches: int, seconds: float, as_json: bool) -> list[float]:
    """Milliseconds of each lookup of a chain that some node holds."""
    client, chance, took = Client(address), np.random.default_rng(1), []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        raw = hashes(int(chance.integers(batches)), ASKED)
        if as_json:
            prefix = NAMESPACE.hex() + "00000000"
            keys = [prefix + raw[i : i + 32].hex() for i in range(0, len(raw), 32)]
            body, kind = json.dumps({"keys": keys}).encode(), "application/json"
        else:
            asked = BulkLookup([KeyRun(NAMESPACE, 0, 32, raw)])
            body, kind = msgspec.msgpack.encode(asked), bulk.MEDIA_TYPE
        started = time.perf_counter()
        found = client.ask("POST", "/v1/placements:lookup", body, kind)
        took.append((time.perf_counter() - started) * 1e3)
        if found["nodes"][0]["prefix"] != ASKED:
            raise SystemExit(f"a lookup found {found['nodes'][:2]} of {ASKED} keys")
    return took


@contextmanager
def reporter(address: str, nodes: int, keys: int) -> Iterator[Connection]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=reporting, args=(there, address, nodes, keys)
    )
    process.start()
    there.close()
    try:
        yield here
        here.send(None)
    finally:
        process.join(30)


def measure(given: argparse.Namespace, folder: Path) -> list[Figure]:
    server = Server(folder)
    try:
        with reporter(server.address, given.nodes, given.batch) as pipe:
            pipe.send(("until", min(SMALL, given.placements)))
            batches = pipe.recv()[3]
            small = np.array(lookups(server.address, batches, given.duration / 6, False))
            used = server.cpu_seconds
            pipe.send(("until", given.placements))
            placements, seconds, behind, batches = pipe.recv()
            used = server.cpu_seconds - used
            resident = server.resident_gb
            large = np.array(lookups(server.address, batches, given.duration / 6, False))
            plain = np.array(lookups(server.address, batches, given.duration / 6, True))
            pipe.send(("at", given.rate / 2))
            beside = np.array(lookups(server.address, batches, given.duration / 2, False))
            pipe.send("stop")
            rate = pipe.recv()
    finally:
        server.end()
    started = time.perf_counter()
    server = Server(folder)
    restart = time.perf_counter() - started
    server.end()
    common = {
        "placements": batches * given.batch,
        "nodes": given.nodes,
        "batch": given.batch,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    told = {**common, "seconds": round(seconds, 1), "server_cpu_seconds": round(used, 1)}
    asked = {**common, "lookups": len(beside), "ingesting_per_s": round(rate)}
    ratio = float(np.median(large) / np.median(small))
    rates = lmcache_rates(given.lmcache_python, given.duration / 6)
    peer = {**asked, "peer": "LMCache coordinator, alone", "dynamo_ms": None}
    if (dynamo := dynamo_query_ms(given.dynamo_python, given.duration / 6)) is not None:
        peer["dynamo_ms"] = round(dynamo, 2)
    lmcache = rates or (None, None, None)
    p50, p99 = np.quantile(beside, (0.5, 0.99))
    return [
        Figure(
            "ingest_placements_per_s", placements / seconds, lmcache[0], given.rate, "1/s", told
        ),
        Figure("ingest_sql_behind_s", behind, None, 10, "s", told),
        Figure("lookup_1000_p50_ms", float(p50), lmcache[1], 3, "ms", peer),
        Figure("lookup_1000_p99_ms", float(p99), lmcache[2], 10, "ms", peer),
        Figure("lookup_1000_alone_p50_ms", float(np.median(large)), lmcache[1], 3, "ms", common),
        Figure("lookup_1000_json_p50_ms", float(np.median(plain)), lmcache[1], 3, "ms", common),
        Figure("lookup_p50_full_to_100k", ratio, None, 1.5, "x", common),
        Figure("resident_gb", resident, None, 2, "GB", common),
        Figure("restart_s", restart, None, None, "s", common),
    ]


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--placements", type=int, default=10_000_000)
    asked.add_argument("--duration", type=float, default=60.0, help="seconds of lookups in all")
    asked.add_argument("--rate", type=float, default=100_000, help="placements/s asked for")
    asked.add_argument("--nodes", type=int, default=100)
    asked.add_argument("--batch", type=int, default=4096, help="keys a report")
    asked.add_argument("--folder", type=Path, help="where the database lies; default: temporary")
    asked.add_argument("--lmcache-python", default=sys.executable, help="has lmcache")
    asked.add_argument("--dynamo-python", default=sys.executable, help="has ai-dynamo-runtime")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        figures = measure(given, Path(folder))
    show("the index over HTTP", figures, given.json)


if __name__ == "__main__":
    main()
