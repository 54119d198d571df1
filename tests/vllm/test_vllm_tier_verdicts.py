"""What is known of chunks: asked once, shared, within a deadline, no longer than somebody asks."""

from __future__ import annotations

from collections import deque

import pytest
from vllm_fakes import Clock

from kvstrata_adapters.engines.vllm.tier_shelves import Found
from kvstrata_adapters.engines.vllm.tier_verdicts import MISSING, Verdicts

pytestmark = pytest.mark.vllm

A, B = b"a", b"b"


class Desk:
    def __init__(self) -> None:
        self.clock = Clock()
        self.asked: list[tuple[int, list[bytes]]] = []
        self.answers: deque[Found] = deque()
        self.verdicts = Verdicts(
            lambda batch, keys: self.asked.append((batch, keys)), self.answers, 1.0, self.clock
        )

    def answer(self, *tiers: int, batch: int = -1) -> None:
        self.answers.append(Found(self.asked[batch][0], list(tiers)))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_nothing_is_known_before_the_answer(desk: Desk) -> None:
    assert desk.verdicts.lookup(A, "r") is None
    assert desk.verdicts.lookup(B, "r") is None
    assert desk.asked == []
    desk.verdicts.flush()
    assert [keys for _, keys in desk.asked] == [[A, B]]
    assert desk.verdicts.lookup(A, "r") is None
    desk.answer(1, MISSING)
    assert desk.verdicts.lookup(A, "r") == desk.verdicts.tier_of(A) == 1
    assert desk.verdicts.lookup(B, "r") == MISSING


def test_a_step_without_questions_asks_nothing(desk: Desk) -> None:
    desk.verdicts.flush()
    desk.verdicts.lookup(A, "r")
    desk.verdicts.flush()
    desk.verdicts.flush()
    desk.verdicts.lookup(A, "r")
    desk.verdicts.lookup(A, "other")
    desk.verdicts.flush()
    assert len(desk.asked) == 1


def test_a_verdict_lives_as_long_as_the_last_request(desk: Desk) -> None:
    for request in ("r", "s"):
        desk.verdicts.lookup(A, request)
    desk.verdicts.flush()
    desk.answer(0)
    desk.verdicts.flush()
    desk.verdicts.forget("r")
    assert desk.verdicts.lookup(A, "t") == 0
    desk.verdicts.forget("s")
    desk.verdicts.forget("t")
    assert len(desk.verdicts) == 0
    assert desk.verdicts.lookup(A, "u") is None


def test_a_question_under_way_serves_the_next_that_asks(desk: Desk) -> None:
    desk.verdicts.lookup(A, "r")
    desk.verdicts.flush()
    desk.verdicts.forget("r")
    desk.verdicts.lookup(A, "s")
    desk.verdicts.flush()
    assert len(desk.asked) == 1
    desk.answer(0)
    assert desk.verdicts.lookup(A, "s") == 0


def test_questions_that_nobody_waits_for_leave_nothing(desk: Desk) -> None:
    desk.verdicts.lookup(A, "r")
    desk.verdicts.forget("r")
    desk.verdicts.flush()
    assert desk.asked == []
    desk.verdicts.lookup(A, "s")
    desk.verdicts.flush()
    desk.verdicts.forget("s")
    desk.answer(0)
    desk.verdicts.flush()
    desk.verdicts.lookup(B, "t")
    desk.verdicts.flush()
    desk.verdicts.forget("t")
    desk.clock.now += 2
    desk.verdicts.flush()
    assert len(desk.verdicts) == 0


def test_no_answer_in_time_is_a_miss_and_a_late_one_changes_nothing(desk: Desk) -> None:
    desk.verdicts.lookup(A, "r")
    desk.verdicts.flush()
    desk.clock.now += 0.9
    desk.verdicts.flush()
    assert desk.verdicts.lookup(A, "r") is None
    desk.clock.now += 0.2
    desk.verdicts.flush()
    assert desk.verdicts.lookup(A, "r") == MISSING
    assert desk.verdicts.timeouts == 1
    desk.answer(0, batch=0)
    assert desk.verdicts.lookup(A, "r") == MISSING
    # Another request asks anew, and a late answer is not its own.
    assert desk.verdicts.lookup(A, "s") is None
    desk.verdicts.flush()
    desk.answer(0, batch=0)
    assert desk.verdicts.lookup(A, "s") is None
    desk.answer(0)
    assert desk.verdicts.lookup(A, "s") == desk.verdicts.lookup(A, "r") == 0


def test_while_nothing_answers_nobody_waits(desk: Desk) -> None:
    desk.verdicts.lookup(A, "r")
    desk.verdicts.flush()
    desk.clock.now += 2
    desk.verdicts.flush()
    # It only asks whether anybody is there, now and then.
    assert [keys for _, keys in desk.asked] == [[A], []]
    for _ in range(3):
        desk.verdicts.lookup(B, "s")
        desk.verdicts.flush()
    assert desk.verdicts.lookup(B, "s") == MISSING
    assert len(desk.asked) == 2
    desk.clock.now += 2
    desk.verdicts.flush()
    assert [keys for _, keys in desk.asked] == [[A], [], []]
    desk.answer()
    assert desk.verdicts.lookup(B, "t") is None
    desk.verdicts.flush()
    assert [keys for _, keys in desk.asked][3:] == [[B]]


def test_what_failed_to_load_stays_missing_for_whom_it_failed(desk: Desk) -> None:
    desk.verdicts.lookup(A, "r")
    desk.verdicts.flush()
    desk.answer(0)
    assert desk.verdicts.lookup(A, "r") == 0
    desk.verdicts.missing([A, B])
    for _ in range(3):
        assert desk.verdicts.lookup(A, "r") == MISSING
        desk.verdicts.flush()
    assert len(desk.asked) == 1
    assert desk.verdicts.lookup(A, "s") is None
    desk.verdicts.flush()
    assert [keys for _, keys in desk.asked] == [[A], [A]]


def test_answers_that_do_not_fit_settle_what_they_can(desk: Desk) -> None:
    desk.answers.append(Found(99, [0]))
    desk.verdicts.lookup(A, "r")
    desk.verdicts.lookup(B, "r")
    desk.verdicts.flush()
    desk.answer(0)
    assert desk.verdicts.lookup(A, "r") == 0
    assert desk.verdicts.lookup(B, "r") is None
