"""REST messages of the control plane, `/v1`: typed once, used by the server and its clients.

Keys travel as lower-case hex of the whole key. Times are seconds since the epoch (UTC),
durations are seconds. Unknown fields in requests are errors; in answers they are ignored, so
that a newer server can talk to an older client.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints

from kvstrata import errors
from kvstrata.errors import Malformed
from kvstrata.keys import DIGEST_BYTES, MAX_KEY_BYTES, Key, split_key

__all__ = [
    "HTTP_STATUS",
    "MAX_INT",
    "MAX_KEYS",
    "MAX_WAIT",
    "Change",
    "Command",
    "CommandBatch",
    "EventsAt",
    "EvictionInfo",
    "EvictionList",
    "EvictionRequest",
    "EvictionResult",
    "EvictionState",
    "Health",
    "HeartbeatReply",
    "HeartbeatRequest",
    "HostUse",
    "KeyOutcome",
    "LeaseInfo",
    "LeaseRequest",
    "LeaseState",
    "LookupReply",
    "LookupRequest",
    "NamespaceInfo",
    "NamespaceList",
    "NodeEviction",
    "NodeInfo",
    "NodeList",
    "NodePlacement",
    "NodeRegistration",
    "NodeState",
    "OfKeys",
    "OfModel",
    "OfNamespaces",
    "Outcome",
    "PrefetchRequest",
    "Problem",
    "Progress",
    "ProgressReply",
    "RegistrationReply",
    "Report",
    "ReportReply",
    "SourceRef",
    "StoreRef",
    "Tally",
    "TaskHealth",
    "TransferInfo",
    "TransferList",
    "TransferRequest",
    "TransferState",
    "TransferSummary",
    "from_hex",
]

MAX_KEYS = 65_536
"""Most keys in one list of one message."""
MAX_INT = 1 << 53
"""Largest number of bytes, chunks or reports in a message: every reader of JSON has it exactly."""
MAX_WAIT = 30.0
"""Longest long poll, seconds."""

# The one table from conditions to HTTP. A 5xx means that asking again may help.
HTTP_STATUS: dict[str, int] = {
    errors.NamespaceMismatch.code: 409,
    errors.Malformed.code: 422,
    errors.Missing.code: 404,
    errors.Corrupt.code: 502,
    errors.Expired.code: 410,
    errors.Busy.code: 503,
    errors.NoSpace.code: 507,
    errors.PeerRefused.code: 403,
    errors.LinkBroken.code: 502,
    errors.ConfigError.code: 500,
}


def from_hex(text: str) -> Key:
    """A key from its hex form. Raises `Malformed`."""
    try:
        raw = bytes.fromhex(text)
    except ValueError as e:
        raise Malformed(f"key is not hexadecimal: {text[:80]!r}") from e
    split_key(raw)
    return Key(raw)


def _number(value: Any) -> Any:
    if isinstance(value, bool | str | bytes):
        raise ValueError("a number is wanted, and not text or a truth value")
    return value


# JSON's types and no others: left to itself, pydantic takes `true` for 1 and "yes" for `true`. It
# stands after the bounds, or the published document would not show those.
NUMBER = BeforeValidator(_number)
Flag = Annotated[bool, Strict()]

# A pattern rather than a Python validator: 65,536 keys take 25 ms instead of 80 on the event
# loop of the server, and the published document states it. 21 bytes: digest, group, 1 of hash.
HexKey = Annotated[
    str,
    StringConstraints(
        to_lower=True, pattern=f"^(?:[0-9a-fA-F]{{2}}){{{DIGEST_BYTES + 5},{MAX_KEY_BYTES}}}$"
    ),
]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]
Keys = Annotated[list[HexKey], Field(max_length=MAX_KEYS)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class Problem(_Answer):
    """RFC 9457 problem document. `code` is the error's name in `kvstrata.errors`.

    `retryable`: the same request may succeed later. `errors` names the parts of the request
    that are wrong (`loc`, `msg`, `type`).
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    code: str = "error"
    retryable: bool = False
    errors: list[dict[str, Any]] = []


# ---------------------------------------------------------------- nodes


class StoreRef(_Request):
    """A secondary tier that a node has attached. Nodes naming the same id share one store."""

    id: Name
    tier: Annotated[str, Field(min_length=1, max_length=64)]


class EventsAt(_Request):
    """Where a node publishes KV events in vLLM's format, and for what."""

    endpoint: Annotated[str, Field(min_length=1, max_length=255)]
    """To subscribe to, as in `tcp://10.0.0.7:5557`."""
    replay: Annotated[str, Field(max_length=255)] = ""
    """To ask for what was lost; empty: nowhere."""
    topic: Annotated[str, Field(max_length=512)] = ""
    model: Annotated[str, Field(max_length=512)] = ""
    """Only chunks of this model; empty: of all."""
    rank: Annotated[int, Field(ge=0, le=1 << 31), NUMBER] = 0


