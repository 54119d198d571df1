from __future__ import annotations

import asyncio

import pytest

from kvstrata.errors import Busy
from kvstrata.testing.waiting import eventually, until


async def test_until_lets_other_tasks_make_it_true() -> None:
    said: list[int] = []
    asyncio.get_running_loop().call_later(0.01, said.append, 1)
    await until(lambda: said)
    with pytest.raises(AssertionError, match=r"within 0\.01 s"):
        await until(lambda: False, 0.01)


def test_eventually_gives_what_came_and_waits_through_errors_of_ours() -> None:
    answers = iter([Busy("later"), "", "there"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert eventually(ask) == "there"


def test_eventually_tells_the_last_error_and_hides_no_bug() -> None:
    def refuse() -> bool:
        raise Busy("still busy")

    def break_() -> bool:
        raise ZeroDivisionError

    with pytest.raises(AssertionError, match="still busy"):
        eventually(refuse, 0.01)
    with pytest.raises(ZeroDivisionError):
        eventually(break_)
