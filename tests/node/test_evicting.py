import asyncio

import pytest
from reporter_kit import NAMESPACE, SaidNode, hexes, key

from kvstrata import api
from kvstrata.errors import Busy, Malformed
from kvstrata.node.evicting import Evicting
from kvstrata.node.reported import Drop, Shed
from kvstrata.testing.waiting import until

DIGEST = NAMESPACE.digest.hex()


def command(eviction="e1", **what):
    return api.Command(kind="evict", transfer=eviction, deadline_in=30, **what)


class Server:
    def __init__(self) -> None:
        self.posted: list[tuple[str, api.EvictionResult]] = []
        self.failures: list[Exception] = []
        self.reported = asyncio.Event()
        self.reported.set()

    async def all_reported(self) -> None:
        await self.reported.wait()

    async def post(self, eviction: str, result: api.EvictionResult) -> None:
        self.posted.append((eviction, result))
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture
async def parts():
    node, server = SaidNode(stores=("disk",)), Server()
    node.gain("host", 1, 2)
    node.gain("disk", 2, 3)
    evicting = Evicting(node, server.post, server.all_reported)
    yield node, server, evicting
    await evicting.close()


async def test_what_is_dropped_is_said_by_tier(parts):
    node, server, evicting = parts
    evicting.handle([command(keys=hexes(2, 9), tiers=["host"])])
    await until(lambda: server.posted)
    assert node.drops == [Drop(keys=[key(2), key(9)], tiers=("host",))]
    assert server.posted == [
        ("e1", api.EvictionResult(incarnation="i1", dropped={"host": 1})),
    ]


async def test_a_namespace_goes_from_all_tiers(parts):
    node, server, evicting = parts
    evicting.handle([command(digests=[DIGEST])])
    await until(lambda: server.posted)
    assert server.posted[0][1].dropped == {"host": 2, "disk": 2}
    assert node.held == {"host": {}, "disk": {}}


async def test_by_the_byte(parts):
    node, server, evicting = parts
    prefix = key(1)[:20]
    asked = {"sizes": {prefix.hex(): 512}, "amounts": {"disk": 513}}
    evicting.handle([api.Command(kind="shed", transfer="e1", deadline_in=30, **asked)])
    await until(lambda: server.posted)
    assert node.sheds == [Shed({prefix: 512}, {"disk": 513})]
    result = api.EvictionResult(incarnation="i1", dropped={"disk": 2}, reported=True)
    assert server.posted == [("e1", result)]
    evicting.handle([api.Command(kind="shed", transfer="e1", deadline_in=30, **asked)])
    await until(lambda: len(server.posted) == 2)
    assert len(node.sheds) == 1


@pytest.mark.parametrize("in_time", [True, False])
async def test_by_the_byte_is_said_after_it_was_reported_or_before_the_deadline(parts, in_time):
    node, server, evicting = parts
    server.reported.clear()
    asked = {"sizes": {key(1)[:20].hex(): 512}, "amounts": {"disk": 513}}
    deadline = 30 if in_time else 0.02
    evicting.handle([api.Command(kind="shed", transfer="e1", deadline_in=deadline, **asked)])
    await until(lambda: not node.held["disk"])
    await asyncio.sleep(0)
    assert server.posted == []
    if in_time:
        server.reported.set()
    await until(lambda: server.posted)
    result = api.EvictionResult(incarnation="i1", dropped={"disk": 2}, reported=in_time)
    assert server.posted == [("e1", result)]


@pytest.mark.parametrize("sizes", [{"00": 1}, {"zz" * 20: 1}, {"00" * 20: 0}])
async def test_by_the_byte_of_nonsense(parts, sizes):
    node, server, evicting = parts
    asked = {"sizes": sizes, "amounts": {"host": 1}}
    evicting.handle([api.Command(kind="shed", transfer="e1", deadline_in=30, **asked)])
    await until(lambda: server.posted)
    assert server.posted[0][1].dropped is None
    assert node.sheds == []


async def test_a_command_that_comes_again_is_not_done_again(parts):
    node, server, evicting = parts
    server.failures.append(Busy("not now"))
    evicting.handle([command(keys=hexes(1))])
    await until(lambda: server.posted)
    node.gain("host", 1)  # computed anew: this one is to stay
    evicting.handle([command(keys=hexes(1))])
    await until(lambda: len(server.posted) == 2)
    assert len(node.drops) == 1
    assert server.posted[0] == server.posted[1]
    assert key(1) in node.held["host"]


async def test_one_under_way_is_not_begun_twice(parts):
    node, server, evicting = parts
    gate = asyncio.Event()
    node.dropping = lambda asked: gate.wait()
    evicting.handle([command(keys=hexes(1))])
    await until(lambda: node.drops)
    evicting.handle([command(keys=hexes(1))])
    gate.set()
    await until(lambda: server.posted)
    assert len(node.drops) == len(server.posted) == 1


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"keys": ["zz"]}, "ValueError"),
        ({"keys": ["00"]}, "Malformed"),
        ({"digests": ["00"]}, "is no namespace digest"),
    ],
)
async def test_nonsense_is_answered_with_what_is_wrong(parts, what, said):
    node, server, evicting = parts
    evicting.handle([command(**what)])
    await until(lambda: server.posted)
    assert server.posted[0][1].dropped is None
    assert said in server.posted[0][1].detail
    assert node.drops == []


async def test_what_fails_says_so_and_so_does_what_takes_too_long(parts):
    node, server, evicting = parts

    def fail(asked):
        raise Malformed("no tier 'tape' here")

    node.dropping = fail
    evicting.handle([command(keys=hexes(1), tiers=["tape"])])
    await until(lambda: server.posted)
    assert server.posted[0][1].detail == "Malformed: no tier 'tape' here"
    node.dropping = lambda asked: asyncio.Event().wait()
    late = api.Command(kind="evict", transfer="e2", keys=hexes(1), deadline_in=0.0)
    evicting.handle([late])
    await until(lambda: len(server.posted) == 2)
    assert server.posted[1][1].detail == "not done before its deadline"
