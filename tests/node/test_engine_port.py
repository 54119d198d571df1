"""Sessions over real sockets: what a client is promised, and what hostile input can't do."""

from __future__ import annotations

import asyncio
import os
import signal
import socket as sockets
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvstrata import wire
from kvstrata.client import LIFELINE_ACK, Client, lifeline_path
from kvstrata.config import HostSettings
from kvstrata.errors import (
    ConfigError,
    Expired,
    KVStrataError,
    LinkBroken,
    Malformed,
    NamespaceMismatch,
)
from kvstrata.host import NO_ROOM, PRESENT
from kvstrata.keys import Key, Namespace
from kvstrata.node.engine_port import EnginePort
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.store import Store
from kvstrata.region import Region
from kvstrata.testing.chunks import a_namespace
from kvstrata.wire import State

PAGE = 4096
PAGES = 16
NAMESPACE = a_namespace(PAGE)


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


class Port:
    """A running engine port over a region, and clients to it from threads."""

    def __init__(self, tmp_path: Path) -> None:
        self.socket = tmp_path / "node.sock"
        self.region = Region.create("test", "1", PAGES * PAGE, tmp_path)
        namespaces = Namespaces()
        settings = HostSettings(shm_dir=tmp_path)
        loop = asyncio.get_running_loop()
        self.store = Store(self.region.view, settings, namespaces, loop.time)
        self.port = EnginePort(self.socket, self.store, self._welcome, self._status)

    def _welcome(self, namespace: Namespace | None) -> wire.Welcome:
        path = self.region.path
        return wire.Welcome(
            "test", "1", str(path.parent), path.name, self.region.size, 30.0, namespace
        )

    def _status(self, seq: int) -> wire.StatusReply:
        labels = [s.label for s in self.port.sessions.values()]
        return wire.StatusReply(seq, "test", "1", 0.0, [], labels, [], {}, {})

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(work, *args)

    def client(self, engine: str = "e", **kwargs: Any) -> Client:
        kwargs.setdefault("namespace", NAMESPACE)
        return Client.connect(self.socket, engine, timeout=30.0, **kwargs)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - there is no event for a socket's end
                await asyncio.sleep(0.005)


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    running = Port(tmp_path)
    await running.port.start()
    task = asyncio.create_task(running.port.run())
    yield running
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await running.port.close()
    running.region.close()


def fill(client: Client, *numbers: int) -> None:
    keys = [key(n) for n in numbers]
    for k, offset in zip(keys, client.reserve(keys), strict=True):
        client.region.view[offset : offset + PAGE] = (k * PAGE)[:PAGE]
    assert client.commit(keys) == [True] * len(keys)


async def test_bytes_written_by_one_process_are_read_by_another(port: Port) -> None:
    def work() -> None:
        with port.client("a") as a, port.client("b") as b:
            fill(a, 1, 2)
            found = b.lookup([key(1), key(2), key(3)])
            assert found.states == [State.HOST, State.HOST, State.MISS]
            assert found.prefix == 2
            for n, offset in zip((1, 2), found.offsets, strict=False):
                view = b.region.view[offset : offset + PAGE]
                assert bytes(view) == (key(n) * PAGE)[:PAGE]
                view.release()
            b.begin(found.lease, [key(1)])
            b.end(found.lease, [key(1)])
            b.release(found.lease)
            with pytest.raises(Expired):
                b.begin(found.lease, [key(1)])

    await port.run(work)


async def test_a_scheduler_learns_the_namespace_its_worker_registered(port: Port) -> None:
    def work() -> None:
        with port.client("e", role="worker"), port.client("e", namespace=None) as scheduler:
            assert scheduler.namespace == NAMESPACE
        with port.client("other", namespace=None) as stranger:
            assert stranger.namespace is None

    await port.run(work)


async def test_two_workers_of_one_engine_must_mean_the_same_bytes(port: Port) -> None:
    other = msgspec.structs.replace(NAMESPACE, dtype="float32")

    def work() -> None:
        with (
            port.client("e", role="worker"),
            pytest.raises(NamespaceMismatch, match="dtype: 'bfloat16' here, 'float32' there"),
        ):
            port.client("e", role="worker", namespace=other)
        # Once the old engine is gone, new weights are welcome.
        port.client("f", role="worker", namespace=other).close()

    await port.run(work)


