"""A node ends when it is told to, whatever hangs in it; and what it was told of its tiers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ByteSize, ValidationError
from tier_kit import NAMESPACE, PAGE, TroubledTier, key, payload, put

from kvstrata.cli.status import main as show_status
from kvstrata.client import Client
from kvstrata.config import HostSettings, NodeSettings, PeerSettings, TierSettings
from kvstrata.errors import ConfigError
from kvstrata.node.process import Node
from kvstrata.node.run import run_node
from kvstrata.testing.waiting import eventually, until
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.tiers.wrappers.base import Wrapper


def settings(folder: Path, *tiers: dict[str, Any], **kwargs: Any) -> NodeSettings:
    return NodeSettings(
        id="a",
        socket=folder / "a.sock",
        host=HostSettings(capacity=ByteSize(16 * PAGE), shm_dir=folder),
        tiers=[
            TierSettings(**{"type": "tier_kit:TroubledTier", "store": f"store-{n}", **tier})
            for n, tier in enumerate(tiers)
        ],
        **kwargs,
    )


def regions(folder: Path) -> list[Path]:
    return list(folder.glob("kvstrata-*"))


def troubled(node: Node, n: int = 0) -> TroubledTier:
    tier = node.store.tiers[n]
    assert isinstance(tier, TroubledTier)
    return tier


# ---------------------------------------------------------------- in this process


@pytest.mark.parametrize("call", ["load", "store", "lookup", "close"])
async def test_a_node_closes_behind_a_stuck_tier_and_leaves_its_memory_mapped(
    tmp_path: Path, call: str
) -> None:
    config = settings(tmp_path, {"name": "bad"}, {"name": "good"}, stop_deadline=1.0)
    node = await Node.start(config)
    node.namespaces.add(NAMESPACE)
    bad, good = troubled(node), troubled(node, 1)
    bad.chunks = {key(1): payload(key(1))}
    bad.hangs = {call}
    put(node.store, 7, 8)
    found: list[Any] = []
    node.store.lookup("reader", 1, [key(1)], "all", 60.0, lambda keys, chunks: found.extend(chunks))
    await until(lambda: call == "close" or call in bad.calls)
    async with asyncio.timeout(30):
        await node.close()
    assert node.stuck == ["tier bad"]
    assert good.closed
    assert {key(7), key(8)} <= set(good.chunks)
    assert len(found) == 1  # who waited was told
    assert regions(tmp_path) == []
    node.region.view[:PAGE] = bytes(PAGE)  # still there to be written to
    bad.release()
    await until(lambda: not bad.running)
    # The next one has the place to itself.
    await (await Node.start(settings(tmp_path))).close()


async def test_a_node_whose_tiers_are_well_unmaps_its_region(tmp_path: Path) -> None:
    node = await Node.start(settings(tmp_path, {}))
    await node.close()
    assert node.stuck == []
    with pytest.raises(ValueError, match="released"):
        node.region.view[:1]


async def test_health_says_which_tier_what_and_since_when(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(
        tmp_path,
        {"name": "bad", "grace": 0.1, "lookup_deadline": 0.1},
        {"name": "good"},
        metrics="127.0.0.1:0",
    )
    node = await Node.start(config)
    node.namespaces.add(NAMESPACE)
    assert node.health() == (True, "")
    bad = troubled(node)
    bad.hangs = {"lookup"}
    await node.store.find("reader", 1, [key(1)], "all", 5.0)
    await until(lambda: not node.health()[0])
    detail = node.health()[1]
    assert detail.startswith("bad: no lookup or load or store since 20")
    assert "a lookup has not returned after 0.2 s (calls that have not returned: 1)" in detail
    status = {tier.name: tier for tier in node.status(0).tiers}
    assert (status["bad"].healthy, status["good"].healthy) == (False, True)
    assert status["bad"].counters["stuck_calls"] == status["bad"].counters["degraded"] == 1
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"http://127.0.0.1:{node.metrics_port}/metrics")).text
        told = await http.get(f"http://127.0.0.1:{node.metrics_port}/healthz")
    assert 'kvstrata_tier_healthy{tier="bad"} 0.0' in text
    assert 'kvstrata_tier_healthy{tier="good"} 1.0' in text
    # A node with a bad tier is of use: whoever restarts what is not well must not restart it.
    assert told.status_code == 200
    assert told.json() == {"status": "degraded", "detail": detail}
    assert await asyncio.to_thread(show_status, ["--socket", str(tmp_path / "a.sock")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "degraded: no lookup" in shown
    bad.release()
    await until(lambda: node.health()[0])
    await node.close()


async def test_the_cluster_hears_of_the_kind_of_a_tier_not_of_its_label(tmp_path: Path) -> None:
    peers = PeerSettings(listen="tcp://127.0.0.1:0", transports=["tcp"])
    node = await Node.start(settings(tmp_path, {"name": "x"}, {"writable": False}, peers=peers))
    [store] = node.controlled().registration().stores
    assert (store.id, store.tier) == ("store-0", "troubled")
    await node.close()


async def test_run_node_says_what_is_stuck(tmp_path: Path) -> None:
    told: list[list[str]] = []
    config = settings(tmp_path, {}, stop_deadline=0.5)
    running = asyncio.create_task(run_node(config, lambda stuck: told.append(list(stuck))))
    await until(lambda: (tmp_path / "a.sock").exists())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        await running
    assert told == [[]]


class Deaf(TroubledTier):
    """Opens for ever, and is cancelled no sooner."""

    opening = asyncio.Event()
    released = asyncio.Event()

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> Tier:
        cls.opening.set()
        try:
            await cls.released.wait()
        finally:
            await cls.released.wait()
        return cls()


async def test_run_node_waits_no_longer_for_a_start_that_does_not_end(tmp_path: Path) -> None:
    told: list[list[str]] = []
    config = settings(tmp_path, {"type": "test_node_stuck:Deaf"}, stop_deadline=0.2)
    running = asyncio.create_task(run_node(config, lambda stuck: told.append(list(stuck))))
    await Deaf.opening.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    done, _ = await asyncio.wait([running], timeout=20)
    Deaf.released.set()
    assert done
    assert told == [["start"]]
    await until(lambda: regions(tmp_path) == [])


# ---------------------------------------------------------------- names, modes and wrappers


class Marked(Wrapper):
    """Says which it is, and what it is around."""

    def __init__(self, inner: Tier, mark: str) -> None:
        super().__init__(inner)
        self.mark = mark

    @classmethod
    def wrap(cls, inner: Tier, options: dict[str, Any], context: TierContext) -> Tier:
        if "mark" not in options:
            raise ConfigError("wrapper marked: mark: this must be set")
        return cls(inner, options["mark"])


def test_only_known_modes_and_usable_names() -> None:
    for wrong in ({"cascade": "sometimes"}, {"name": "a b"}, {"name": "-x"}, {"grace": 0}):
        with pytest.raises(ValidationError):
            TierSettings(type="fs", **wrong)  # type: ignore[arg-type]
    assert TierSettings(type="fs", root="/x", name="a").options == {"root": "/x"}  # type: ignore[call-arg]


async def test_wrappers_are_put_around_a_tier_innermost_first(tmp_path: Path) -> None:
    wrap = [{"type": "test_node_stuck:Marked", "mark": mark} for mark in ("in", "out")]
    node = await Node.start(settings(tmp_path, {"name": "x"} | {"wrap": wrap}))
    [outer] = node.store.tiers
    assert isinstance(outer, Marked)
    assert isinstance(outer.inner, Marked)
    assert (outer.mark, outer.inner.mark) == ("out", "in")
    assert [tier.name for tier in node.status(0).tiers] == ["host", "x"]
    await node.close()
    assert isinstance(outer.inner.inner, TroubledTier)
    assert outer.inner.inner.closed


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"wrap": [{"type": "nosuch"}]}, "wrapper 'nosuch' is neither one of"),
        ({"wrap": [{"type": "tier_kit:TroubledTier"}]}, "is not a kvstrata.tiers.wrappers"),
        ({"wrap": [{"type": "test_node_stuck:Marked"}]}, "mark: this must be set"),
        ({"name": "host"}, "two tiers are called host"),
    ],
)
async def test_what_can_not_be_wrapped_or_called_so_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: dict[str, Any], message: str
) -> None:
    opened: list[Tier] = []

    async def opening(cls: type[Tier], options: dict[str, Any], context: TierContext) -> Tier:
        opened.append(TroubledTier())
        return opened[-1]

    monkeypatch.setattr(TroubledTier, "open", classmethod(opening))
    with pytest.raises(ConfigError, match=message):
        await Node.start(settings(tmp_path, tier))
    assert all(tier.closed for tier in opened)  # type: ignore[attr-defined]
    assert regions(tmp_path) == []


async def test_a_tier_of_the_settings_cascades_as_they_say(tmp_path: Path) -> None:
    node = await Node.start(
        settings(
            tmp_path,
            {"name": "one", "cascade": "on_evict"},
            {"cascade": "second_touch"},
        )
    )
    assert [c.mode for c in node.store.cascades] == ["on_evict", "second_touch"]
    put(node.store, 1)
    await node.close()
    # A clean end stores what is in memory only, where eviction would have.
    assert [set(troubled(node, n).chunks) for n in (0, 1)] == [{key(1)}, set()]


# ---------------------------------------------------------------- in a process of its own


@contextmanager
def process(folder: Path, call: str) -> Iterator[subprocess.Popen[bytes]]:
    tiers = [{"type": "stuck_kit:StuckTier", "call": call, "marker": str(folder / "hangs")}]
    command = [sys.executable, "-m", "kvstrata", "node", "--id", "a", "--stop-deadline", "1s"]
    command += ["--socket", str(folder / "a.sock"), "--host.shm-dir", str(folder)]
    command += ["--host.capacity", str(16 * PAGE), "--tiers", json.dumps(tiers)]
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(command, env=env, stderr=log)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("call", ["store", "close"])
def test_a_process_ends_although_threads_hang(tmp_path: Path, call: str) -> None:
    with process(tmp_path, call) as child:
        client = eventually(
            lambda: Client.connect(tmp_path / "a.sock", "engine", namespace=NAMESPACE)
        )
        with client:
            [offset] = client.reserve([key(1)])
            client.region.view[offset : offset + PAGE] = payload(key(1))
            assert client.commit([key(1)]) == [True]
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 1
    assert regions(tmp_path) == []
    assert "stays mapped, since these still run: tier stuck" in (tmp_path / "log").read_text()


def test_a_process_that_is_stopped_while_a_tier_hangs_in_opening_ends(tmp_path: Path) -> None:
    with process(tmp_path, "open") as child:
        eventually((tmp_path / "hangs").exists)
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 1
    assert regions(tmp_path) == []
