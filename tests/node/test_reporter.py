import asyncio
from contextlib import asynccontextmanager

import pytest
from reporter_kit import NAMESPACE, Link, SaidNode, hexes, key, reporter_of

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.config import ControlSettings, ServerSettings
from kvstrata.control import ControlPlane
from kvstrata.errors import ConfigError
from kvstrata.node.reporter import Reporter
from kvstrata.testing.waiting import until
from kvstrata_server.app import create_app
from kvstrata_server.scheduling.evictions import Shed


@asynccontextmanager
async def app_on(path, name: str = "control", **settings: object):
    url = f"sqlite+aiosqlite:///{path / name}.sqlite"
    app = create_app(ServerSettings(database=url, **settings))
    async with app.router.lifespan_context(app):
        yield app


@asynccontextmanager
async def reporting(node: SaidNode, link: Link, **more: object):
    reporter = reporter_of(node, link, **more)
    task = asyncio.create_task(reporter.run())
    try:
        yield reporter
    finally:
        await reporter.close()
        await task


def keys_at(app, node: str, store: str | None = None) -> set[bytes]:
    places = app.state.control.places
    return set(places.index.keys_at(places.location(node, store)))


def knows(app, node: SaidNode) -> bool:
    """Whether the server's index says what the node holds."""
    if node.name not in app.state.control.cluster.nodes:
        return False
    return all(
        keys_at(app, node.name, None if location == "host" else location) == set(held)
        for location, held in node.held.items()
    )


async def test_it_registers_and_reports_what_is_there_and_what_changes(tmp_path):
    node = SaidNode(stores=("s",))
    node.gain("host", 1, 2)
    node.gain("s", 3)
    async with app_on(tmp_path) as app, reporting(node, Link(app)) as reporter:
        await until(lambda: knows(app, node))
        assert (reporter.status, reporter.registered) == ("connected", True)
        node.lose("host", 1)
        node.gain("s", 1, 4)
        await until(lambda: knows(app, node))
        assert node.snapshots == 1


async def test_heartbeats_tell_how_the_node_is(tmp_path):
    node = SaidNode()
    async with app_on(tmp_path) as app, reporting(node, Link(app)):
        cluster = app.state.control.cluster
        await until(lambda: "a" in cluster.nodes and cluster.nodes["a"].host is not None)
        assert cluster.info(cluster.nodes["a"]).host == node.host_use()
        node.trouble = "fs: disk is full"
        await until(lambda: not cluster.nodes["a"].healthy)
        assert cluster.nodes["a"].detail == "fs: disk is full"


async def test_the_server_knows_the_node_s_version_after_it_began_anew(tmp_path):
    node, link = SaidNode(), Link()
    node.version = "1.2.3"
    for name in ("first", "second"):
        async with app_on(tmp_path, name) as app:
            link.app = app
            cluster = app.state.control.cluster
            async with reporting(node, link):
                await until(lambda: "a" in cluster.nodes)  # noqa: B023
                assert cluster.info(cluster.nodes["a"]).version == "1.2.3"
                # Not kept in SQL, but said again and again.
                cluster.nodes["a"].version = ""
                await until(lambda: cluster.nodes["a"].version == "1.2.3")  # noqa: B023


async def test_a_server_of_an_older_version_refuses_and_both_versions_are_said(
    tmp_path, caplog, monkeypatch
):
    class LaterRegistration(api.NodeRegistration):
        future: int

    node = SaidNode()
    node.version = "99.0"
    said = {**node.registration().model_dump(), "future": 1}
    monkeypatch.setattr(node, "registration", lambda: LaterRegistration(**said))
    async with app_on(tmp_path) as app, reporting(node, Link(app)) as reporter:
        await until(lambda: reporter.status.startswith("refused"))
        server = app.state.control.health().version
        wanted = f"this node's version is 99.0, the server's {server}: servers are to be upgraded"
        assert "future" in reporter.status
        assert wanted in reporter.status
        assert wanted in caplog.text


async def test_a_server_that_comes_late_finds_everything(tmp_path):
    node = SaidNode()
    link = Link()
    async with reporting(node, link) as reporter:
        await until(lambda: len(link.asked) > 3)
        assert reporter.status.startswith("unreachable: control plane at http://test")
        node.gain("host", 1)
        async with app_on(tmp_path) as app:
            link.app = app
            await until(lambda: knows(app, node))
            assert reporter.status == "connected"