class NodeRegistration(_Request):
    """POST /v1/nodes. Repeating it is harmless; a new incarnation voids what the old one held."""

    id: Name
    incarnation: Name
    peer_address: Annotated[str, Field(max_length=255)] | None = None
    """Where other nodes reach its peer port (`tcp://10.0.0.7:7801`); None: can't be a source."""
    transports: list[Name] = []
    capacity_bytes: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER] = 0
    stores: Annotated[list[StoreRef], Field(max_length=64)] = []
    events: Annotated[list[EventsAt], Field(max_length=64)] = []


class RegistrationReply(_Answer):
    node: str
    incarnation: str
    heartbeat_ttl: float
    """Placements of a node silent for longer than this are no longer offered."""
    next_seq: int = 0
    """The `seq` the server expects in the next report of this incarnation.

    A node whose own count differs sends a snapshot, numbered by the larger of the two.
    """


class HostUse(_Request):
    used_bytes: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]
    capacity_bytes: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]
    chunks: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]


class HeartbeatRequest(_Request):
    """PUT /v1/nodes/{id}/heartbeat"""

    incarnation: Name
    host: HostUse
    healthy: Flag = True
    detail: Annotated[str, Field(max_length=2000)] = ""
    next_seq: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER] | None = None
    """`seq` of the node's next report: shows a server that lost the last ones that it did."""
    events: Annotated[list[EventsAt], Field(max_length=64)] | None = None
    """As registered: a server that has begun anew doesn't remember. None: as they were."""


class HeartbeatReply(_Answer):
    snapshot_wanted: bool = False
    """The server missed a report: send everything (`Report.snapshot`)."""


class NodeState(enum.StrEnum):
    UP = "up"
    SILENT = "silent"  # heartbeat overdue: its placements are not offered
    GONE = "gone"  # deregistered


class NodeInfo(_Answer):
    id: str
    incarnation: str
    state: NodeState
    peer_address: str | None
    transports: list[str]
    host: HostUse
    stores: list[StoreRef]
    healthy: bool
    detail: str
    heartbeat_age: float
    events: list[EventsAt] = []
    """Where it publishes KV events."""


class NodeList(_Answer):
    nodes: list[NodeInfo]
    next: str | None = None


# ---------------------------------------------------------------- placements


class Change(_Request):
    """Chunks that appeared at or left one location of the reporting node.

    `location` is `host` or the id of one of its stores. A key in both lists is there.
    A key removed from a store is gone from it for every node that shares the store.
    """

    location: Name
    added: Keys = []
    removed: Keys = []


class Report(_Request):
    """POST /v1/nodes/{id}/reports. `seq` counts from 0 in each incarnation, without gaps.

    `snapshot: first|more|last|only` marks the parts of a full list: the server replaces what it
    knew of this node when the last part is in. Parts of a snapshot are numbered like others and
    follow each other; the first one may skip numbers, since it makes up for what was lost.
    """

    incarnation: Name
    seq: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]
    changes: Annotated[list[Change], Field(max_length=64)]
    snapshot: Literal["no", "first", "more", "last", "only"] = "no"
    namespaces: Annotated[list[str], Field(max_length=64)] = []
    """Namespace documents (canonical JSON) whose chunks are reported for the first time."""


class ReportReply(_Answer):
    applied: bool
    """False: a repetition (`seq < next_seq`, harmless), or refused until a snapshot comes."""
    next_seq: int
    snapshot_wanted: bool = False


class NamespaceInfo(_Answer):
    digest: str
    document: dict[str, Any] | None
    """None: chunks were reported, the document not yet."""


class NamespaceList(_Answer):
    namespaces: list[NamespaceInfo]
    next: str | None = None


class LookupRequest(_Request):
    """POST /v1/placements:lookup. `prefix` reads `keys` as a chain, `all` as a set."""

    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]
    mode: Literal["prefix", "all"] = "prefix"
    nodes: Annotated[list[Name], Field(max_length=10_000)] | None = None
    """Ask about these only; None: every node."""


class Tally(_Answer):
    """Of one tier: chunks found in all, and how many from the first key on without a gap."""

    found: int
    prefix: int


class NodePlacement(_Answer):
    node: str
    incarnation: str
    prefix: int
    """Leading keys this node can serve from any mix of its tiers."""
    tiers: dict[str, Tally]
    age: float
    """Seconds since this node's last accepted report or heartbeat."""
    keys: list[str] | None = None
    """`all` mode: which of the keys asked for it holds, in request order."""


