"""What the server's tests share: a clock to turn, a namespace, and a running app."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
from fastapi import FastAPI

from kvstrata import api
from kvstrata.config import ServerSettings
from kvstrata.control import ControlPlane
from kvstrata.keys import Field, Group, Namespace
from kvstrata_server.app import create_app
from kvstrata_server.plane import ControlState
from kvstrata_server.sql.database import Database

NAMESPACE = Namespace(
    model="tiny",
    revision="r1",
    config="c1",
    dtype="bf16",
    content_format="test",
    groups=(Group(0, "full", ("l0", "l1"), (Field("kv", 2, 64),), 16),),
    blocks_per_chunk=4,
    hash_algorithm="sha256",
    hash_seed="s",
)
CHUNK_BYTES = NAMESPACE.chunk_bytes[0]
DOCUMENT = NAMESPACE.document.decode()
TTL = 10.0


class TurnedClock:
    """Seconds since the epoch, when the test says so."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Running:
    app: FastAPI
    control: ControlPlane
    http: httpx.AsyncClient
    clock: TurnedClock

    @property
    def state(self) -> ControlState:
        return self.app.state.control


def keys(*numbers: int) -> list[str]:
    """Keys of chunks 0, 1, 2, ... of the test's namespace, as they travel."""
    return [NAMESPACE.key(0, n.to_bytes(8, "big")).hex() for n in numbers]


def database_url(path: Path | str) -> str:
    """Of the file in a folder; an address is what it is."""
    if isinstance(path, str):
        return path
    return f"sqlite+aiosqlite:///{path / 'control.sqlite'}"


def lay_out(path: Path) -> None:
    """A migrated database in a folder that has none yet."""
    file = path / "control.sqlite"
    if not file.exists():
        file.write_bytes(_migrated())


@cache
def _migrated() -> bytes:
    """To copy: migrating one for each test would take most of the time."""

    async def migrate(path: Path) -> None:
        database = Database(database_url(path))
        await database.migrate()
        await database.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(migrate(Path(folder)))
        return (Path(folder) / "control.sqlite").read_bytes()


@asynccontextmanager
async def running(
    path: Path | str, clock: TurnedClock | None = None, token: str = "", **settings: object
) -> AsyncIterator[Running]:
    """The app on the database in `path`, opened, with clients that need no network."""
    clock = clock or TurnedClock()
    if isinstance(path, Path):
        await asyncio.to_thread(lay_out, path)
    app = create_app(
        ServerSettings(database=database_url(path), token=token, heartbeat_ttl=TTL, **settings),
        clock=clock,
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        ControlPlane("http://test", token, transport=transport) as control,
        httpx.AsyncClient(base_url="http://test", transport=transport) as http,
    ):
        yield Running(app, control, http, clock)


async def join(
    control: ControlPlane,
    node: str,
    incarnation: str = "i1",
    stores: tuple[str, ...] = (),
    peers: bool = True,
) -> api.RegistrationReply:
    """Register a node; it serves peers at a port that nobody listens on."""
    return await control.register(
        api.NodeRegistration(
            id=node,
            incarnation=incarnation,
            peer_address=f"tcp://{node}.test:7801" if peers else None,
            transports=["tcp"],
            capacity_bytes=1 << 20,
            stores=[api.StoreRef(id=store, tier="fs") for store in stores],
        )
    )


def report(
    seq: int,
    *changes: api.Change,
    incarnation: str = "i1",
    snapshot: str = "no",
    namespaces: tuple[str, ...] = (DOCUMENT,),
) -> api.Report:
    return api.Report(
        incarnation=incarnation,
        seq=seq,
        changes=list(changes),
        snapshot=snapshot,  # type: ignore[arg-type]
        namespaces=list(namespaces),
    )


def host(added: list[str] = [], removed: list[str] = []) -> api.Change:  # noqa: B006
    return api.Change(location="host", added=added, removed=removed)


def store(name: str, added: list[str] = [], removed: list[str] = []) -> api.Change:  # noqa: B006
    return api.Change(location=name, added=added, removed=removed)


async def prefixes(control: ControlPlane, asked: list[str]) -> dict[str, int]:
    """Prefix per node."""
    reply = await control.lookup(api.LookupRequest(keys=asked))
    return {node.node: node.prefix for node in reply.nodes}


async def held(control: ControlPlane, asked: list[str]) -> dict[str, dict[str, int]]:
    """How many of the keys each node has, per tier."""
    reply = await control.lookup(api.LookupRequest(keys=asked, mode="all"))
    return {
        node.node: {tier: tally.found for tier, tally in node.tiers.items()} for node in reply.nodes
    }
