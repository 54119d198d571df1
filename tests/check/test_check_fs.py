"""`kvstrata fsck` and `du` on a directory: a store that was damaged in every way."""

from __future__ import annotations

import asyncio
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvstrata.check.fs import FsCheck, FsCheckOptions
from kvstrata.check.fs_use import fs_use
from kvstrata.check.report import Problem, Report
from kvstrata.cli import main
from kvstrata.errors import ConfigError
from kvstrata.keys import Key, Namespace
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.tiers import aligned, payload
from kvstrata.tiers.base import Item, Outcome, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_format import PAGE_BYTES, path_of

SIZE = 10_000
OURS, THEIRS = a_namespace(model="llama"), a_namespace(model="qwen", tenant="acme")
HOUR, DAY = 3600.0, 86_400.0


def key(i: int, namespace: Namespace = OURS) -> Key:
    return namespace.key(0, bytes([i]) * 8)


def item(i: int, namespace: Namespace = OURS, size: int = SIZE) -> Item:
    view = aligned(size)
    view[:] = payload(key(i, namespace), size)
    return Item(key(i, namespace), view)


def context() -> TierContext:
    known = {ns.digest: ns for ns in (OURS, THEIRS)}
    return TierContext("node", namespace_of=known.get)


async def fill(root: Path, items: list[Item]) -> None:
    tier = await FsTier.open({"root": root}, context())
    assert await tier.store(items) == [Outcome.STORED] * len(items)
    await tier.close()


async def loads(root: Path, items: list[Item]) -> list[Outcome]:
    tier = await FsTier.open({"root": root}, context())
    blank = [Item(i.key, aligned(i.view.nbytes)) for i in items]
    outcomes = await tier.load(blank)
    for i, o, b in zip(items, outcomes, blank, strict=True):
        assert o is not Outcome.LOADED or b.view == i.view
    await tier.close()
    return outcomes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten chunks of two namespaces."""
    asyncio.run(
        fill(tmp_path / "store", [item(i) for i in range(8)] + [item(i, THEIRS) for i in (0, 1)])
    )
    return tmp_path / "store"


def check(root: Path, **options: Any) -> Report:
    return FsCheck(root, FsCheckOptions(**options)).run()


def change(root: Path, i: int, at: int, to: bytes | None = None) -> None:
    path = root / path_of(key(i))
    content = bytearray(path.read_bytes())
    content[at : at + 1] = bytes([content[at] ^ 1]) if to is None else to
    path.write_bytes(content)


def found(report: Report) -> dict[str, int]:
    return {problem.value: n for problem, n in report.found.items() if n}


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every file but the locks of writers: its size and time."""
    return {
        str(p.relative_to(root)): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in root.rglob("*")
        if p.is_file()
    }


# ---------------------------------------------------------------- what is found


def test_a_store_that_is_well(root: Path) -> None:
    report = check(root)
    assert found(report) == {}
    assert (report.chunks, report.namespaces, report.wrong) == (10, 2, 0)
    assert report.verified_bytes >= 10 * SIZE
    assert report.stored_bytes >= 10 * SIZE
    assert report.id


def test_nothing_is_written_without_repair(root: Path) -> None:
    change(root, 1, PAGE_BYTES + 5)
    (root / OURS.digest.hex() / "strange").write_text("x")
    before = tree(root)
    check(root)
    assert tree(root) == before


