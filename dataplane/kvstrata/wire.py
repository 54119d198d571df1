"""Messages between an engine and its node: msgpack over ZMQ on a Unix socket.

A session is one process's conversation: a DEALER socket whose identity is the session id, and
a *lifeline*, a plain Unix stream socket beside it that carries the same id and nothing else.
The kernel closes the lifeline when the process ends in any way; only then are the session's
slots taken back, and those of a scheduler only when the last worker of its engine has ended too,
because it is they who write. A process that is merely slow or stopped keeps what it may still
touch.

An engine sends at most one `Step` per scheduler step. Every list in it is a batch; the node
handles the parts in the order of the fields and answers with one `StepReply` that bears the
same `seq`. Lookups that wait for a promotion are settled later, by `Resolved`.

Sequences are parallel: `offsets[i]` belongs to `keys[i]`. Offsets are byte offsets in the
region; -1 where there is none. Durations are seconds.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from kvstrata.errors import Malformed
from kvstrata.keys import Namespace

__all__ = [
    "PROTOCOL",
    "Credits",
    "Drop",
    "Dropped",
    "Failure",
    "Found",
    "FromNode",
    "Hello",
    "Lookup",
    "Resolved",
    "State",
    "Status",
    "StatusReply",
    "Step",
    "StepReply",
    "TierStatus",
    "ToNode",
    "Told",
    "Use",
    "Welcome",
    "decode_from_node",
    "decode_to_node",
    "encode",
]

PROTOCOL = 1
MAX_KEYS = 65_536
MAX_BLOCKS = 65_536


class State(enum.IntEnum):
    """Of one key in an answer to a lookup."""

    MISS = 0
    HOST = 1  # readable at its offset, and leased
    PENDING = 2  # being promoted or written; `Resolved` follows


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


# ---------------------------------------------------------------- engine to node


class Hello(_Message, frozen=True, array_like=True, tag="hello"):
    """Opens a session. `engine` names the engine; all its processes send the same name.

    A process that knows the namespace registers it; one that does not (a scheduler) sends None
    and is told the one its engine's workers registered.
    """

    protocol: int
    engine: str
    role: Literal["scheduler", "worker", "tool"]
    namespace: Namespace | None = None


class Lookup(_Message, frozen=True, array_like=True):
    """Find chunks and lease what is found. `id` is the lease's name in this session.

    Repeating an id adds to that lease. `prefix`: keys are a chain, so nothing is promoted
    past the first miss; what is in the host tier is found and leased there, too. A key named
    twice counts once. `wait`: how long a promotion may take, 0: none.
    """

    id: int
    keys: list[bytes]
    want: Literal["prefix", "all"] = "prefix"
    wait: float = 10.0


class Use(_Message, frozen=True, array_like=True):
    """Name the chunk that a granted slot will hold. Valid once per slot."""

    offset: int
    key: bytes


class Told(_Message, frozen=True, array_like=True):
    """What a chunk is in the engine's own terms, for whoever routes requests by KV events.

    `blocks` are the low 64 bits of the hashes of its blocks in order, `parent` those of the block
    before the first (None: the chunk begins the sequence), `tokens` the token ids as little-endian
    u32, as many in each block. `lora` and `salt` went into the hashes beside them.
    """

    key: bytes
    blocks: list[int]
    tokens: bytes
    parent: int | None = None
    lora: str = ""
    salt: str = ""


class Step(_Message, frozen=True, array_like=True, tag="step"):
    """One batch of everything, `MAX_KEYS` keys and as many leases at most. Empty parts cost a
    byte each.

    - `releases`: leases that end.
    - `renews`: leases to extend by the node's lease TTL.
    - `begin`, `end`: (lease, keys) whose bytes this session starts, or stops, to read. Between
      the two a slot is never reused, whatever its lease says.
    - `commits`: every rank has written its share: the chunks become readable.
    - `aborts`: they never will be.
    - `uses`: granted slots that now have a key and will be written.
    - `lookups`: see `Lookup`.
    - `reserves`: keys to make room for now (an engine without credits).
    - `credits`: by group, how many free slots this session wants to hold granted.
    - `tells`: what chunks are, at any time; handled before the rest. Optional: a node that
      publishes no events forgets it.
    """

    seq: int
    releases: list[int] = []
    renews: list[int] = []
    begin: list[tuple[int, list[bytes]]] = []
    end: list[tuple[int, list[bytes]]] = []
    commits: list[bytes] = []
    aborts: list[bytes] = []
    uses: list[Use] = []
    lookups: list[Lookup] = []
    reserves: list[bytes] = []
    credits: dict[int, int] = {}
    tells: list[Told] = []


class Status(_Message, frozen=True, array_like=True, tag="status"):
    """Ask for the node's state (the CLI)."""

    seq: int


