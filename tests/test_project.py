"""The files around the code say what is true: README, settings page, Makefile, CI, compose."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvstrata.cli.flags import settings_from
from kvstrata.config import NodeSettings, ServerSettings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCHEMAS = {"node": NodeSettings, "server": ServerSettings}


def test_the_settings_page_is_that_of_the_schema() -> None:
    document = runpy.run_path(str(ROOT / "docs" / "settings.py"))["document"]
    assert (ROOT / "docs" / "settings.md").read_text() == document(), "run `make docs`"


def test_readme_s_first_screen() -> None:
    screen = "\n".join(README.splitlines()[:30])
    for words in ("tiered KV-cache store", "host tier", "fs tier", "make demo", "make test"):
        assert words in screen


def test_readme_s_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def commands() -> list[list[str]]:
    """`kvstrata node ...` and `kvstrata server ...` as README tells people to type them."""
    lines = re.sub(r"\\\n\s*", " ", README).splitlines()
    typed = [line.strip() for line in lines if line.startswith("    kvstrata ")]
    split = [re.findall(r"'[^']*'|\S+", line.split("#")[0]) for line in typed]
    return [[word.strip("'") for word in words[1:]] for words in split if words[1] in SCHEMAS]


def test_readme_s_commands_are_valid() -> None:
    assert {words[0] for words in commands()} == {"node", "server"}
    for command, *flags in commands():
        settings_from(SCHEMAS[command], flags, f"kvstrata {command}")


def test_readme_s_flags_and_defaults_exist() -> None:
    flags = re.findall(r"^\| `(--[a-z.-]+)` \|", README, re.MULTILINE)
    assert len(flags) > 5
    for flag in flags:
        part: type = NodeSettings
        for name in flag.removeprefix("--").replace("-", "_").split("."):
            field = part.model_fields[name]  # type: ignore[attr-defined]
            part = field.annotation


def test_readme_s_vllm_configuration_names_what_exists() -> None:
    [block] = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    extra = json.loads(block)["kv_connector_extra_config"]
    path = ROOT / "adapters" / (extra["spec_module_path"].replace(".", "/") + ".py")
    assert f"class {extra['spec_name']}(" in path.read_text()
    options = (path.parent / "options.py").read_text()
    assert all(f"    {name}: " in options for name in extra["kvstrata"])


def test_the_changelog_has_this_version() -> None:
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_declared_commands_can_be_loaded() -> None:
    declared = PROJECT["entry-points"]["kvstrata.commands"]
    installed = {e.name: e for e in entry_points(group="kvstrata.commands")}
    assert {name: installed[name].value for name in declared} == declared
    for name in declared:
        assert callable(installed[name].load())


# ---------------------------------------------------------------- make, CI, compose


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("venv", "-m venv .venv"),
        ("venv", "--constraint constraints.txt"),
        ("constraints", ".venv-new/bin/pip freeze"),
        ("demo", ".venv/bin/kvstrata demo"),
        ("test", "pytest -n 2 --dist worksteal -m 'not vllm'"),
        ("lint", "ruff format --check ."),
        ("test-vllm", "pytest tests/vllm tests/adapters -m vllm -n 0"),
        ("openapi", "-m kvstrata_server.openapi"),
        ("clients", "openapi/clients/generate.py build/clients"),
        ("docs", "docs/settings.py"),
    ],
)
def test_make_knows_how(target: str, runs: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert runs in done.stdout


def test_constraints_fit_what_the_project_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["server"], *extras["dev"]]:
        asked = Requirement(text)
        assert asked.specifier.contains(versions[canonicalize_name(asked.name)]), text
    # They depend on the machine, or belong to the environment of vLLM.
    assert not versions.keys() & {"torch", "vllm", "nixl", "nixl-cu12", "kvstrata"}


def test_ci_runs_everything() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    for target in ("lint", "test", "test-vllm"):
        assert f"\nmake {target}\n" in text


def compose() -> list[str] | None:
    """The compose command of this machine, if it has one."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0:
            return command
    return None


def test_the_compose_file_is_valid() -> None:
    command = compose()
    if command is None:
        pytest.skip("neither `docker compose` nor docker-compose is installed")
    done = subprocess.run(
        [*command, "-f", "docker-compose.yml", "config", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_compose_file_sets_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    found = re.findall(r"^\s+(KVSTRATA_(?:NODE|SERVER)_[A-Z_]+): (.+)$", text, re.MULTILINE)
    assert len(found) > 8
    for name, raw in found:
        value = re.sub(r"\$\{[A-Z_]+:-(.*)\}", r"\1", raw.strip("'"))
        monkeypatch.setenv(name, value)
        prefix, part = ("KVSTRATA_NODE_", NodeSettings)
        if name.startswith("KVSTRATA_SERVER_"):
            prefix, part = ("KVSTRATA_SERVER_", ServerSettings)
        for field in name.removeprefix(prefix).lower().split("__"):
            part = part.model_fields[field].annotation  # type: ignore[assignment]
    node = settings_from(NodeSettings, [], "kvstrata node")
    assert node.id == "node-b"
    assert node.tiers[0].type == "fs"
    assert settings_from(ServerSettings, [], "kvstrata server").token == "dev-token"
