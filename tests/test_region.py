"""The region over a temporary directory: nothing in it depends on tmpfs but the free space."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvstrata import numa, region
from kvstrata.errors import ConfigError, LinkBroken, Malformed
from kvstrata.numa import memory_nodes
from kvstrata.region import Region, sweep

SIZE = 4 * mmap.PAGESIZE
CHILD = """
import sys, time
from pathlib import Path
from kvstrata.region import Region
region = Region.create("dead", "1", 1 << 16, Path(sys.argv[1]))
print(region.name, flush=True)
sys.stdin.read()
"""


def create(where: Path, node: str = "n", incarnation: str = "1", size: int = SIZE) -> Region:
    return Region.create(node, incarnation, size, where)


def test_engines_see_what_the_node_writes_and_the_reverse(tmp_path: Path) -> None:
    node = create(tmp_path)
    engine = Region.attach(node.name, SIZE, tmp_path)
    node.view[5:8] = b"abc"
    engine.view[SIZE - 1] = 7
    assert bytes(engine.view[5:8]) == b"abc"
    assert node.view[SIZE - 1] == 7
    assert len(node.view) == len(engine.view) == SIZE
    engine.close()
    node.close()


WORKER = """
import sys
from pathlib import Path
from kvstrata.region import Region
name, size, rank, shares = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
region = Region.attach(name, size, Path(sys.argv[1]))
print("mapped", flush=True)
sys.stdin.readline()
share = size // 2 // shares
mine = region.view[size // 2 + rank * share :][:share]
for _ in range(50):
    mine[:] = bytes([rank + 1]) * share
"""


def test_the_workers_of_an_engine_write_their_shares_of_a_slot_at_once(tmp_path: Path) -> None:
    node, shares = create(tmp_path), 4
    workers = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", WORKER, str(tmp_path)),
                *(node.name, str(SIZE), str(rank), str(shares)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(shares)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "mapped\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        assert [worker.wait(timeout=30) for worker in workers] == [0] * shares
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    written = b"".join(bytes([rank + 1]) * (SIZE // 2 // shares) for rank in range(shares))
    assert bytes(node.view) == bytes(SIZE // 2) + written
    node.close()


def test_name_tells_node_and_incarnation(tmp_path: Path) -> None:
    region = create(tmp_path, "node-a.local", "42")
    assert region.name == "kvstrata-node-a.local-42"
    assert region.path.stat().st_mode & 0o777 == 0o600
    region.close()


def test_populated_memory_is_there(tmp_path: Path) -> None:
    region = create(tmp_path)
    assert bytes(region.view) == bytes(SIZE)
    assert region.path.stat().st_size == SIZE
    region.close()


def flags_of(region: Region) -> set[str]:
    """What the kernel notes of this process's mapping of it (VmFlags in smaps)."""
    smaps = Path("/proc/self/smaps").read_text()
    entry = smaps.split(str(region.path), 1)[1]
    return set(entry.split("VmFlags:", 1)[1].split("\n", 1)[0].split())


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(),
    reason="this kernel has no transparent huge pages",
)
def test_huge_pages_are_asked_for_unless_told_not_to(tmp_path: Path) -> None:
    for asked in (True, False):
        region = Region.create("n", f"{asked}", SIZE, tmp_path, huge_pages=asked)
        assert ("hg" in flags_of(region)) == asked
        assert bytes(region.view) == bytes(SIZE)
        region.close()


