import asyncio
import contextlib
import os
import time

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvstrata import peer_wire as wire
from kvstrata.config import PeerSettings
from kvstrata.errors import (
    Busy,
    ConfigError,
    Expired,
    KVStrataError,
    LinkBroken,
    Malformed,
    NamespaceMismatch,
    PeerRefused,
)
from kvstrata.node import peer_port
from kvstrata.node.peer_port import PeerPort
from kvstrata.peer_socket import tune
from kvstrata.testing.sources import MemorySource, demo_keys, demo_namespace, pattern
from kvstrata.testing.waiting import until
from kvstrata.tiers.peer_link import PeerLink
from kvstrata.transports.tcp import TcpTransport

NAMESPACE = demo_namespace(1024)
KEYS = demo_keys(NAMESPACE, 8)
SECRET = "only the cluster knows"


def soon(seconds=10.0):
    return time.monotonic() + seconds


strangers = []


@pytest.fixture
def context():
    context = zmq.asyncio.Context()
    yield context
    while strangers:
        strangers.pop().socket.close(0)
    context.destroy(linger=0)


@pytest.fixture
def source():
    source = MemorySource(memoryview(bytearray(1 << 20)), [NAMESPACE])
    for i, key in enumerate(KEYS[:4]):
        source.put(key, pattern(4096, i))
    return source


@pytest.fixture
async def port(source, monkeypatch):
    monkeypatch.setattr(peer_port, "_BEAT_SECONDS", 0.05)
    transport = TcpTransport(source.memory, source.authorize, "127.0.0.1")
    await transport.start()
    settings = PeerSettings(listen="tcp://127.0.0.1:0", secret=SECRET, lease_ttl=5)
    port = PeerPort(settings, "far", "i1", source, [transport])
    await port.start()
    yield port
    await port.close()
    await transport.close()


@pytest.fixture
async def link(context, port):
    link = await connect(context, port)
    yield link
    await link.close()


async def connect(context, port, secret=SECRET, node="near"):
    address = wire.parse_address(port.address)
    return await PeerLink.connect(context, address, secret, node, "i2", soon())


class Stranger:
    """A DEALER that says what it likes."""

    def __init__(self, context, port, identity=None):
        self.socket = context.socket(zmq.DEALER)
        tune(self.socket, "127.0.0.1")
        if identity is not None:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(port.address)
        strangers.append(self)

    async def says(self, *frames):
        await self.socket.send_multipart(
            [f if isinstance(f, bytes) else wire.encode(f) for f in frames]
        )

    async def hears(self):
        async with asyncio.timeout(30):
            while True:
                message = wire.decode_from_source((await self.socket.recv_multipart())[0])
                if not isinstance(message, wire.Beat):
                    return message

    async def asks(self, *frames):
        await self.says(*frames)
        return await self.hears()


def hello(**changed):
    fields = {"protocol": 1, "node": "near", "incarnation": "i2", "nonce": b"n" * 32}
    return wire.Hello(**(fields | changed))


# ---------------------------------------------------------------- the handshake


async def test_handshake(link, port):
    assert (link.node, link.incarnation) == ("far", "i1")
    assert list(link.transports) == ["tcp"]
    assert port.sessions == ["near/i2#1"]


async def test_a_wrong_secret_is_refused(context, port, source):
    for secret in ("", "wrong", SECRET + " "):
        with pytest.raises(PeerRefused, match=r"peers\.secret"):
            await connect(context, port, secret)
    assert port.sessions == []
    assert source.gone == []
    assert port.counters["peer_refused"] == 3


async def test_a_recorded_proof_opens_nothing(context, port):
    first = Stranger(context, port)
    challenge = await first.asks(hello())
    proof = wire.Prove(wire.consumer_proof(SECRET, hello(), challenge))
    assert isinstance(await first.asks(proof), wire.Welcome)
    again = Stranger(context, port)
    assert isinstance(await again.asks(hello()), wire.Challenge)
    assert (await again.asks(proof)).code == PeerRefused.code
    assert (await again.asks(proof)).code == PeerRefused.code, "a challenge is used once"
    assert len(port.sessions) == 1


async def test_what_a_source_proves_opens_nothing(context, port):
    stranger = Stranger(context, port)
    challenge = await stranger.asks(hello())
    reflected = wire.source_proof(SECRET, hello(), challenge, "near", "i2", {})
    assert (await stranger.asks(wire.Prove(reflected))).code == PeerRefused.code