async def test_a_killed_process_gives_back_all_it_held(port: Port) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        import msgspec
        from kvstrata import wire
        from kvstrata.client import Client
        from kvstrata.keys import Namespace
        namespace = Namespace.parse(sys.argv[2].encode())
        client = Client.connect(sys.argv[1], "victim", namespace=namespace)
        keys = [namespace.key(0, bytes([n])) for n in range(1, 5)]
        client.reserve(keys)
        client.send(wire.Step(0, credits={0: 2}))
        client.status()
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        str(port.socket),
        NAMESPACE.document.decode(),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"ready\n"
        usage = port.store.host.usage()
        assert (usage.writing, usage.granted) == (4 * PAGE, 2 * PAGE)
        # Stopped is not dead: it may go on to write.
        os.kill(process.pid, signal.SIGSTOP)
        assert await port.run(lambda: _status_sessions(port)) == ["victim/scheduler", "t/tool"]
        assert port.store.host.usage().writing == 4 * PAGE
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    await port.until(lambda: not port.port.sessions)
    assert port.store.host.usage().used == 0


async def test_slots_outlive_their_scheduler_while_a_worker_may_write_to_them(port: Port) -> None:
    worker = await port.run(lambda: port.client("e", role="worker"))
    scheduler = await port.run(port.client)
    await port.run(scheduler.reserve, [key(1), key(2)])
    scheduler.close()
    await port.until(lambda: len(port.port.sessions) == 1)
    assert port.store.host.usage().used == 2 * PAGE
    # Another engine's worker makes no difference, the last of this one's does.
    other = await port.run(lambda: port.client("other", role="worker"))
    worker.close()
    await port.until(lambda: len(port.port.sessions) == 1)
    assert port.store.host.usage().used == 0
    other.close()


def _status_sessions(port: Port) -> list[str]:
    with port.client("t", role="tool", namespace=None) as tool:
        return tool.status().sessions


async def test_credits_are_granted_ahead_named_and_topped_up(port: Port) -> None:
    def work() -> None:
        with port.client() as client:
            client.send(wire.Step(0, credits={0: 3}))
            (reply,) = _replies(client, 1)
            (granted,) = reply.credits
            assert len(granted.offsets) == 3
            uses = [wire.Use(granted.offsets[0], key(1)), wire.Use(12345, key(2))]
            client.send(wire.Step(0, uses=uses, credits={0: 3}))
            (reply,) = _replies(client, 1)
            assert reply.used == [1, -1]
            assert len(reply.credits[0].offsets) == 1
            client.send(wire.Step(0, commits=[key(1)], lookups=[wire.Lookup(1, [key(1)])]))
            (reply,) = _replies(client, 1)
            assert reply.committed == [True]
            assert reply.found[0].states == bytes([State.HOST])
            # Sixteen pages, a quarter of them for credits, to all sessions together.
            client.send(wire.Step(0, credits={0: 100}))
            (reply,) = _replies(client, 1)
            assert port.store.host.usage().granted == 4 * PAGE

    await port.run(work)


def _replies(client: Client, count: int) -> list[wire.StepReply]:
    got: list[wire.StepReply] = []
    while len(got) < count:
        client._wait(5.0)
        for message in client.receive():
            assert isinstance(message, wire.StepReply), message
            got.append(message)
    return got


async def test_a_node_that_is_drained_takes_nothing_new_and_serves_what_it_has(port: Port) -> None:
    def work() -> None:
        with port.client() as client:
            fill(client, 1, 2)
            client.send(wire.Step(0, credits={0: 2}))
            (credit,) = _replies(client, 1)[0].credits
            (reserved,) = client.reserve([key(3)])
            assert reserved >= 0
            port.store.draining = True
            assert client.reserve([key(1), key(3), key(4)]) == [PRESENT, PRESENT, NO_ROOM]
            uses = [wire.Use(credit.offsets[0], key(5))]
            client.send(wire.Step(0, credits={0: 8}, uses=uses, commits=[key(1), key(3)]))
            (reply,) = _replies(client, 1)
            assert (reply.used, reply.committed, reply.credits) == ([1], [True, False], [])
            assert client.commit([key(5)]) == [False]
            found = client.lookup([key(n) for n in (1, 2, 3, 5)], want="all")
            assert found.states == [State.HOST, State.HOST, State.MISS, State.MISS]
            client.release(found.lease)
            port.store.draining = False
            fill(client, 3, 4, 5)

    await port.run(work)
    assert port.store.host.usage().chunks == 5


async def test_a_step_that_makes_no_sense_is_refused_and_the_session_stands(port: Port) -> None:
    def work() -> None:
        with port.client() as client:
            with pytest.raises(Malformed, match="not of this session's namespace"):
                client._step(wire.Step(0, commits=[b"n" * 36], reserves=[key(1)]))
            assert client.reserve([key(2)]) == [0]

    await port.run(work)


