"""What the kernel is told of a mapping, and what it may answer."""

import errno
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.numa import memory_nodes, prefer_node


@pytest.mark.parametrize(
    ("told", "nodes"),
    [("0\n", [0]), ("0-1\n", [0, 1]), ("0,2-4,7\n", [0, 2, 3, 4, 7]), ("\n", [])],
)
def test_nodes_with_memory(tmp_path: Path, told: str, nodes: list[int]) -> None:
    (tmp_path / "has_memory").write_text(told)
    assert memory_nodes(tmp_path / "has_memory") == nodes
    assert memory_nodes(tmp_path / "absent") == []


def test_the_mapping_and_the_node_reach_the_kernel() -> None:
    asked = []
    assert prefer_node(4096, 8192, 3, [0, 3], lambda *a: asked.append(a) or 0) is None  # type: ignore[func-returns-value]
    assert asked == [(4096, 8192, 3)]


@pytest.mark.parametrize(
    ("error", "why"),
    [(errno.EPERM, "seccomp"), (errno.ENOSYS, "without NUMA"), (errno.EINVAL, "Invalid argument")],
)
def test_why_the_kernel_will_not(error: int, why: str) -> None:
    told = prefer_node(4096, 8192, 0, [], lambda *_: error)
    assert told is not None
    assert why in told


def test_a_node_that_this_host_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"numa_node is 2: .* are \[0, 1\]"):
        prefer_node(4096, 8192, 2, [0, 1], lambda *_: 0)
