import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack

import pytest
import zmq
import zmq.asyncio

from kvstrata import peer_wire as wire
from kvstrata.config import PeerSettings
from kvstrata.errors import (
    ConfigError,
    Expired,
    KVStrataError,
    LinkBroken,
    NamespaceMismatch,
)
from kvstrata.node.peer_port import PeerPort
from kvstrata.node.peer_source import GrantedChunk
from kvstrata.peer_socket import tune
from kvstrata.region import Region
from kvstrata.slots import Slots
from kvstrata.testing import FakeClock, TierTests
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.sources import (
    MemorySource,
    SourceProcess,
    demo_keys,
    demo_namespace,
    pattern,
)
from kvstrata.testing.waiting import until
from kvstrata.tiers import peer, peer_links
from kvstrata.tiers.base import Item, Outcome, TierContext
from kvstrata.tiers.peer import COOL_OFF_SECONDS, PeerTier
from kvstrata.tiers.peer_links import PeerLinks
from kvstrata.transports import start_transports
from kvstrata.transports.tcp import TcpTransport

LOADED, MISSING, CORRUPT, FAILED = (
    Outcome.LOADED,
    Outcome.MISSING,
    Outcome.CORRUPT,
    Outcome.FAILED,
)
SECRET = "s3cret"
UNIT = 4096
CHUNK = 4 * UNIT
NAMESPACE = demo_namespace(UNIT)
KEYS = demo_keys(NAMESPACE, 32)
SIZE = 4 << 20


def soon(seconds=15.0):
    return time.monotonic() + seconds


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Lookups that a busy machine does not cut short."""
    monkeypatch.setattr(peer, "LOOKUP_SECONDS", 10.0)


class Near:
    """A consumer: a region, its transports and links."""

    def __init__(self, region, links):
        self.region = region
        self.links = links
        self.slots = Slots(region.size)

    def items(self, keys, nbytes=CHUNK):
        items = []
        for key in keys:
            offset = self.slots.allocate(nbytes)
            view = self.region.view[offset : offset + nbytes]
            view[:] = b"\xaa" * nbytes
            items.append(Item(key, view, offset))
        return items

    async def fetch(self, address, keys=KEYS, deadline=None, namespace=NAMESPACE):
        items = self.items(keys)
        outcomes = await self.links.fetch(address, namespace, items, deadline or soon())
        self.check(items, outcomes)
        return outcomes

    def check(self, items, outcomes):
        assert len(items) == len(outcomes)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is LOADED:
                assert item.view == pattern(CHUNK, KEYS.index(item.key)), "wrong bytes were served"


class World:
    """Opens nodes over real regions in this process, and closes them all."""

    def __init__(self, tmp_path, stack):
        self.tmp_path = tmp_path
        self.stack = stack
        self.nodes = 0

    def region(self, size=SIZE):
        self.nodes += 1
        region = Region.create(f"node{self.nodes}", "1", size, self.tmp_path, populate=False)
        self.stack.callback(region.close)
        return region

    async def transports(self, names, region, authorize, host=""):
        def opened(transport):
            self.stack.push_async_callback(transport.close)

        return await start_transports(names, region.view, authorize, host, opened=opened)

    async def source(self, count=32, transports=("tcp",), kind=MemorySource, node=None):
        """A source with the first `count` chunks: (address, its MemorySource)."""
        region = self.region()
        source = kind(region.view, [NAMESPACE])
        for i, key in enumerate(KEYS[:count]):
            source.put(key, pattern(CHUNK, i))
        started = await self.transports(transports, region, source.authorize, "127.0.0.1")
        settings = PeerSettings(listen="tcp://127.0.0.1:0", secret=SECRET)
        port = PeerPort(settings, node or f"far{self.nodes}", "1", source, started)
        await port.start()
        self.stack.push_async_callback(port.close)
        source.port = port
        return port.address, source

    async def consumer(self, transports=("tcp",), secret=SECRET, node="near", **options):
        region = self.region()
        started = await self.transports(transports, region, lambda *_: False)
        links = PeerLinks(PeerSettings(secret=secret), node, "1", started, **options)
        self.stack.push_async_callback(links.close)
        return Near(region, links)


@pytest.fixture
async def world(tmp_path):
    async with AsyncExitStack() as stack:
        yield World(tmp_path, stack)


@pytest.fixture
async def near(world):
    return await world.consumer()


class Torn(MemorySource):
    """Its engine writes over two chunks just after they were granted."""

    async def grant(self, peer, keys, ttl, wait):
        grant = await super().grant(peer, keys, ttl, wait)
        for key in KEYS[2:4]:
            self.memory[self.chunks[key].offset + 77] ^= 1
        return grant


class Flaky(TcpTransport):
    """Serves well, and breaks on the consumer's side."""

    name = "flaky"
    error = LinkBroken("cable out")
    pulls = 0

    async def pull(self, remote, lease, reads, deadline):
        Flaky.pulls += 1
        raise self.error