async def test_garbage_does_not_hurt_anyone(port: Port) -> None:
    def work() -> None:
        context = zmq.Context()
        with port.client() as client:
            rude = context.socket(zmq.DEALER)
            rude.setsockopt(zmq.LINGER, 0)
            rude.connect(f"ipc://{port.socket}")
            for frames in ([b""], [b"\xc1"], [b"a", b"b", b"c"], [os.urandom(1000)]):
                rude.send_multipart(frames)
            # Without a lifeline nothing is listened to, but an answer says why.
            failure = wire.decode_from_node(rude.recv())
            assert isinstance(failure, wire.Failure)
            assert "lifeline" in failure.message
            life = sockets.socket(sockets.AF_UNIX)
            life.connect(str(lifeline_path(port.socket)))
            life.sendall(b"x")  # half an id, then gone
            life.close()
            client._dealer.send(b"\xff\xff")
            client._dealer.send(wire.encode(wire.Hello(1, "e", "scheduler")))
            assert client.reserve([key(1)]) == [0]
            rude.close()
        context.term()

    await port.run(work)
    assert port.port.malformed >= 2


async def test_another_protocol_is_refused(port: Port) -> None:
    def work() -> None:
        with Client.open(port.socket, "e", namespace=NAMESPACE) as client:
            client._hello = wire.Hello(99, "e", "scheduler", NAMESPACE)
            with pytest.raises(Malformed, match="protocol 99: this node speaks 1"):
                _until_welcome(client)

    await port.run(work)


def _until_welcome(client: Client) -> None:
    while not client.poll_welcome():
        client._wait(5.0)


async def test_the_node_going_away_is_noticed_at_once(port: Port) -> None:
    client = await port.run(port.client)
    await port.port.close()
    with pytest.raises(LinkBroken, match="gone"):
        await port.run(client.reserve, [key(1)])
    with pytest.raises(LinkBroken):
        client.receive()
    client.close()


async def test_no_node_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LinkBroken, match="start one with `kvstrata node`"):
        Client.connect(tmp_path / "none.sock", "e")


async def test_a_release_ends_what_its_lookup_still_waits_for(port: Port) -> None:
    def work() -> None:
        with port.client("a") as a, port.client("b") as b:
            a.reserve([key(1)])
            b.send(wire.Step(0, lookups=[wire.Lookup(7, [key(1)], "all", 5.0)]))
            b.release(7)
            a.commit([key(1)])
            assert b.drop(["host"]) == {"host": 1}  # no lease came with the commit

    await port.run(work)


async def test_dropping_by_tier(port: Port) -> None:
    def work() -> None:
        with port.client() as client:
            fill(client, 1, 2)
            assert client.drop(["host"], [key(1)]) == {"host": 1}
            assert client.lookup([key(1), key(2)], want="all").states == [State.MISS, State.HOST]
            with pytest.raises(Malformed, match="no tier 'fs'"):
                client.drop(["fs"])

    await port.run(work)


async def test_a_pending_chunk_is_settled_when_its_writer_commits(port: Port) -> None:
    def work() -> None:
        with port.client("a") as a, port.client("b") as b:
            a.reserve([key(1)])
            b.send(wire.Step(0, lookups=[wire.Lookup(7, [key(1)], "all", 5.0)]))
            (reply,) = _replies(b, 1)
            assert reply.found[0].states == bytes([State.PENDING])
            a.commit([key(1)])
            b._wait(5.0)
            (resolved,) = b.receive()
            assert isinstance(resolved, wire.Resolved)
            assert (resolved.id, resolved.keys, resolved.states) == (
                7,
                [key(1)],
                bytes([State.HOST]),
            )

    await port.run(work)


async def test_what_a_lifeline_says_is_not_kept(port: Port) -> None:
    def work() -> None:
        with port.client() as client:
            client._lifeline.setblocking(True)
            for _ in range(64):
                client._lifeline.sendall(bytes(1 << 20))
            client._lifeline.setblocking(False)
            assert client.reserve([key(1)]) == [0]

    tracemalloc.start()
    try:
        await port.run(work)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20


async def test_a_bug_behind_the_port_is_answered_and_ends_nothing(port: Port) -> None:
    def boom(*args: Any) -> Any:
        raise RuntimeError("a bug")

    port.port._status = boom
    port.store.drop = boom  # type: ignore[method-assign]

    def work() -> None:
        with port.client() as client:
            with pytest.raises(KVStrataError, match="a bug"):
                client.status()
            with pytest.raises(KVStrataError, match="a bug"):
                client.drop(["host"])
            assert client.reserve([key(1)]) == [0]

    await port.run(work)


