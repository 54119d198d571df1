"""The generated clients: made from the published document, checked by types, and used."""

import re
import shutil

import pytest
from clients_kit import ROOT, TOKEN, check, environment, generated, node, server

HERE = ROOT / "tests" / "clients"
PAGE = ROOT / "docs" / "clients.md"

pytestmark = pytest.mark.timeout(180)


def shown(language: str) -> str:
    """By the page on clients."""
    [block] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return block


def test_python(tmp_path):
    client = generated("python", tmp_path)
    python, installed = environment() / "bin" / "python", tmp_path / "installed"
    check(
        *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"),
        *("--no-build-isolation", "--no-deps", "--target", installed, client),
    )
    program, page = HERE / "exercise.py", tmp_path / "page.py"
    page.write_text(f"token: str\nkeys: list[str]\n{shown('python')}")
    check(
        *(python, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "mypy"),
        *(installed / "kvstrata_client", program, page),
        MYPYPATH=installed,
        cwd=tmp_path,
    )
    with server(tmp_path) as url:
        said = check(python, "-W", "error", program, url, TOKEN, PYTHONPATH=installed, cwd=tmp_path)
    assert said == "all of it\n"


def test_typescript(tmp_path):
    client = generated("typescript", tmp_path)
    modules = environment() / "typescript" / "node_modules"
    program = tmp_path / "program"
    (program / "node_modules").mkdir(parents=True)
    (program / "node_modules" / "kvstrata-client").symlink_to(client)
    (program / "node_modules" / "@types").symlink_to(modules / "@types")
    shutil.copy(HERE / "exercise.ts", program)
    page = f"declare const token: string, keys: string[];\n{shown('typescript')}"
    (program / "page.ts").write_text(page)
    (program / "package.json").write_text('{"type": "module"}')
    check(
        *(node(), modules / ".bin" / "tsc", "--strict", "--noUncheckedIndexedAccess"),
        *(
            "--target",
            "ES2022",
            "--module",
            "NodeNext",
            "--types",
            "node",
            "exercise.ts",
            "page.ts",
        ),
        cwd=program,
    )
    with server(tmp_path) as url:
        said = check(node(), program / "exercise.js", url, TOKEN)
    assert said == "all of it\n"