def policy_of(region: Region) -> str:
    """Of this process's mapping of it, as the kernel tells it (numa_maps)."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    (policy,) = {line.split()[1] for line in lines if str(region.path) in line}
    return policy


def test_memory_of_a_numa_node_is_preferred_where_the_kernel_lets_us(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel is built without NUMA")
    node = memory_nodes()[-1]
    region = Region.create("n", "1", SIZE, tmp_path, numa_node=node)
    if caplog.messages:
        region.close()
        pytest.skip(caplog.messages[0])
    assert policy_of(region) == f"prefer:{node}"
    assert bytes(region.view) == bytes(SIZE)
    region.close()
    assert not region.path.exists()
    other = Region.create("n", "2", SIZE, tmp_path)
    assert policy_of(other) == "default"
    other.close()


def test_a_kernel_that_binds_no_memory_is_told_of_and_the_region_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numa, "_mbind", lambda *_: errno.EPERM)
    region = Region.create("n", "1", SIZE, tmp_path, numa_node=0)
    assert "numactl --preferred=0" in caplog.text
    assert "seccomp" in caplog.text
    assert bytes(region.view) == bytes(SIZE)
    region.close()


def test_a_numa_node_that_is_not_here_leaves_no_region(tmp_path: Path) -> None:
    if not memory_nodes():
        pytest.skip("this kernel tells of no NUMA nodes")
    with pytest.raises(ConfigError, match=r"host\.numa_node is 1000: nodes of this host"):
        Region.create("n", "1", SIZE, tmp_path, numa_node=1000)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_not_there_is_told_and_not_left_to_kill_its_users(tmp_path: Path) -> None:
    region = Region.create("n", "1", 4 * mmap.PAGESIZE, tmp_path, populate=False)
    os.truncate(region.path, mmap.PAGESIZE)
    with pytest.raises(ConfigError, match=r"lower `host\.capacity`"):
        region.populate()
    region.close()


def test_other_threads_run_while_memory_is_populated(tmp_path: Path) -> None:
    region = Region.create("n", "1", 128 << 20, tmp_path, populate=False)
    thread = threading.Thread(target=region.populate)
    turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    region.close()
    assert turns >= 3


def test_a_region_that_is_closed_under_its_populating_thread_ends_it(tmp_path: Path) -> None:
    region = Region.create("n", "1", mmap.PAGESIZE, tmp_path, populate=False)
    region.close()
    region.populate()


def test_close_removes_the_owners_file_only(tmp_path: Path) -> None:
    node = create(tmp_path)
    engine = Region.attach(node.name, SIZE, tmp_path)
    engine.close()
    engine.close()
    assert node.path.exists()
    node.close()
    node.close()
    assert not node.path.exists()


def test_memory_in_use_outlives_close(tmp_path: Path) -> None:
    region = create(tmp_path)
    held = region.view[:4]
    region.close()
    held[0] = 9
    assert held[0] == 9


@pytest.mark.parametrize("name", ["", "other", "kvstrata-../x", "kvstrata-a/b", "kvstrata-" * 40])
def test_odd_names_are_malformed(tmp_path: Path, name: str) -> None:
    with pytest.raises(Malformed, match="not a region name"):
        Region.attach(name, SIZE, tmp_path)


def test_a_region_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(LinkBroken, match="can't be mapped"):
        Region.attach("kvstrata-n-1", SIZE, tmp_path)


def test_a_region_of_another_size(tmp_path: Path) -> None:
    region = create(tmp_path)
    with pytest.raises(LinkBroken, match=f"the {2 * SIZE} bytes its node announced"):
        Region.attach(region.name, 2 * SIZE, tmp_path)
    region.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(SIZE))
    (tmp_path / "kvstrata-n-1").symlink_to(tmp_path / "secret")
    with pytest.raises(LinkBroken):
        Region.attach("kvstrata-n-1", SIZE, tmp_path)
    assert sweep(tmp_path) == []


def test_capacity_is_checked_against_what_is_free(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    free = stat.f_bavail * stat.f_frsize
    with pytest.raises(ConfigError) as caught:
        create(tmp_path, size=free + (64 << 30))
    says = str(caught.value)
    assert says.startswith("region needs ")
    assert f"GiB but {tmp_path} has " in says
    assert says.endswith("free: lower `host.capacity` or mount a larger tmpfs")
    assert list(tmp_path.iterdir()) == []


def test_a_region_is_at_least_a_page(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="less than one page"):
        create(tmp_path, size=100)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host\.shm_dir"):
        create(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"host\.shm_dir .*file is no directory"):
        create(tmp_path / "file")


def test_which_file_systems_are_in_memory() -> None:
    assert region._in_memory(Path("/dev/shm"))
    assert not region._in_memory(Path("/proc"))
    assert region._in_memory(Path("/absent"))  # nothing is known of it


@pytest.mark.parametrize("in_memory", [True, False])
def test_shared_memory_that_is_a_file_on_a_disk_is_told_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_memory: bool,
) -> None:
    monkeypatch.setattr(region, "_in_memory", lambda path: in_memory)
    create(tmp_path).close()
    told = f"host.shm_dir {tmp_path} is on no tmpfs"
    assert (told in caplog.text) is not in_memory


# ---------------------------------------------------------------- orphans


def spawn(where: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a region until its input closes or it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(where)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, where / process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def test_the_region_of_a_killed_node_is_swept_and_of_a_living_one_not(tmp_path: Path) -> None:
    process, path = spawn(tmp_path)
    try:
        mine = create(tmp_path)
        assert sweep(tmp_path) == []
        assert path.exists()
    finally:
        end(process)
    assert path.exists(), "a killed process can't have removed it"
    assert sweep(tmp_path) == [path.name]
    assert not path.exists()
    assert sweep(tmp_path) == []
    assert mine.path.exists()
    mine.close()


def test_the_sweep_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "kvstrata").touch()
    (tmp_path / "other-kvstrata-1").touch()
    (tmp_path / "kvstrata-directory").mkdir()
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_a_name_already_taken_is_not_shared(tmp_path: Path) -> None:
    region = create(tmp_path)
    with pytest.raises(FileExistsError):
        create(tmp_path)
    assert region.path.exists()
    region.close()