class Buggy(Flaky):
    name = "buggy"
    error = RuntimeError("a bug in a plug-in")


# ---------------------------------------------------------------- fetching


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
async def test_fetch(world, transport):
    try:
        near = await world.consumer((transport,))
    except ConfigError as e:
        pytest.skip(f"{transport} does not run here: {e}")
    address, source = await world.source(8, (transport,))
    assert await near.fetch(address, KEYS[4:12]) == [LOADED] * 4 + [MISSING] * 4
    assert near.links.counters["loaded"] == 4
    assert near.links.counters[f"bytes_{transport}"] == 4 * CHUNK
    assert near.links.reasons == {}
    await until(lambda: not source.leases)


async def test_nothing_to_fetch(near):
    assert await near.links.fetch("tcp://127.0.0.1:1", NAMESPACE, [], soon()) == []


async def test_the_same_key_twice(world, near):
    address, _ = await world.source()
    assert await near.fetch(address, [KEYS[3], KEYS[1], KEYS[3]]) == [LOADED] * 3


async def test_many_rounds(world, near, monkeypatch):
    monkeypatch.setattr(peer_links, "ROUND_BYTES", 3 * CHUNK)
    address, source = await world.source(30)
    assert await near.fetch(address) == [LOADED] * 30 + [MISSING] * 2
    assert source.port.counters["requests"] == 1 + 11
    await until(lambda: not source.leases)


async def test_many_fetches_share_one_link(world, near, monkeypatch):
    monkeypatch.setattr(peer_links, "ROUND_BYTES", CHUNK)
    address, source = await world.source()
    many = await asyncio.gather(*(near.fetch(address, KEYS[:8]) for _ in range(12)))
    assert many == [[LOADED] * 8] * 12
    assert source.port.counters["sessions"] == 1


async def test_bytes_that_changed_after_the_grant_are_never_served(world, near):
    address, source = await world.source(kind=Torn)
    outcomes = await near.fetch(address, KEYS[:6])
    assert outcomes == [LOADED, LOADED, CORRUPT, CORRUPT, LOADED, LOADED]
    assert near.links.counters["corrupt"] == 2
    await until(lambda: not source.leases)


async def test_another_length_is_corrupt(world, near):
    address, source = await world.source()
    chunk = source.chunks[KEYS[1]]
    source.chunks[KEYS[1]] = GrantedChunk(chunk.offset, chunk.nbytes - 1, chunk.checksum)
    assert await near.fetch(address, KEYS[:3]) == [LOADED, CORRUPT, LOADED]


async def test_an_offset_outside_the_source_fails(world, near):
    address, source = await world.source()
    chunk = source.chunks[KEYS[1]]
    source.chunks[KEYS[1]] = GrantedChunk(SIZE, chunk.nbytes, chunk.checksum)
    assert await near.fetch(address, KEYS[1:2]) == [FAILED]
    assert "denied" in near.links.reasons[address]


