"""What waits for each node: transfers to hand out, and news that a transfer is over.

A command is offered again until the node says that it took it. Whose turn it is, and how many run
at once, is `turns`'.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvstrata import api
from kvstrata_server.clock import Clock
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.scheduling.planning import ANY, OWN, Plan, plan
from kvstrata_server.scheduling.transfer import Transfer
from kvstrata_server.scheduling.turns import Turn, Turns

__all__ = ["Outgoing"]

# A command whose answer got lost is offered again after this; one that was taken is not.
_REDELIVERY = 5.0
# Planning takes about a millisecond for a thousand keys. So many keys are planned at once, and a
# plan counts for this many at least.
_MOST_PLANNED = api.MAX_KEYS
_LEAST_PLANNED = 2048
# Each is answered by a request of its own, one after the other.
_MOST_NOTICES = 64
# How many of those that wait at a target are looked at to tell when another one begins.
_MOST_COUNTED = 1000
# Who waits for a busy link is planned again after this: another source may be better by then.
_REPLANNING = 5.0


@dataclass(slots=True)
class _Notice:
    """A target that has to be told, until it answers or this has no point any more."""

    until: float
    offered: float | None = None


@dataclass(slots=True)
class _Mailbox:
    """What waits for one node, and what wakes its long poll."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    notices: dict[str, _Notice] = field(default_factory=dict)