class Drop(_Message, frozen=True, array_like=True, tag="drop"):
    """Drop idle chunks from tiers (an operator, tests). No keys: all. Leased chunks stay."""

    seq: int
    tiers: list[str]
    keys: list[bytes] | None = None


ToNode = Hello | Step | Status | Drop


# ---------------------------------------------------------------- node to engine


class Welcome(_Message, frozen=True, array_like=True, tag="welcome"):
    """Answer to `Hello`: where the region is and the bounds that hold. `tells`: whether this node
    publishes KV events, and so wants to be told what chunks are."""

    node: str
    incarnation: str
    shm_dir: str
    region: str
    region_bytes: int
    lease_ttl: float
    namespace: Namespace | None = None
    tells: bool = False


class Found(_Message, frozen=True, array_like=True):
    """Answer to one lookup. `states[i]` is a `State`. The lease runs for `ttl` seconds."""

    id: int
    states: bytes
    offsets: list[int]
    ttl: float


class Credits(_Message, frozen=True, array_like=True):
    """Slots of one group granted to this session."""

    group: int
    offsets: list[int]


class StepReply(_Message, frozen=True, array_like=True, tag="stepped"):
    """`committed[i]`: whether `commits[i]` became readable.

    `used[i]`: 1 the slot now belongs to the key; 0 the chunk is already here or being written:
    the slot stays this session's until it commits or aborts the key, so that a write already
    under way harms nobody; -1 the slot was not granted to this session, write nothing.
    `reserved[i]`: offset, -1 no room, -2 already here or being written.
    `lapsed`: leases of `renews` and `begin` that no longer hold what they were named for; what
    was read under them must not be used.
    """

    seq: int
    committed: list[bool] = []
    used: list[int] = []
    found: list[Found] = []
    reserved: list[int] = []
    credits: list[Credits] = []
    lapsed: list[int] = []


class Resolved(_Message, frozen=True, array_like=True, tag="resolved"):
    """Keys of lookup `id` that were `PENDING` are now settled: `HOST` or `MISS`."""

    id: int
    keys: list[bytes]
    states: bytes
    offsets: list[int]


class TierStatus(_Message, frozen=True, array_like=True):
    name: str
    used_bytes: int
    capacity_bytes: int | None
    chunks: int
    healthy: bool
    detail: str
    counters: dict[str, int]


class StatusReply(_Message, frozen=True, array_like=True, tag="status_reply"):
    seq: int
    node: str
    incarnation: str
    uptime: float
    tiers: list[TierStatus]
    sessions: list[str]
    namespaces: list[str]
    counters: dict[str, int]
    tasks: dict[str, str]


class Dropped(_Message, frozen=True, array_like=True, tag="dropped"):
    seq: int
    dropped: dict[str, int]


class Failure(_Message, frozen=True, array_like=True, tag="failure"):
    """The message with this `seq` (-1: the session itself) was refused; see `errors.from_code`."""

    seq: int
    code: str
    message: str


FromNode = Welcome | StepReply | Resolved | StatusReply | Dropped | Failure

# RecursionError: fields that this version skips may nest as deep as a sender likes.
_UNDECODABLE = (msgspec.DecodeError, msgspec.ValidationError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_node = msgspec.msgpack.Decoder(FromNode)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode_to_node(raw: bytes | memoryview) -> ToNode:
    """An engine's message. Raises `Malformed`."""
    try:
        message: ToNode = _to_node.decode(raw)
    except _UNDECODABLE as e:
        raise Malformed(f"message to node: {e}") from e
    return message


def decode_from_node(raw: bytes | memoryview) -> FromNode:
    """A node's message. Raises `Malformed`."""
    try:
        message: FromNode = _from_node.decode(raw)
    except _UNDECODABLE as e:
        raise Malformed(f"message from node: {e}") from e
    return message
