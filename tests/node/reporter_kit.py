"""A node that only says what it holds, and a way to a control plane that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import httpx

from kvstrata import api
from kvstrata.api import Outcome
from kvstrata.backoff import Backoff
from kvstrata.config import ControlSettings
from kvstrata.control import ControlPlane
from kvstrata.keys import Key
from kvstrata.node.placements import PlacementChange, Placements
from kvstrata.node.reported import Drop, Pull, PullResult, Shed, WriteBack, Written
from kvstrata.node.reporter import Reporter
from kvstrata.testing.chunks import a_namespace

NAMESPACE = a_namespace(128, blocks_per_chunk=4)


def key(number: int) -> Key:
    return NAMESPACE.key(0, number.to_bytes(8, "big"))


def hexes(*numbers: int) -> list[str]:
    return [key(n).hex() for n in numbers]


class SaidNode:
    """A `Reported` whose contents the test sets. Pulls succeed, unless `pulling` says otherwise."""

    def __init__(
        self, name: str = "a", incarnation: str = "i1", stores: Sequence[str] = ()
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.version = ""
        self.held: dict[str, dict[Key, None]] = {"host": {}, **{s: {} for s in stores}}
        self.placements = Placements()
        self.placements.enabled = True
        self.snapshots = 0
        self.trouble = ""
        self.ailing_stores: list[str] = []
        self.pulls: list[Pull] = []
        self.pulling: Callable[[Pull], object] | None = None
        self.cancelled: list[str] = []
        self.released: list[str] = []
        self.kept: list[str] = []
        self.heeded: list[str] = []
        self.draining = False
        self.written: list[WriteBack] = []
        self.writing: Callable[[WriteBack, Written], object] | None = None
        self.drops: list[Drop] = []
        self.dropping: Callable[[Drop], object] | None = None
        self.sheds: list[Shed] = []

    def gain(self, location: str, *numbers: int) -> None:
        keys = [key(n) for n in numbers]
        self.held[location].update(dict.fromkeys(keys))
        self.placements.added(location, keys)

    def lose(self, location: str, *numbers: int) -> None:
        keys = [key(n) for n in numbers]
        for each in keys:
            self.held[location].pop(each, None)
        self.placements.removed(location, keys)

    def registration(self) -> api.NodeRegistration:
        return api.NodeRegistration(
            id=self.name,
            incarnation=self.incarnation,
            peer_address=f"tcp://{self.name}.test:7801",
            stores=[api.StoreRef(id=s, tier="fs") for s in self.held if s != "host"],
            version=self.version,
        )

    def host_use(self) -> api.HostUse:
        return api.HostUse(used_bytes=7, capacity_bytes=100, chunks=len(self.held["host"]))

    def health(self) -> tuple[bool, str]:
        return not self.trouble, self.trouble

    def ailing(self) -> Sequence[str]:
        return self.ailing_stores

    def take_changes(self) -> Sequence[PlacementChange]:
        return self.placements.take()

    def snapshot(self) -> Sequence[PlacementChange]:
        self.snapshots += 1
        self.placements.take()
        return [PlacementChange(location, list(keys)) for location, keys in self.held.items()]

    def namespace_documents(self) -> Mapping[bytes, bytes]:
        return {NAMESPACE.digest: NAMESPACE.document}

    async def pull(self, pull: Pull) -> PullResult:
        self.pulls.append(pull)
        try:
            if self.pulling is not None:
                found = self.pulling(pull)
                if asyncio.iscoroutine(found) or isinstance(found, asyncio.Future):
                    await found
        except asyncio.CancelledError:
            self.cancelled.append(pull.transfer)
            raise
        return PullResult(
            dict.fromkeys(pull.keys, Outcome.STORED),
            dict.fromkeys(pull.keys, "somewhere"),
            len(pull.keys) * NAMESPACE.chunk_bytes[0],
        )

    def keep(self, transfer: str) -> None:
        self.kept.append(transfer)

    def told(self, transfer: str) -> None:
        self.heeded.append(transfer)

    def release(self, transfer: str) -> None:
        self.released.append(transfer)

    async def drop(self, asked: Drop) -> Mapping[str, int]:
        self.drops.append(asked)
        if self.dropping is not None:
            found = self.dropping(asked)
            if asyncio.iscoroutine(found) or isinstance(found, asyncio.Future):
                await found
        dropped = {}
        for tier in asked.tiers or self.held:
            here = self.held[tier]
            gone = [k for k in here if k in asked.keys or k[:16] in asked.digests]
            for each in gone:
                del here[each]
            self.placements.removed(tier, gone)
            dropped[tier] = len(gone)
        return dropped

    async def write_back(self, asked: WriteBack, written: Written) -> None:
        """The first store takes all that is in host memory, unless `writing` says otherwise."""
        self.written.append(asked)
        if self.writing is not None:
            found = self.writing(asked, written)
            if asyncio.iscoroutine(found) or isinstance(found, asyncio.Future):
                await found
            return
        here = [each for each in asked.keys if each in self.held["host"]]
        written.outcomes.update(dict.fromkeys(asked.keys, Outcome.MISSING))
        written.outcomes.update(dict.fromkeys(here, Outcome.STORED))
        written.stores.update(dict.fromkeys(here, asked.stores[0]))
        self.held[asked.stores[0]].update(dict.fromkeys(here))
        self.placements.added(asked.stores[0], here)

    async def shed(self, asked: Shed) -> Mapping[str, int]:
        """What was gained first goes first."""
        self.sheds.append(asked)
        dropped = {}
        for location, nbytes in asked.amounts.items():
            here = self.held[location]
            gone = []
            for each in here:
                if nbytes > 0 and each[:20] in asked.sizes:
                    gone.append(each)
                    nbytes -= asked.sizes[each[:20]]
            for each in gone:
                del here[each]
            self.placements.removed(location, gone)
            dropped[location] = len(gone)
        return dropped


class Link(httpx.AsyncBaseTransport):
    """The way to `app`. `down`: nothing arrives. `loses`: the answer to such paths is lost."""

    def __init__(self, app: object = None) -> None:
        self.app = app
        self.down = False
        self.loses: Callable[[str], bool] = lambda path: False
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(f"{request.method} {path}")
        if self.down or self.app is None:
            raise httpx.ConnectError("no route to host", request=request)
        inner = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        response = await inner.handle_async_request(request)
        if self.loses(path):
            raise httpx.ReadError("connection reset", request=request)
        return response


def reporter_of(node: SaidNode, link: httpx.AsyncBaseTransport | None, url: str = "http://test",
                **more: object) -> Reporter:  # fmt: skip
    """A reporter in a hurry."""
    settings = ControlSettings(url=url, report_interval=0.002, heartbeat_interval=0.02)
    return Reporter(
        settings,
        node,
        control=ControlPlane(url, transport=link),
        new_backoff=lambda: Backoff(0.002, 0.01),
        **more,
    )
