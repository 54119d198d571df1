import asyncio
import importlib.util
import os
import signal
import sys
import threading
from types import SimpleNamespace

import msgspec
import pytest

from kvstrata.errors import ConfigError, LinkBroken
from kvstrata.testing.sources import SourceProcess, pattern
from kvstrata.testing.transports import LEASE, SIZE, TransportTests, soon
from kvstrata.transports import Read, nixl
from kvstrata.transports.nixl import NixlTransport

installed = any(importlib.util.find_spec(m) for m in ("nixl", "nixl_cu12", "nixl_cu13"))
needs_nixl = pytest.mark.skipif(not installed, reason="NIXL is not installed")


@needs_nixl
class TestNixl(TransportTests):
    transport = "nixl"


@pytest.fixture
async def consumer():
    consumer = NixlTransport(memoryview(bytearray(SIZE)), lambda *_: False)
    await consumer.start()
    yield consumer
    await consumer.close()


async def test_not_installed(monkeypatch):
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
    transport = NixlTransport(memoryview(bytearray(4096)), lambda *_: False)
    with pytest.raises(ConfigError, match="pip install"):
        await transport.start()
    await transport.close()


async def test_a_start_that_is_cancelled_is_ended_by_close(monkeypatch):
    """Its thread is in C++ by then, registers the region, and can't be told to stop."""
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class SlowAgent:
        described, polls = b"here", False

        def __init__(self, *_):
            begun.set()
            assert go_on.wait(20)

        def close(self):
            closed.set()

    bind = SimpleNamespace(nixlRemoteDisconnectError=RuntimeError)
    monkeypatch.setattr(nixl, "import_nixl", lambda: SimpleNamespace(nixlBind=bind))
    monkeypatch.setattr(nixl, "Agent", SlowAgent)
    before = set(threading.enumerate())
    transport = NixlTransport(memoryview(bytearray(4096)), lambda *_: False, "127.0.0.1")
    starting = asyncio.create_task(transport.start())
    assert await asyncio.to_thread(begun.wait, 20)
    starting.cancel()
    await asyncio.wait([starting])
    closing = asyncio.create_task(transport.close())
    await asyncio.sleep(0.05)
    assert not closing.done(), "its thread still uses the region"
    go_on.set()
    await closing
    assert closed.is_set()
    left = {t.name for t in set(threading.enumerate()) - before}
    assert not {name for name in left if not name.startswith("asyncio")}


@needs_nixl
async def test_a_source_elsewhere_without_rdma_is_left_to_tcp(consumer, monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    source = NixlTransport(memoryview(bytearray(SIZE)), lambda *_: False, "127.0.0.1")
    await source.start()
    try:
        told = msgspec.msgpack.decode(source.describe())
        told[1] = "another host"
        with pytest.raises(LinkBroken, match="UCX_TLS"):
            await consumer.pull(msgspec.msgpack.encode(told), LEASE, [Read(0, 0, 4096)], soon())
    finally:
        await source.close()


@needs_nixl
async def test_a_read_that_can_not_be_stopped_costs_the_agent(monkeypatch):
    """Released or not, a read over sockets lands when its source wakes up, unless we are gone."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl, "GRACE_SECONDS", 0.1)
    memory = memoryview(bytearray(SIZE))
    consumer = NixlTransport(memory, lambda *_: False, "127.0.0.1")
    await consumer.start()
    far = SourceProcess("transport", "nixl", str(SIZE))
    try:
        remote = bytes.fromhex(far.told)
        reads = [Read(0, 0, SIZE)]
        assert await consumer.pull(remote, LEASE, reads, soon()) == [True]
        before = consumer.describe()
        os.kill(far.pid, signal.SIGSTOP)
        assert await consumer.pull(remote, LEASE, reads, soon(0.2)) == [False]
        memory[:] = bytes(SIZE)
        os.kill(far.pid, signal.SIGCONT)
        for _ in range(10):
            await asyncio.sleep(0.1)  # with `release` instead, everything is there by now
            assert memory == bytes(SIZE), "memory was written after the pull returned"
        assert consumer.describe() != before, "peers have to learn of the new agent"
        near = SourceProcess("transport", "nixl", str(SIZE))
        try:
            assert await consumer.pull(bytes.fromhex(near.told), LEASE, reads, soon()) == [True]
            assert memory == pattern(SIZE, 1)
        finally:
            near.kill()
    finally:
        far.kill()
        await consumer.close()


@needs_nixl
async def test_no_noise(capfd, consumer):
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""