async def test_who_finds_the_server_back_tells_those_that_wait_to_try_again(tmp_path):
    node = SaidNode()

    async def patient(seconds: float) -> None:
        between = seconds in (0.002, 0.02)  # reports, and heartbeats; else it failed
        await asyncio.sleep(seconds if between else 3600)

    async with app_on(tmp_path) as app:
        link = Link(app)
        async with reporting(node, link, sleep=patient) as reporter:
            await until(lambda: knows(app, node))
            link.loses = lambda path: path.endswith("/heartbeat")
            await until(lambda: reporter.status.startswith("unreachable"))
            await asyncio.sleep(0.02)
            assert reporter.status.startswith("unreachable")  # nobody was asked anything
            link.loses = lambda path: False
            beats = link.asked.count("PUT /v1/nodes/a/heartbeat")
            node.gain("host", 1)
            await until(lambda: link.asked.count("PUT /v1/nodes/a/heartbeat") > beats + 1)
            assert reporter.status == "connected"


async def test_a_cut_link_is_taken_up_without_a_snapshot(tmp_path):
    node = SaidNode()
    async with app_on(tmp_path) as app:
        link = Link(app)
        async with reporting(node, link) as reporter:
            await until(lambda: knows(app, node) and node.snapshots)
            link.down = True
            await until(lambda: reporter.status.startswith("unreachable"))
            for number in range(50):
                node.gain("host", number)
            node.lose("host", 7)
            link.down = False
            await until(lambda: knows(app, node))
            assert node.snapshots == 1
            assert link.asked.count("POST /v1/nodes") == 1
            # Though its poll for commands is not answered for a long time.
            await until(lambda: reporter.status == "connected")


async def test_lost_answers_do_no_harm(tmp_path):
    node = SaidNode()
    async with app_on(tmp_path) as app:
        link = Link(app)
        lost = 0

        def every_other(path: str) -> bool:
            nonlocal lost
            lost += path.endswith("/reports")
            return path.endswith("/reports") and lost % 2 == 1

        link.loses = every_other
        async with reporting(node, link):
            for number in range(5):
                node.gain("host", number)
                await until(lambda: knows(app, node))
            assert lost > 5
            assert node.snapshots == 1


async def test_a_server_that_forgot_everything_is_told_again(tmp_path):
    node = SaidNode(stores=("s",))
    node.gain("host", 1)
    node.gain("s", 2)
    link = Link()
    async with reporting(node, link):
        for name in ("first", "second"):
            async with app_on(tmp_path, name) as app:
                link.app = app
                await until(lambda app=app: knows(app, node))
                link.app = None
                node.gain("host", 3)


async def test_a_server_that_missed_the_last_report_hears_of_it_by_heartbeat(tmp_path):
    node = SaidNode()
    async with app_on(tmp_path) as app, reporting(node, Link(app)):
        node.gain("host", 1)
        await until(lambda: knows(app, node))
        cluster = app.state.control.cluster
        # As after a restart from SQL that a kill had left one report behind.
        cluster.nodes["a"].next_seq -= 1
        cluster.index.clear(cluster.places.location("a", None))
        await until(lambda: knows(app, node))
        assert node.snapshots == 2


async def test_a_node_taken_out_of_service_by_mistake_comes_back(tmp_path):
    node = SaidNode()
    node.gain("host", 1)
    async with app_on(tmp_path) as app, reporting(node, Link(app)):
        await until(lambda: knows(app, node))
        app.state.control.cluster.deregister("a", None)
        await until(lambda: knows(app, node))


async def test_another_node_with_its_id_is_seen(tmp_path, caplog):
    ours = SaidNode(incarnation="i1")
    async with app_on(tmp_path) as app, reporting(ours, Link(app)) as reporter:
        await until(lambda: knows(app, ours) and ours.snapshots)
        statuses = []

        async def watch() -> None:
            while not any("another id" in s for s in statuses):
                statuses.append(reporter.status)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        app.state.control.cluster.register(SaidNode(incarnation="i2").registration())
        await asyncio.wait_for(watching, 20)
        told = [r for r in caplog.records if "another id" in r.getMessage()]
        assert [r.levelname for r in told][:1] == ["WARNING"]
        # It may as well have been a restored database: it takes its place again, in time.
        await until(lambda: app.state.control.cluster.nodes["a"].incarnation == "i1")


async def test_closing_says_goodbye(tmp_path):
    node = SaidNode()
    node.gain("host", 1)
    async with app_on(tmp_path) as app:
        async with reporting(node, Link(app)) as reporter:
            await until(lambda: knows(app, node))
        assert app.state.control.cluster.nodes["a"].gone
        assert reporter.status == "closed"
        assert keys_at(app, "a") == set()
        await reporter.run()  # a supervisor may start it once more
        assert app.state.control.cluster.nodes["a"].gone


