"""Whole nodes: in this process where that is enough, killed in their own where it is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ByteSize

from kvstrata.client import Client
from kvstrata.config import HostSettings, NodeSettings, PeerSettings, TierSettings, run_dir
from kvstrata.errors import ConfigError, KVStrataError, LinkBroken
from kvstrata.keys import Key
from kvstrata.node.process import Node
from kvstrata.node.pulls import Pulls
from kvstrata.node.reported import Pull, PullSource, WriteBack, Written
from kvstrata.testing.chunks import a_namespace
from kvstrata.wire import State, StatusReply

PAGE = 8192
NAMESPACE = a_namespace(PAGE)


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def payload(n: int) -> bytes:
    return bytes([n % 251]) * PAGE


def settings(folder: Path, id_: str = "a", pages: int = 8, **kwargs: Any) -> NodeSettings:
    kwargs.setdefault("tiers", [TierSettings(type="fs", root=str(folder / "fs"))])  # type: ignore[call-arg]
    return NodeSettings(
        id=id_,
        socket=folder / f"{id_}.sock",
        host=HostSettings(capacity=ByteSize(pages * PAGE), shm_dir=folder),
        **kwargs,
    )


@asynccontextmanager
async def running(config: NodeSettings) -> AsyncIterator[Node]:
    node = await Node.start(config)
    try:
        yield node
    finally:
        await node.close()


def connect(folder: Path, id_: str = "a") -> Client:
    return Client.connect(folder / f"{id_}.sock", "engine", namespace=NAMESPACE)


def write(client: Client, *numbers: int) -> None:
    keys = [key(n) for n in numbers]
    for n, offset in zip(numbers, client.reserve(keys), strict=True):
        client.region.view[offset : offset + PAGE] = payload(n)
    assert client.commit(keys) == [True] * len(keys)


def read(client: Client, *numbers: int) -> dict[int, bytes]:
    """What a prefix lookup gives back, by number."""
    found = client.lookup([key(n) for n in numbers])
    held = dict(zip(numbers, found.offsets[: found.prefix], strict=False))
    view = client.region.view
    content = {n: bytes(view[offset : offset + PAGE]) for n, offset in held.items()}
    client.release(found.lease)
    return content


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except KVStrataError:
            pass
        time.sleep(0.02)
    raise AssertionError("did not happen in time")


def stored_in_fs(client: Client, count: int) -> bool:
    return tier(client.status(), "fs").chunks >= count


def tier(status: StatusReply, name: str) -> Any:
    return next(t for t in status.tiers if t.name == name)


@contextmanager
def process(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "kvstrata", "node", "--id", "a"]
    command += ["--socket", str(folder / "a.sock"), "--host.shm-dir", str(folder)]
    command += ["--host.capacity", str(8 * PAGE), *flags]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()


def regions(folder: Path) -> list[Path]:
    return list(folder.glob("kvstrata-*"))


async def test_a_working_set_larger_than_the_region_comes_back_from_fs(tmp_path: Path) -> None:
    def work() -> None:
        with connect(tmp_path) as client:
            for start in range(0, 24, 4):
                write(client, *range(start, start + 4))
                wait_for(lambda start=start: stored_in_fs(client, start + 4))
            assert read(client, *range(4)) == {n: payload(n) for n in range(4)}
            status = client.status()
            assert tier(status, "fs").counters["hits"] == 4
            assert status.counters["fs_hits"] == 4
            assert tier(status, "host").used_bytes <= 8 * PAGE

    async with running(settings(tmp_path)):
        await asyncio.to_thread(work)


async def test_fs_survives_the_node(tmp_path: Path) -> None:
    def first() -> None:
        with connect(tmp_path) as client:
            write(client, 1, 2)

    def second() -> None:
        with connect(tmp_path) as client:
            assert read(client, 1, 2) == {n: payload(n) for n in (1, 2)}

    # The first stops at once after its last store: what it accepted is in fs all the same.
    for work in (first, second):
        async with running(settings(tmp_path)):
            await asyncio.to_thread(work)
        assert regions(tmp_path) == []


async def test_a_damaged_file_is_a_miss_counted_and_replaced(tmp_path: Path) -> None:
    def work() -> None:
        with connect(tmp_path) as client:
            write(client, 1, 2, 3)
            wait_for(lambda: stored_in_fs(client, 3))
            client.drop(["host"])
            name = f"{(2).to_bytes(4, 'big').hex()}.0.kv"
            (path,) = (tmp_path / "fs").rglob(name)
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
            assert read(client, 1, 2, 3) == {1: payload(1)}
            assert tier(client.status(), "fs").counters["corrupt"] == 1
            write(client, 2)
            wait_for(lambda: stored_in_fs(client, 3))
            client.drop(["host"])
            assert read(client, 1, 2, 3) == {n: payload(n) for n in (1, 2, 3)}

    async with running(settings(tmp_path)):
        await asyncio.to_thread(work)


async def test_one_node_a_socket(tmp_path: Path) -> None:
    async with running(settings(tmp_path)):
        with pytest.raises(ConfigError, match="another node serves"):
            await Node.start(settings(tmp_path))
    async with running(settings(tmp_path)):
        pass


async def test_the_last_directory_of_a_socket_is_made_and_said_and_none_above(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    here = settings(tmp_path)
    near = here.model_copy(update={"socket": tmp_path / "near" / "a.sock"})
    far = here.model_copy(update={"socket": tmp_path / "very" / "far" / "a.sock"})
    async with running(near):
        pass
    assert (tmp_path / "near").stat().st_mode & 0o777 == 0o700
    assert f"made {tmp_path / 'near'} for the socket" in caplog.text
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'very'} does not exist: make it"):
        await Node.start(far)
    assert not (tmp_path / "very").exists()
    # Where sockets are by default, nobody has made anything yet.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "very"))
    own = here.model_copy(update={"socket": run_dir() / "own" / "a.sock"})
    async with running(own):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiers": [TierSettings(type="nosuch")]}, "tier type 'nosuch' is neither one of"),
        ({"tiers": [TierSettings(type="no.such:Tier")]}, "tier type 'no.such:Tier'"),
        ({"peers": PeerSettings(transports=["pigeon"], listen="tcp://127.0.0.1:0")}, "pigeon"),
        ({"peers": PeerSettings(listen="tcp://0.0.0.0:0", transports=["tcp"])}, "peers.secret"),
        ({"metrics": "203.0.113.1:0"}, "metrics '203.0.113.1:0'"),
        ({"pages": 1 << 40}, "lower `host.capacity`"),
    ],
)
async def test_what_can_not_work_is_refused_and_leaves_nothing(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await Node.start(settings(tmp_path, **change))
    assert regions(tmp_path) == []
    async with running(settings(tmp_path)):  # nor a lock
        pass


async def test_metrics_are_served(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("http_proxy", raising=False)
        async with running(settings(tmp_path, metrics="127.0.0.1:0")) as node:
            url = f"http://127.0.0.1:{node.metrics_port}/metrics"
            async with httpx.AsyncClient(trust_env=False) as http:
                text = (await http.get(url)).text
    assert f'kvstrata_tier_capacity_bytes{{tier="host"}} {float(8 * PAGE)}' in text
    assert 'kvstrata_tier_events_total{event="corrupt",tier="fs"} 0.0' in text


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
async def test_a_pull_brings_chunks_from_another_node(tmp_path: Path, transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu12", reason="nixl is not installed")
    peers = PeerSettings(listen="tcp://127.0.0.1:0", transports=[transport])

    def fill() -> None:
        with connect(tmp_path, "a") as client:
            write(client, 1, 2, 3, 4)
            wait_for(lambda: stored_in_fs(client, 4))
            client.drop(["host"], [key(3)])  # only in the source's fs: it promotes it

    def check() -> None:
        with connect(tmp_path, "b") as client:
            assert read(client, 1, 2, 3, 4) == {n: payload(n) for n in range(1, 5)}

    async with (
        running(settings(tmp_path, "a", peers=peers)) as a,
        running(settings(tmp_path, "b", tiers=[], peers=peers)) as b,
    ):
        await asyncio.to_thread(fill)
        assert a.controlled().registration().version == version("kvstrata")
        address = a.controlled().registration().peer_address
        assert address is not None
        pull = Pull(
            "t1",
            [NAMESPACE.document],
            [key(n) for n in (1, 2, 3, 4, 99)],
            [PullSource("dead", "tcp://127.0.0.1:1"), PullSource("a", address)],
            time.monotonic() + 20,
            hold=30.0,
        )
        result = await b.controlled().pull(pull)
        assert {k: str(v) for k, v in result.outcomes.items()} == {
            **{key(n): "stored" for n in (1, 2, 3, 4)},
            key(99): "failed",  # the dead one may have it
        }
        assert result.sources == {key(n): "a" for n in (1, 2, 3, 4)}
        assert result.bytes == 4 * PAGE
        assert b.store.host.drop() == 0  # held for whoever will ask
        again = await b.controlled().pull(pull)
        assert [str(again.outcomes[key(n)]) for n in (1, 2, 3, 4)] == ["present"] * 4
        await asyncio.to_thread(check)
        # The source lets go at once: nothing of it stays leased.
        assert a.store.host.drop() == 4


async def test_a_pull_within_a_byte_budget(tmp_path: Path) -> None:
    peers = PeerSettings(listen="tcp://127.0.0.1:0", transports=["tcp"])

    def fill() -> None:
        with connect(tmp_path, "a") as client:
            write(client, 1, 2, 3)

    async with (
        running(settings(tmp_path, "a", tiers=[], peers=peers)) as a,
        running(settings(tmp_path, "b", tiers=[], peers=peers)) as b,
    ):
        await asyncio.to_thread(fill)
        sources = [PullSource("a", a.controlled().registration().peer_address or "")]
        keys = [key(n) for n in (1, 2, 3)]
        pull = Pull("t", [NAMESPACE.document], keys, sources, time.monotonic() + 20, 1.0, 2 * PAGE)
        result = await b.controlled().pull(pull)
    assert [str(result.outcomes[k]) for k in keys] == ["stored", "stored", "no_room"]


async def test_a_node_that_is_drained_takes_nothing_from_others_and_says_so(tmp_path: Path) -> None:
    peers = PeerSettings(listen="tcp://127.0.0.1:0", transports=["tcp"])

    def check(number: int) -> StatusReply:
        with connect(tmp_path) as client:
            write(client, number)
            return client.status()

    async with running(settings(tmp_path, peers=peers)) as node:
        controlled = node.controlled()
        before = await asyncio.to_thread(check, 1)
        controlled.draining = True
        pull = Pull("t1", [NAMESPACE.document], [key(1)], [], time.monotonic() + 20, hold=30.0)
        result = await controlled.pull(pull)
        assert (str(result.outcomes[key(1)]), "drained" in result.detail) == ("no_room", True)
        assert set(node.status(0).tasks) - set(before.tasks) == {"drain"}
        written = Written()
        stores = [node.store.guards[0].store_id]
        await controlled.write_back(WriteBack("o", [key(1)], stores), written)
        assert str(written.outcomes[key(1)]) in ("stored", "present")
        controlled.draining = False
        await asyncio.to_thread(check, 2)


async def test_a_static_peer_is_asked_on_a_miss(tmp_path: Path) -> None:
    port = PeerSettings(listen="tcp://127.0.0.1:0", transports=["tcp"])

    def fill() -> None:
        with connect(tmp_path, "a") as client:
            write(client, 1, 2)

    def check() -> None:
        with connect(tmp_path, "b") as client:
            assert read(client, 1, 2, 3) == {n: payload(n) for n in (1, 2)}
            assert client.status().counters["peer_hits"] == 2

    async with running(settings(tmp_path, "a", tiers=[], peers=port)) as a:
        await asyncio.to_thread(fill)
        address = a.controlled().registration().peer_address or ""
        asking = PeerSettings(static=[address], transports=["tcp"])
        async with running(settings(tmp_path, "b", tiers=[], peers=asking)):
            await asyncio.to_thread(check)


def test_a_killed_node_leaves_nothing_after_the_next_start(tmp_path: Path) -> None:
    fs = f'[{{"type": "fs", "root": "{tmp_path / "fs"}"}}]'
    with process(tmp_path, "--tiers", fs) as child:
        client = wait_for(lambda: connect(tmp_path))
        write(client, 1, 2)
        wait_for(lambda: stored_in_fs(client, 2))
        (orphan,) = regions(tmp_path)
        child.kill()
        child.wait()
        with pytest.raises(LinkBroken, match="gone"):
            client.lookup([key(1)])
        # The engine's own mapping stays readable: a copy under way does not crash.
        assert len(client.region.view) == 8 * PAGE
        client.close()
    assert orphan.exists()
    with process(tmp_path, "--tiers", fs) as child:
        with wait_for(lambda: connect(tmp_path)) as client:
            assert not orphan.exists()
            assert read(client, 1, 2) == {n: payload(n) for n in (1, 2)}
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    assert regions(tmp_path) == []


def test_a_private_node_ends_with_its_standard_input(tmp_path: Path) -> None:
    with process(tmp_path, "--exit-with-stdin") as child:
        wait_for(lambda: connect(tmp_path)).close()
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0
    assert regions(tmp_path) == []
    assert not (tmp_path / "a.sock").exists()


def test_a_stopped_engine_keeps_its_slots_and_a_dead_one_does_not(tmp_path: Path) -> None:
    with process(tmp_path):
        client = wait_for(lambda: connect(tmp_path))
        pid = os.fork()
        if pid == 0:  # pragma: no cover - the engine, seen from its node
            try:
                write(connect(tmp_path), 1)
                engine = connect(tmp_path)
                engine.reserve([key(n) for n in range(2, 8)])
                time.sleep(60)
            finally:
                os._exit(1)
        try:
            wait_for(lambda: tier(client.status(), "host").used_bytes == 7 * PAGE)
            assert client.lookup([key(1)]).states == [State.HOST]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        wait_for(lambda: tier(client.status(), "host").used_bytes == PAGE)
        client.close()


async def test_pulls_survive_a_source_that_breaks_its_contract(tmp_path: Path) -> None:
    class Broken:
        async def fetch(self, *args: Any) -> Any:
            raise RuntimeError("a bug")

    async with running(settings(tmp_path, tiers=[])) as node:
        node.namespaces.add(NAMESPACE)
        pulls = Pulls(node.store, Broken())
        sources = [PullSource("x", "tcp://127.0.0.1:1")]
        result = await pulls.pull(Pull("t", [], [key(1)], sources, time.monotonic() + 5, 1.0))
        assert [str(o) for o in result.outcomes.values()] == ["failed"]
        assert "a bug" in result.detail
        assert node.store.host.usage().used == 0
