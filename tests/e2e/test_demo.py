"""The demo as a user runs it: it tells the truth, fails loudly, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvstrata_adapters.demo.conversations import Turn
from kvstrata_adapters.demo.report import print_story
from kvstrata_adapters.demo.story import Check, Phase, Story
from kvstrata_adapters.engines.numpy_decoder import GenerateResult

pytestmark = pytest.mark.timeout(240)

SMALL = ["--conversations=3", "--turns=2", "--answer=2"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the demo puts its files. Short: a socket's path has at most 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="kd"))
    yield made
    shutil.rmtree(made)


def start(folder: Path, *args: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvstrata", "demo", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), **environment},
        # Whoever runs the tests in the background of a shell has it ignored, and so would the demo.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def mentioning(text: str) -> list[int]:
    """Living processes whose command line holds `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def until(look: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_every_check_holds_and_nothing_is_left(folder: Path) -> None:
    demo = start(folder, *SMALL)
    out, err = demo.communicate(timeout=160)
    assert demo.returncode == 0, out + err
    assert "all 11 checks hold" in out
    assert "FAILED" not in out
    rows = {
        cells[0].strip(): [int(re.match(r" *(\d+)", cell)[1]) for cell in cells[1:]]  # type: ignore[index]
        for line in out.splitlines()
        if len(cells := line.strip("│").split("│")) == 5
    }
    for name, (*phases, total) in rows.items():
        assert name.startswith("-") or abs(sum(phases) - total) <= len(phases), (
            f"{name} doesn't add up"
        )
    assert rows["turns"] == [6, 3, 2, 11]
    asked, reused = rows["tokens asked"], rows["tokens reused"]
    host, fs, peer = (hits for name, hits in rows.items() if name.startswith("hits:"))
    for i in range(4):
        assert 0 < reused[i] < asked[i]
        assert reused[i] == 64 * (host[i] + fs[i] + peer[i])
    assert fs[3] > 0
    assert peer[:3] == [0, 0, peer[3]]
    assert peer[3] > 0
    assert mentioning(str(folder)) == []
    assert list(folder.iterdir()) == []


def test_interrupted_it_ends_what_it_started(folder: Path) -> None:
    demo = start(folder, *SMALL)
    try:
        sockets = f"{folder}/kvstrata-demo-"
        assert until(lambda: len(mentioning(sockets)) >= 3, 120), "it started no nodes"
        demo.send_signal(signal.SIGINT)
        _, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert "Traceback" not in err
    assert mentioning(str(folder)) == []
    assert list(folder.iterdir()) == []


def test_killed_its_processes_end_by_themselves(folder: Path) -> None:
    demo = start(folder, *SMALL)
    started: list[int] = []

    def all_three() -> bool:
        started[:] = {
            *mentioning(f"--socket={folder}/kvstrata-demo-"),
            *mentioning(f"--database=sqlite+aiosqlite:///{folder}/"),
        }
        return len(started) == 3

    assert until(all_three, 120), "it started no server and two nodes"
    demo.kill()
    demo.communicate()
    try:
        assert until(lambda: mentioning(str(folder)) == [], 60)
    finally:
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_what_went_wrong_is_said(folder: Path) -> None:
    demo = start(folder, *SMALL, KVSTRATA_NODE_HOST__SHM_DIR="/no/such/tmpfs")
    out, err = demo.communicate(timeout=100)
    assert demo.returncode == 1
    assert err.count("\n") == 1
    assert re.match(r"kvstrata demo: node-[ab] ended with 2: .*/no/such/tmpfs", err)
    assert "node-a said last:" in out
    assert mentioning(str(folder)) == []


@pytest.mark.parametrize(
    ("args", "told"),
    [(["--conversations=1"], "raise --conversations"), (["--turns=0"], "not a number from 1 on")],
)
def test_what_cannot_be_shown_is_refused(args: list[str], told: str, folder: Path) -> None:
    demo = start(folder, *args)
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 2
    assert told in err


def test_a_different_bit_is_a_failed_check() -> None:
    logits = np.ones((2, 4), np.float32)
    other = logits.copy()
    other[1, 3] = np.nextafter(other[1, 3], np.float32(2))
    turn = Turn(_result(logits), _result(other), reusable=0)
    assert not turn.same
    assert Turn(_result(logits), _result(logits.copy()), reusable=0).same
    assert not Turn(_result(logits), _result(logits, tokens=[0, 1]), reusable=0).same

    story = Story(chunk_bytes=1024, chunk_tokens=64, host_bytes=1 << 20)
    story.phases = [Phase("conversations", [turn], {"host": 0, "fs": 0})]
    story.checks = [Check("logits are equal", turn.same, "1 of 1 different"), Check("x", True, "")]
    assert [check.what for check in story.failed] == ["logits are equal"]
    shown = io.StringIO()
    print_story(Console(width=140, file=shown), story)
    assert "FAILED logits are equal (1 of 1 different)" in shown.getvalue()


def _result(logits: np.ndarray, tokens: list[int] | None = None) -> GenerateResult:
    return GenerateResult(prompt_tokens=8, tokens=tokens or [0, 0], logits=logits)
