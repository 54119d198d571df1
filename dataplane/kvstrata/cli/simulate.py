"""`kvstrata simulate TRACE`: how often would the host tier have had what was asked?"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import Progress

from kvstrata.cli.cluster import show, size, table
from kvstrata.cli.flags import Parser
from kvstrata.errors import ConfigError
from kvstrata.policies import BUILT_IN
from kvstrata.simulate import Outcome, Trace, read_trace, simulate

__all__ = ["main"]

_ABOUT = """\
Replay a trace of requests through the host tier's own code and print the hit rate by tier, as a
share of all input tokens, beside that of a cache without bounds.

A trace has one JSON object a line: timestamp (ms), input_length, output_length, hash_ids."""

# Of all different chunks of the trace, where no capacity is given.
_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
_MARKS = "oxv#@%&$"


def main(argv: list[str]) -> int:
    parser = Parser("kvstrata simulate", _ABOUT)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument(
        "--policy",
        type=lambda text: text.split(","),
        default=["lru"],
        metavar="NAME,...",
        help=f"{', '.join(BUILT_IN)}, or module:Class (default: lru)",
    )
    parser.add_argument(
        "--capacity",
        type=_sizes,
        metavar="SIZE,...",
        help="of the host tier, as in 64GiB (default: from 1/64 of what the trace asks for to all)",
    )
    parser.add_argument(
        "--fs-capacity",
        type=_size,
        default=0,
        metavar="SIZE",
        help="of a second tier, written through (default: none)",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=_count,
        default=512,
        metavar="N",
        help="tokens that a hash id stands for (default: 512)",
    )
    parser.add_argument(
        "--bytes-per-token",
        type=_count,
        default=131_072,
        metavar="N",
        help="of KV cache (default: 131072, Llama 3.1 8B in bfloat16)",
    )
    parser.add_argument("--requests", type=_count, metavar="N", help="only the first N")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the curve (needs matplotlib)"
    )
    options = parser.parse_args(argv)
    if options.png is not None:
        _pyplot()  # before the work, not after
    trace = read_trace(options.trace, options.chunk_tokens, options.requests)
    chunk_bytes = options.chunk_tokens * options.bytes_per_token
    capacities = options.capacity or _default_capacities(trace, chunk_bytes)
    outcomes = _run(trace, options, sorted(set(capacities)), chunk_bytes)
    if options.json:
        for outcome in outcomes:
            print(_line(outcome))
    else:
        _print(trace, outcomes, chunk_bytes)
    if options.png is not None:
        _draw(outcomes, options.png, options.trace.name)
    return 0


def _run(
    trace: Trace, options: argparse.Namespace, capacities: Sequence[int], chunk_bytes: int
) -> list[Outcome]:
    runs = [(policy, capacity) for policy in options.policy for capacity in capacities]
    outcomes = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for policy, capacity in progress.track(runs, description="replaying"):
            outcomes.append(simulate(trace, policy, capacity, chunk_bytes, options.fs_capacity))
    return outcomes


def _default_capacities(trace: Trace, chunk_bytes: int) -> list[int]:
    counts = {max(1, math.ceil(trace.chunks * share)) for share in _SHARES}
    return [count * chunk_bytes for count in counts]


# ---------------------------------------------------------------- showing


def _line(outcome: Outcome) -> str:
    fields = {name: getattr(outcome, name) for name in outcome.__dataclass_fields__}
    rates = {
        name: round(getattr(outcome, name), 6)
        for name in ("host_rate", "second_rate", "rate", "ceiling_rate")
    }
    return msgspec.json.encode(fields | rates).decode()


def _print(trace: Trace, outcomes: Sequence[Outcome], chunk_bytes: int) -> None:
    second = any(outcome.second_capacity for outcome in outcomes)
    print(
        f"{len(trace.requests)} requests, {trace.tokens} tokens, {trace.chunks} different chunks "
        f"of {size(chunk_bytes)}.\n"
        f"A cache without bounds would have had {outcomes[0].ceiling_rate:.1%} of the tokens."
    )
    columns = [">capacity", "policy", ">host", *([">fs", ">both"] if second else []), ">evicted"]
    rows = table("share of the tokens found", *columns)
    for outcome in sorted(outcomes, key=lambda outcome: outcome.capacity):
        below = [f"{outcome.second_rate:.1%}", f"{outcome.rate:.1%}"] if second else []
        rows.add_row(
            size(outcome.capacity),
            outcome.policy,
            f"{outcome.host_rate:.1%}",
            *below,
            str(outcome.evicted),
        )
    show(rows)
    if len({outcome.capacity for outcome in outcomes}) > 1:
        print(_curve(outcomes))


def _curve(outcomes: Sequence[Outcome], height: int = 12, step: int = 10) -> str:
    """Hit rate over capacity, in characters: a column a capacity, a mark a policy."""
    capacities = sorted({outcome.capacity for outcome in outcomes})
    policies = list(dict.fromkeys(outcome.policy for outcome in outcomes))
    top = max(outcomes[0].ceiling_rate, 0.01)
    width = step * len(capacities)
    grid = [[" "] * width for _ in range(height)]
    grid[0] = ["-"] * width
    for outcome in outcomes:
        row = height - 1 - min(round(outcome.rate / top * (height - 1)), height - 1)
        # Side by side, so that equal ones don't hide each other.
        place = step // 2 - len(policies) // 2 + policies.index(outcome.policy)
        column = capacities.index(outcome.capacity) * step + max(0, min(place, step - 1))
        grid[row][column] = _MARKS[policies.index(outcome.policy) % len(_MARKS)]
    lines = [
        f"{top * (height - 1 - i) / (height - 1):6.1%} |{''.join(row)}"
        for i, row in enumerate(grid)
    ]
    lines.append(" " * 7 + "+" + "-" * width)
    lines.append(" " * 8 + "".join(f"{size(capacity):^{step}}" for capacity in capacities))
    legend = ", ".join(f"{_MARKS[i % len(_MARKS)]} {name}" for i, name in enumerate(policies))
    lines.append(" " * 8 + f"{legend}, - without bounds")
    return "\n".join(line.rstrip() for line in lines)


def _draw(outcomes: Sequence[Outcome], file: Path, title: str) -> None:
    figure, axes = _pyplot().subplots(figsize=(8, 5), layout="constrained")
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.policy == policy]
        gib = [outcome.capacity / (1 << 30) for outcome in mine]
        axes.plot(gib, [100 * outcome.rate for outcome in mine], marker="o", label=policy)
    axes.axhline(100 * outcomes[0].ceiling_rate, linestyle="--", color="grey", label="no bounds")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("host tier, GiB")
    second = any(outcome.second_capacity for outcome in outcomes)
    axes.set_ylabel(f"input tokens found{' in host and fs' if second else ''}, %")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, format="png", dpi=150)
    except OSError as e:
        raise ConfigError(f"--png {file}: {e.strerror}") from e
    finally:
        _pyplot().close(figure)


def _pyplot() -> Any:
    """matplotlib without a screen. It is no dependency of ours."""
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError as e:
        raise ConfigError("--png needs matplotlib: pip install matplotlib") from e


# ---------------------------------------------------------------- the command line


def _size(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 64GiB or 500MB") from e


def _sizes(text: str) -> list[int]:
    return [_size(part) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)