DAMAGES = {
    "payload": (lambda root: change(root, 1, PAGE_BYTES + 5), Problem.PAYLOAD),
    "header": (lambda root: change(root, 1, 20), Problem.HEADER),
    "version": (lambda root: change(root, 1, 8), Problem.HEADER),
    "magic": (lambda root: change(root, 1, 0), Problem.HEADER),
    "short": (lambda root: os.truncate(root / path_of(key(1)), 2 * PAGE_BYTES), Problem.HEADER),
    "empty": (lambda root: os.truncate(root / path_of(key(1)), 0), Problem.HEADER),
    "grown": (lambda root: os.truncate(root / path_of(key(1)), 1 << 20), Problem.HEADER),
}


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_damage_is_found_and_set_aside(root: Path, kind: str) -> None:
    damage, problem = DAMAGES[kind]
    damage(root)
    report = check(root)
    assert found(report) == {problem.value: 1}
    [finding] = report.findings
    assert finding.path == path_of(key(1))
    assert (report.wrong, report.left, finding.repaired) == (1, 1, "")
    assert (root / path_of(key(1))).exists()

    mended = check(root, repair=True)
    assert (mended.wrong, mended.left) == (1, 0)
    assert not (root / path_of(key(1))).exists()
    after = check(root)
    assert found(after) == {"quarantined": 1}
    assert (after.wrong, after.chunks) == (0, 9)
    items = [item(i) for i in range(8)]
    expected = [Outcome.LOADED] * 8
    expected[1] = Outcome.MISSING
    assert asyncio.run(loads(root, items)) == expected


def test_quick_reads_no_payload(root: Path) -> None:
    change(root, 1, PAGE_BYTES + 5)
    change(root, 2, 20)
    report = check(root, payloads=False)
    assert found(report) == {"header": 1}
    assert report.verified_bytes <= 10 * PAGE_BYTES


def test_a_chunk_under_anothers_name_goes_home(root: Path) -> None:
    right, wrong = root / path_of(key(1)), root / path_of(key(99))
    wrong.parent.mkdir(parents=True)
    right.rename(wrong)
    report = check(root)
    assert found(report) == {"name": 1}
    assert path_of(key(1)) in report.findings[0].detail
    assert check(root, repair=True).left == 0
    assert right.exists()
    assert not wrong.exists()
    assert asyncio.run(loads(root, [item(1)])) == [Outcome.LOADED]


def test_a_chunk_in_the_wrong_folder_is_found(root: Path) -> None:
    right = root / path_of(key(1))
    wrong = right.parent.parent / "ff" / right.name
    wrong.parent.mkdir()
    right.rename(wrong)
    assert found(check(root)) == {"name": 1}
    assert check(root, repair=True).left == 0
    assert right.exists()


def test_one_whose_own_place_is_taken_is_set_aside(root: Path) -> None:
    right, wrong = root / path_of(key(1)), root / path_of(key(2))
    wrong.write_bytes(right.read_bytes())
    assert found(check(root)) == {"name": 1}
    report = check(root, repair=True)
    assert report.findings[0].repaired == "moved to quarantine"
    outcomes = asyncio.run(loads(root, [item(1), item(2)]))
    assert outcomes == [Outcome.LOADED, Outcome.MISSING]


def test_what_is_foreign(root: Path) -> None:
    folder = (root / path_of(key(1))).parent
    (folder / "notes.txt").write_text("x")
    (folder.parent / "more").write_text("x")
    (folder / "a folder").mkdir()
    (root / "lost+found").mkdir()
    report = check(root)
    assert found(report) == {"foreign": 4}
    mended = check(root, repair=True)
    assert mended.repaired[Problem.FOREIGN] == 2
    assert mended.left == 2, "folders, and what is in the root, are left alone"
    assert (root / "lost+found").exists()


def test_a_link_is_not_followed(root: Path, tmp_path: Path) -> None:
    path = root / path_of(key(1))
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    report = check(root, repair=True)
    assert found(report) == {"unreadable": 1}
    assert elsewhere.exists()
    assert not path.is_symlink()


def test_namespace_documents(root: Path) -> None:
    (root / OURS.digest.hex() / "namespace.json").write_bytes(THEIRS.document)
    (root / THEIRS.digest.hex() / "namespace.json").unlink()
    report = check(root)
    assert found(report) == {"description": 1, "undescribed": 1}
    assert report.wrong == 1
    assert check(root, repair=True).left == 0
    asyncio.run(fill(root, [item(50), item(50, THEIRS)]))
    assert found(check(root)) == {"quarantined": 1}, "nodes write them anew"


def test_a_long_name_is_set_aside_and_not_removed(root: Path) -> None:
    strange = root / OURS.digest.hex() / ("n" * 255)
    strange.write_bytes(b"somebody's notes")
    assert check(root, repair=True).left == 0
    [kept] = (root / "quarantine").iterdir()
    assert kept.read_bytes() == b"somebody's notes"


