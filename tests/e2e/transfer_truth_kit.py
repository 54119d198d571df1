"""What is not true of a transfer, given who held what and who was away when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from killed_cluster_kit import HELD, NOBODYS, NODES, NUMBERS, PAGE, SOURCES, KilledCluster
from transfer_clients_kit import DEADLINE, Asked

from kvstrata.api import KeyOutcome, Outcome, TransferInfo, TransferState
from kvstrata.keys import Key

__all__ = ["faults"]

_HERE = (Outcome.STORED, Outcome.PRESENT)
# How long after its deadline a transfer may end, in seconds, while a server is there to end it: it
# looks four times a second, on a machine that may have much else to do.
_ALLOWANCE = 5.0


def faults(
    asked: Sequence[Asked], told: dict[str, TransferInfo], cluster: KilledCluster
) -> list[str]:
    """In words; `told` is what the control plane said in the end, by transfer."""
    brought: dict[str, set[int]] = {name: set(HELD.get(name, ())) for name in NODES}
    for each in asked:
        brought[each.plan.request.target].update(each.plan.numbers)
    found = []
    for each in asked:
        info = told.get(each.id)
        if info is None:
            found.append(f"{each.plan.name}: {each.id!r} is not there")
            continue
        truth = _Truth(each, info, cluster, brought)
        found += [f"{each.plan.name}: {fault}\n    {truth}" for fault in truth.faults()]
    return found


class _Truth:
    def __init__(
        self,
        asked: Asked,
        info: TransferInfo,
        cluster: KilledCluster,
        brought: dict[str, set[int]],
    ) -> None:
        self.asked, self.info, self.cluster, self.brought = asked, info, cluster, brought
        self.request = asked.plan.request
        self.outcomes = Counter(k.outcome for k in info.keys)
        others = [n for n in NODES if n != self.request.target]
        self.may_give = {"any": others, "own": []}.get(self.request.source, [self.request.source])
        began, ended = asked.began, info.ended or float("inf")
        others = [*cluster.urls, self.request.target, *self.may_give]
        self.calm = not cluster.disturbed(others, began, ended)
        self.in_time = self.request.deadline == DEADLINE

    def __str__(self) -> str:
        info, o = self.info, self.asked.began
        lines = [
            f"{info.id} {info.state} {info.source} -> {info.target}, {info.bytes} bytes of "
            f"{self.request.byte_budget}, hold {self.request.hold}, began {o % 1000:.2f}, created "
            f"{info.created - o:+.2f}, deadline {info.deadline - o:+.2f}, ended "
            f"{(info.ended or 0) - o:+.2f}, cancelled {self.asked.cancelled}: {info.detail}",
            *(f"{NUMBERS[Key(bytes.fromhex(k.key))]}: {k.outcome} {k.source}" for k in info.keys),
            *(f"read at {r.at - o:+.2f}: {sorted(r.here)}" for r in self.asked.readings),
            *(
                f"{d.name} away {d.began - o:+.2f} .. {d.ended - o:+.2f}"
                for d in self.cluster.outages
                if d.ended + 1 > o and d.began - 1 < (info.ended or 0)
            ),
        ]
        return "\n    ".join(lines)

    def faults(self) -> Iterator[str]:
        yield from self._about_its_record()
        yield from self._about_its_end()
        yield from self._about_bytes()
        for k in self.info.keys:
            yield from self._about_key(k, NUMBERS[Key(bytes.fromhex(k.key))])
        yield from self._about_readings()

    def _about_its_record(self) -> Iterator[str]:
        info = self.info
        if [k.key for k in info.keys] != self.request.keys:
            yield "other keys than asked for"
        if info.counts != dict(self.outcomes):
            yield f"counts {info.counts} are not those of its keys"
        if (info.source, info.target) != (self.request.source, self.request.target):
            yield "another source or target than asked for"
        if self.asked.seen is None:
            yield "its client never saw it end"
        elif self.asked.seen != info:
            was, now = vars(self.asked.seen), vars(info)
            changes = [(name, was[name], now[name]) for name in was if was[name] != now[name]]
            yield f"it changed after its end: {changes}"

    def _about_its_end(self) -> Iterator[str]:
        info, here, all_ = self.info, sum(self.outcomes[o] for o in _HERE), len(self.info.keys)
        by_target = {
            TransferState.DONE: here == all_,
            TransferState.PARTIAL: 0 < here < all_,
            TransferState.FAILED: here == 0,
        }
        if info.ended is None or not info.state.ended:
            yield "it has no end"
            return
        if info.state in by_target:
            if not by_target[info.state] or self.outcomes[Outcome.CANCELLED]:
                yield "its state is not that of its outcomes"
        elif info.state is TransferState.CANCELLED:
            if not self.asked.cancelled:
                yield "cancelled by nobody"
        elif info.state is TransferState.EXPIRED:
            if info.ended < info.deadline:
                yield "expired before its deadline"
            if self.calm and self.in_time:
                yield "it was not carried out, though nobody was away"
        else:
            yield "no documented end"
        servers = [o for o in self.cluster.outages if o.name in self.cluster.urls]
        away = [o.ended for o in servers if o.began - 1 < info.ended and o.ended > info.deadline]
        if info.ended > max([info.deadline, *away]) + _ALLOWANCE:
            yield "it ended too late"

    def _about_bytes(self) -> Iterator[str]:
        info, budget = self.info, self.request.byte_budget
        if budget is not None and info.bytes > budget:
            yield "more bytes than its budget"
        stored = self.outcomes[Outcome.STORED] * PAGE
        # What arrived and was evicted before the end was moved, too.
        if not stored <= info.bytes <= stored + self.outcomes[Outcome.NO_ROOM] * PAGE:
            yield "its bytes are not those of what was stored"

    def _about_key(self, k: KeyOutcome, n: int) -> Iterator[str]:
        request, info = self.request, self.info
        if k.outcome is Outcome.STORED:
            if k.source not in self.may_give:
                yield f"{n} came from {k.source}, which it may not"
            elif n not in self.brought[k.source]:
                yield f"{n} came from {k.source}, which never had it"
        elif k.source is not None and k.outcome is not Outcome.NO_ROOM:
            yield f"{n} has a source, though it did not come"
        if k.outcome in _HERE and n in NOBODYS:
            yield f"{n} is said to be here, and is nowhere"
        held = any(n in HELD[s] for s in self.may_give if s in SOURCES)
        if k.outcome is Outcome.MISSING and held and self.calm:
            yield f"{n} is said to be missing, and is not"
        if k.outcome is Outcome.MISSING and n in HELD.get(request.target, ()) and self.calm:
            yield f"{n} is said to be missing, and is on the target's own disk"
        if k.outcome is Outcome.FAILED and self.calm:
            yield f"{n} failed, though nobody was away"
        if k.outcome in (Outcome.CORRUPT, Outcome.PENDING):
            yield f"{n} is {k.outcome}"
        if k.outcome is Outcome.CANCELLED and info.state not in (
            TransferState.CANCELLED,
            TransferState.EXPIRED,
        ):
            yield f"{n} is cancelled, and the transfer is not"
        if k.outcome is Outcome.NO_ROOM and request.target != "t2":
            upto = 1 + request.keys.index(k.key)
            if request.byte_budget is None or upto * PAGE <= request.byte_budget:
                yield f"{n} had no room, where there was some"

    def _about_readings(self) -> Iterator[str]:
        info = self.info
        here = {NUMBERS[Key(bytes.fromhex(k.key))] for k in info.keys if k.outcome in _HERE}
        for reading in self.asked.readings if info.ended is not None else ():
            if reading.wrong:
                yield f"wrong bytes of {sorted(reading.wrong)}"
            # A roomy target loses nothing but by its death; to cancel what is over ends its hold.
            held = info.target != "t2" or (
                reading.at < info.ended + self.request.hold - 0.1 and not self.asked.cancelled
            )
            died = self.cluster.disturbed([info.target], info.ended, reading.at)
            if held and not died and not here <= reading.here:
                yield f"{sorted(here - reading.here)} are not here, and should be held"