async def test_another_protocol_is_told_which_one_we_speak(context, port):
    answer = await Stranger(context, port).asks(hello(protocol=2))
    assert answer.code == PeerRefused.code
    assert "protocol 1, not 2" in answer.message


async def test_nothing_is_answered_before_the_handshake(context, port, source):
    stranger = Stranger(context, port)
    for message in (
        wire.Acquire(1, list(KEYS), 1.0, 0.0),
        wire.Probe(2, list(KEYS)),
        wire.Open(3, NAMESPACE.document),
        wire.Release(b"l" * 16),
        wire.Bye(),
    ):
        assert (await stranger.asks(message)).code == LinkBroken.code
    await stranger.says(hello())
    assert isinstance(await stranger.hears(), wire.Challenge)
    assert (await stranger.asks(wire.Probe(4, list(KEYS)))).code == LinkBroken.code
    assert source.leases == {}


async def test_hello_twice_is_malformed(context, port):
    stranger = Stranger(context, port)
    challenge = await stranger.asks(hello())
    await stranger.asks(wire.Prove(wire.consumer_proof(SECRET, hello(), challenge)))
    assert (await stranger.asks(hello())).code == Malformed.code
    assert len(port.sessions) == 1


async def test_handshakes_and_sessions_are_bounded(context, port, monkeypatch):
    monkeypatch.setattr(peer_port, "MAX_SESSIONS", 2)
    for _ in range(5):
        stranger = Stranger(context, port)
        assert isinstance(await stranger.asks(hello()), wire.Challenge)
    assert len(port._handshakes) == 2
    links = [await connect(context, port) for _ in range(2)]
    with pytest.raises(Busy):
        await connect(context, port)
    for link in links:
        await link.close()


async def test_an_old_handshake_is_forgotten(source, monkeypatch):
    monkeypatch.setattr(peer_port, "_BEAT_SECONDS", 0.01)
    clock = iter(range(0, 10_000, 100))
    settings = PeerSettings(listen="tcp://127.0.0.1:0", secret=SECRET)
    port = PeerPort(settings, "far", "i1", source, [], clock=lambda: next(clock))
    port._handshakes[b"x"] = peer_port._Handshake(hello(), wire.Challenge(b"c" * 32), -1.0)
    await port.start()
    try:
        await until(lambda: not port._handshakes)
    finally:
        await port.close()


# ---------------------------------------------------------------- hostile input


@pytest.mark.parametrize(
    "identity", [b"\xff", b"\xff" * 255, b"no colon", b"a:b:c", b"\x80\x81", b"10.0.0.7:22"]
)
async def test_any_identity_is_just_a_name(context, port, link, identity):
    stranger = Stranger(context, port, identity)
    assert (await stranger.asks(b"\xc1")).code == Malformed.code
    assert await link.probe(KEYS[:1], soon()) == [True]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b""],
        [b"a"] * 50,
        [b"\xc1"],
        [b"\x91" * 5000],
        [msgspec.msgpack.encode(["nonsense", 1])],
        [msgspec.msgpack.encode(["hello", 1, 2, 3, 4])],
        [msgspec.msgpack.encode(["acquire", 1, [1, 2], 1.0, 1.0])],
        [msgspec.msgpack.encode({"hello": 1})],
        [os.urandom(1000)],
    ],
)
async def test_garbage_is_counted_and_refused(context, port, link, frames):
    stranger = Stranger(context, port)
    assert (await stranger.asks(*frames)).code == Malformed.code
    assert port.counters["malformed"] == 1
    assert await link.probe(KEYS[:1], soon()) == [True]


