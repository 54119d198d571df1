"""What a tenant's quota leaves room for when chunks are asked for.

Room is the quota without what the tenant holds by the last count and without what is on its way:
bytes of transfers that were accepted here and have not ended, or have so lately that the count may
not have them; but not those of chunks that were at their target when the count began. So the first
of many at once gets what there is, and what moves counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata import api
from kvstrata.api import Outcome
from kvstrata.errors import Busy, Malformed, NoSpace
from kvstrata.keys import Key
from kvstrata_server.clock import Clock
from kvstrata_server.placement.cluster import Cluster
from kvstrata_server.scheduling.planning import Plan
from kvstrata_server.scheduling.transfer import Transfer
from kvstrata_server.tenancy.quotas import Quotas
from kvstrata_server.tenancy.usage import Pace, Usage

__all__ = ["Admission"]

# From the end of a transfer until its target has reported what it brought, at the latest.
_UNTOLD = 2.0
# The longest that it takes to be accepted.
_ACCEPTANCE = 10.0
_KEYS_PER_STEP = 1000


@dataclass(slots=True)
class _Claim:
    """What is on its way: `keys`, and the `nbytes` of those that the last count can't have.
    `ended`: when it was found that they are not any more; a transfer that is about to be accepted
    is not yet, and gets a moment for it."""

    target: str
    keys: Sequence[Key]
    nbytes: int
    since: float
    begun: bool = False
    ended: float | None = None

    def counts(self, moving: bool, now: float, counted: float | None) -> bool:
        """Whether the last count can't have it."""
        self.begun = self.begun or moving
        if moving or (not self.begun and now < self.since + _ACCEPTANCE):
            return True
        if self.ended is None:
            self.ended = now
        return counted is None or counted < self.ended + _UNTOLD


class Admission:
    """Asked by the scheduler about each request that a client makes, before it is accepted."""

    def __init__(
        self,
        quotas: Quotas,
        usage: Usage,
        cluster: Cluster,
        clock: Clock,
        moving: Callable[[str], bool],
    ) -> None:
        """`moving(transfer)`: whether it is accepted and has not ended."""
        self._quotas = quotas
        self._usage = usage
        self._cluster = cluster
        self._namespaces = cluster.namespaces
        self._clock = clock
        self._moving = moving
        self._claims: dict[str, dict[str, _Claim]] = {}

    def room(self, tenant: str) -> int | None:
        """Bytes that may still be brought to any place; None: no bound. Raises `Busy` before
        anything was counted."""
        quota = self._quotas.get(tenant)
        if quota is None or quota.max_bytes is None:
            return None
        if self._usage.counted_at is None:
            raise Busy(
                f"tenant {api.tenant_name(tenant)!r} has a quota, and this server has just started "
                "and not counted yet what it holds: ask again in a moment"
            )
        return max(0, quota.max_bytes - self._usage.of(tenant).bytes - self._claimed(tenant))

    def budget(self, keys: Sequence[Key], asked: int | None) -> int | None:
        """The byte budget, as far as the quota of the keys' tenant allows for it. Raises
        `Malformed` for keys of several tenants, if one of them has a quota."""
        if not self._quotas:
            return asked
        tenants = self._namespaces.tenants(keys)
        if len(tenants) > 1 and any(self._quotas.get(tenant) for tenant in tenants):
            raise Malformed(
                "these keys are of several tenants: ask for those of each by themselves"
            )
        rooms = [room for tenant in tenants if (room := self.room(tenant)) is not None]
        return min([*rooms, *([] if asked is None else [asked])], default=None)

    def admit(self, transfer: Transfer, planned: Plan, asked: int | None) -> None:
        """A transfer is about to be accepted, planned within `budget`; `asked` is the budget
        without the quota. Raises `NoSpace` if the quota leaves nothing of it to be done, but for
        a dry run, which says so key by key."""
        if not self._quotas:
            return
        tenant = next(iter(self._namespaces.tenants(transfer.keys)), "")
        room = self.room(tenant)
        if room is None:
            return
        outcomes = [each.outcome for each in planned.expected]
        lacking = outcomes.count(Outcome.NO_ROOM)
        if lacking and (asked is None or room < asked):
            told = self._told(tenant, room, lacking, len(outcomes))
            dry = transfer.state is api.TransferState.PLANNED
            if not dry and not {Outcome.PRESENT, Outcome.PENDING}.intersection(outcomes):
                raise NoSpace(told)
            transfer.detail = told
        if transfer.state is not api.TransferState.PLANNED:
            keys = [
                key
                for key, outcome in zip(transfer.keys, outcomes, strict=True)
                if outcome is Outcome.PENDING
            ]
            claim = _Claim(transfer.target, keys, planned.arriving, self._clock())
            self._claims.setdefault(tenant, {})[transfer.id] = claim

    async def arrivals(self, pace: Pace) -> Callable[[], None]:
        """See what is at its targets by now. To be awaited before a count, which has all of that,
        and what it returns to be called with its result."""
        for tenant in list(self._claims):
            self._claimed(tenant)  # notes which have ended, and lets go of what is counted
        found = [
            (claim, await self._absent(claim, pace))
            for claims in list(self._claims.values())
            for claim in list(claims.values())
        ]

        def apply() -> None:
            for claim, nbytes in found:
                claim.nbytes = nbytes

        return apply

    async def _absent(self, claim: _Claim, pace: Pace) -> int:
        """Bytes of the keys that are not in the target's host memory."""
        there, total = self._cluster.places.location(claim.target, None), 0
        for start in range(0, len(claim.keys), _KEYS_PER_STEP):
            keys = claim.keys[start : start + _KEYS_PER_STEP]
            for key, holders in zip(keys, self._cluster.index.holders(keys), strict=True):
                if there not in holders:
                    total += self._namespaces.chunk_bytes(key)
            await pace.step()
        return total

    def _claimed(self, tenant: str) -> int:
        now, counted, total = self._clock(), self._usage.counted_at, 0
        claims = self._claims.get(tenant, {})
        for transfer, claim in list(claims.items()):
            if claim.counts(self._moving(transfer), now, counted):
                total += claim.nbytes
            else:
                del claims[transfer]
        if not claims:
            self._claims.pop(tenant, None)
        return total

    def _told(self, tenant: str, room: int, lacking: int, asked: int) -> str:
        quota, name = self._quotas.get(tenant), api.tenant_name(tenant)
        most = 0 if quota is None or quota.max_bytes is None else quota.max_bytes
        held = self._usage.of(tenant).bytes
        over = f", {held - most} too many" if held > most else ""
        return (
            f"no room for {lacking} of {asked} chunks: tenant {name!r} holds {held} bytes of the "
            f"{most} that its quota allows{over}, so {room} more may come. Have some of its chunks "
            f"dropped (POST /v1/evictions), or raise the quota (PUT /v1/quotas/{name})"
        )
