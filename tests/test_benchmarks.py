"""What all benchmarks print, and that each starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_a_figure_is_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    from figures import Figure, show

    there = Figure("store", 1.23456, 2.0, 4.0, settings={"rounds": 3})
    absent = Figure("find", 0.5, None, 1.0, "us")
    free = Figure("load", 1.0, 4.0, None)
    show("title", [there, absent, free], as_json=True)
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "name": "store",
        "value": 1.235,
        "unit": "GB/s",
        "peer": 2.0,
        "limit": 4.0,
        "ratio": 0.309,
        "of_peer": 0.617,
        "settings": {"rounds": 3},
    }
    assert list(second) == list(first)
    assert (second["peer"], second["unit"], second["settings"]) == (None, "us", {})
    assert (third["limit"], third["ratio"], third["of_peer"]) == (None, None, 0.25)


def test_people_read_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    from figures import Figure, show

    show("the title", [Figure("find", 0.5, None, 1.0, "us", {"rounds": 7})], as_json=False)
    told = capsys.readouterr().out
    assert "the title" in told
    [row] = [line for line in told.splitlines() if "find" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "find", "0.50", "-", "1.00", "us", "50%", "-", "7",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "device_copy",
        "fs_tier",
        "host_tier",
        "index",
        "obj_tier",
        "transports",
        "vllm_tier",
        "wrappers",
    ],
)
def test_each_starts_and_asks_one_question(name: str) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--json" in done.stdout
    assert "?" in done.stdout
