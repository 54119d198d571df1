"""Traces made on the spot, small enough to count by hand."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstrata.cli import main
from kvstrata.errors import ConfigError
from kvstrata.simulate import Trace, read_trace, simulate

TOKENS = 8
PAGE = 4096


def write(path: Path, requests: Sequence[Sequence[int]], extra: int = 0) -> Path:
    """A trace in which each request has these hash ids, all full, and `extra` tokens more."""
    lines = [
        json.dumps(
            {
                "timestamp": 1000 * second,
                "input_length": len(ids) * TOKENS + extra,
                "output_length": 5,
                "hash_ids": [*ids, 10_000 + second] if extra else list(ids),
            }
        )
        for second, ids in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    # A conversation of three turns, and another with the same start.
    requests = [[1, 2], [1, 2, 3, 4], [9], [1, 2, 3, 4, 5], [1, 2, 7]]
    return read_trace(write(tmp_path / "t.jsonl", requests, extra=3), TOKENS)


def scans_over_something_hot(path: Path) -> Trace:
    """Two short prompts that are asked again and again, between long ones that never are."""
    requests: list[list[int]] = [[1, 2], [3, 4]]
    for n in range(60):
        requests += [[1, 2], [3, 4]]
        requests += [list(range(m, m + 12)) for m in (100 + 24 * n, 112 + 24 * n)]
    return read_trace(write(path, requests), TOKENS)


def conversations(path: Path, turns: int = 600) -> Trace:
    """Twelve users who take turns at random; each turn adds to what was said."""
    rng = random.Random(0)
    said: dict[int, list[int]] = {}
    requests = []
    fresh = 1000
    for _ in range(turns):
        user = rng.randrange(12)
        ids = said.setdefault(user, [1, 2])
        ids += range(fresh, fresh + rng.randint(1, 3))
        fresh += 3
        requests.append(list(ids))
        if len(ids) > 25:
            del said[user]
    return read_trace(write(path, requests), TOKENS)


# ---------------------------------------------------------------- reading


def test_full_chunks_count_and_the_ceiling_is_what_came_before(trace: Trace) -> None:
    assert [len(request.keys) for request in trace.requests] == [2, 4, 1, 5, 3]
    assert trace.tokens == 15 * TOKENS + 5 * 3
    assert trace.ceiling == (0 + 2 + 0 + 4 + 2) * TOKENS
    assert trace.chunks == 7
    assert [request.time for request in trace.requests] == [0, 1, 2, 3, 4]


def test_a_prefix_ends_at_the_first_chunk_that_is_new(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", [[1, 2, 3], [1, 8, 3]]), TOKENS)
    assert trace.ceiling == TOKENS


def test_requests_are_taken_in_order_of_time(tmp_path: Path) -> None:
    lines = write(tmp_path / "t", [[1], [1, 2], [1, 2, 3]]).read_text().splitlines()
    (tmp_path / "t").write_text("\n".join(reversed(lines)))
    assert [r.time for r in read_trace(tmp_path / "t", TOKENS).requests] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"timestamp": 0}', "line 2: .*input_length"),
        ("not json", "line 2: "),
        (
            '{"timestamp":0,"input_length":99,"output_length":0,"hash_ids":[1]}',
            "99 tokens fill 12 chunks of 8, but there are 1 hash_ids",
        ),
        (f'{{"timestamp":0,"input_length":8,"output_length":0,"hash_ids":[{1 << 70}]}}', "line 2"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path / "t", [[1]])
    path.write_text(path.read_text() + text + "\n")
    with pytest.raises(ConfigError, match=says):
        read_trace(path, TOKENS)


def test_traces_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "absent", TOKENS)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(tmp_path / "empty", TOKENS)


# ---------------------------------------------------------------- replaying


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_a_tier_that_holds_everything_reaches_the_ceiling(trace: Trace, policy: str) -> None:
    outcome = simulate(trace, policy, 7 * PAGE, PAGE)
    assert (outcome.host, outcome.second, outcome.evicted) == (trace.ceiling, 0, 0)
    assert outcome.rate == outcome.host_rate == outcome.ceiling_rate == 64 / 135


def test_an_lru_of_four_chunks_counted_by_hand(trace: Trace) -> None:
    # [1 2] [1 2 3 4] fill it; 9 takes the place of 4; then 1 2 3 are found, and 4 takes that of 9;
    # 5 finds no room while the rest is leased; 1 2 are found.
    outcome = simulate(trace, "lru", 4 * PAGE, PAGE)
    assert outcome.host == (0 + 2 + 0 + 3 + 2) * TOKENS


def test_the_second_tier_has_what_the_first_gave_up(trace: Trace) -> None:
    outcome = simulate(trace, "lru", 4 * PAGE, PAGE, second_capacity=100 * PAGE)
    assert (outcome.host, outcome.second) == (7 * TOKENS, 1 * TOKENS)
    assert outcome.rate == outcome.ceiling_rate


def test_a_bounded_second_tier_forgets(tmp_path: Path) -> None:
    requests = [[n, n + 1] for n in range(0, 20, 2)] * 2
    trace = read_trace(write(tmp_path / "t", requests), TOKENS)
    rates = [simulate(trace, "lru", 2 * PAGE, PAGE, n * PAGE).rate for n in (0, 10, 20)]
    assert rates == [0, 0, 0.5]


def test_a_scan_is_resisted_by_those_that_promise_it(tmp_path: Path) -> None:
    trace = scans_over_something_hot(tmp_path / "t")
    found = {p: simulate(trace, p, 20 * PAGE, PAGE).host for p in ("lru", "arc", "s3fifo")}
    assert found["lru"] == 4 * TOKENS, "before the first scan"
    assert found["arc"] == found["s3fifo"] == trace.ceiling


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_more_memory_finds_more_of_conversations(tmp_path: Path, policy: str) -> None:
    trace = conversations(tmp_path / "t")
    sizes = (10, 40, 160, trace.chunks)
    found = [simulate(trace, policy, n * PAGE, PAGE).host for n in sizes]
    assert found == sorted(found)
    assert 0 < found[0] < found[2]
    assert found[3] == trace.ceiling


def test_a_tier_that_holds_no_chunk_is_refused(trace: Trace) -> None:
    with pytest.raises(ConfigError, match="raise --capacity"):
        simulate(trace, "lru", PAGE, PAGE + 1)


# ---------------------------------------------------------------- the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    conversations(tmp_path / "talk.jsonl", 60)
    return tmp_path / "talk.jsonl"


SIZES = ["--chunk-tokens", str(TOKENS), "--bytes-per-token", "512"]


def test_lines_for_machines(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--policy", "lru,s3fifo", "--capacity", "64KiB,1MiB", "--fs-capacity", "1GiB"]
    assert main(["simulate", str(file), *SIZES, *args, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["policy"], r["capacity"]) for r in rows] == [
        ("lru", 1 << 16),
        ("lru", 1 << 20),
        ("s3fifo", 1 << 16),
        ("s3fifo", 1 << 20),
    ]
    for row in rows:
        assert row["requests"] == 60
        assert row["host"] + row["second"] == row["ceiling"]
        assert row["rate"] == pytest.approx(row["ceiling"] / row["tokens"], abs=1e-6)
        assert row["second_capacity"] == 1 << 30


def test_a_table_and_a_curve_for_people(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(file), *SIZES, "--policy", "lru,arc"]) == 0
    out = capsys.readouterr().out
    assert "60 requests" in out
    assert "A cache without bounds would have had" in out
    assert "o lru, x arc, - without bounds" in out
    assert max(map(len, out.splitlines())) <= 80
    curve = [line.split("|")[1] for line in out.splitlines() if "% |" in line]
    assert sum(line.count("o") for line in curve) == 7, "one for every capacity"
    assert "o" in curve[0], "the largest reaches the ceiling"


def test_one_capacity_needs_no_curve(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(file), *SIZES, "--capacity", "1MiB", "--requests", "7"]) == 0
    out = capsys.readouterr().out
    assert "7 requests" in out
    assert "% |" not in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--capacity", "much"], "'much' is not a size"),
        (["--capacity", "1KiB"], "holds no chunk"),
        (["--policy", "mru"], "neither one of"),
        (["--chunk-tokens", "0"], "'0' is not a number from 1 on"),
        (["--chunk-tokens", "1"], "is --chunk-tokens right?"),
    ],
)
def test_mistakes_are_told_in_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    assert main(["simulate", str(file), *SIZES, *args]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_png_without_matplotlib_says_what_to_do(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", str(file), "--png", str(file.with_suffix(".png"))]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not file.with_suffix(".png").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
def test_png(file: Path) -> None:
    png = file.with_suffix(".png")
    assert main(["simulate", str(file), *SIZES, "--policy", "lru,arc", "--png", str(png)]) == 0
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
