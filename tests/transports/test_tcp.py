import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time

import msgspec
import pytest

from kvstrata.errors import ConfigError, LinkBroken, Malformed, PeerRefused
from kvstrata.testing.sources import pattern
from kvstrata.testing.transports import LEASE, SIZE, TransportTests, scattered, soon
from kvstrata.testing.waiting import until
from kvstrata.transports import Read, tcp_source
from kvstrata.transports.tcp import TcpTransport
from kvstrata.transports.tcp_wire import MAX_RANGES

OK, DENIED, MALFORMED, BUSY = range(4)


class TestTcp(TransportTests):
    transport = "tcp"


@pytest.fixture
def allowed():
    """Leases the source honours; tests change it."""
    return {LEASE}


@pytest.fixture
async def source(allowed):
    memory = memoryview(bytearray(pattern(SIZE, 1)))
    source = TcpTransport(memory, lambda lease, offset, nbytes: lease in allowed, "127.0.0.1")
    await source.start()
    yield source
    await source.close()


@pytest.fixture
async def consumer():
    consumer = TcpTransport(memoryview(bytearray(SIZE)), lambda *_: False)
    await consumer.start()
    yield consumer
    await consumer.close()


def request(lease=LEASE, ranges=((0, 4096),), magic=b"kvsr", version=1, count=None):
    count = len(ranges) if count is None else count
    head = struct.pack("<4sBxxxI16s", magic, version, count, lease)
    return head + b"".join(struct.pack("<QQ", *r) for r in ranges)


def port_of(source):
    return msgspec.msgpack.decode(source.describe())[1]


def serving():
    """The threads that answer consumers; one about to start counts."""
    return [t for t in threading.enumerate() if t.name == "kvstrata-tcp-serve"]


def dial(source):
    sock = socket.create_connection(("127.0.0.1", port_of(source)), 5)
    sock.settimeout(5)
    return sock


def everything(sock):
    """What the source says until it closes."""
    said = b""
    try:
        while part := sock.recv(1 << 16):
            said += part
    except ConnectionResetError:
        pass
    return said


async def says(source, message):
    def talk():
        with dial(source) as sock:
            sock.sendall(message)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            return everything(sock)

    return await asyncio.to_thread(talk)


# ---------------------------------------------------------------- the format


async def test_the_format_on_the_wire(source):
    said = await says(source, request(ranges=((4096, 3), (8192, 2))))
    data = pattern(SIZE, 1)
    assert said == b"kvsa\x01\x00\0\0" + b"\x01" + data[4096:4099] + b"\x01" + data[8192:8194]


@pytest.mark.parametrize(
    "message",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
        request(magic=b"kvsa"),
        request(version=2),
        request(count=0, ranges=()),
        request(count=MAX_RANGES + 1),
        request(count=0xFFFFFFFF),
    ],
)
async def test_malformed_requests_are_told_so_and_dropped(source, consumer, message, caplog):
    with caplog.at_level(logging.WARNING, "kvstrata.transports.tcp_source"):
        for _ in range(3):
            # What it left unread may reset the connection before the answer is read.
            assert (await says(source, message))[:6] in (b"kvsa\x01\x02", b"")
    assert len(caplog.records) == 1, "a stranger can fill the log"
    assert await consumer.pull(source.describe(), LEASE, [Read(0, 0, 4096)], soon()) == [True]


@pytest.mark.parametrize(
    "bad", [(SIZE, 1), (0, SIZE + 1), (2**64 - 1, 2), (2**64 - 4096, 4096), (0, 2**64 - 1)]
)
async def test_ranges_outside_the_region_are_denied_whole(source, bad):
    assert await says(source, request(ranges=((0, 4096), bad))) == b"kvsa\x01\x01\0\0"


async def test_a_request_cut_short(source, consumer):
    whole = request(ranges=((0, 4096), (4096, 4096)))
    for cut in (1, 27, 28, len(whole) - 1):
        assert await says(source, whole[:cut]) == b""
    assert await consumer.pull(source.describe(), LEASE, [Read(0, 0, 4096)], soon()) == [True]


# ---------------------------------------------------------------- leases


async def test_a_lease_that_ends_meanwhile_costs_the_rest(consumer):
    memory = memoryview(bytearray(pattern(SIZE, 1)))
    asked = []

    def authorize(lease, offset, nbytes):
        asked.append(offset)
        return len(asked) <= 6  # 4 ranges asked at the start, then 2 as they are sent

    source = TcpTransport(memory, authorize, "127.0.0.1")
    await source.start()
    try:
        reads = [Read(i * 4096, i * 4096, 4096) for i in range(4)]
        arrived = await consumer.pull(source.describe(), LEASE, reads, soon())
        assert arrived == [True, True, False, False]
    finally:
        await source.close()


async def test_a_lease_that_ends_within_a_range_breaks_off(consumer):
    allowed = iter([True, True, True, False])
    source = TcpTransport(memoryview(bytearray(SIZE)), lambda *_: next(allowed), "127.0.0.1")
    await source.start()
    try:
        with pytest.raises(LinkBroken):
            await consumer.pull(source.describe(), LEASE, [Read(0, 0, 4 << 20)], soon())
    finally:
        await source.close()


async def test_a_lease_has_16_bytes(source, consumer):
    with pytest.raises(Malformed):
        await consumer.pull(source.describe(), b"short", [Read(0, 0, 1)], soon())


