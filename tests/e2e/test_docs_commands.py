"""The pages that show integrations: their commands run, and print what the pages say."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from dynamo_kit import ROOT, dynamo_python, free_port

from kvstrata_adapters.engines.vllm.options import parse_options

pytestmark = pytest.mark.timeout(180)

PORTS = re.compile(r"\b(?:127\.0\.0\.1:|--port )(\d{4})\b")
MARK = "@@ what the page shows so far ends here @@"


@dataclass
class Block:
    kind: str
    text: str


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / "docs" / page).read_text()
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)]


def with_free_ports(text: str) -> str:
    """Fixed ports are for people."""
    for port in set(PORTS.findall(text)):
        text = re.sub(rf"(127\.0\.0\.1:|--port ){port}\b", rf"\g<1>{free_port()}", text)
    return text


def shown_by(script: str, folder: Path) -> list[str]:
    """What each marked part of a script printed. Ends all that it has started."""
    bins = folder / "bin"
    bins.mkdir()
    programs = {"python": sys.executable, "kvstrata": f"{sys.executable} -m kvstrata"}
    if "dynamo-python" in script:
        programs["dynamo-python"] = dynamo_python()
    for name, program in programs.items():
        (bins / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (bins / name).chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {"PATH": f"{bins}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(folder)}
    child = subprocess.Popen(
        ["bash", "-eu", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=150)
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(20)
    logs = "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in folder.glob("demo/*.log"))
    assert child.returncode == 0, f"{out}\n{err}\n{logs}"
    return out.split(f"{MARK}\n")


@pytest.mark.parametrize("page", ["dynamo.md", "llm-d.md"])
def test_commands_of_a_page_do_what_it_says(page: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    if page == "dynamo.md":
        dynamo_python()
    blocks = [block for block in blocks_of(page) if block.kind in ("bash", "text")]
    commands = [block.text + f"\necho '{MARK}'\n" for block in blocks if block.kind == "bash"]
    parts = shown_by(with_free_ports("".join(commands)), tmp_path)
    shown = iter(parts)
    last = ""
    for block in blocks:
        if block.kind == "bash":
            last = next(shown)
        else:
            assert last.strip() == block.text.strip(), page
    assert list(shown) == [""]


@pytest.mark.parametrize("page", ["dynamo.md", "llm-d.md"])
def test_vllm_configurations_are_ones_we_take(page: str) -> None:
    [block] = [block for block in blocks_of(page) if block.kind == "json"]
    shown = json.loads(block.text)
    module = shown["kv_connector_module_path"].replace(".", "/")
    source = (ROOT / "adapters" / f"{module}.py").read_text()
    assert f"class {shown['kv_connector']}(" in source
    assert parse_options(shown["kv_connector_extra_config"]).node is not None
