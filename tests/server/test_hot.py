from server_kit import TurnedClock, host, join, keys, report, running
from sqlalchemy import text

from kvstrata import api
from kvstrata.keys import Key
from kvstrata_server.lookups.hot import _MOST_WRITTEN, HotPrefixes
from kvstrata_server.sql.writes import CountHits


class Written(list):
    """Stands in for the writer."""

    def put(self, *writes: CountHits) -> None:
        self.extend(writes)


async def test_what_lookups_find_most_is_seen_in_sql(place):
    async with running(place) as r:
        await join(r.control, "a")
        await join(r.control, "b")
        await r.control.report("a", report(0, host(keys(0, 1, 2))))
        await r.control.report("b", report(0, host(keys(0, 1))))
        for asked in (keys(0, 1, 2, 3), keys(0, 1), keys(0, 1, 2), keys(7)):
            await r.control.lookup(api.LookupRequest(keys=asked))
        await r.control.lookup(api.LookupRequest(keys=keys(0), mode="all"))
        r.state.hot.flush(force=True)
        await r.state.writer.flushed(10)
        rows = await r.state.database.rows(
            text("SELECT model, hash, chunks, nodes, hits FROM hottest_prefixes")
        )
        assert [tuple(row) for row in rows] == [
            ("tiny", keys(2)[0][40:], 3, 1, 2),
            ("tiny", keys(1)[0][40:], 2, 2, 1),
        ]


def test_only_the_hottest_are_written_and_only_now_and_then():
    clock, written = TurnedClock(), Written()
    hot = HotPrefixes(written, clock)  # type: ignore[arg-type]
    for number in range(1000):
        for _ in range(1 + (number == 999)):
            hot.found(Key(b"%d" % number), 1, 1)
    hot.flush()
    assert written == []
    clock.advance(6)
    hot.flush()
    hot.flush()
    [counted] = written
    assert len(counted.hits) == _MOST_WRITTEN
    assert (counted.hits[0].key, counted.hits[0].hits) == (b"999", 2)