class LookupReply(_Answer):
    keys: int
    nodes: list[NodePlacement]
    """Best first: longest prefix (`all` mode: most keys), then the longest prefix in host
    memory, then the youngest report. Nodes that hold none of the keys are left out."""


# ---------------------------------------------------------------- transfers


class TransferState(enum.StrEnum):
    """queued -> running -> done | partial | failed; cancelled and expired from either.

    `running`: the target said that it took it. `done`: every key stored or present. `partial`:
    some. `failed`: none. An ended transfer never changes again.
    """

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PLANNED = "planned"  # a dry run: never executed, not stored

    @property
    def ended(self) -> bool:
        return self not in (TransferState.QUEUED, TransferState.RUNNING)


class Outcome(enum.StrEnum):
    """Of one key of a transfer, at the target.

    What is pending when the transfer is cancelled or expires becomes `cancelled`: whether its
    bytes arrived is not known.
    """

    PENDING = "pending"
    STORED = "stored"
    PRESENT = "present"
    MISSING = "missing"
    CORRUPT = "corrupt"
    NO_ROOM = "no_room"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TransferRequest(_Request):
    """POST /v1/transfers. Send an `Idempotency-Key` header to make a retry harmless.

    `source` is a node id or `any`. `deadline` is seconds from now. `hold` is how long the target
    keeps the chunks leased after they arrived, so that the request that needs them finds them.
    `source` may also be `own`: the target promotes from its own tiers, and asks no other node.
    `byte_budget` is the most bytes to move: keys past it end as `no_room`. Of two transfers to
    one node the one of higher `priority` is handed out first. Repeated keys count once.
    """

    target: Name
    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]
    source: Name = "any"
    priority: Annotated[int, Field(ge=0, le=9), NUMBER] = 5
    deadline: Annotated[float, Field(gt=0, le=3600), NUMBER] = 60.0
    hold: Annotated[float, Field(ge=0, le=3600), NUMBER] = 60.0
    byte_budget: Annotated[int, Field(gt=0, le=MAX_INT), NUMBER] | None = None
    dry_run: Flag = False


class PrefetchRequest(_Request):
    """POST /v1/prefetches: a transfer from a node's own tiers into its host memory.

    `hold` is how long the chunks stay leased there; the rest is as in `TransferRequest`.
    """

    node: Name
    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]
    priority: Annotated[int, Field(ge=0, le=9), NUMBER] = 5
    deadline: Annotated[float, Field(gt=0, le=3600), NUMBER] = 60.0
    hold: Annotated[float, Field(ge=0, le=3600), NUMBER] = 60.0
    byte_budget: Annotated[int, Field(gt=0, le=MAX_INT), NUMBER] | None = None
    dry_run: Flag = False


class KeyOutcome(_Answer):
    key: str
    outcome: Outcome
    source: str | None = None
    """Node the bytes came from; of a dry run, where they would come from."""


class LeaseRequest(_Request):
    """POST /v1/leases: keep chunks in a node's host memory for `ttl` seconds, whatever else comes.

    What isn't there is promoted from the node's own tiers, within `deadline` seconds.
    """

    node: Name
    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]
    ttl: Annotated[float, Field(gt=0, le=3600), NUMBER] = 60.0
    deadline: Annotated[float, Field(gt=0, le=3600), NUMBER] = 10.0


class LeaseState(enum.StrEnum):
    """pending -> held -> ended. `held`: the keys of the answer that are `stored` or `present`
    can't be evicted there until `expires`. A lease that got none of its keys ends at once."""

    PENDING = "pending"
    HELD = "held"
    ENDED = "ended"


class LeaseInfo(_Answer):
    id: str
    """Also that of the transfer that brings the chunks up."""
    state: LeaseState
    node: str
    expires: float | None = None
    """When it ends by itself, or did; None while it is pending, and if it holds nothing."""
    keys: list[KeyOutcome]


class TransferSummary(_Answer):
    id: str
    """Sorts by time of creation. Of a dry run it names nothing."""
    state: TransferState
    source: str
    target: str
    priority: int
    created: float
    deadline: float
    ended: float | None = None
    detail: str = ""
    bytes: int = 0
    """Bytes moved; of a dry run, bytes that would be moved (0 where sizes are unknown)."""
    counts: dict[Outcome, int] = {}
    """How many keys have each outcome."""


class TransferInfo(TransferSummary):
    keys: list[KeyOutcome]
    kv_transfer_params: dict[str, Any] = {}
    """For llm-d: what to paste into the request that will use the chunks."""
    router_hint: dict[str, Any] = {}
    """For Dynamo: likewise."""


class TransferList(_Answer):
    transfers: list[TransferSummary]
    next: str | None = None


# ---------------------------------------------------------------- commands to a node


class SourceRef(_Answer):
    node: str
    address: str


