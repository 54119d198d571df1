"""The scheduler's connection to its node: one message out and one in per step, and never a wait.

What a step has to say gathers in a `Draft`; `flush` sends it. `receive` pairs each answer with
the step it answers. When the node dies, `receive` says so once (`Lost`), and `flush` tries again
with a growing pause until a node answers (`Restored`): maybe another one, with another region.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstrata import wire
from kvstrata.client import Client
from kvstrata.errors import Busy, KVStrataError, LinkBroken, PeerRefused

__all__ = ["Answered", "Draft", "Event", "Lost", "NodeLink", "Restored"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_WELCOME_SECONDS = 10.0


@dataclass(slots=True)
class Draft:
    """The next step, being written. See `wire.Step`."""

    releases: list[int] = field(default_factory=list)
    renews: list[int] = field(default_factory=list)
    begin: list[tuple[int, list[bytes]]] = field(default_factory=list)
    end: list[tuple[int, list[bytes]]] = field(default_factory=list)
    commits: list[bytes] = field(default_factory=list)
    aborts: list[bytes] = field(default_factory=list)
    uses: list[wire.Use] = field(default_factory=list)
    lookups: list[wire.Lookup] = field(default_factory=list)
    credits: dict[int, int] = field(default_factory=dict)
    tells: list[wire.Told] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.releases
            or self.renews
            or self.begin
            or self.end
            or self.commits
            or self.aborts
            or self.uses
            or self.lookups
            or self.credits
            or self.tells
        )

    def step(self) -> wire.Step:
        return wire.Step(
            seq=0,
            releases=self.releases,
            renews=self.renews,
            begin=self.begin,
            end=self.end,
            commits=self.commits,
            aborts=self.aborts,
            uses=self.uses,
            lookups=self.lookups,
            credits=self.credits,
            tells=self.tells,
        )


@dataclass(frozen=True, slots=True)
class Answered:
    """`reply` answers `step`, which was given to the socket at `sent`."""

    step: wire.Step
    reply: wire.StepReply
    sent: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is gone, and with it all slots, leases and answers due. `node_lives`: it was
    ended by a misunderstanding, and the node may give the slots to others."""

    node_lives: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """A session stands again; nothing of the old one holds."""

    welcome: wire.Welcome


Event = Answered | wire.Resolved | Lost | Restored


class NodeLink:
    """`client` stands; `reopen` begins another session without waiting (`Client.open`)."""

    def __init__(
        self, client: Client, reopen: Callable[[], Client], clock: Callable[[], float]
    ) -> None:
        self.draft = Draft()
        self._client: Client | None = client
        self._opening: Client | None = None
        self._reopen = reopen
        self._clock = clock
        self._unsent: deque[wire.Step] = deque()
        self._due: dict[int, tuple[wire.Step, float]] = {}
        self._events: list[Event] = []
        self._retry_at = 0.0
        self._give_up_at = 0.0
        self._pause = _FIRST_PAUSE

    @property
    def up(self) -> bool:
        return self._client is not None

    @property
    def opening(self) -> bool:
        """Whether a node has been found and its welcome is on its way."""
        return self._opening is not None

    @property
    def welcome(self) -> wire.Welcome:
        """Of the session that stands. Raises `LinkBroken` if none does."""
        if self._client is None:
            raise LinkBroken("there is no session with a node")
        return self._client.welcome

    @property
    def unsent(self) -> bool:
        return self.up and bool(self.draft or self._unsent)

    def silent_for(self) -> float:
        """Seconds since the oldest step was sent that still has no answer; 0 if there is none."""
        oldest = next(iter(self._due.values()), None)
        return self._clock() - oldest[1] if oldest else 0.0

    def new_lease(self) -> int:
        if self._client is None:
            raise LinkBroken("there is no session with a node")
        return self._client.new_lease()

    def flush(self) -> None:
        """Send the draft. A message that the socket can't take now waits for the next call."""
        if self._client is None:
            self._connect()
            return
        if self.draft:
            self._unsent.append(self.draft.step())
            self.draft = Draft()
        try:
            while self._unsent:
                sent = self._clock()
                seq = self._client.send(self._unsent[0])
                self._due[seq] = (self._unsent.popleft(), sent)
        except Busy:
            return
        except KVStrataError as e:
            self._lose(e)

    def receive(self) -> list[Event]:
        """What has happened, in order."""
        if self._client is not None:
            try:
                for message in self._client.receive():
                    self._take(message)
            except KVStrataError as e:
                self._lose(e)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for client in (self._client, self._opening):
            if client is not None:
                client.close()
        self._client = self._opening = None
        self._retry_at = float("inf")

    def _take(self, message: wire.StepReply | wire.Resolved | wire.Failure) -> None:
        if isinstance(message, wire.Resolved):
            self._events.append(message)
        elif isinstance(message, wire.Failure):
            # A step that was refused leaves both sides with another picture: begin anew.
            raise PeerRefused(f"the node refused a step ({message.code}): {message.message}")
        elif (due := self._due.pop(message.seq, None)) is not None:
            if next(iter(self._due), message.seq) < message.seq:
                # Answers come in order. What was granted in that one would be nobody's.
                raise PeerRefused("an answer of the node was lost")
            self._events.append(Answered(due[0], message, due[1]))

    def _lose(self, why: KVStrataError) -> None:
        """End the session. Only `LinkBroken` means that the node is gone."""
        _log.warning("lost the node, going on without it: %s", why)
        if self._client is not None:
            self._client.close()
        self._client = None
        self._due.clear()
        self._unsent.clear()
        self.draft = Draft()
        self._events.append(Lost(node_lives=not isinstance(why, LinkBroken)))
        self._pause = _FIRST_PAUSE
        self._retry_at = self._clock() + self._pause

    def _connect(self) -> None:
        now = self._clock()
        try:
            if self._opening is None:
                if now < self._retry_at:
                    return
                self._opening = self._reopen()
                self._give_up_at = now + _WELCOME_SECONDS
            if self._opening.poll_welcome():
                self._client, self._opening = self._opening, None
                self.draft = Draft()
                _log.info("found node %s again", self._client.welcome.node)
                self._events.append(Restored(self._client.welcome))
                return
            if now < self._give_up_at:
                return
            raise LinkBroken("the node does not answer")
        except KVStrataError as e:
            _log.debug("no node yet: %s", e)
            if self._opening is not None:
                self._opening.close()
                self._opening = None
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)
            self._retry_at = now + self._pause