async def test_only_region_memory(near):
    item = Item(KEYS[0], memoryview(bytearray(CHUNK)))
    with pytest.raises(ValueError, match="region"):
        await near.links.fetch("tcp://127.0.0.1:1", NAMESPACE, [item], soon())


async def test_a_mismatch_names_the_field(world, near):
    address, _ = await world.source()
    other = demo_namespace(UNIT, revision="r2")
    for _ in range(2):
        with pytest.raises(NamespaceMismatch, match="revision") as caught:
            await near.fetch(address, KEYS[:1], namespace=other)
        assert caught.value.field == "revision"


async def test_a_model_it_does_not_know_is_missing(world, near):
    address, _ = await world.source()
    other = demo_namespace(UNIT, model="another")
    assert await near.fetch(address, KEYS[:2], namespace=other) == [MISSING] * 2


async def test_probe(world, near):
    address, source = await world.source(3)
    assert await near.links.probe(address, NAMESPACE, KEYS[1:5], soon()) == [True] * 2 + [False] * 2
    assert source.leases == {}


async def test_probe_of_more_keys_than_a_message_holds(world, near):
    address, source = await world.source(3)
    keys = demo_keys(NAMESPACE, 2 * wire.MAX_KEYS + 1)
    assert sum(await near.links.probe(address, NAMESPACE, keys, soon())) == 3
    assert source.port.counters["requests"] == 1 + 3


async def test_ourselves_have_nothing(world):
    address, _ = await world.source(node="near")
    near = await world.consumer(node="near")
    assert await near.fetch(address, KEYS[:2]) == [MISSING] * 2
    assert await near.links.probe(address, NAMESPACE, KEYS[:2], soon()) == [False] * 2


# ---------------------------------------------------------------- transports


@pytest.mark.parametrize("bad", [Flaky, Buggy])
async def test_a_transport_that_fails_is_replaced_for_this_peer(world, bad):
    names = (f"{__name__}:{bad.__name__}", "tcp")
    address, _ = await world.source(transports=names)
    near = await world.consumer(names)
    Flaky.pulls = 0
    for _ in range(3):
        assert await near.fetch(address, KEYS[:2]) == [LOADED] * 2
    assert Flaky.pulls == 1
    assert near.links.counters[f"failed_{bad.name}"] == 1
    assert near.links.counters["bytes_tcp"] == 6 * CHUNK


async def test_the_last_transport_is_tried_again(world):
    names = (f"{__name__}:Flaky",)
    address, source = await world.source(transports=names)
    near = await world.consumer(names)
    Flaky.pulls = 0
    for _ in range(2):
        assert await near.fetch(address, KEYS[:2]) == [FAILED] * 2
    assert Flaky.pulls == 2
    assert near.links.reasons[address] == "cable out"
    await until(lambda: not source.leases)


async def test_our_order_of_preference_decides(world):
    flaky = f"{__name__}:Flaky"
    address, _ = await world.source(transports=(flaky, "tcp"))
    near = await world.consumer(("tcp", flaky))
    assert await near.fetch(address, KEYS[:2]) == [LOADED] * 2
    assert near.links.counters["failed_flaky"] == 0


async def test_no_transport_in_common(world, near):
    address, _ = await world.source(transports=(f"{__name__}:Flaky",))
    assert await near.fetch(address, KEYS[:2]) == [FAILED] * 2
    assert "flaky" in near.links.reasons[address]


# ---------------------------------------------------------------- what fails


async def test_nobody_there(near):
    began = time.monotonic()
    assert await near.fetch("tcp://127.0.0.1:1", KEYS[:2]) == [FAILED] * 2
    assert time.monotonic() - began < 5
    assert "127.0.0.1:1" in near.links.reasons["tcp://127.0.0.1:1"]
    with pytest.raises(LinkBroken):
        await near.links.probe("tcp://127.0.0.1:1", NAMESPACE, KEYS[:2], soon())