class Outgoing:
    """`orders(node)` are commands of other kinds that wait for a node."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        turns: Turns,
        orders: Callable[[Node], list[api.Command]],
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._turns = turns
        self._orders = orders
        self._mailboxes: dict[str, _Mailbox] = {}
        self._tenants: dict[str, str] = {}
        """Transfer -> tenant, of all that are here."""
        self._targets: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Tenant -> how many of its transfers are for each target."""
        self._closing = False

    def add(self, transfer: Transfer) -> None:
        """It waits for its target; one that runs has its place there, and is offered again."""
        mailbox = self._mailbox(transfer.target)
        mailbox.transfers[transfer.id] = transfer
        turn = self._turn(transfer)
        transfer.cost = turn.cost
        if transfer.id not in self._tenants:
            self._tenants[transfer.id] = turn.tenant
            self._targets[turn.tenant][transfer.target] += 1
        if transfer.source not in (ANY, OWN):
            transfer.waits_for = transfer.source
        if transfer.state is api.TransferState.RUNNING:
            self.taken(transfer)
        mailbox.wake.set()

    def remove(self, transfer: Transfer) -> None:
        """It is over, and another may have its turn."""
        self._turns.end(transfer.id)
        mailbox = self._mailbox(transfer.target)
        mailbox.transfers.pop(transfer.id, None)
        mailbox.wake.set()
        tenant = self._tenants.pop(transfer.id, None)
        if tenant is None:
            return
        targets = self._targets[tenant]
        targets[transfer.target] -= 1
        if not targets[transfer.target]:
            del targets[transfer.target]
        if not targets:
            del self._targets[tenant]
        elif self._turns.is_limited(tenant):
            self._wake_tenant(tenant)

    def taken(self, transfer: Transfer, link: str = "") -> None:
        """Its target works on it, whichever server handed it out."""
        self._turns.count(self._turn(transfer), link, transfer.target)

    def link(self, transfer: str) -> str:
        """The source whose link it is counted at; empty: not known."""
        return self._turns.source(transfer)

    def before(self, transfer: Transfer) -> int:
        """Bytes that its target is likely to move before it begins: what runs there, what is more
        urgent, and what of the same urgency is older; unless there is room for all of them. Of
        many that wait some stand for all."""
        others = self._mailbox(transfer.target).transfers
        mine = (-transfer.priority, transfer.created, transfer.id)
        ahead = left = 0
        for other in islice(others.values(), _MOST_COUNTED):
            if other.id in self._turns:
                ahead, left = ahead + 1, left + max(0, other.cost - other.bytes)
            elif (-other.priority, other.created, other.id) < mine:
                ahead, left = ahead + 1, left + other.cost
        if len(others) > _MOST_COUNTED:
            left = left * len(others) // _MOST_COUNTED
        return left if ahead >= self._turns.per_node else 0

    def nbytes(self, transfer: Transfer) -> int:
        """Of all its keys, or 0 where sizes are unknown."""
        return len(transfer.keys) * self._cluster.namespaces.chunk_bytes(transfer.keys[0])

    def notify(self, node_id: str, transfer: str, until: float) -> None:
        """Have a target told that a transfer is over, until it answers."""
        mailbox = self._mailbox(node_id)
        if transfer not in mailbox.notices:
            mailbox.notices[transfer] = _Notice(until)
            mailbox.wake.set()

    def answered(self, node_id: str, transfer: str) -> None:
        """The target knows that a transfer is over."""
        self._mailbox(node_id).notices.pop(transfer, None)

    def forget_old(self) -> None:
        """News whose time is over: of nodes that are away, or ask another server."""
        now = self._clock()
        for node_id, mailbox in list(self._mailboxes.items()):
            mailbox.notices = {t: n for t, n in mailbox.notices.items() if n.until >= now}
            idle = not (mailbox.notices or mailbox.transfers)
            if idle and node_id not in self._cluster.nodes:
                del self._mailboxes[node_id]

    def wake(self, node_id: str) -> None:
        """There is something for this node to do."""
        self._mailbox(node_id).wake.set()

    def close(self) -> None:
        """End long polls now; later ones don't wait."""
        self._closing = True
        for mailbox in self._mailboxes.values():
            mailbox.wake.set()

    async def commands(
        self,
        node_id: str,
        incarnation: str,
        wait: float,
        hung_up: Callable[[], Awaitable[bool]],
        expire: Callable[[], None],
    ) -> api.CommandBatch:
        """What this node should do; waits until there is something, `wait` seconds at most.

        Nothing is handed to a caller that hung up while it waited. `expire` ends what is past its
        deadline.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            node = self._cluster.require_current(node_id, incarnation)
            expire()
            mailbox = self._mailbox(node_id)
            if await hung_up():
                return api.CommandBatch(commands=[])
            mailbox.wake.clear()
            pulls, all_planned = self._pulls(node, mailbox)
            commands = [*self._orders(node), *self._notices(mailbox), *pulls]
            left = until - loop.time()
            if commands or left <= 0 or self._closing:
                return api.CommandBatch(commands=commands)
            if not all_planned:
                await asyncio.sleep(0)  # and go on with those behind
                continue
            try:
                async with asyncio.timeout(min(left, _REDELIVERY)):
                    await mailbox.wake.wait()
            except TimeoutError:
                continue

    def _notices(self, mailbox: _Mailbox) -> list[api.Command]:
        now = self._clock()
        commands: list[api.Command] = []
        for transfer, notice in list(mailbox.notices.items()):
            if now > notice.until:
                del mailbox.notices[transfer]
            elif len(commands) == _MOST_NOTICES:
                break
            elif notice.offered is None or now - notice.offered >= _REDELIVERY:
                notice.offered = now
                commands.append(api.Command(kind="cancel", transfer=transfer))
        return commands

    def _pulls(self, node: Node, mailbox: _Mailbox) -> tuple[list[api.Command], bool]:
        """Commands, and whether all were looked at that have room."""
        now = self._clock()
        commands: list[api.Command] = []
        room, effort = api.MAX_KEYS, _MOST_PLANNED
        for transfer, last in self._in_order(node, mailbox, now):
            known = transfer.id in self._turns
            if room <= 0 or not (known or self._turns.has_room(node.id)):
                return commands, True
            if effort <= 0:
                return commands, last
            effort -= max(len(transfer.keys), _LEAST_PLANNED)
            planned = plan(
                self._cluster,
                transfer.keys,
                node,
                transfer.source,
                transfer.byte_budget,
                transfer.free_only,
            )
            best = planned.first.id if planned.first else ""
            transfer.planned, transfer.waits_for = now, best
            turn = self._turn(transfer)
            held_up = self._turns.holds_up(turn)
            if self._turns.start(turn, best, node.id):
                if held_up:
                    self._wake_tenant(turn.tenant)
                transfer.offer(node.incarnation, now)
                room -= len(transfer.keys)
                commands.append(self._pull_command(transfer, planned, now))
        return commands, True

    def _in_order(
        self, node: Node, mailbox: _Mailbox, now: float
    ) -> Iterator[tuple[Transfer, bool]]:
        """Those that may be handed out, whose turn it is first.

        Those whose offer was lost have their places, and would keep them idle behind others. Those
        that wait for a busy link are passed over, or many of them would keep others from being
        looked at; now and then, last of all (True), it is seen whether they still need that one.
        """
        due = {
            transfer.id: transfer
            for transfer in mailbox.transfers.values()
            if transfer.is_due(node.incarnation, now, _REDELIVERY)
        }
        for transfer in due.values():
            if transfer.id in self._turns:
                yield transfer, False
        fresh = [
            self._turn(transfer) for transfer in due.values() if transfer.id not in self._turns
        ]
        waiting = []
        for turn in self._turns.in_order(turn for turn in fresh if self._turns.allows(turn)):
            transfer = due[turn.id]
            if not self._turns.is_busy(transfer.waits_for, node.id):
                yield transfer, False
            elif transfer.source == ANY and now - transfer.planned >= _REPLANNING:
                waiting.append(transfer)
        for transfer in sorted(waiting, key=lambda transfer: transfer.planned):
            yield transfer, True

    def _turn(self, transfer: Transfer) -> Turn:
        namespaces = self._cluster.namespaces
        return Turn(
            transfer.id,
            namespaces.tenant(transfer.keys[0]),
            transfer.priority,
            (transfer.created, transfer.id),
            max(1, len(transfer.keys) * namespaces.chunk_bytes(transfer.keys[0])),
        )

    def _pull_command(self, transfer: Transfer, planned: Plan, now: float) -> api.Command:
        return api.Command(
            kind="pull",
            transfer=transfer.id,
            namespaces=self._cluster.namespaces.documents(transfer.keys),
            keys=[key.hex() for key in transfer.keys],
            sources=[
                api.SourceRef(node=source.id, address=source.peer_address)
                for source in planned.sources
                if source.peer_address
            ],
            deadline_in=max(0.0, transfer.deadline - now),
            hold=transfer.hold,
            byte_budget=transfer.byte_budget,
            free_only=transfer.free_only,
        )

    def _wake_tenant(self, tenant: str) -> None:
        """Nodes where transfers may wait for their tenant's turn."""
        for target in self._targets.get(tenant, ()):
            self._mailbox(target).wake.set()

    def _mailbox(self, node_id: str) -> _Mailbox:
        return self._mailboxes.setdefault(node_id, _Mailbox())
