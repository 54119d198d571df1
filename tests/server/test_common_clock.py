"""Servers that share a database go by its time."""

import logging
import time

import pytest
from server_kit import database_url

from kvstrata_server.clock import SteadyClock
from kvstrata_server.sql.common_clock import CommonClock
from kvstrata_server.sql.database import Database


def test_a_steady_clock_never_goes_back_with_the_wall():
    wall, ticks = [1000.0], [5.0]
    clock = SteadyClock(lambda: wall[0], lambda: ticks[0])
    assert clock() == 1000.0
    wall[0] = 0.0
    ticks[0] += 2.5
    assert clock() == 1002.5
    clock.correct(10)
    assert clock() == 1012.5


@pytest.fixture
async def database(postgres_address):
    database = Database(postgres_address)
    yield database
    await database.close()


@pytest.mark.parametrize("wrong", [600.0, -600.0])
async def test_a_wrong_clock_is_set_by_the_database_s(database, caplog, wrong):
    caplog.set_level(logging.WARNING)
    clock = SteadyClock(lambda: time.time() + wrong)
    await CommonClock(database, clock).begin()
    assert abs(clock() - time.time()) < 30
    assert f" s {'ahead of' if wrong > 0 else 'behind'} the database's" in caplog.text


async def test_one_that_fell_behind_is_set_forward_and_one_ahead_is_a_problem(database, caplog):
    ticks = [0.0]
    clock = SteadyClock(time.time, lambda: time.monotonic() + ticks[0])
    common = CommonClock(database, clock)
    await common.begin()
    ticks[0] -= 100  # the machine was suspended
    before = clock()
    await common.look()
    assert 90 < clock() - before < 130
    assert not common.problem
    assert "set forward" in caplog.text
    ticks[0] += 100
    before = clock()
    await common.look()
    assert clock() >= before
    assert "ahead of the database's" in common.problem
    ticks[0] -= 100
    await common.look()
    assert not common.problem


async def test_a_database_of_one_server_s_own_tells_it_nothing(tmp_path):
    database = Database(database_url(tmp_path))
    clock = SteadyClock(lambda: 5.0, lambda: 0.0)
    common = CommonClock(database, clock)
    await common.begin()
    await common.look()
    assert (clock(), common.problem) == (5.0, "")
    await database.close()