async def test_an_engine_that_never_pauses_leaves_others_their_turn(port: Port) -> None:
    asked = turns = 0
    told = port.port._status

    def status(seq: int) -> wire.StatusReply:
        nonlocal asked
        asked += 1
        return told(seq)

    port.port._status = status

    def flood() -> Client:
        client = port.client()
        for seq in range(500):
            client._send(wire.Status(seq))
        return client

    client = await port.run(flood)
    while asked < 500:
        turns += 1
        await asyncio.sleep(0)
    client.close()
    assert turns > 5


async def test_engines_that_have_ended_are_forgotten(port: Port) -> None:
    def work() -> None:
        for i in range(3):
            port.client(f"engine {i}").close()

    await port.run(work)
    await port.until(lambda: not port.port.sessions)
    assert not port.port._engines
    assert not port.port._orphans


async def test_an_engine_has_a_name_of_bounded_length(port: Port) -> None:
    def work() -> None:
        for name in ("", "x" * 257):
            with pytest.raises(Malformed, match="engine name"):
                port.client(name)

    await port.run(work)


async def test_a_socket_path_the_kernel_can_not_take(tmp_path: Path) -> None:
    region = memoryview(bytearray(PAGES * PAGE))
    store = Store(region, HostSettings(), Namespaces(), asyncio.get_running_loop().time)
    socket = tmp_path / ("x" * 100)
    port = EnginePort(socket, store, lambda namespace: None, lambda seq: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="set a shorter `socket`"):
        await port.start()
    await port.close()


async def test_a_closed_client_is_a_broken_link(port: Port) -> None:
    def work() -> None:
        client = port.client()
        client.close()
        with pytest.raises(LinkBroken):
            client.receive()
        with pytest.raises(LinkBroken):
            client.send(wire.Step(0))
        with pytest.raises(LinkBroken):
            client.status()

    await port.run(work)


def test_a_node_that_dies_before_its_welcome_is_not_waited_for(tmp_path: Path) -> None:
    socket = tmp_path / "node.sock"
    with sockets.socket(sockets.AF_UNIX) as listener:
        listener.bind(str(lifeline_path(socket)))
        listener.listen()
        client = Client.open(socket, "e")
        lifeline, _ = listener.accept()
        with client, lifeline:
            lifeline.sendall(LIFELINE_ACK)
            assert not client.poll_welcome()
            lifeline.close()
            with pytest.raises(LinkBroken, match="is gone"):
                client.poll_welcome()


async def test_a_key_asked_for_twice_is_answered_twice(port: Port) -> None:
    def work() -> None:
        with port.client("a") as a, port.client("b") as b:
            a.reserve([key(1)])
            ask = wire.Lookup(b.new_lease(), [key(1), key(1)], "all", 5.0)
            (found,) = b._step(wire.Step(0, lookups=[ask])).found
            assert list(found.states) == [State.PENDING, State.PENDING]
            a.abort([key(1)])
            b.lookup([key(2), key(2)])
            a.reserve([key(3)])
            later = threading.Timer(0.1, a.commit, [[key(3)]])
            later.start()
            found = b.lookup([key(3), key(3)])
            later.join()
            assert found.states == [State.HOST, State.HOST]
            assert found.offsets[0] == found.offsets[1] >= 0

    await port.run(work)
    counters = port.store.counters
    assert counters.asked == counters.host_hits + counters.misses == 3


async def test_slots_of_living_engines_are_not_reused_while_the_node_ends(port: Port) -> None:
    """Promotions and pulls may still be ending, and want slots that engines read or write."""

    def work() -> Client:
        client = port.client()
        fill(client, 1)
        found = client.lookup([key(1)])
        client.begin(found.lease, [key(1)])
        client.reserve([key(2)])
        return client

    client = await port.run(work)
    await port.port.close()
    assert not port.port.sessions
    assert port.store.host.drop() == 0
    assert port.store.host.usage().used == 2 * PAGE
    client.close()


async def test_chunks_that_can_never_be_held_are_told_when_their_engine_comes(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    for pages, told in ((1, ""), (PAGES // 2, "granted ahead"), (2 * PAGES, "host.capacity")):
        caplog.clear()
        namespace = a_namespace(PAGE * pages)

        def work(namespace: Namespace = namespace) -> None:
            port.client("e", namespace=namespace).close()

        await port.run(work)
        await port.until(lambda: not port.port.sessions)
        warned = " ".join(r.message for r in caplog.records if r.levelname == "WARNING")
        assert bool(warned) == bool(told)
        assert told in warned