class Command(_Answer):
    """What a node is asked to do; it polls for these, so it needs no open port for them.

    `pull`: fetch `keys` from `sources` (best first) before `deadline_in` seconds have passed,
    hold them leased for `hold` seconds, and post `Progress`. `cancel`: stop pulling `transfer`,
    or release what it holds if it has ended.
    `evict`: drop `keys`, or what is of the namespaces `digests`, from `tiers` (none named: all),
    and post `EvictionResult`. A command is repeated until the node answers it, so executing one is
    idempotent. A node ignores kinds it doesn't know.
    """

    kind: str
    transfer: str
    """Id of the transfer, or of the eviction."""
    namespaces: list[str] = []
    keys: list[str] = []
    sources: list[SourceRef] = []
    deadline_in: float = 0.0
    hold: float = 0.0
    byte_budget: int | None = None
    tiers: list[str] = []
    digests: list[str] = []


class CommandBatch(_Answer):
    """GET /v1/nodes/{id}/commands?incarnation=...&wait=SECONDS (long poll, `MAX_WAIT` at most)"""

    commands: list[Command]


class Progress(_Request):
    """POST /v1/nodes/{id}/progress: what became of the keys so far; `final` ends the transfer.

    A node posts one without outcomes when it takes a command. `bytes` is the total so far.
    """

    incarnation: Name
    transfer: Name
    final: Flag
    outcomes: dict[HexKey, Outcome] = {}
    sources: dict[HexKey, Name] = {}
    bytes: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER] = 0
    detail: Annotated[str, Field(max_length=2000)] = ""


class ProgressReply(_Answer):
    state: TransferState
    """An ended state: stop working on it."""


# ---------------------------------------------------------------- evictions


class EvictionState(enum.StrEnum):
    """running -> done | partial | expired. `done`: every node said what it dropped. `partial`: some
    node could not. `expired`: some node said nothing before the deadline; it may do it yet."""

    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    EXPIRED = "expired"

    @property
    def ended(self) -> bool:
        return self is not EvictionState.RUNNING


class OfKeys(_Request):
    """Just these chunks."""

    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]


class OfNamespaces(_Request):
    """All chunks of namespaces, by their digests."""

    digests: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]], Field(min_length=1, max_length=1000)
    ]


class OfModel(_Request):
    """All chunks of a model, or of one revision of its weights."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    revision: Annotated[str, Field(min_length=1, max_length=512)] | None = None


class EvictionRequest(_Request):
    """POST /v1/evictions: have nodes give chunks up, as after new weights or on a tenant's request.

    `tiers` are `host` and names of a node's tiers; None: all it can write to. `nodes` None: all
    that are up. Chunks that are leased stay. Nothing keeps engines from storing them anew.
    """

    chunks: OfKeys | OfNamespaces | OfModel
    nodes: Annotated[list[Name], Field(min_length=1, max_length=10_000)] | None = None
    tiers: Annotated[list[Name], Field(min_length=1, max_length=64)] | None = None
    deadline: Annotated[float, Field(gt=0, le=3600), NUMBER] = 60.0


class NodeEviction(_Answer):
    """At one node. `dropped` is None until it has said so, then chunks by tier."""

    node: str
    dropped: dict[str, int] | None = None
    detail: str = ""
    """Why it could not, if it couldn't."""


class EvictionInfo(_Answer):
    id: str
    """Sorts by time of creation."""
    state: EvictionState
    created: float
    deadline: float
    ended: float | None = None
    nodes: list[NodeEviction]


class EvictionList(_Answer):
    evictions: list[EvictionInfo]
    next: str | None = None


class EvictionResult(_Request):
    """POST /v1/nodes/{id}/evictions/{eviction}: what the node dropped, or why it could not."""

    incarnation: Name
    dropped: Annotated[
        dict[Name, Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]] | None, Field(max_length=64)
    ] = None
    detail: Annotated[str, Field(max_length=2000)] = ""


# ---------------------------------------------------------------- health


class TaskHealth(_Answer):
    """A background task of the server."""

    name: str
    healthy: bool
    detail: str = ""


class Health(_Answer):
    """GET /healthz and /readyz: open without a token."""

    status: Literal["ok", "degraded"]
    version: str
    tasks: list[TaskHealth]
    restarts: int
    """How often a task failed and began anew."""
    unwritten_rows: int
    """Rows of the index that SQL doesn't have yet."""


class AuditEntry(_Answer):
    """One act that changed state. `actor` is the token's name, `operation` is named as in the
    API's document, `subject` is the path asked for, `status` the HTTP status answered."""

    id: int
    time: float
    actor: str
    client: str
    operation: str
    subject: str
    status: int


class AuditList(_Answer):
    entries: list[AuditEntry]
    next: int | None = None
