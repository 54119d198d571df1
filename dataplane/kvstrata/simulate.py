"""What a policy and a capacity would have made of a trace of requests.

A trace has one JSON object a line: `timestamp` in milliseconds, `input_length` and
`output_length` in tokens, and `hash_ids`, one for every started chunk of the input, where equal
ids mean equal prefixes up to there. The requests go through the host tier's own code, one after
the other: look the prefix up under a lease, bring in what the second tier has of it, reserve and
commit the rest. Only chunks that are full count, as in an engine; what a request generated is
seen when the next one sends it back as input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from kvstrata.errors import ConfigError
from kvstrata.host import HostTier
from kvstrata.keys import DIGEST_BYTES, Key, make_key
from kvstrata.policies import Lru, open_policy
from kvstrata.slots import Slots

__all__ = ["Outcome", "Request", "Trace", "read_trace", "simulate"]

_LEASE_TTL = 30.0


class _Line(msgspec.Struct):
    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=0)]
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Request:
    """`time` in seconds, `tokens` of input, and the keys of the chunks they fill."""

    time: float
    tokens: int
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. `ceiling` are the tokens of input that a cache that forgets
    nothing would have held, `chunks` how many different ones it would hold in the end."""

    requests: tuple[Request, ...]
    chunk_tokens: int
    tokens: int
    ceiling: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. Token counts are of input: `tokens` asked for, of which `host` and `second`
    were found in these tiers, as part of an unbroken prefix. Capacities in bytes."""

    policy: str
    capacity: int
    second_capacity: int
    requests: int
    tokens: int
    host: int
    second: int
    ceiling: int
    evicted: int

    @property
    def host_rate(self) -> float:
        return self.host / max(self.tokens, 1)

    @property
    def second_rate(self) -> float:
        return self.second / max(self.tokens, 1)

    @property
    def rate(self) -> float:
        return self.host_rate + self.second_rate

    @property
    def ceiling_rate(self) -> float:
        return self.ceiling / max(self.tokens, 1)


def read_trace(path: Path, chunk_tokens: int, limit: int | None = None) -> Trace:
    """The first `limit` requests of a trace (None: all). Raises `ConfigError` naming the line."""
    decode = msgspec.json.Decoder(_Line).decode
    known: dict[int, Key] = {}
    requests = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(islice(lines, limit), 1):
                if not line.strip():
                    continue
                try:
                    requests.append(_request(decode(line), chunk_tokens, known))
                except (msgspec.DecodeError, ValueError, OverflowError) as e:
                    raise ConfigError(f"{path}, line {number}: {e}") from e
    except OSError as e:
        raise ConfigError(f"trace {path}: {e.strerror}") from e
    if not requests:
        raise ConfigError(f"trace {path} has no requests")
    requests.sort(key=lambda request: request.time)
    seen: set[Key] = set()
    ceiling = 0
    for request in requests:
        ceiling += _prefix(request.keys, seen) * chunk_tokens
        seen.update(request.keys)
    tokens = sum(request.tokens for request in requests)
    return Trace(tuple(requests), chunk_tokens, tokens, ceiling, len(seen))


def simulate(
    trace: Trace, policy: str, capacity: int, chunk_bytes: int, second_capacity: int = 0
) -> Outcome:
    """Replay a trace through a host tier of `capacity` bytes, and a second tier, written through
    and least recently used, of `second_capacity` (0: none). Raises `ConfigError` if the host tier
    can't hold one chunk, or on a policy that does not exist."""
    if capacity < Slots.rounded(chunk_bytes):
        raise ConfigError(
            f"a capacity of {capacity} bytes holds no chunk of {chunk_bytes}: raise --capacity, or "
            "lower --bytes-per-token"
        )
    now = trace.requests[0].time
    host = HostTier(Slots(capacity), open_policy(policy, capacity), lambda: now)
    second = _Second(second_capacity, chunk_bytes)
    found_host = found_second = 0
    for request in trace.requests:
        now = request.time
        keys = request.keys
        leased = host.lease("engine", 1, keys, _LEASE_TTL, chain=True)
        here = {key for key, chunk in zip(keys, leased, strict=True) if chunk is not None}
        prefix = keys[: _prefix(keys, here | second.held(keys))]
        below = [key for key in prefix if key not in here]
        found_host += len(prefix) - len(below)
        found_second += len(below)
        second.touch(prefix)
        _store(host, "tier", below, chunk_bytes)
        host.lease("engine", 1, below, _LEASE_TTL)
        _store(host, "engine", keys[len(prefix) :], chunk_bytes)
        second.store(keys)
        host.release("engine", [1])
    return Outcome(
        policy=policy,
        capacity=capacity,
        second_capacity=second_capacity,
        requests=len(trace.requests),
        tokens=trace.tokens,
        host=found_host * trace.chunk_tokens,
        second=found_second * trace.chunk_tokens,
        ceiling=trace.ceiling,
        evicted=host.evicted,
    )


class _Second:
    """A tier behind the host tier, as a set of keys: written through, least recently used."""

    def __init__(self, capacity: int, chunk_bytes: int) -> None:
        self._most = capacity // chunk_bytes
        self._order = Lru(capacity)
        self._held: set[Key] = set()

    def held(self, keys: Sequence[Key]) -> set[Key]:
        return self._held.intersection(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        self._order.touch(keys)

    def store(self, keys: Sequence[Key]) -> None:
        fresh = [key for key in keys if key not in self._held][: self._most]
        if not fresh:
            return
        self._order.insert(fresh, 1, after=keys[: len(keys) - len(fresh)])
        self._held.update(fresh)
        gone = list(islice(self._order.victims(), max(0, len(self._held) - self._most)))
        self._order.evict(gone)
        self._held.difference_update(gone)


def _store(host: HostTier, owner: str, keys: Sequence[Key], chunk_bytes: int) -> None:
    if keys:
        offsets = host.reserve(owner, [(key, chunk_bytes) for key in keys])
        host.commit(owner, [key for key, o in zip(keys, offsets, strict=True) if o >= 0])


def _prefix(keys: Iterable[Key], held: set[Key]) -> int:
    count = 0
    for key in keys:
        if key not in held:
            break
        count += 1
    return count


def _request(line: _Line, chunk_tokens: int, known: dict[int, Key]) -> Request:
    full = line.input_length // chunk_tokens
    if len(line.hash_ids) < full:
        raise ValueError(
            f"{line.input_length} tokens fill {full} chunks of {chunk_tokens}, but there are "
            f"{len(line.hash_ids)} hash_ids: is --chunk-tokens right?"
        )
    for id_ in line.hash_ids[:full]:
        if id_ not in known:
            known[id_] = make_key(bytes(DIGEST_BYTES), 0, id_.to_bytes(8, "big", signed=True))
    return Request(
        line.timestamp / 1000, line.input_length, tuple(known[id_] for id_ in line.hash_ids[:full])
    )
