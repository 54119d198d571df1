"""The control plane as a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server_kit import database_url

PROGRAM = "import sys; from kvstrata_server.app import main; sys.exit(main(sys.argv[1:]))"


class Server:
    def __init__(self, path: Path, listen: str, *flags: str) -> None:
        base = [sys.executable, "-c", PROGRAM, "--listen", listen, "--database", database_url(path)]
        self.process = subprocess.Popen(
            [*base, *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        found = re.fullmatch(r"kvstrata server: listening on (https?://127\.0\.0\.1:\d+)\n", line)
        assert found, f"the server said {line!r}"
        self.url = found[1]

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        code = self.process.wait(20)
        self.process.stdout.close()
        return code


@contextmanager
def server(path: Path, listen: str = "127.0.0.1:0", *flags: str) -> Iterator[Server]:
    started = Server(path, listen, *flags)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end(signal.SIGKILL)
