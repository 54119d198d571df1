from kvstrata.backoff import Backoff


def test_waits_double_up_to_the_cap_and_begin_anew():
    backoff = Backoff(0.1, 1.0, rand=lambda: 1.0)
    assert [round(backoff.next(), 6) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.reset()
    assert backoff.next() == 0.1


def test_the_upper_half_is_random():
    assert Backoff(1.0, 8.0, rand=lambda: 0.0).next() == 0.5
    backoff = Backoff(1.0, 8.0)
    assert all(0.5 <= backoff.next() <= 8.0 for _ in range(5000))