async def test_a_message_over_the_limit_costs_its_connection(context, port, link):
    stranger = Stranger(context, port)
    await stranger.says(bytes(wire.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await stranger.socket.recv_multipart()
    assert port.counters["malformed"] == 0
    assert await link.probe(KEYS[:1], soon()) == [True]


async def test_a_flood_does_not_starve_the_others(context, port, link):
    stranger = Stranger(context, port)

    async def flood():
        for _ in range(500):
            await stranger.says(b"\xc1")

    flooding = asyncio.create_task(flood())
    for _ in range(20):
        assert await link.probe(KEYS[:1], soon()) == [True]
    await flooding


@pytest.mark.parametrize("key", [b"", b"k" * 20, b"k" * 53])
async def test_keys_that_can_not_be_keys(link, key):
    with pytest.raises(Malformed):
        await link.probe([key], soon())
    with pytest.raises(Malformed):
        await link.acquire([key], 1, 0, soon())
    assert await link.probe(KEYS[:1], soon()) == [True]


async def test_too_many_keys_are_malformed(context, port):
    stranger = Stranger(context, port)
    answer = await stranger.asks(wire.Probe(1, [KEYS[0]] * (wire.MAX_KEYS + 1)))
    assert answer.code == Malformed.code


async def test_a_bug_in_the_source_is_an_answer(link, source, caplog):
    source.probe = lambda keys: 1 / 0
    with pytest.raises(KVStrataError, match="internal error"):
        await link.probe(KEYS[:1], soon())
    with pytest.raises(KVStrataError, match="internal error"):
        await link.probe(KEYS[:1], soon())
    assert (await link.acquire(KEYS[:1], 1, 0, soon())).chunks[0] is not None


# ---------------------------------------------------------------- namespaces


async def test_a_namespace_it_has(link):
    assert await link.open(NAMESPACE, soon()) is True


async def test_a_mismatch_names_the_first_field(link):
    other = demo_namespace(1024, revision="r2")
    for _ in range(2):
        with pytest.raises(NamespaceMismatch, match="revision") as caught:
            await link.open(other, soon())
        assert caught.value.field == "revision"
    with pytest.raises(NamespaceMismatch, match="unit_bytes") as caught:
        await link.open(demo_namespace(2048), soon())
    assert caught.value.field == "groups[0].fields[0].unit_bytes"
    assert await link.open(NAMESPACE, soon()) is True


async def test_an_unknown_model_is_no_mismatch(link, source):
    other = demo_namespace(1024, model="another")
    assert await link.open(other, soon()) is False
    source.served.append(other)
    assert await link.open(other, soon()) is True


async def test_one_of_several_of_the_same_model(link, source):
    source.served.insert(0, demo_namespace(1024, dtype="fp8"))
    assert await link.open(NAMESPACE, soon()) is True


# ---------------------------------------------------------------- leases


async def test_acquire(link, source):
    granted = await link.acquire([KEYS[1], KEYS[7], KEYS[0]], 2.0, 0.0, soon())
    at = [source.chunks[KEYS[1]], None, source.chunks[KEYS[0]]]
    assert granted.ttl == 2.0
    assert granted.chunks == [c and wire.ChunkAt(c.offset, c.nbytes, c.checksum) for c in at]
    assert source.authorize(granted.lease, at[0].offset, at[0].nbytes)
    link.release(granted.lease)
    await until(lambda: not source.leases)
    assert not source.authorize(granted.lease, at[0].offset, at[0].nbytes)


async def test_the_ttl_is_the_settings_at_most(link):
    assert (await link.acquire(KEYS[:1], 1000.0, 0.0, soon())).ttl == 5.0


async def test_probe_leases_nothing(link, source):
    assert await link.probe(KEYS, soon()) == [True] * 4 + [False] * 4
    assert source.leases == {}


async def test_another_peers_lease_is_not_mine_to_release(context, port, link, source):
    granted = await link.acquire(KEYS[:1], 2.0, 0.0, soon())
    other = await connect(context, port, node="other")
    other.release(granted.lease)
    await other.probe(KEYS[:1], soon())
    assert granted.lease in source.leases
    await other.close()


async def test_outstanding_requests_are_bounded(link, source, monkeypatch):
    monkeypatch.setattr(wire, "MAX_OUTSTANDING", 2)
    source.gate = asyncio.Event()
    waiting = [asyncio.ensure_future(link.acquire(KEYS[:1], 2, 0, soon())) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await link.acquire(KEYS[:1], 2, 0, soon())
    source.gate.set()
    for granted in await asyncio.gather(*waiting):
        assert granted.chunks[0] is not None


async def test_a_slow_request_does_not_hold_up_others(link, source):
    source.gate = asyncio.Event()
    slow = asyncio.ensure_future(link.acquire(KEYS[:1], 2, 5, soon()))
    assert await link.probe(KEYS[:1], soon()) == [True]
    assert not slow.done()
    source.gate.set()
    await slow


async def test_what_is_granted_too_late_is_released(link, source):
    source.gate = asyncio.Event()
    with pytest.raises(Expired):
        await link.acquire(KEYS[:1], 5, 5, soon(0.05))
    granted = asyncio.ensure_future(link.acquire(KEYS[1:2], 5, 5, soon()))
    await asyncio.sleep(0)
    source.gate.set()
    lease = (await granted).lease
    await until(lambda: list(source.leases) == [lease])


# ---------------------------------------------------------------- ends of sessions


async def test_bye_ends_the_session_and_its_leases(context, port, source):
    link = await connect(context, port)
    await link.acquire(KEYS[:2], 5, 0, soon())
    await link.close()
    await until(lambda: source.gone)
    assert source.gone == ["near/i2#1"]
    assert source.leases == {}
    assert port.sessions == []


async def test_a_consumer_that_vanishes_is_noticed(context, port, source):
    link = await connect(context, port)
    await link.acquire(KEYS[:2], 5, 0, soon())
    link._break("a test cut it")  # so that close says no bye
    await link.close()
    await until(lambda: source.gone == ["near/i2#1"])
    assert source.leases == {}


async def test_a_grant_under_way_ends_with_its_session(context, port, source):
    cancelled = []

    async def grant(peer, keys, ttl, wait):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(peer)

    source.grant = grant
    link = await connect(context, port)
    waiting = asyncio.ensure_future(link.acquire(KEYS[:1], 5, 5, soon()))
    await asyncio.sleep(0.05)
    await link.close()
    with pytest.raises(LinkBroken):
        await waiting
    await until(lambda: cancelled == ["near/i2#1"])


async def test_a_grant_that_ignores_its_cancellation_is_released(context, port, source):
    grant, held = source.grant, asyncio.Event()

    async def stubborn(peer, keys, ttl, wait):
        with contextlib.suppress(asyncio.CancelledError):
            await held.wait()
        return await grant(peer, keys, ttl, wait)

    source.grant = stubborn
    link = await connect(context, port)
    waiting = asyncio.ensure_future(link.acquire(KEYS[:1], 5, 5, soon()))
    await asyncio.sleep(0.05)
    await link.close()
    await asyncio.wait([waiting])
    assert isinstance(waiting.exception(), LinkBroken)
    await until(lambda: source.gone)
    await asyncio.sleep(0)
    assert source.leases == {}


async def test_close_ends_all_sessions(context, port, source):
    links = [await connect(context, port, node=name) for name in ("a", "b")]
    for link in links:
        await link.acquire(KEYS[:1], 5, 0, soon())
    await port.close()
    await port.close()
    assert sorted(source.gone) == ["a/i2#1", "b/i2#2"]
    assert source.leases == {}
    for link in links:
        await until(lambda link=link: link.broken)
        with pytest.raises(LinkBroken):
            await link.probe(KEYS[:1], soon())
        await link.close()


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listen": "tcp://0.0.0.0:0", "advertise": "tcp://10.0.0.7:1"}, "secret"),
        ({"listen": "tcp://192.0.2.2:0"}, "secret"),
        ({"listen": "tcp://0.0.0.0:0", "secret": "s"}, "advertise"),
        ({"listen": "tcp://127.0.0.1:0", "advertise": "somewhere"}, "tcp://host:port"),
        ({"listen": ""}, "tcp://host:port"),
        ({"listen": "ipc:///tmp/x"}, "tcp://host:port"),
        ({"listen": "tcp://192.0.2.222:0", "secret": "s"}, r"192\.0\.2\.222"),
    ],
)
async def test_settings_that_can_not_work(source, settings, message):
    port = PeerPort(PeerSettings(**settings), "far", "i1", source, [])
    with pytest.raises(ConfigError, match=message):
        await port.start()
    await port.close()


async def test_loopback_needs_no_secret(context, source):
    port = PeerPort(PeerSettings(listen="tcp://127.0.0.1:0"), "far", "i1", source, [])
    await port.start()
    link = await connect(context, port, secret="")
    assert await link.probe(KEYS[:1], soon()) == [True]
    with pytest.raises(PeerRefused):
        await connect(context, port, secret="wrong")
    await link.close()
    await port.close()


async def test_the_advertised_address_wins(source):
    settings = PeerSettings(listen="tcp://127.0.0.1:0", advertise="tcp://node-7:7801")
    port = PeerPort(settings, "far", "i1", source, [])
    await port.start()
    assert port.address == "tcp://node-7:7801"
    await port.close()