# ---------------------------------------------------------------- connections


def accepted(source):
    return set(source._source._open)


async def test_a_connection_is_kept_for_the_next_pull(source, consumer):
    await consumer.pull(source.describe(), LEASE, [Read(0, 0, 4096)], soon())
    first = accepted(source)
    for _ in range(5):
        await consumer.pull(source.describe(), LEASE, [Read(0, 0, 4096)], soon())
    assert len(first) == 1
    assert accepted(source) == first


async def test_a_kept_connection_that_died_is_replaced(source, consumer):
    await consumer.pull(source.describe(), LEASE, [Read(0, 0, 4096)], soon())
    for sock in accepted(source):
        sock.shutdown(socket.SHUT_RDWR)
    assert await consumer.pull(source.describe(), LEASE, [Read(0, 0, 4096)], soon()) == [True]


async def test_strangers_are_bounded(source, consumer, monkeypatch):
    monkeypatch.setattr(tcp_source, "_MAX_CONNECTIONS", 3)
    socks = []
    try:
        socks += [dial(source) for _ in range(3)]
        with dial(source) as fourth:
            assert (await asyncio.to_thread(everything, fourth))[:6] == b"kvsa\x01\x03"
        with pytest.raises((PeerRefused, LinkBroken)):
            await consumer.pull(source.describe(), LEASE, [Read(0, 0, 4096)], soon())
    finally:
        for sock in socks:
            sock.close()


async def test_who_says_nothing_is_dropped(source, monkeypatch):
    monkeypatch.setattr(tcp_source, "_FIRST_REQUEST_SECONDS", 0.05)
    with dial(source) as sock:
        assert await asyncio.to_thread(everything, sock) == b""


async def test_who_dribbles_is_dropped(source, monkeypatch):
    monkeypatch.setattr(tcp_source, "_REQUEST_SECONDS", 0.1)
    whole = request()

    def dribble():
        with dial(source) as sock:
            began = time.monotonic()
            try:
                for i in range(len(whole)):
                    sock.sendall(whole[i : i + 1])
                    time.sleep(0.02)  # the point of the test: a slow client
            except OSError:
                pass
            return time.monotonic() - began

    assert await asyncio.to_thread(dribble) < 0.02 * len(whole)


async def test_who_does_not_read_is_dropped(source, monkeypatch):
    monkeypatch.setattr(tcp_source, "_WRITE_SECONDS", 0.1)
    with dial(source) as sock:
        sock.sendall(request(ranges=((0, SIZE),) * 16))
        await until(serving)
        await until(lambda: not serving())


async def test_close_leaves_no_thread():
    before = set(threading.enumerate())
    source = TcpTransport(memoryview(bytearray(SIZE)), lambda *_: True, "127.0.0.1")
    consumer = TcpTransport(memoryview(bytearray(SIZE)), lambda *_: True)
    await source.start()
    await consumer.start()
    await consumer.pull(source.describe(), LEASE, scattered(16, 4096), soon())
    await source.close()
    await consumer.close()
    left = {t for t in set(threading.enumerate()) - before if t.name.startswith("kvstrata")}
    assert not left


# ---------------------------------------------------------------- a source that lies


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", LinkBroken),
        (b"kvsa", LinkBroken),
        (b"HTTP/1.1 400 Bad Request\r\n", Malformed),
        (b"kvsa\x09\x00\0\0", Malformed),
        (b"kvsa\x01\x77\0\0", Malformed),
        (b"kvsa\x01\x01\0\0", PeerRefused),
        (b"kvsa\x01\x03\0\0", PeerRefused),
        (b"kvsa\x01\x00\0\0", LinkBroken),
        (b"kvsa\x01\x00\0\0\x01half", LinkBroken),
    ],
)
async def test_a_source_that_answers_nonsense(consumer, answer, error):
    def serve(listener):
        sock, _ = listener.accept()
        with sock:
            sock.recv(1 << 16)
            sock.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.to_thread(serve, listener)
        remote = msgspec.msgpack.encode(["127.0.0.1", listener.getsockname()[1]])
        pull = consumer.pull(remote, LEASE, [Read(0, 0, 4096)], soon())
        _, outcome = await asyncio.gather(serving, pull, return_exceptions=True)
        assert type(outcome) is error


# ---------------------------------------------------------------- addresses


async def test_the_address_we_dialled_wins(source, consumer):
    lie = msgspec.msgpack.encode(["192.0.2.1", port_of(source)])
    remote = consumer.seen_from(lie, "127.0.0.1")
    assert await consumer.pull(remote, LEASE, [Read(0, 0, 4096)], soon()) == [True]


async def test_a_wildcard_source_tells_no_host():
    source = TcpTransport(memoryview(bytearray(4096)), lambda *_: True, "0.0.0.0")
    await source.start()
    try:
        assert msgspec.msgpack.decode(source.describe())[0] == ""
        with pytest.raises(Malformed):
            await source.pull(source.describe(), LEASE, [Read(0, 0, 1)], soon())
    finally:
        await source.close()


async def test_an_address_that_is_not_ours():
    source = TcpTransport(memoryview(bytearray(4096)), lambda *_: True, "192.0.2.200")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.200"):
        await source.start()
    await source.close()
