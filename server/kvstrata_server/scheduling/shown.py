"""A transfer as it was at one moment, and as JSON with an entry per key.

Nothing is done to all keys of a large one at once: everybody else waits for the event loop. Made an
object a key and written by pydantic, an answer with 65,536 keys would take it a tenth of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.keys import Key

__all__ = ["Shown"]

# Keys of an answer that are written at a time: some milliseconds.
_PART = 4000


@dataclass(frozen=True, slots=True)
class Shown:
    """`keys`, `outcomes` and `sources` run in parallel, in request order. `holds_until` is when the
    target gives up what it keeps leased of it, 0 if it keeps nothing."""

    summary: api.TransferSummary
    keys: Sequence[Key]
    outcomes: Sequence[Outcome]
    sources: Sequence[str | None]
    hints: Mapping[str, Any]
    holds_until: float
    estimate: float | None = None

    @property
    def id(self) -> str:
        return self.summary.id

    @property
    def state(self) -> TransferState:
        return self.summary.state

    async def json(self) -> bytes:
        """As an `api.TransferInfo`."""
        return msgspec.json.encode(
            {
                **self.summary.model_dump(mode="json"),
                "keys": await self.outcomes_json(),
                "kv_transfer_params": self.hints.get("kv_transfer_params", {}),
                "router_hint": self.hints.get("router_hint", {}),
                "estimate": self.estimate,
            }
        )

    async def outcomes_json(self) -> msgspec.Raw:
        """As a list of `api.KeyOutcome`."""
        # What comes after a key: there are few different ones. By identity, since an enum's hash
        # takes longer than all the rest.
        tails: dict[tuple[int, str | None], str] = {}
        parts: list[bytes] = []
        for start in range(0, len(self.keys), _PART):
            if start:
                await asyncio.sleep(0)
            part = slice(start, start + _PART)
            entries: list[str] = []
            for key, outcome, source in zip(
                self.keys[part], self.outcomes[part], self.sources[part], strict=True
            ):
                tail = tails.get((id(outcome), source))
                if tail is None:
                    tail = tails[id(outcome), source] = _tail(outcome, source)
                entries.append(f'{{"key":"{key.hex()}{tail}')
            parts.append(",".join(entries).encode())
        return msgspec.Raw(b"".join((b"[", b",".join(parts), b"]")))


def _tail(outcome: Outcome, source: str | None) -> str:
    told = msgspec.json.encode({"outcome": outcome.value, "source": source}).decode()
    return f'",{told[1:]}'
