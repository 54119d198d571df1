import asyncio

import pytest
from reporter_kit import SaidNode, hexes, key

from kvstrata import api
from kvstrata.api import Outcome
from kvstrata.errors import Busy, Malformed
from kvstrata.node.reported import WriteBack
from kvstrata.node.storing import Storing
from kvstrata.testing.waiting import until


def command(*numbers, order="o1", **more):
    what = {"deadline_in": 30.0, "stores": ["disk"], "keys": hexes(*numbers)} | more
    return api.Command(kind="store", transfer=order, **what)


class Server:
    def __init__(self) -> None:
        self.posted: list[tuple[str, api.StoreResult]] = []
        self.failures: list[Exception] = []

    async def post(self, order: str, result: api.StoreResult) -> None:
        self.posted.append((order, result))
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture
async def parts():
    node, server = SaidNode(stores=("disk",)), Server()
    node.gain("host", 1, 2)
    storing = Storing(node, server.post)
    yield node, server, storing
    await storing.close()


async def test_what_became_of_each_key_is_said(parts):
    node, server, storing = parts
    storing.handle([command(1, 2, 9)])
    await until(lambda: server.posted)
    assert node.written == [WriteBack("o1", [key(1), key(2), key(9)], ["disk"])]
    told = dict(zip(hexes(1, 2, 9), (Outcome.STORED, Outcome.STORED, Outcome.MISSING), strict=True))
    expected = api.StoreResult(
        incarnation="i1", outcomes=told, stores=dict.fromkeys(hexes(1, 2), "disk")
    )
    assert server.posted == [("o1", expected)]


async def test_an_order_that_comes_again_is_said_and_not_done_again(parts):
    node, server, storing = parts
    server.failures.append(Busy("not now"))
    for times in (1, 2):
        storing.handle([command(1)])
        await until(lambda times=times: len(server.posted) == times)
    assert len(node.written) == 1
    assert server.posted[0] == server.posted[1]


async def test_one_under_way_is_not_begun_twice(parts):
    node, server, storing = parts
    gate = asyncio.Event()
    node.writing = lambda asked, written: gate.wait()
    storing.handle([command(1)])
    await until(lambda: node.written)
    storing.handle([command(1)])
    gate.set()
    await until(lambda: server.posted)
    assert len(node.written) == len(server.posted) == 1


async def test_what_was_done_before_the_deadline_is_said(parts):
    node, server, storing = parts

    async def slow(asked, written):
        written.outcomes[key(1)] = Outcome.STORED
        written.stores[key(1)] = "disk"
        await asyncio.Event().wait()

    node.writing = slow
    storing.handle([command(1, 2, deadline_in=0.01)])
    await until(lambda: server.posted)
    result = server.posted[0][1]
    assert result.outcomes == dict(zip(hexes(1, 2), (Outcome.STORED, Outcome.FAILED), strict=True))
    assert result.detail == "not done before its deadline"


@pytest.mark.parametrize(
    ("what", "said"), [({"keys": ["zz"]}, "ValueError"), ({"stores": ["tape"]}, "'tape'")]
)
async def test_what_can_not_be_done_says_why(parts, what, said):
    node, server, storing = parts

    def refuse(asked, written):
        raise Malformed(f"no store {asked.stores} here")

    node.writing = refuse
    storing.handle([command(1, **what)])
    await until(lambda: server.posted)
    assert server.posted[0][1].outcomes == {}
    assert said in server.posted[0][1].detail