def test_what_no_quarantine_holds_is_left_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it would be removed at once, to keep the bound; and it is no node's."""
    monkeypatch.setattr("kvstrata.check.fs.MOST_BYTES", 16_384)
    strange = root / OURS.digest.hex() / "backup.tar"
    strange.write_bytes(b"x" * 100_000)
    report = check(root, repair=True)
    assert (found(report), report.left) == ({"foreign": 1}, 1)
    assert "larger than the quarantine" in report.findings[0].detail
    assert strange.stat().st_size == 100_000


def test_a_name_that_is_no_text(root: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Whoever may write to a mount may call a file anything; it must not keep the check away."""
    (root / os.fsdecode(b"notes-\xff\x1b[2J")).touch()
    assert main(["fsck", str(root), "--json"]) == 3
    [finding] = json.loads(capsysbinary.readouterr().out)["findings"]
    assert finding["path"] == "notes-\\xff\\x1b[2J"
    assert main(["fsck", str(root)]) == 3
    shown = capsysbinary.readouterr().out
    assert b"notes-\\xff" in shown
    assert b"\x1b[2J" not in shown


def test_orphans(root: Path) -> None:
    folder = (root / path_of(key(1))).parent
    old, young = folder / ".77-0123456789ab.1.tmp", folder / ".77-0123456789ab.2.tmp"
    for temp in (old, young):
        temp.write_bytes(b"half a chunk")
    past = time.time() - 2 * HOUR
    os.utime(old, (past, past))
    report = check(root)
    assert found(report) == {"orphan": 1}
    assert report.wrong == 0
    check(root, repair=True)
    assert not old.exists()
    assert young.exists(), "its writer may live on a host whose locks we don't see"


async def test_what_a_living_node_writes_is_no_orphan(root: Path) -> None:
    tier = await FsTier.open({"root": root}, context())
    [lock] = (root / "writers").glob("*.lock")
    temp = root / OURS.digest.hex() / f".{lock.stem}.5.tmp"
    temp.write_bytes(b"x")
    past = time.time() - 2 * HOUR
    os.utime(temp, (past, past))
    report = await asyncio.to_thread(check, root, repair=True)
    assert found(report) == {}
    assert temp.exists()
    assert lock.exists()
    temp.unlink()
    await tier.close()


def five_checks(root: Path) -> list[Report]:
    return [check(root, repair=True) for _ in range(5)]


async def test_beside_a_node_that_stores_and_evicts(root: Path) -> None:
    """No false alarm, and no harm to what the node does."""
    tier = await FsTier.open({"root": root}, context())
    checks = asyncio.create_task(asyncio.to_thread(five_checks, root))
    stored = 0
    while not checks.done() and stored < 3000:
        items = [item(100 + i % 100) for i in range(stored, stored + 10)]
        await tier.store(items)
        await tier.evict([i.key for i in items[::2]])
        stored += 10
    for report in await checks:
        assert found(report) == {}
    blank = [Item(key(i), aligned(SIZE)) for i in range(8)]
    assert await tier.load(blank) == [Outcome.LOADED] * 8
    await tier.close()


def test_the_quarantine_is_told(root: Path) -> None:
    change(root, 1, 20)
    change(root, 2, 20)
    check(root, repair=True)
    report = check(root)
    assert found(report) == {"quarantined": 2}
    assert "bytes of disk" in report.findings[0].detail


def test_an_identity_that_is_damaged(root: Path) -> None:
    (root / ".kvstrata-store").write_text("{")
    report = check(root, repair=True)
    assert found(report) == {"identity": 1}
    assert (report.left, report.chunks) == (1, 10)


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a store"):
        check(tmp_path)
    assert list(tmp_path.iterdir()) == [], "looking makes none"


def test_memory_is_bounded(tmp_path: Path) -> None:
    asyncio.run(fill(tmp_path, [item(i, size=8 << 20) for i in range(3)]))
    tracemalloc.start()
    try:
        report = check(tmp_path, threads=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.verified_bytes > 24 << 20
    assert peak < 4 << 20


def test_progress(root: Path) -> None:
    told: list[tuple[int, int]] = []
    FsCheck(root, FsCheckOptions(threads=1), lambda done, of: told.append((done, of))).run()
    assert told[-1][0] == told[-1][1] == len(told) > 0


# ---------------------------------------------------------------- the commands


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: str) -> tuple[int, str]:
        status = main(list(argv))
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_exit_statuses(root: Path, said: Any, tmp_path: Path) -> None:
    assert said("fsck", str(root))[0] == 0
    change(root, 1, 20)
    status, out = said("fsck", str(root))
    assert status == 3
    assert "DAMAGED" in out
    assert OURS.digest.hex()[:16] in out
    assert said("fsck", str(root), "--repair")[0] == 4
    assert said("fsck", str(root))[0] == 0
    assert said("fsck", str(tmp_path / "nowhere")) == (
        2,
        f"kvstrata fsck: {tmp_path / 'nowhere'} is not a store: it has no .kvstrata-store; name "
        "the root of an fs tier\n",
    )


def test_json(root: Path, said: Any) -> None:
    change(root, 1, PAGE_BYTES)
    status, out = said("fsck", str(root), "--json")
    told = json.loads(out)
    assert status == 3
    assert (told["chunks"], told["wrong"], told["left"]) == (10, 1, 1)
    assert told["found"] == {"payload": 1}
    assert told["findings"] == [
        {
            "problem": "payload",
            "path": path_of(key(1)),
            "detail": "payload checksum differs",
            "repaired": "",
        }
    ]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["s3://"], "names no bucket"),
        (["/x", "--region", "eu"], "--region is for s3:// stores"),
        (["/x", "--threads", "0"], "a number from 1 to 64"),
        ([], "the following arguments are required"),
    ],
)
def test_command_lines_that_cannot_work(said: Any, argv: list[str], says: str) -> None:
    for command in ("fsck", "du"):
        status, out = said(command, *argv)
        assert status == 2
        assert says in out


# ---------------------------------------------------------------- du


def test_use_by_namespace_tenant_and_age(root: Path) -> None:
    now = time.time()
    for i, age in enumerate((0.0, 2 * HOUR, 3 * DAY, 10 * DAY, 100 * DAY)):
        os.utime(root / path_of(key(i)), (now - age, now - age))
    report = fs_use(root, now=lambda: now)
    per_chunk = 4 * PAGE_BYTES
    ours, theirs = report.namespaces[OURS.digest.hex()], report.namespaces[THEIRS.digest.hex()]
    assert (ours.chunks, theirs.chunks) == (8, 2)
    assert (ours.bytes, theirs.bytes) == (8 * per_chunk, 2 * per_chunk)
    assert ours.by_age == [4 * per_chunk, *[per_chunk] * 4]
    assert report.total().bytes == 10 * per_chunk
    tenants = report.by_tenant()
    assert {t: u.chunks for t, u in tenants.items()} == {"": 8, "acme": 2}
    disk = sum(p.stat().st_blocks * 512 for p in root.rglob("*") if p.is_file())
    assert report.total().bytes + report.other_bytes == disk


def test_du_reads_no_payload_and_writes_nothing(root: Path) -> None:
    change(root, 1, 20)
    before = tree(root)
    assert fs_use(root).total().chunks == 10
    assert tree(root) == before


def test_a_namespace_nobody_described(root: Path, said: Any) -> None:
    (root / THEIRS.digest.hex() / "namespace.json").unlink()
    assert fs_use(root).by_tenant()[None].chunks == 2
    status, out = said("du", str(root), "--json")
    told = json.loads(out)
    assert status == 0
    assert told["total"]["chunks"] == 10
    assert [n["known"] and n["known"]["model"] for n in told["namespaces"]] == ["llama", None]
    assert sum(told["total"]["by_age"].values()) == told["total"]["bytes"]


def test_du_table(root: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, out = said("du", str(root))
    assert status == 0
    for words in ("llama", "qwen", "acme", "total", "bfloat16", OURS.digest.hex()):
        assert words in out
