"""Where other nodes ask this one for chunks: sessions, leases, and who may hold them.

A ROUTER socket. A session is one connection that proved it knows the cluster's secret; it ends
when the consumer says so, when its connection goes, or when this port closes, and its leases
end with it. Everything that arrives is hostile until then: identities are opaque bytes, what
can't be decoded is counted and dropped, and nothing is ever dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from kvstrata import peer_wire as wire
from kvstrata.config import PeerSettings
from kvstrata.errors import (
    Busy,
    ConfigError,
    KVStrataError,
    LinkBroken,
    Malformed,
    NamespaceMismatch,
    PeerRefused,
)
from kvstrata.keys import Namespace, check_keys, require_same
from kvstrata.node.peer_source import PeerSource
from kvstrata.node.supervisor import Supervisor
from kvstrata.peer_socket import post, tune
from kvstrata.transports import Transport

__all__ = ["PeerPort"]

log = logging.getLogger(__name__)

MAX_SESSIONS = 256
_HANDSHAKE_SECONDS = 10.0
_BEAT_SECONDS = 2.0
# A flood would otherwise be read to its end before anyone else on the loop has a turn.
_TURN = 16


@dataclass(slots=True)
class _Handshake:
    hello: wire.Hello
    challenge: wire.Challenge
    began: float


@dataclass(slots=True)
class _Session:
    identity: bytes
    name: str
    requests: set[asyncio.Task[None]] = field(default_factory=set)


class PeerPort:
    """Serves one `PeerSource` to peers. `counters` are monotonic; `loops` tells of failures."""

    def __init__(
        self,
        settings: PeerSettings,
        node: str,
        incarnation: str,
        source: PeerSource,
        transports: Sequence[Transport],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._node = node
        self._incarnation = incarnation
        self._source = source
        self._transports = list(transports)
        self._clock = clock
        self._context = zmq.asyncio.Context()
        self._socket: Any = None
        self.loops = Supervisor()
        self._handshakes: OrderedDict[bytes, _Handshake] = OrderedDict()
        self._sessions: dict[bytes, _Session] = {}
        self._numbered = 0
        self._complained: set[str] = set()
        self.counters: Counter[str] = Counter()
        self.address = ""
        """What other nodes dial: `peers.advertise`, or the address bound."""

    @property
    def sessions(self) -> list[str]:
        """Names of the peers connected now."""
        return [session.name for session in self._sessions.values()]

    async def start(self) -> None:
        """Bind and serve. Raises `ConfigError`."""
        listen = wire.parse_address(self._settings.listen)
        if not listen.loopback and not self._settings.secret:
            raise ConfigError(
                f"peers.listen {self._settings.listen} can be reached from other hosts: set "
                "peers.secret, the same on all nodes, or listen on 127.0.0.1"
            )
        if listen.wildcard and not self._settings.advertise:
            raise ConfigError(
                f"peers.listen {self._settings.listen} names no host: set peers.advertise to the "
                "address that other nodes should dial"
            )
        if self._settings.advertise:
            wire.parse_address(self._settings.advertise)
        self._socket = self._context.socket(zmq.ROUTER)
        tune(self._socket, listen.host)
        # Sending to a consumer that has gone is an error: how its end is noticed.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(listen.url)
        except zmq.ZMQError as e:
            self._context.destroy(linger=0)
            raise ConfigError(f"peers.listen {self._settings.listen}: {e.strerror}") from e
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = self._settings.advertise or bound
        self.loops.start("peer port receive", self._receive)
        self.loops.start("peer port beat", self._beat)

    async def close(self) -> None:
        """End every session and release its leases. Idempotent."""
        await self.loops.stop()
        requests = [task for session in self._sessions.values() for task in session.requests]
        for session in list(self._sessions.values()):
            self._end(session)
        await asyncio.gather(*requests, return_exceptions=True)
        self._context.destroy(linger=0)

    # ------------------------------------------------------------ loops

    async def _receive(self) -> None:
        while True:
            for _ in range(_TURN):
                frames = await self._socket.recv_multipart()
                identity = frames[0]
                try:
                    if len(frames) != 2:
                        raise Malformed(f"a message has 2 frames, this one has {len(frames)}")
                    self._handle(identity, wire.decode_to_source(frames[1]))
                except KVStrataError as e:
                    self._refuse(identity, -1, e)
                except Exception as e:
                    log.exception("peer port: a message failed")
                    self._refuse(identity, -1, KVStrataError(f"internal error: {e!r}"))
            await asyncio.sleep(0)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            for session in list(self._sessions.values()):
                self._send(session.identity, wire.Beat())
            oldest = self._clock() - _HANDSHAKE_SECONDS
            while self._handshakes and next(iter(self._handshakes.values())).began < oldest:
                self._handshakes.popitem(last=False)

    # ------------------------------------------------------------ handshake

    def _handle(self, identity: bytes, message: wire.ToSource) -> None:
        session = self._sessions.get(identity)
        if isinstance(message, wire.Hello):
            self._challenge(identity, message)
        elif isinstance(message, wire.Prove):
            self._welcome(identity, message)
        elif session is None:
            # Also what a consumer hears whose session we gave up: it has to start anew.
            raise LinkBroken("no session: say hello first")
        elif isinstance(message, wire.Bye):
            self._end(session)
        elif isinstance(message, wire.Release):
            self._source.release_grant(session.name, message.lease)
        else:
            self._begin(session, message)

    def _challenge(self, identity: bytes, hello: wire.Hello) -> None:
        if hello.protocol != wire.PROTOCOL:
            raise PeerRefused(
                f"node {self._node} speaks peer protocol {wire.PROTOCOL}, not {hello.protocol}"
            )
        if identity in self._sessions:
            raise Malformed("said hello twice")
        if len(self._handshakes) >= MAX_SESSIONS:
            self._handshakes.popitem(last=False)
        challenge = wire.Challenge(secrets.token_bytes(wire.NONCE_BYTES))
        self._handshakes[identity] = _Handshake(hello, challenge, self._clock())
        self._send(identity, challenge)

    def _welcome(self, identity: bytes, prove: wire.Prove) -> None:
        handshake = self._handshakes.pop(identity, None)
        if handshake is None:
            raise PeerRefused("a proof without a challenge: say hello first")
        hello, challenge = handshake.hello, handshake.challenge
        secret = self._settings.secret
        if not hmac.compare_digest(prove.proof, wire.consumer_proof(secret, hello, challenge)):
            raise PeerRefused(
                f"node {self._node} does not accept this proof: is peers.secret the same?"
            )
        if len(self._sessions) >= MAX_SESSIONS:
            raise Busy(f"node {self._node} already serves {MAX_SESSIONS} peers")
        self._numbered += 1
        name = f"{hello.node}/{hello.incarnation}#{self._numbered}"
        self._sessions[identity] = _Session(identity, name)
        self.counters["sessions"] += 1
        transports = {t.name: t.describe() for t in self._transports}
        transports = {name: told for name, told in transports.items() if told}
        proof = wire.source_proof(
            secret, hello, challenge, self._node, self._incarnation, transports
        )
        self._send(identity, wire.Welcome(self._node, self._incarnation, transports, proof))

    def _end(self, session: _Session) -> None:
        if self._sessions.pop(session.identity, None) is None:
            return
        for task in session.requests:
            task.cancel()
        self._source.peer_gone(session.name)

    # ------------------------------------------------------------ requests

    def _begin(self, session: _Session, request: wire.Open | wire.Acquire | wire.Probe) -> None:
        self.counters["requests"] += 1
        if len(session.requests) >= wire.MAX_OUTSTANDING:
            busy = Busy(f"a peer may have {wire.MAX_OUTSTANDING} requests outstanding")
            self._refuse(session.identity, request.id, busy)
            return
        task = asyncio.create_task(self._answer(session, request))
        session.requests.add(task)
        task.add_done_callback(session.requests.discard)

    async def _answer(
        self, session: _Session, request: wire.Open | wire.Acquire | wire.Probe
    ) -> None:
        try:
            if isinstance(request, wire.Open):
                reply: wire.FromSource = self._open(request)
            elif isinstance(request, wire.Probe):
                keys = check_keys(request.keys)
                reply = wire.Probed(request.id, self._source.probe(keys))
            else:
                reply = await self._acquire(session, request)
        except KVStrataError as e:
            self._refuse(session.identity, request.id, e)
        except Exception as e:
            log.exception("peer port: a request failed")
            self._refuse(session.identity, request.id, KVStrataError(f"internal error: {e!r}"))
        else:
            self._send(session.identity, reply)

    def _open(self, request: wire.Open) -> wire.Opened:
        theirs = Namespace.parse(request.document)
        ours = [ns for ns in self._source.namespaces() if ns.model == theirs.model]
        if any(ns.digest == theirs.digest for ns in ours):
            return wire.Opened(request.id, known=True)
        for namespace in ours:
            require_same(namespace, theirs)
        return wire.Opened(request.id, known=False)

    async def _acquire(self, session: _Session, request: wire.Acquire) -> wire.Granted:
        keys = check_keys(request.keys)
        ttl = min(request.ttl, self._settings.lease_ttl)
        grant = await self._source.grant(session.name, keys, ttl, request.wait)
        if session.identity not in self._sessions:
            # It left while the source was busy, too late to cancel it.
            self._source.release_grant(session.name, grant.lease)
            raise LinkBroken("the session has ended")
        chunks = [
            None if c is None else wire.ChunkAt(c.offset, c.nbytes, c.checksum)
            for c in grant.chunks
        ]
        self.counters["granted"] += sum(c is not None for c in chunks)
        return wire.Granted(request.id, grant.lease, min(ttl, grant.ttl), chunks)

    # ------------------------------------------------------------ answers

    def _refuse(self, identity: bytes, request: int, error: KVStrataError) -> None:
        self.counters[error.code] += 1
        if error.code not in self._complained and not isinstance(error, LinkBroken | Busy):
            self._complained.add(error.code)
            log.warning("peer port refused a message (logged once): %s", error)
        mismatch = error.field if isinstance(error, NamespaceMismatch) else ""
        self._send(identity, wire.Failure(request, error.code, str(error)[:2000], mismatch))

    def _send(self, identity: bytes, message: wire.FromSource) -> None:
        try:
            post(self._socket, [identity, wire.encode(message)])
        except zmq.ZMQError:
            # Gone, or so far behind that it may as well be.
            self._handshakes.pop(identity, None)
            session = self._sessions.get(identity)
            if session is not None:
                with contextlib.suppress(Exception):
                    self._end(session)