async def test_closing_without_a_server_is_quick():
    link = Link()
    async with reporting(SaidNode(), link):
        await until(lambda: link.asked)


async def test_a_defect_in_the_node_is_survived(tmp_path, monkeypatch, caplog):
    node = SaidNode()
    async with app_on(tmp_path) as app, reporting(node, Link(app)):
        await until(lambda: knows(app, node) and node.snapshots)
        failures = []

        def fail() -> list:
            failures.append(1)
            raise RuntimeError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(node, "take_changes", fail)
            await until(lambda: len(failures) > 2)
        node.gain("host", 1)
        await until(lambda: knows(app, node))
        assert "planted" in caplog.text


def test_an_impossible_address_is_a_config_error():
    with pytest.raises(ConfigError, match="http://"):
        Reporter(ControlSettings(url="127.0.0.1:7800"), SaidNode())


# ---------------------------------------------------------------- transfers


@asynccontextmanager
async def pair(tmp_path, **more: object):
    """Source `a` said by hand, target `b` with a reporter, and a client to ask with."""
    async with app_on(tmp_path) as app:
        link = Link(app)
        source = SaidNode("a")
        source.gain("host", 1, 2)
        target = SaidNode("b")
        async with (
            reporting(source, Link(app)),
            reporting(target, link, **more),
            ControlPlane("http://test", transport=Link(app)) as client,
        ):
            await until(lambda: knows(app, source) and knows(app, target))
            yield target, client, link


async def ended(client: ControlPlane, transfer: str) -> api.TransferInfo:
    async with asyncio.timeout(20):
        while not (info := await client.get_transfer(transfer)).state.ended:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    return info


def asked(**more: object) -> api.TransferRequest:
    return api.TransferRequest(target="b", keys=hexes(1, 2), **more)


async def test_a_transfer_is_executed_and_its_outcome_posted(tmp_path):
    clock = [1000.0]
    async with pair(tmp_path, clock=lambda: clock[0]) as (target, client, _):
        made = await client.create_transfer(asked(deadline=30, hold=9, byte_budget=4096))
        info = await ended(client, made.id)
        assert info.state is TransferState.DONE
        assert info.bytes > 0
        assert {k.source for k in info.keys} == {"somewhere"}
        (pull,) = target.pulls
        assert (pull.transfer, list(pull.keys), pull.hold) == (made.id, [key(1), key(2)], 9)
        assert [(s.node, s.address) for s in pull.sources] == [("a", "tcp://a.test:7801")]
        assert [len(d) > 0 for d in pull.namespaces] == [True]
        assert 1000 < pull.deadline <= 1030
        assert pull.byte_budget == 4096


async def test_a_node_that_is_drained_stores_what_is_only_there_and_settles(tmp_path):
    node, other = SaidNode(stores=("nfs",)), SaidNode("b", stores=("nfs",))
    node.gain("host", 1, 2, 3)
    node.gain("nfs", 3)
    async with app_on(tmp_path) as app, reporting(node, Link(app)), reporting(other, Link(app)):
        drains = app.state.control.drains
        await until(lambda: knows(app, node) and knows(app, other))
        await drains.create("a", api.DrainRequest())
        await until(lambda: node.draining)
        found = app.state.control.cluster.nodes["a"]
        await until(lambda: found.drain is api.DrainState.DRAINED)
        info = await drains.get("a")
        assert (info.may_stop, info.stored) == (True, {"nfs": 2})
        assert {each for asked in node.written for each in asked.keys} == {key(1), key(2)}
        await drains.cancel("a")
        await until(lambda: not node.draining)


async def test_it_settles_once_and_until_it_takes_new_chunks():
    node = SaidNode()
    node.gain("host", 1, 2)
    draining, settled = True, []

    class Heard:
        async def heartbeat(self, node_id, beat):
            settled.append(beat.settled)
            return api.HeartbeatReply(draining=draining)

        async def report(self, node_id, report):
            return api.ReportReply(applied=True, next_seq=report.seq + 1)

    reporter = Reporter(
        ControlSettings(url="http://unused"),
        node,
        control=Heard(),
        sleep=lambda s: asyncio.sleep(0),
    )
    reporter._incarnation = node.incarnation
    await reporter._heartbeat()
    await reporter._heartbeat()  # what it has is not reported yet
    for _ in range(2):
        await reporter._report()
    for number in (1, 2):  # evictions go on, and are not waited for
        node.lose("host", number)
        await reporter._heartbeat()
    draining = False
    await reporter._heartbeat()
    draining = True
    node.gain("host", 3)
    for _ in range(2):
        await reporter._heartbeat()
    assert settled == [False, False, True, True, True, False, False]


