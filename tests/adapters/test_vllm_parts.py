"""The parts of the vLLM adapter that do not need vLLM."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.errors import ConfigError, LinkBroken
from kvstrata.keys import Field, Group, Namespace
from kvstrata_adapters.engines.vllm.faults import FaultLine, fault_path, report_fault
from kvstrata_adapters.engines.vllm.naming import Naming
from kvstrata_adapters.engines.vllm.options import parse_options
from kvstrata_adapters.engines.vllm.revision import SAMPLE_BYTES, folder_revision
from kvstrata_adapters.engines.vllm.slots import Shortage, SlotPool


def make_namespace(*unit_bytes: int) -> Namespace:
    return Namespace(
        model="m",
        revision="1",
        config="c",
        dtype="bfloat16",
        content_format="x",
        groups=tuple(
            Group(i, "full", ("a",), (Field("kv", 1, n),), 16) for i, n in enumerate(unit_bytes)
        ),
        blocks_per_chunk=1,
        hash_algorithm="sha256",
        hash_seed="0",
    )


# ---------------------------------------------------------------- options


def test_options_are_human() -> None:
    options = parse_options(
        {
            "spec_name": "x",
            "kvstrata": {
                "host_capacity": "2GiB",
                "wait": "500ms",
                "tiers": [{"type": "fs", "root": "/x"}],
            },
        }
    )
    assert (options.host_capacity, options.wait, options.node) == (2 << 30, 0.5, None)
    assert options.tiers[0].options == {"root": "/x"}
    assert parse_options({}).credits == 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": "/x"}, "kvstrata: nodes: Extra inputs are not permitted"),
        ({"node": "/x", "host_capacity": 5}, r"\['host_capacity'\] are settings of the node"),
        ({"wait": "soon"}, "wait: .*not a time"),
        ({"credits": 0}, "credits"),
        ("x", "kvstrata"),
    ],
)
def test_options_that_can_not_be_meant_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_options({"kvstrata": given})


# ---------------------------------------------------------------- revision


def save(folder: Path, **tensors: bytes) -> None:
    """A safetensors file, by its format."""
    folder.mkdir(exist_ok=True)
    header, body = {}, b""
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + body)
    (folder / "config.json").write_text("{}")


def noise(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("whole", [1 << 30, 0])
def test_equal_copies_have_one_revision_and_other_weights_another(
    tmp_path: Path, whole: int
) -> None:
    big = 64 * SAMPLE_BYTES
    save(tmp_path / "a", q=noise(1, big), k=noise(2, 100))
    save(tmp_path / "b", q=noise(1, big), k=noise(2, 100))
    save(tmp_path / "small-tensor", q=noise(1, big), k=noise(3, 100))
    save(tmp_path / "big-tensor", q=noise(4, big), k=noise(2, 100))
    save(tmp_path / "config", q=noise(1, big), k=noise(2, 100))
    (tmp_path / "config" / "config.json").write_text('{"rope_theta": 1}')
    names = ["a", "b", "small-tensor", "big-tensor", "config"]
    revisions = [folder_revision(tmp_path / name, whole) for name in names]
    assert revisions[0] == revisions[1]
    assert len(set(revisions)) == 4


def test_a_small_model_is_hashed_whole(tmp_path: Path) -> None:
    data = bytearray(64 * SAMPLE_BYTES)
    save(tmp_path / "a", q=bytes(data))
    data[2 * SAMPLE_BYTES] = 1  # between two samples
    save(tmp_path / "b", q=bytes(data))
    assert folder_revision(tmp_path / "a") != folder_revision(tmp_path / "b")
    assert folder_revision(tmp_path / "a", 0) == folder_revision(tmp_path / "b", 0)


def test_weights_that_are_missing_or_no_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set `kvstrata.revision`"):
        folder_revision(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        folder_revision(tmp_path, 0)


# ---------------------------------------------------------------- faults


def test_a_fault_is_told_before_the_call_returns(tmp_path: Path) -> None:
    line = FaultLine(tmp_path / "f")
    assert line.drain() == set()
    keys = [n.to_bytes(52, "big") for n in range(2500)]
    for _ in range(50):  # nobody listens meanwhile
        report_fault(str(line.path), keys)
    report_fault(str(line.path), [b"one more"])
    assert line.drain() == {*keys, b"one more"}
    assert line.drain() == set()
    report_fault(str(line.path), [b"later"])
    assert line.drain() == {b"later"}
    line.close()
    line.close()
    with pytest.raises(LinkBroken, match="can't be told"):
        report_fault(str(line.path), keys)


def test_lines_of_killed_schedulers_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    living = FaultLine(fault_path("living"))
    dead = fault_path("dead")
    dead.touch()
    other = FaultLine(fault_path("other"))
    assert not dead.exists()
    report_fault(str(living.path), [b"k"])
    assert living.drain() == {b"k"}
    living.close()
    other.close()


def test_a_record_that_is_still_being_written_is_read_later(tmp_path: Path) -> None:
    line = FaultLine(tmp_path / "f")
    report_fault(str(line.path), [b"first"])
    report_fault(str(line.path), [b"second"])
    whole = line.path.read_bytes()
    for cut in range(1, len(whole)):
        line.path.write_bytes(whole[:cut])
        line._at = 0
        early = line.drain()
        line.path.write_bytes(whole)
        assert early | line.drain() == {b"first", b"second"}
    line.close()


# ---------------------------------------------------------------- keys and slots


def test_keys_go_both_ways() -> None:
    naming = Naming(make_namespace(4096, 8192))
    theirs = b"h" * 32 + (1).to_bytes(4, "big")
    assert naming.ours(theirs) == naming.namespace.key(1, b"h" * 32)
    assert naming.theirs(naming.ours(theirs)) == theirs
    assert naming.size(theirs) == 8192


def test_slots_are_held_by_size_and_asked_for_by_one_group() -> None:
    pool = SlotPool(make_namespace(4096, 8192, 4096), most=10, floor=2)
    assert pool.wanted() == {0: 2, 1: 2}
    pool.add(2, [0, 4096])
    assert pool.wanted() == {1: 2}
    assert [pool.take(4096), pool.take(4096), pool.take(4096)] == [0, 4096, None]
    pool.expected[4096] = 5
    assert pool.wanted()[0] == 7
    pool.expected[4096] = 500
    assert pool.wanted()[0] == 10
    pool.need(8192, 30)  # beyond the bound, but only once
    assert pool.wanted()[1] == 30
    assert pool.wanted()[1] == 2


# ---------------------------------------------------------------- stores that lack slots

NEED = Counter({4096: 3})


def asking(pool: SlotPool, *slots: int) -> None:
    """The node is asked, and answers with these slots."""
    pool.asked()
    pool.answered()
    pool.add(0, slots)


def test_a_store_waits_for_the_answer_to_its_own_question() -> None:
    pool = SlotPool(make_namespace(4096), most=10)
    pool.asked()  # before there was a shortage
    shortage = Shortage(pool, now=100.0)
    assert shortage.waits(NEED, 100.0)
    pool.answered()
    assert shortage.waits(NEED, 101.0)
    asking(pool, 0, 4096)
    assert pool.lacks(NEED)
    assert not shortage.waits(NEED, 101.0)  # the node has no more than two


def test_a_store_without_any_slot_asks_three_times() -> None:
    pool = SlotPool(make_namespace(4096), most=10)
    shortage = Shortage(pool, now=0.0)
    told = []
    for _ in range(4):
        told.append(shortage.waits(NEED, 0.0))
        asking(pool)
    assert told == [True, True, True, False]


def test_no_store_waits_for_longer_than_its_patience() -> None:
    pool = SlotPool(make_namespace(4096), most=10)
    shortage = Shortage(pool, now=0.0)
    assert shortage.waits(NEED, 4.9)
    assert not shortage.waits(NEED, 5.0)


def test_what_a_lost_session_owed_counts_as_answered() -> None:
    pool = SlotPool(make_namespace(4096), most=10)
    pool.add(0, [0])
    shortage = Shortage(pool, now=0.0)
    pool.asked()
    pool.clear()
    assert pool.free(4096) == 0
    assert shortage.waits(NEED, 0.0)  # one of the three: nothing came of it
    asking(pool, 0, 4096, 8192)
    assert not pool.lacks(NEED)
