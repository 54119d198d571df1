"""Every operation of the published document, with whatever schemathesis can think of.

It runs as a program against a server process, so that requests are real ones, malformed ones
included. `schemathesis.toml` says what the document can't. The seed stays the same, so that a run
tells of a change and not of chance; SCHEMATHESIS_SEED and SCHEMATHESIS_EXAMPLES look further.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_kit import server

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "openapi" / "kvstrata.json"
TOKEN = "of-the-tests"


@pytest.mark.timeout(400)
def test_nothing_is_answered_that_the_document_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTRATA_SERVER_TOKEN", TOKEN)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("SCHEMATHESIS_HOOKS", str(HERE / "schemathesis_msgpack.py"))
    with server(tmp_path) as running:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "--config-file"),
                str(HERE / "schemathesis.toml"),
                *("run", str(DOCUMENT), "--url", running.url, "--no-color"),
                *("--header", f"Authorization: Bearer {TOKEN}"),
                *("--max-examples", os.environ.get("SCHEMATHESIS_EXAMPLES", "5")),
                *("--seed", os.environ.get("SCHEMATHESIS_SEED", "1")),
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=380,
        )
        assert running.process.poll() is None, "the server has ended"
    print(done.stdout[-20_000:])
    assert done.returncode == 0, "see what schemathesis found above; its seed repeats it"
