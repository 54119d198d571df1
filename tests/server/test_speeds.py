import pytest
from server_kit import CHUNK_BYTES, host, join, keys, report, running

from kvstrata import api
from kvstrata_server.scheduling.speeds import Speeds


def test_a_link_is_as_fast_as_it_lately_was():
    speeds = Speeds()
    assert speeds.estimate("a", "t", 100, 0, 4) is None
    speeds.saw("a", "t", 1000, 10)
    assert speeds.estimate("a", "t", 100, 0, 4) == pytest.approx(1.0)
    for _ in range(30):
        speeds.saw("a", "t", 1000, 1)
    assert speeds.estimate("a", "t", 1000, 0, 4) == pytest.approx(1.0, rel=0.02)
    # Of a link that carried nothing yet, as all that came to the target.
    assert speeds.estimate("b", "t", 1000, 0, 4) == pytest.approx(1.0, rel=0.02)
    speeds.saw("b", "t", 1000, 4)
    assert speeds.estimate("b", "t", 1000, 0, 4) == pytest.approx(4.0)
    assert speeds.estimate("a", "other", 1000, 0, 4) is None


def test_what_moved_nothing_or_in_no_time_tells_nothing():
    speeds = Speeds()
    speeds.saw("a", "t", 0, 10)
    speeds.saw("a", "t", 10, 0)
    assert speeds.estimate("a", "t", 100, 0, 4) is None


def test_what_waits_before_is_moved_by_all_that_run_at_once():
    speeds = Speeds()
    speeds.saw("a", "t", 100, 1)
    assert speeds.estimate("a", "t", 100, 800, 4) == pytest.approx(1 + 2)


def test_it_is_bounded():
    speeds = Speeds(most=4)
    for n in range(10):
        speeds.saw("a", f"t{n}", 100, 1)
    assert [speeds.estimate("a", f"t{n}", 100, 0, 1) is None for n in (0, 7, 8, 9)] == [
        True,
        True,
        False,
        False,
    ]


async def test_dry_runs_and_what_is_queued_have_an_estimate(tmp_path):
    async with running(tmp_path, transfers_per_node=1) as r:
        for node in "abt":
            await join(r.control, node)
        await r.control.report("a", report(0, host(keys(*range(10)))))

        async def ask(*numbers, **more):
            asked = api.TransferRequest(target="t", keys=keys(*numbers), **more)
            made = await r.control.create_transfer(asked)
            r.clock.advance(0.01)
            return made

        async def post(transfer, final, nbytes):
            return await r.control.progress(
                "t",
                api.Progress(incarnation="i1", transfer=transfer, final=final, bytes=nbytes),
            )

        first = await ask(0, 1, 2, 3)
        assert first.estimate is None  # nothing is known
        await r.control.commands("t", "i1")
        await post(first.id, False, 0)
        r.clock.advance(8)
        await post(first.id, True, 4 * CHUNK_BYTES)  # two seconds a chunk
        assert (await r.control.get_transfer(first.id)).estimate is None  # it is over
        dry = await ask(0, 1, dry_run=True)
        assert (dry.bytes, dry.estimate) == (2 * CHUNK_BYTES, pytest.approx(4))
        queued = await ask(0, 1, 2)
        assert queued.estimate == pytest.approx(6)
        behind = await ask(5)
        assert behind.estimate == pytest.approx(6 + 2)
        assert (await ask(6, priority=9, dry_run=True)).estimate == pytest.approx(2)
        await r.control.commands("t", "i1")
        await post(queued.id, False, 2 * CHUNK_BYTES)
        shown = await r.control.get_transfer(behind.id)
        assert shown.estimate == pytest.approx(2 + 2)
        nothing = await ask(77, dry_run=True)
        # Nobody has it; it would be known after what waits.
        assert (nothing.bytes, nothing.estimate) == (0, pytest.approx(2 + 2))
