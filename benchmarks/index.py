"""How fast is the control plane's index told and asked over HTTP, and what does it weigh?

Nodes report batches of new chunks as msgpack until the index has `--placements`: that is the rate
of ingestion, and how long SQL (a SQLite file) then needs to catch up. Then the full index churns
for `--seconds`, as fast as it goes: each report brings a batch and takes the oldest one away. Ten
times a second SQL is asked which reports it has: `behind` is the longest that one of them was
acknowledged and not in it. Then lookups of 1,000 keys, one after the other, while reports go on at
half the rate asked for; and lookups of an index of 100,000 placements and of the full one, with
nothing beside them. The server is a process of its own, one for ingestion and one that looks up are
others: all on this machine's cores. At last the server is started again, and loads the index from
SQL. With the defaults that takes less than five minutes.

Limits are what was asked for on 2 cores: 100,000 placements/s for 60 s, 3 ms, 10 ms, 2 GB, SQL
within 10 s, and at the full size at most 1.5 times the 3 ms' worth of the small one.

Peers are measured in the same run, after ours and alone on the cores, where they are installed:
LMCache's coordinator, told and asked in the same way in its own words; Dynamo's indexer, asked for
the prefix of a request of 8,300 tokens that one worker announced, as ours is (`/query`). Each may
be in an environment of its own, whose interpreter is named here:

    make dynamo  # .venv-dynamo, which is the default here
    python -m venv lmcache && lmcache/bin/pip install lmcache==0.5.6
    python benchmarks/index.py --lmcache-python lmcache/bin/python

LMCache brings torch for CUDA along. Where there is a torch for the CPU already (`make test-vllm`
makes such an environment), `pip install --no-deps lmcache==0.5.6` into it will do.

Reference: a 2-core AMD EPYC VM, Linux 6.18, Python 3.11, SQLite 3.40, 10 M placements, reports of
4,096, 60 s, nothing else running; all of it from one run. `/query` is the one thing that Dynamo's
indexer, which is in Rust and hashes there, answers faster.

                                 ours      LMCache    Dynamo    limit
    ingest_placements_per_s      362,480   28,772     -         100,000
    ingest_sql_behind_s          0.9       -          -         10
    sustained_placements_per_s   184,385   28,772     -         100,000
    sustained_sql_behind_s       2.7       -          -         10
    lookup_1000_p50_ms           0.89      14.3       -         3
    lookup_1000_p99_ms           4.5       28.2       -         10
    lookup_1000_alone_p50_ms     0.87      14.3       -         3
    lookup_1000_json_p50_ms      1.98      14.3       -         3
    query_8300_tokens_p50_ms     3.39      -          0.89      -
    lookup_p50_full_to_100k      1.06      -          -         1.5
    resident_gb                  0.73      -          -         2
    restart_s                    24        -          -         -
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from figures import Figure, parser, show
from index_nodes import JSON, NAMESPACE, Churned, Client, hashes, reporter
from index_peers import BLOCK, TOKENS, dynamo_query_ms, lmcache_rates
from kvstrata import bulk
from kvstrata.bulk import BulkChange, BulkLookup, BulkReport, KeyRun, runs_of
from kvstrata.keys import Field, Group, Namespace
from kvstrata_server.lookups.hashing import chunk_keys

SMALL = 100_000
ASKED = 1_000
PROGRAM = "import sys; from kvstrata_server.app import main; sys.exit(main(sys.argv[1:]))"


class Server:
    """`kvstrata server` on a new SQLite file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "index.sqlite"
        database = f"sqlite+aiosqlite:///{self.file}"
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


def lookups(address: str, batches: range, seconds: float, as_json: bool) -> list[float]:
    """Milliseconds of each lookup of a chain that some node holds: the beginning of a batch."""
    client, chance, took = Client(address), np.random.default_rng(1), []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        raw = hashes(int(chance.integers(batches.start, batches.stop)), ASKED)
        if as_json:
            prefix = NAMESPACE.hex() + "00000000"
            keys = [prefix + raw[i : i + 32].hex() for i in range(0, len(raw), 32)]
            body, kind = json.dumps({"keys": keys}).encode(), JSON
        else:
            asked = BulkLookup([KeyRun(NAMESPACE, 0, 32, raw)])
            body, kind = msgspec.msgpack.encode(asked), bulk.MEDIA_TYPE
        started = time.perf_counter()
        found = client.ask("POST", "/v1/placements:lookup", body, kind)
        took.append((time.perf_counter() - started) * 1e3)
        if found["nodes"][0]["prefix"] != ASKED:
            raise SystemExit(f"a lookup found {found['nodes'][:2]} of {ASKED} keys")
    return took


