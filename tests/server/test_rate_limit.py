"""How often somebody may ask."""

import pytest

from kvstrata_server.access.rate_limit import RateLimit


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("rate", [0.1, 0.4, 1.0, 3.0])
def test_who_waits_as_told_may_go_on(rate):
    clock = Clock()
    limit = RateLimit(rate, 2 * rate, clock)
    for _ in range(10):
        if wait := limit.wait("a"):
            clock.now += wait + 1e-6
            assert limit.wait("a") == 0
    assert clock.now <= 1000 + 10 / rate


def test_a_clock_that_is_set_back_locks_nobody_out():
    clock = Clock()
    limit = RateLimit(10, 20, clock)
    for _ in range(20):
        assert limit.wait("a") == 0
    clock.now -= 3600
    assert 0 < limit.wait("a") <= 0.1
    clock.now += 0.1001
    assert limit.wait("a") == 0
