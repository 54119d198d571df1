import asyncio

import pytest
from reporter_kit import NAMESPACE, SaidNode, hexes

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.errors import LinkBroken, Missing, PeerRefused
from kvstrata.node.pulling import Puller
from kvstrata.testing.waiting import until

PULL = api.Command(kind="pull", transfer="t1", keys=hexes(1), deadline_in=30)
CANCEL = api.Command(kind="cancel", transfer="t1")


class Server:
    """Takes progress; what it answers is set by the test."""

    def __init__(self) -> None:
        self.posted: list[api.Progress] = []
        self.state = TransferState.RUNNING
        self.failures: list[Exception] = []

    async def post(self, progress: api.Progress) -> api.ProgressReply:
        self.posted.append(progress)
        if self.failures:
            raise self.failures.pop(0)
        return api.ProgressReply(state=self.state)

    @property
    def finals(self) -> list[api.Progress]:
        return [progress for progress in self.posted if progress.final]


@pytest.fixture
async def parts():
    node, server = SaidNode(), Server()
    sleeps: list[float] = []

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        await asyncio.sleep(0)

    puller = Puller(node, server.post, sleep=sleep)
    yield node, server, puller
    await puller.close()


async def test_taking_a_command_is_said_at_once_and_its_result_at_the_end(parts):
    node, server, puller = parts
    gate = asyncio.Event()
    node.pulling = lambda pull: gate.wait()
    await puller.handle([PULL])
    assert [(p.transfer, p.final, p.outcomes) for p in server.posted] == [("t1", False, {})]
    gate.set()
    await until(lambda: server.finals)
    (final,) = server.finals
    assert final.outcomes == {hexes(1)[0]: Outcome.STORED}
    assert final.sources == {hexes(1)[0]: "somewhere"}
    assert final.bytes == NAMESPACE.chunk_bytes[0]
    assert final.incarnation == "i1"


async def test_a_command_that_comes_again_is_not_executed_again(parts):
    node, server, puller = parts
    gate = asyncio.Event()
    node.pulling = lambda pull: gate.wait()
    await puller.handle([PULL])
    await puller.handle([PULL])
    gate.set()
    await until(lambda: server.finals)
    await puller.handle([PULL])
    assert len(node.pulls) == 1
    assert server.finals[0] == server.finals[1]


async def test_a_result_is_posted_until_it_arrives(parts):
    _, server, puller = parts
    await puller.handle([PULL])
    server.failures = [LinkBroken("gone"), LinkBroken("gone")]
    await until(lambda: len(server.finals) == 3)


async def test_a_cancel_ends_the_pull_and_is_confirmed(parts):
    node, server, puller = parts
    node.pulling = lambda pull: asyncio.get_running_loop().create_future()
    await puller.handle([PULL])
    await until(lambda: node.pulls)
    await puller.handle([CANCEL])
    await until(lambda: node.cancelled == ["t1"])
    assert [(p.final, p.detail) for p in server.posted] == [(False, ""), (True, "cancelled")]


async def test_a_cancel_of_something_unknown_is_confirmed_too(parts):
    _, server, puller = parts
    await puller.handle([CANCEL])
    assert [p.transfer for p in server.finals] == ["t1"]


@pytest.mark.parametrize("how", ["ended", "unknown"])
async def test_what_the_server_does_not_want_any_more_is_stopped(parts, how):
    node, server, puller = parts
    node.pulling = lambda pull: asyncio.get_running_loop().create_future()
    await puller.handle([PULL])
    await until(lambda: node.pulls)
    if how == "ended":
        server.state = TransferState.EXPIRED
    else:
        server.failures = [Missing("no such transfer")]
    await puller.handle([PULL])
    await until(lambda: node.cancelled == ["t1"])


@pytest.mark.parametrize(
    ("failures", "posts", "said"),
    [([PeerRefused("it is another's")], 1, "refused"), ([Missing("nobody")] * 6, 6, "gave up")],
)
async def test_a_result_that_is_not_taken_is_let_go(parts, caplog, failures, posts, said):
    node, server, puller = parts
    await puller.handle([PULL])
    server.failures = list(failures)
    await until(lambda: said in caplog.text)
    assert len(server.finals) == posts
    assert node.released == ["t1"]  # by nobody else: the server doesn't know it
    await puller.handle([PULL])
    await until(lambda: len(server.finals) == posts + 1)
    assert len(node.pulls) == 2
    assert node.released == ["t1"]


async def test_a_result_outlives_that_the_node_is_not_known_for_a_moment(parts):
    node, server, puller = parts
    await puller.handle([PULL])
    server.failures = [Missing("node 'b' was taken out of service"), LinkBroken("gone")] * 2
    await until(lambda: len(server.finals) == 5)
    assert {p.outcomes[hexes(1)[0]] for p in server.finals} == {Outcome.STORED}
    assert node.released == []


async def test_what_arrived_is_kept_until_the_server_has_the_result_and_then_held(parts):
    node, server, puller = parts
    await puller.handle([PULL])
    server.state = TransferState.DONE
    server.failures = [LinkBroken("gone")] * 3
    await until(lambda: node.heeded)
    assert node.kept == ["t1"] * 3
    assert (node.heeded, node.released) == (["t1"], [])


async def test_closing_stops_what_runs(parts):
    node, _, puller = parts
    node.pulling = lambda pull: asyncio.get_running_loop().create_future()
    await puller.handle([PULL])
    await until(lambda: node.pulls)
    await puller.close()
    assert node.cancelled == ["t1"]


async def test_of_large_results_few_are_kept(parts, monkeypatch):
    _, _, puller = parts
    monkeypatch.setattr("kvstrata.node.pulling._REMEMBERED_KEYS", 5)
    for n in range(4):
        command = PULL.model_copy(update={"transfer": f"t{n}", "keys": hexes(1, 2)})
        await puller.handle([command])
        await until(lambda n=n: f"t{n}" in puller._results)
    assert list(puller._results) == ["t2", "t3"]
    await puller.handle([PULL.model_copy(update={"transfer": "big", "keys": hexes(*range(9))})])
    await until(lambda: list(puller._results) == ["big"])


async def test_what_an_ended_transfer_holds_is_released_on_request(parts):
    node, server, puller = parts
    await puller.handle([PULL])
    await until(lambda: server.finals)
    await puller.handle([CANCEL])
    assert node.released == ["t1"]
    assert server.finals[-1].outcomes == {}


@pytest.mark.parametrize("state", list(TransferState))
async def test_what_ended_without_our_result_is_not_held(parts, state):
    node, server, puller = parts
    gate = asyncio.Event()
    node.pulling = lambda pull: gate.wait()
    server.state = TransferState.RUNNING
    await puller.handle([PULL])
    server.state = state
    gate.set()
    await until(lambda: server.finals and not puller._running)
    unwanted = state in (TransferState.CANCELLED, TransferState.EXPIRED)
    assert node.released == (["t1"] if unwanted else [])