def queries(address: str, seconds: float) -> float:
    """p50 of `/query` for the request that Dynamo's indexer is asked about, in ms; one node has
    it."""
    client = Client(address)
    group = Group(0, "full", ("l0",), (Field("kv", 2, 64),), BLOCK)
    space = Namespace("m", "r", "c", "bf16", "f", (group,), 1, "xxh3", "")
    tokens = list(range(TOKENS // BLOCK * BLOCK))
    client.ask("POST", "/v1/nodes", json.dumps({"id": "query", "incarnation": "i"}).encode())
    change = BulkChange("host", runs_of(chunk_keys(space, tokens)[0]))
    report = BulkReport("i", 0, [change], namespaces=[space.document.decode()])
    client.post("/v1/nodes/query/reports", report)
    question = json.dumps({"token_ids": tokens, "model_name": "m"}).encode()
    took, deadline = [], time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        found = client.ask("POST", "/query", question)
        took.append((time.perf_counter() - started) * 1e3)
        if found["instances"]["query"]["longest_matched"] != len(tokens):
            raise SystemExit(f"a query found {found['instances']} of {len(tokens)} tokens")
    return float(np.median(took))


def measure(given: argparse.Namespace, folder: Path) -> list[Figure]:
    server = Server(folder)
    try:
        with reporter(server.address, given.nodes, given.batch, server.file) as pipe:
            pipe.send(("until", min(SMALL, given.placements)))
            batches = pipe.recv()[3]
            small = np.array(lookups(server.address, range(batches), given.duration / 6, False))
            used = server.cpu_seconds
            pipe.send(("until", given.placements))
            placements, seconds, behind, batches = pipe.recv()
            used = server.cpu_seconds - used
            resident = server.resident_gb
            large = np.array(lookups(server.address, range(batches), given.duration / 6, False))
            plain = np.array(lookups(server.address, range(batches), given.duration / 6, True))
            query = queries(server.address, given.duration / 12)
            busy = server.cpu_seconds
            pipe.send(("churn", given.seconds))
            churned: Churned = pipe.recv()
            busy = server.cpu_seconds - busy
            later = server.resident_gb
            there = range(churned.oldest, churned.batches)
            pipe.send(("at", given.rate / 2))
            beside = np.array(lookups(server.address, there, given.duration / 2, False))
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
    sustained = {
        **common,
        "seconds": round(churned.seconds, 1),
        "slowest_10_s_per_s": round(churned.slowest),
        "sql_samples": churned.samples,
        "server_cpu_seconds": round(busy, 1),
        "resident_gb": round(later, 2),
    }
    asked = {**common, "lookups": len(beside), "ingesting_per_s": round(rate)}
    ratio = float(np.median(large) / np.median(small))
    rates = lmcache_rates(given.lmcache_python, given.duration / 6)
    dynamo = dynamo_query_ms(given.dynamo_python, given.duration / 6)
    for settings in (told, sustained, asked):
        settings["peer"] = "LMCache's coordinator, alone" if rates else "not installed"
    prompt = {**common, "peer": "Dynamo's indexer, alone" if dynamo else "not installed"}
    lmcache = rates or (None, None, None)
    p50, p99 = np.quantile(beside, (0.5, 0.99))
    return [
        Figure(
            "ingest_placements_per_s", placements / seconds, lmcache[0], given.rate, "1/s", told
        ),
        Figure("ingest_sql_behind_s", behind, None, 10, "s", told),
        Figure(
            "sustained_placements_per_s",
            churned.placements / churned.seconds,
            lmcache[0],
            given.rate,
            "1/s",
            sustained,
        ),
        Figure("sustained_sql_behind_s", churned.behind, None, 10, "s", sustained),
        Figure("lookup_1000_p50_ms", float(p50), lmcache[1], 3, "ms", asked),
        Figure("lookup_1000_p99_ms", float(p99), lmcache[2], 10, "ms", asked),
        Figure("lookup_1000_alone_p50_ms", float(np.median(large)), lmcache[1], 3, "ms", common),
        Figure("lookup_1000_json_p50_ms", float(np.median(plain)), lmcache[1], 3, "ms", common),
        Figure("query_8300_tokens_p50_ms", query, dynamo, None, "ms", prompt),
        Figure("lookup_p50_full_to_100k", ratio, None, 1.5, "x", common),
        Figure("resident_gb", resident, None, 2, "GB", common),
        Figure("restart_s", restart, None, None, "s", common),
    ]


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--placements", type=int, default=10_000_000)
    asked.add_argument("--seconds", type=float, default=60.0, help="of ingestion at full size")
    asked.add_argument("--duration", type=float, default=60.0, help="seconds of lookups in all")
    asked.add_argument("--rate", type=float, default=100_000, help="placements/s asked for")
    asked.add_argument("--nodes", type=int, default=100)
    asked.add_argument("--batch", type=int, default=4096, help="keys a report")
    asked.add_argument("--folder", type=Path, help="where the database lies; default: temporary")
    asked.add_argument("--lmcache-python", default=sys.executable, help="has lmcache")
    dynamo = Path(__file__).parents[1] / ".venv-dynamo" / "bin" / "python"
    python = str(dynamo) if dynamo.exists() else sys.executable
    asked.add_argument("--dynamo-python", default=python, help="has ai-dynamo-runtime")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        figures = measure(given, Path(folder))
    show("the index over HTTP", figures, given.json)


if __name__ == "__main__":
    main()
