"""An engine's own node: one for all its processes, and gone with the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.client import Client
from kvstrata.config import TierSettings
from kvstrata.errors import ConfigError
from kvstrata_adapters.private_node import PrivateNode, private_socket

CAPACITY = 1 << 20
STARTER = """
import sys, time
from kvstrata_adapters.private_node import PrivateNode
node = PrivateNode.ensure("killed", 1 << 20)
print(node._process.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def run_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # A socket's path has at most 107 bytes; a parallel worker's tmp_path leaves too few of them.
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "kvstrata"


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def regions(engine: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"kvstrata-{private_socket(engine).parent.name}-*"))


def test_one_process_starts_it_and_the_others_find_it(tmp_path: Path, run_folder: Path) -> None:
    engine = f"one-{os.getpid()}"
    tier = TierSettings.model_validate({"type": "fs", "root": str(tmp_path / "files")})
    first = PrivateNode.ensure(engine, CAPACITY, [tier])
    assert first is not None
    try:
        assert PrivateNode.ensure(engine, CAPACITY) is None
        with Client.connect(private_socket(engine), engine, "tool") as client:
            assert client.welcome.region_bytes == CAPACITY
            assert {t.name for t in client.status().tiers} == {"host", "fs"}
        assert len(regions(engine)) == 1
    finally:
        first.stop()
    assert regions(engine) == []
    assert [p.name for p in run_folder.iterdir()] == ["own.lock"]
    first.stop()


def test_it_ends_with_the_process_that_started_it(run_folder: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, start_new_session=True
    )
    assert starter.stdout is not None
    try:
        pid = int(starter.stdout.readline())
        assert len(regions("killed")) == 1
    finally:
        os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
        starter.stdout.close()
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert regions("killed") == []
    # What it left of its folder goes when another one starts.
    other = PrivateNode.ensure("next", CAPACITY)
    assert other is not None
    other.stop()
    assert [p.name for p in run_folder.iterdir()] == ["own.lock"]


def test_settings_meant_for_another_node_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = f"env-{os.getpid()}"
    monkeypatch.setenv("KVSTRATA_NODE_HOST__SHM_DIR", "/no/such/tmpfs")
    monkeypatch.setenv("KVSTRATA_CONFIG", "/no/such/file")
    node = PrivateNode.ensure(engine, CAPACITY)
    assert node is not None
    node.stop()


def test_what_can_not_work_is_said() -> None:
    with pytest.raises(ConfigError, match="ended with exit code"):
        PrivateNode.ensure(f"bad-{os.getpid()}", 1)