async def test_an_answer_that_was_overtaken_says_nothing_of_now():
    node = SaidNode()
    asked = []

    class Slow:
        async def heartbeat(self, node, beat):
            asked.append(asyncio.get_running_loop().create_future())
            return await asked[-1]

    reporter = Reporter(ControlSettings(url="http://unused"), node, control=Slow())
    reporter._incarnation = node.incarnation
    beats = [asyncio.create_task(reporter._heartbeat()) for _ in range(3)]
    await until(lambda: len(asked) == 3)
    for which, draining, now in ((1, True, True), (0, False, True), (2, False, False)):
        asked[which].set_result(api.HeartbeatReply(draining=draining))
        await beats[which]
        assert node.draining is now


async def test_cancelling_reaches_the_pull(tmp_path):
    async with pair(tmp_path) as (target, client, _):
        target.pulling = lambda pull: asyncio.get_running_loop().create_future()
        made = await client.create_transfer(asked())
        await until(lambda: target.pulls)
        info = await client.cancel_transfer(made.id)
        assert info.state is TransferState.CANCELLED
        await until(lambda: target.cancelled == [made.id])


async def test_a_pull_that_never_ends_is_cut_off_at_its_deadline(tmp_path):
    async with pair(tmp_path) as (target, client, _):
        target.pulling = lambda pull: asyncio.get_running_loop().create_future()
        made = await client.create_transfer(asked(deadline=0.2))
        info = await ended(client, made.id)
        assert info.state in (TransferState.EXPIRED, TransferState.FAILED)
        await until(lambda: target.cancelled == [made.id])


async def test_a_pull_that_fails_says_why(tmp_path):
    def fail(pull: object) -> None:
        raise RuntimeError("no slots")

    async with pair(tmp_path) as (target, client, _):
        target.pulling = fail
        info = await ended(client, (await client.create_transfer(asked())).id)
        assert (info.state, info.detail) == (TransferState.FAILED, "RuntimeError: no slots")
        assert [k.outcome for k in info.keys] == [Outcome.FAILED, Outcome.FAILED]


async def test_lost_answers_do_not_execute_it_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstrata_server.scheduling.outgoing._REDELIVERY", 0.05)
    async with pair(tmp_path) as (target, client, link):
        losses = {"/commands": 1, "/progress": 3}

        def lossy(path: str) -> bool:
            for end in losses:
                if path.endswith(end) and losses[end] > 0:
                    losses[end] -= 1
                    return True
            return False

        link.loses = lossy
        made = await client.create_transfer(asked())
        assert (await ended(client, made.id)).state is TransferState.DONE
        assert [pull.transfer for pull in target.pulls] == [made.id]


async def test_a_few_run_at_once_and_the_others_wait(tmp_path):
    async with pair(tmp_path) as (target, client, _):
        gate = asyncio.Event()
        target.pulling = lambda pull: gate.wait()
        made = [(await client.create_transfer(asked())).id for _ in range(6)]
        await until(lambda: len(target.pulls) == 4)
        gate.set()
        for transfer in made:
            assert (await ended(client, transfer)).state is TransferState.DONE
        assert sorted(pull.transfer for pull in target.pulls) == sorted(made)


async def test_changes_do_not_pile_up_while_the_server_was_never_there():
    node, link = SaidNode(), Link()
    link.down = True
    async with reporting(node, link):
        for n in range(20):
            node.gain("host", n)
            node.lose("host", n)
            tries = len(link.asked)
            await until(lambda: len(link.asked) > tries + 1)  # noqa: B023 - awaited here
        assert len(node.placements._last.get("host", {})) < 5


async def test_what_was_given_up_by_the_byte_is_said_when_it_is_reported(tmp_path):
    node = SaidNode()
    node.gain("host", *range(9))
    async with app_on(tmp_path) as app:
        link, evictions = Link(app), app.state.control.evictions
        async with reporting(node, link):
            await until(lambda: knows(app, node))
            lost = iter([True] * 5)
            link.loses = lambda path: path.endswith("/reports") and next(lost, False)
            prefix, nbytes = key(0)[:20].hex(), NAMESPACE.chunk_bytes[0]
            shed = Shed({"host": 4 * nbytes}, {prefix: nbytes})
            made = await evictions.shed("", {"a": shed}, 30)
            await until(lambda: not evictions.sheds_of(""))
            assert len(node.held["host"]) == 5
            assert knows(app, node)
            (told,) = (await evictions.get(made.id)).nodes
            assert (told.dropped, told.reported) == ({"host": 4}, True)
