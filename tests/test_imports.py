"""What importing costs, what it pulls in, and who may import whom."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstrata

SOURCES = Path(kvstrata.__file__).parent
HEAVY = (
    *("torch", "jax", "nixl", "nixl_cu12", "vllm", "fastapi", "sqlalchemy", "uvicorn", "pytest"),
    *("aioboto3", "aiohttp", "botocore"),
)

# DESIGN section 8: imports go down, or stay on their floor. A module has the floor of the longest
# name here that leads to it; `testing` stands beside the house and nobody imports it.
FLOORS = {
    "kvstrata.errors": 0,
    "kvstrata.addresses": 1,
    "kvstrata.plugins": 1,
    "kvstrata.keys": 1,
    "kvstrata.config": 1,
    "kvstrata.sources": 1,
    "kvstrata.region": 1,
    "kvstrata.numa": 1,
    "kvstrata.standard_input": 1,
    "kvstrata.backoff": 1,
    "kvstrata.transports": 1,
    "kvstrata.layout": 2,
    "kvstrata.slots": 2,
    "kvstrata.chains": 2,
    "kvstrata.chunks": 2,
    "kvstrata.policies": 2,
    "kvstrata.wire": 2,
    "kvstrata.peer_wire": 2,
    "kvstrata.peer_socket": 2,
    "kvstrata.api": 2,
    "kvstrata.bulk": 2,
    "kvstrata.control": 2,
    "kvstrata.control_calls": 2,
    "kvstrata.control_requests": 2,
    "kvstrata.control_trouble": 2,
    "kvstrata.eviction": 3,
    "kvstrata.leases": 3,
    "kvstrata.overdue": 3,
    "kvstrata.host": 3,
    "kvstrata.tiers": 3,
    "kvstrata.client": 3,
    "kvstrata.node": 4,
    "kvstrata.simulate": 4,
    "kvstrata.check": 4,
    "kvstrata.cli": 5,
    "kvstrata.__main__": 5,
    "kvstrata.testing": 9,
}


def timed_import(module: str) -> tuple[float, set[str]]:
    """Seconds it takes in a fresh interpreter, and the top-level packages it loads."""
    code = (
        f"import time; t = time.perf_counter(); import {module}; t = time.perf_counter() - t\n"
        "import sys, json; print(json.dumps([t, sorted({n.split('.')[0] for n in sys.modules})]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    seconds, loaded = json.loads(out.stdout)
    return seconds, set(loaded)


def test_import_is_quick_and_light() -> None:
    runs = [timed_import("kvstrata") for _ in range(5)]
    assert min(seconds for seconds, _ in runs) < 0.3
    assert runs[0][1].isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["kvstrata.client", "kvstrata.cli", "kvstrata.node.process"])
def test_what_engines_and_nodes_import_needs_no_extra(module: str) -> None:
    _, loaded = timed_import(module)
    assert loaded.isdisjoint(HEAVY)


# ---------------------------------------------------------------- public names


def test_public_names_are_sorted_and_resolve() -> None:
    assert kvstrata.__all__ == sorted(kvstrata.__all__)
    assert len(set(kvstrata.__all__)) == len(kvstrata.__all__)
    for name in kvstrata.__all__:
        value = getattr(kvstrata, name)
        if name != "__version__":
            home = importlib.import_module(kvstrata._MODULE_OF[name])
            assert value is getattr(home, name)
            assert name in home.__all__, f"{home.__name__} does not export {name}"
    assert {*kvstrata.__all__} <= {*dir(kvstrata)}
    assert {*kvstrata._MODULE_OF, "__version__"} == {*kvstrata.__all__}


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((SOURCES / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        node.module: tuple(alias.name for alias in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert seen == kvstrata._NAMES


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clinet'"):
        _ = kvstrata.Clinet  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_distribution() -> None:
    assert kvstrata.__version__.count(".") == 2


# ---------------------------------------------------------------- who imports whom


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCES.rglob("*.py"):
        parts = ["kvstrata", *path.relative_to(SOURCES).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Modules that a source file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def floor(module: str) -> int:
    parts = module.split(".")
    for n in range(len(parts), 1, -1):
        if ".".join(parts[:n]) in FLOORS:
            return FLOORS[".".join(parts[:n])]
    raise AssertionError(f"{module} has no floor: give it one, as DESIGN section 8 has it")


def test_the_library_knows_neither_server_nor_adapters() -> None:
    for name, path in MODULES.items():
        for imported in imports(path):
            assert imported.split(".")[0] not in ("kvstrata_server", "kvstrata_adapters"), name


def test_imports_only_go_down() -> None:
    wrong = [
        f"{name} (floor {floor(name)}) imports {imported} (floor {floor(imported)})"
        for name, path in MODULES.items()
        if name != "kvstrata"
        for imported in imports(path)
        if imported.startswith("kvstrata.") and floor(imported) > floor(name)
    ]
    assert wrong == []


def test_imports_make_no_circles() -> None:
    graph = {
        name: {i for i in imports(path) if i in MODULES and i not in (name, "kvstrata")}
        for name, path in MODULES.items()
        if name != "kvstrata"
    }
    while graph:
        leaves = [name for name, targets in graph.items() if not targets & graph.keys()]
        assert leaves, f"these import each other: {sorted(graph)}"
        for name in leaves:
            del graph[name]
