"""Where engines reach their node: when sessions begin and end, and the messages they send.

A session begins with its lifeline (see `kvstrata.wire`) and lives exactly as long as it. A message
that makes no sense is refused with a `Failure` that says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvstrata import wire
from kvstrata.client import LIFELINE_ACK, SESSION_BYTES, lifeline_path
from kvstrata.errors import (
    Busy,
    ConfigError,
    KVStrataError,
    LinkBroken,
    Malformed,
    NamespaceMismatch,
)
from kvstrata.keys import Namespace, check_keys, require_same
from kvstrata.node.session import MAX_NAME, Session
from kvstrata.node.store import Store

__all__ = ["EnginePort"]

_log = logging.getLogger(__name__)

_MAX_SESSIONS = 256
_MAX_DROPS = 16
# A flood would otherwise be read to its end before anyone else on the loop has a turn.
_TURN = 16
_MAX_MESSAGE_BYTES = 64 << 20


class EnginePort:
    """`welcome(namespace)` makes the answer to a hello; `status(seq)` that to a status request."""

    def __init__(
        self,
        socket: Path,
        store: Store,
        welcome: Callable[[Namespace | None], wire.Welcome],
        status: Callable[[int], wire.StatusReply],
    ) -> None:
        self.sessions: dict[bytes, Session] = {}
        self.malformed = 0
        self._socket = socket
        self._store = store
        self._welcome = welcome
        self._status = status
        self._engines: dict[str, Namespace] = {}
        # By engine, owners whose session has ended while a worker of the engine lives.
        self._orphans: dict[str | None, list[str]] = {}
        self._numbers = 0
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._lifelines: asyncio.Server | None = None
        self._writers: dict[asyncio.StreamWriter, asyncio.Event] = {}

    async def start(self) -> None:
        """Listen. The caller has made sure that no other node uses this socket. Raises
        `ConfigError` if it can't be bound."""
        try:
            await self._listen()
        except (OSError, zmq.ZMQError) as e:
            raise ConfigError(
                f"can't listen at {self._socket}: {e.strerror or e}: set a shorter `socket`, or "
                "one in another folder"
            ) from e

    async def _listen(self) -> None:
        life = lifeline_path(self._socket)
        for path in (self._socket, life):
            path.unlink(missing_ok=True)
        self._router.bind(f"ipc://{self._socket}")
        self._lifelines = await asyncio.start_unix_server(self._lifeline, life)
        for path in (self._socket, life):
            path.chmod(0o600)

    async def run(self) -> None:
        """Handle messages until cancelled."""
        while True:
            for _ in range(_TURN):
                frames = await self._router.recv_multipart()
                if len(frames) == 2:
                    self._handle(frames[0], frames[1])
                else:
                    self.malformed += 1
            await asyncio.sleep(0)

    async def close(self) -> None:
        """End every session; their processes see their lifelines close. Idempotent.

        What they held stays taken: they live on, and may still read or write it while the
        promotions and pulls of this node come to their end.
        """
        self._closing = True
        if self._lifelines is not None:
            self._lifelines.close()
        for writer in list(self._writers):
            writer.close()
        await asyncio.gather(*(ended.wait() for ended in self._writers.values()))
        for task in self._tasks:
            task.cancel()
        self._router.close()
        self._context.term()
        for path in (self._socket, lifeline_path(self._socket)):
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------ sessions

    async def _lifeline(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session: Session | None = None
        ended = self._writers[writer] = asyncio.Event()
        try:
            async with asyncio.timeout(5):
                id_ = await reader.readexactly(SESSION_BYTES)
            if id_ in self.sessions or id_[:1] == b"\0":
                return
            if len(self.sessions) >= _MAX_SESSIONS:
                _log.warning("refused a session: %d engine processes are connected", _MAX_SESSIONS)
                return
            self._numbers += 1
            owner = f"session:{self._numbers}"
            session = self.sessions[id_] = Session(id_, owner, self._store, self._send)
            writer.write(LIFELINE_ACK)
            while await reader.read(4096):  # until the process ends; what it says is not kept
                pass
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if session is not None and self.sessions.get(session.id) is session:
                self._end(session)
            writer.close()
            del self._writers[writer]
            ended.set()

    def _end(self, session: Session) -> None:
        _log.info("session of %s ended", session.label)
        del self.sessions[session.id]
        engine = session.hello.engine if session.hello else None
        siblings = [s.hello for s in self.sessions.values() if s.hello and s.hello.engine == engine]
        if not siblings and engine is not None:
            self._engines.pop(engine, None)
        left = self._orphans.setdefault(engine, [])
        left.append(session.owner)
        self._store.stop_waiting(session.owner)
        if self._closing:
            return
        # A scheduler names the slots, its workers write to them: as long as one of them lives,
        # it may be at it.
        if not any(sibling.role == "worker" for sibling in siblings):
            for owner in self._orphans.pop(engine):
                self._store.forget(owner)

    def _open(self, session: Session, hello: wire.Hello) -> wire.Welcome:
        if hello.protocol != wire.PROTOCOL:
            raise Malformed(f"protocol {hello.protocol}: this node speaks {wire.PROTOCOL}")
        if session.hello is not None:
            raise Malformed("a session says hello once")
        if not 1 <= len(hello.engine) <= MAX_NAME:
            raise Malformed(f"an engine name has 1 to {MAX_NAME} characters")
        namespace = hello.namespace or self._engines.get(hello.engine)
        if hello.namespace is not None:
            # Every process of an engine must mean the same bytes. An engine that came back with
            # other weights may, once nothing of the old one is left.
            for other in self.sessions.values():
                if other.hello and other.hello.engine == hello.engine and other.namespace:
                    require_same(other.namespace, hello.namespace.checked())
            self._store.namespaces.add(hello.namespace)
            self._engines[hello.engine] = hello.namespace
        session.begin(hello, namespace)
        if namespace is not None:
            self._warn_of_size(hello, namespace)
        _log.info("session of %s began", session.label)
        return self._welcome(namespace)

    def _warn_of_size(self, hello: wire.Hello, namespace: Namespace) -> None:
        """Chunks that can't be held would only show as misses that never end."""
        largest, region = max(namespace.chunk_bytes.values()), self._store.host.slots.capacity
        if largest > region:
            _log.warning(
                "engine %s has chunks of %d bytes, but the region has %d: raise host.capacity",
                *(hello.engine, largest, region),
            )
        elif largest > region * self._store.settings.credit_budget:
            _log.warning(
                "engine %s has chunks of %d bytes, more than may be granted ahead in a region of "
                "%d: raise host.capacity or host.credit_budget",
                *(hello.engine, largest, region),
            )

    # ------------------------------------------------------------ messages

    def _handle(self, id_: bytes, raw: bytes) -> None:
        session = self.sessions.get(id_)
        seq = -1
        try:
            if session is None:
                raise LinkBroken("no lifeline: open it before the first message")
            message = wire.decode_to_node(raw)
            if isinstance(message, wire.Hello):
                self._send(session, self._open(session, message))
                return
            seq = message.seq
            if session.hello is None:
                raise Malformed("say hello first")
            if isinstance(message, wire.Step):
                self._send(session, session.step(message))
            elif isinstance(message, wire.Status):
                self._send(session, self._status(seq))
            else:
                self._drop(session, message)
        except KVStrataError as e:
            self.malformed += isinstance(e, Malformed)
            text = f"{e} [{e.field}]" if isinstance(e, NamespaceMismatch) and e.field else str(e)
            self._send_to(id_, wire.Failure(seq, e.code, text))
        except Exception as e:
            # The session can't tell how far its message got: it hears of it, and begins anew.
            _log.exception("a message of %s failed", session.label if session else "nobody")
            self._send_to(id_, _internal(seq, e))

    def _drop(self, session: Session, message: wire.Drop) -> None:
        keys = None if message.keys is None else check_keys(message.keys)
        if len(self._tasks) >= _MAX_DROPS:
            raise Busy(f"{_MAX_DROPS} drops are under way: ask again when one has ended")

        async def work() -> None:
            try:
                dropped = await self._store.drop(message.tiers, keys)
                self._send(session, wire.Dropped(message.seq, dropped))
            except KVStrataError as e:
                self._send(session, wire.Failure(message.seq, e.code, str(e)))
            except Exception as e:
                _log.exception("dropping chunks failed")
                self._send(session, _internal(message.seq, e))

        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ sending

    def _send(self, session: Session, message: msgspec.Struct) -> None:
        if self.sessions.get(session.id) is session:
            self._send_to(session.id, message)

    def _send_to(self, id_: bytes, message: msgspec.Struct) -> None:
        # A ROUTER never blocks: it drops what a peer that is gone or does not read can't take,
        # and the future is done at once. The engine's own deadlines cover what was dropped.
        self._router.send_multipart([id_, wire.encode(message)])


def _internal(seq: int, error: Exception) -> wire.Failure:
    return wire.Failure(seq, KVStrataError.code, f"internal error of the node: {error!r}"[:2000])