async def test_a_wrong_secret(world):
    address, source = await world.source()
    near = await world.consumer(secret="wrong")
    assert await near.fetch(address, KEYS[:2]) == [FAILED] * 2
    assert "peers.secret" in near.links.reasons[address]
    assert source.port.sessions == []


@pytest.mark.parametrize(
    ("address", "secret", "message"),
    [
        ("tcp://192.0.2.7:7801", "", "secret"),
        ("tcp://a-node:7801", "", "secret"),
        ("ipc:///tmp/x", SECRET, "tcp://host:port"),
        ("nonsense", SECRET, "tcp://host:port"),
    ],
)
async def test_addresses_that_are_not_dialled(world, address, secret, message):
    near = await world.consumer(secret=secret)
    with pytest.raises(ConfigError, match=message):
        await near.fetch(address, KEYS[:1])


async def test_a_source_that_does_not_know_the_secret(near):
    """Anyone may listen at an address; it must not be believed, nor learn anything."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    tune(router, "127.0.0.1")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    said = []

    async def pretend():
        identity, raw = await router.recv_multipart()
        said.append(raw)
        await router.send_multipart([identity, wire.encode(wire.Challenge(b"c" * 32))])
        identity, raw = await router.recv_multipart()
        said.append(raw)
        welcome = wire.Welcome("far", "1", {"tcp": b"x"}, wire.decode_to_source(raw).proof)
        await router.send_multipart([identity, wire.encode(welcome)])

    pretending = asyncio.create_task(pretend())
    address = f"tcp://127.0.0.1:{port}"
    assert await near.fetch(address, KEYS[:1]) == [FAILED]
    assert "does not know peers.secret" in near.links.reasons[address]
    await pretending
    assert not any(SECRET.encode() in raw for raw in said)
    router.close(0)
    context.destroy(0)


@pytest.mark.parametrize(
    "answer", [b"\xc1", wire.encode(wire.Probed(0, [True])), wire.encode(wire.Beat())]
)
async def test_a_source_that_answers_nonsense(near, answer):
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    tune(router, "127.0.0.1")
    port = router.bind_to_random_port("tcp://127.0.0.1")

    async def pretend():
        identity, _ = await router.recv_multipart()
        await router.send_multipart([identity, answer])

    pretending = asyncio.create_task(pretend())
    began = time.monotonic()
    assert await near.fetch(f"tcp://127.0.0.1:{port}", KEYS[:1], soon(1)) == [FAILED]
    assert time.monotonic() - began < 4
    await pretending
    router.close(0)
    context.destroy(0)


async def test_the_deadline_bounds_everything(world, near):
    address, source = await world.source()
    source.gate = asyncio.Event()
    began = time.monotonic()
    assert await near.fetch(address, KEYS[:2], soon(0.2)) == [FAILED] * 2
    assert time.monotonic() - began < 3
    assert "in time" in near.links.reasons[address]
    source.gate.set()
    assert await near.fetch(address, KEYS[:2]) == [LOADED] * 2
    assert near.links.reasons == {}
    # The late grant was released when it came.
    await until(lambda: not source.leases)


async def test_a_deadline_that_has_passed(world, near):
    address, source = await world.source()
    assert await near.fetch(address, KEYS[:2], soon(-1)) == [FAILED] * 2
    with pytest.raises(Expired):
        await near.links.probe(address, NAMESPACE, KEYS[:2], soon(-1))
    assert source.leases == {}
    assert await near.fetch(address, KEYS[:2]) == [LOADED] * 2


async def test_a_deadline_that_has_passed_costs_others_nothing(world, near):
    address, source = await world.source()
    assert await near.fetch(address, KEYS[:2]) == [LOADED] * 2
    late, others = await asyncio.gather(
        near.fetch(address, KEYS[2:4], soon(-1)), near.fetch(address, KEYS[4:6])
    )
    assert (late, others) == ([FAILED] * 2, [LOADED] * 2)
    assert await near.fetch(address, KEYS[2:4]) == [LOADED] * 2
    assert source.port.counters["sessions"] == 1  # the source heard of nothing that is wrong


async def test_deadlines_are_in_the_injected_clock(world):
    clock = FakeClock(-1e6)
    near = await world.consumer(clock=clock)
    address, _ = await world.source()
    assert await near.fetch(address, KEYS[:2], clock() + 10) == [LOADED] * 2
    assert await near.fetch(address, KEYS[:2], clock() - 1) == [FAILED] * 2


async def test_a_cancelled_fetch_releases_its_lease(world, near):
    address, source = await world.source()
    assert await near.fetch(address, KEYS[:1]) == [LOADED]
    source.gate = asyncio.Event()
    fetch = asyncio.create_task(near.fetch(address, KEYS[:4]))
    await until(lambda: source.port.counters["requests"] == 3)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    source.gate.set()
    await asyncio.sleep(0)
    assert await near.fetch(address, KEYS[:1]) == [LOADED]
    await until(lambda: not source.leases)


async def test_a_source_that_went_is_dialled_again(world, near):
    address, source = await world.source()
    assert await near.fetch(address, KEYS[:2]) == [LOADED] * 2
    await source.port.close()
    assert await near.fetch(address, KEYS[:2]) == [FAILED] * 2
    settings = PeerSettings(listen=address, secret=SECRET)
    region = world.region()
    again = MemorySource(region.view, [NAMESPACE])
    again.put(KEYS[1], pattern(CHUNK, 1))
    transports = await world.transports(("tcp",), region, again.authorize, "127.0.0.1")
    port = PeerPort(settings, "far", "2", again, transports)
    await port.start()
    assert await near.fetch(address, KEYS[:2]) == [MISSING, LOADED]
    await port.close()


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
async def test_a_killed_source(world, transport):
    try:
        near = await world.consumer((transport,))
    except ConfigError as e:
        pytest.skip(f"{transport} does not run here: {e}")
    far = SourceProcess("port", transport, str(UNIT), "32")
    try:
        assert await near.fetch(far.told) == [LOADED] * 32
        os.kill(far.pid, signal.SIGSTOP)
        fetch = asyncio.create_task(near.fetch(far.told))
        await asyncio.sleep(0.05)
        far.kill()
        began = time.monotonic()
        assert await fetch == [FAILED] * 32
        assert time.monotonic() - began < 5
        assert near.links.reasons[far.told]
    finally:
        far.kill()


async def test_a_source_that_hangs_is_noticed_by_heartbeat(world, near, monkeypatch):
    far = SourceProcess("port", "tcp", str(UNIT), "2")
    try:
        assert await near.fetch(far.told, KEYS[:2]) == [LOADED] * 2
        os.kill(far.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert await near.fetch(far.told, KEYS[:2], soon(30)) == [FAILED] * 2
        assert time.monotonic() - began < 15
        assert "gone" in near.links.reasons[far.told]
    finally:
        far.kill()


async def test_close_ends_fetches(world, near):
    address, source = await world.source()
    source.gate = asyncio.Event()
    fetch = asyncio.create_task(near.fetch(address, KEYS[:2]))
    await until(lambda: source.port.counters["requests"] == 2)
    await near.links.close()
    await near.links.close()
    assert await fetch == [FAILED] * 2
    assert await near.fetch(address, KEYS[:2]) == [FAILED] * 2
    with pytest.raises(LinkBroken):
        await near.links.probe(address, NAMESPACE, KEYS[:1], soon())
    await until(lambda: source.gone)


# ---------------------------------------------------------------- the tier


class TestPeerTier(TierTests):
    durable = False
    takes_shorter = False  # a chunk of a peer has the size that its namespace says

    @pytest.fixture(autouse=True)
    async def _world(self, tmp_path):
        async with AsyncExitStack() as stack:
            self.world = World(tmp_path / "regions", stack)
            self.world.tmp_path.mkdir()
            yield

    @pytest.fixture
    def context(self, clock, removed):
        known = {ns.digest: ns for ns in (a_namespace(), a_namespace(tenant="other"))}
        return TierContext("near", clock, known.get, removed.extend)

    async def open_tier(self, tmp_path, context):
        address, self.source = await self.world.source(0)
        self.source.served = [a_namespace(tenant="other"), a_namespace()]
        self.near = await self.world.consumer(clock=context.clock)
        return PeerTier(self.near.links, [address], context)

    async def fill(self, tier, items):
        for item in items:
            if item.key not in self.source.chunks:
                self.source.put(item.key, bytes(item.view))

    def blank(self, items):
        return [self.near.items([item.key], item.view.nbytes)[0] for item in items]

    async def test_load_writes_inside_its_view_only(self, tier):
        items = self.items(0, 3)
        await self.fill(tier, items)
        region = self.near.region.view
        region[:] = b"\xaa" * len(region)
        blank = self.blank(items)
        assert await tier.load(blank) == [LOADED] * 3
        self.check_bytes(blank, [LOADED] * 3)
        for item in blank:
            item.view[:] = b"\xaa" * item.view.nbytes
        assert region == b"\xaa" * len(region)

    async def test_load_of_another_size_is_never_served(self, tier):
        items = self.items(0, 3)
        await self.fill(tier, items)
        blank = self.blank(items)
        blank[1] = self.near.items([items[1].key], self.size + 1)[0]
        outcomes = await tier.load(blank)
        assert outcomes == [LOADED, CORRUPT, LOADED]
        self.check_bytes(blank, outcomes)


@pytest.fixture
def clock():
    return FakeClock(1000.0)


def tier_over(near, addresses, clock):
    known = {NAMESPACE.digest: NAMESPACE}
    return PeerTier(near.links, addresses, TierContext("near", clock, known.get))


@pytest.fixture
async def seeker(world, clock):
    return await world.consumer(clock=clock)


async def load(tier, near, keys):
    items = near.items(keys)
    outcomes = await tier.load(items)
    near.check(items, outcomes)
    return outcomes


async def test_it_only_reads(seeker, clock):
    tier = tier_over(seeker, [], clock)
    assert not tier.writable
    assert await tier.store(seeker.items(KEYS[:2])) == [Outcome.NO_ROOM] * 2
    assert await tier.evict(KEYS[:2]) == [False] * 2
    assert tier.keys() == []
    assert tier.usage().capacity_bytes == 0
    with pytest.raises(ConfigError, match=r"peers\.static"):
        await PeerTier.open({}, TierContext("near"))


async def test_each_from_who_has_it(world, seeker, clock):
    first, _ = await world.source(4)
    second, there = await world.source(0)
    for i in range(3, 8):
        there.put(KEYS[i], pattern(CHUNK, i))
    tier = tier_over(seeker, [first, second], clock)
    assert await tier.lookup(KEYS[:10]) == [True] * 8 + [False] * 2
    assert await load(tier, seeker, KEYS[:10]) == [LOADED] * 8 + [MISSING] * 2
    await tier.close()


async def test_the_work_is_spread(world, seeker, clock):
    first, here = await world.source(32)
    second, there = await world.source(32)
    tier = tier_over(seeker, [first, second], clock)
    await tier.lookup(KEYS)
    assert await load(tier, seeker, KEYS) == [LOADED] * 32
    assert here.port.counters["granted"] == there.port.counters["granted"] == 16
    await tier.close()


async def test_a_dead_peer_is_replaced(world, seeker, clock):
    far = SourceProcess("port", "tcp", str(UNIT), "32")
    second, _ = await world.source(32)
    try:
        tier = tier_over(seeker, [far.told, second], clock)
        assert await tier.lookup(KEYS) == [True] * 32
        far.kill()
        assert await load(tier, seeker, KEYS) == [LOADED] * 32
        assert far.told in tier.usage().detail
        assert tier.usage().healthy
        await tier.close()
    finally:
        far.kill()


async def test_a_torn_peer_is_replaced(world, seeker, clock):
    first, _ = await world.source(32, kind=Torn)
    second, _ = await world.source(32)
    tier = tier_over(seeker, [first, second], clock)
    await tier.lookup(KEYS[:8])
    assert await load(tier, seeker, KEYS[:8]) == [LOADED] * 8
    # Spread over both, one of the two torn chunks was asked of the first.
    assert tier.usage().counters["corrupt"] == 1
    await tier.close()


async def test_a_peer_that_fails_is_left_alone_for_a_while(seeker, clock, monkeypatch):
    asked = []

    async def probe(address, namespace, keys, deadline):
        asked.append(address)
        raise LinkBroken("no")

    monkeypatch.setattr(seeker.links, "probe", probe)
    tier = tier_over(seeker, ["tcp://127.0.0.1:1"], clock)
    assert await tier.lookup(KEYS[:2]) == [False] * 2
    assert await tier.lookup(KEYS[:2]) == [False] * 2
    assert len(asked) == 1
    assert not tier.usage().healthy
    assert "tcp://127.0.0.1:1" in tier.usage().detail
    clock.advance(COOL_OFF_SECONDS)
    assert tier.usage().healthy
    await tier.lookup(KEYS[:2])
    assert len(asked) == 2
    await tier.close()


async def test_a_peer_with_another_revision_is_a_miss_and_well(world, seeker, clock):
    address, source = await world.source(4)
    source.served = [demo_namespace(UNIT, revision="r2")]
    tier = tier_over(seeker, [address], clock)
    assert await tier.lookup(KEYS[:2]) == [False] * 2
    assert await load(tier, seeker, KEYS[:2]) == [MISSING] * 2
    assert tier.usage().healthy
    await tier.close()


async def test_a_namespace_nobody_registered_is_a_miss(world, seeker, clock):
    address, _ = await world.source(4)
    tier = PeerTier(seeker.links, [address], TierContext("near", clock))
    assert await tier.lookup(KEYS[:2]) == [False] * 2
    assert await load(tier, seeker, KEYS[:2]) == [MISSING] * 2


async def test_a_slow_peer_does_not_hold_up_a_lookup(world, seeker, clock, monkeypatch):
    far = SourceProcess("port", "tcp", str(UNIT), "2")
    second, _ = await world.source(2)
    try:
        tier = tier_over(seeker, [far.told, second], clock)
        assert await tier.lookup(KEYS[:2]) == [True] * 2
        os.kill(far.pid, signal.SIGSTOP)
        monkeypatch.setattr(peer, "LOOKUP_SECONDS", 1.0)
        began = time.monotonic()
        assert await tier.lookup(KEYS[:2]) == [True] * 2
        assert time.monotonic() - began < 5
        assert "in time" in tier.usage().detail
        await tier.close()
    finally:
        far.kill()


async def test_close_ends_loads(world, seeker, clock):
    address, source = await world.source(4)
    tier = tier_over(seeker, [address], clock)
    await tier.lookup(KEYS[:2])
    source.gate = asyncio.Event()
    loading = asyncio.create_task(load(tier, seeker, KEYS[:2]))
    await until(lambda: source.port.counters["requests"] == 3)
    with pytest.raises(Expired):
        await tier.drain(clock() + 0.01)
    await tier.close()
    await tier.close()
    with pytest.raises(KVStrataError):
        await loading
    with pytest.raises(LinkBroken):
        await tier.lookup(KEYS[:2])


async def test_an_address_that_is_none_is_told_at_start(seeker, clock):
    with pytest.raises(ConfigError, match=r"'10\.0\.0\.1:7801': write tcp://host:port"):
        tier_over(seeker, ["tcp://127.0.0.1:7801", "10.0.0.1:7801"], clock)
