"""Settings: one schema gives the file (TOML), the environment, the flags and their docs.

Sizes and times are human (`64GiB`, `30s`). What is wrong is a `ValidationError`, which
`what_is_wrong` tells in one line, or a `ConfigError`; where values come from is `sources`'.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvstrata.addresses import split_address
from kvstrata.errors import ConfigError
from kvstrata.sources import sources_of

__all__ = [
    "CascadeMode",
    "EventSettings",
    "NodeSettings",
    "ServerSettings",
    "TierSettings",
    "WrapSettings",
    "parse_seconds",
    "run_dir",
    "what_is_wrong",
]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

# What the kernel takes (108 with a final zero), less the suffix of a lifeline's socket.
_MOST_SOCKET = 107 - len(".life")


def parse_seconds(value: Any) -> Any:
    """`"1.5s"`, `"200ms"`, `"10m"`, a number of seconds, or a timedelta, as float seconds."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*(ms|s|m|min|h|d)?\s*", value)
        if match is None:
            raise ValueError(f"{value!r} is not a time: write 30s, 200ms, 5m, 2h or 1d")
        return float(match[1]) * _UNITS[match[2] or "s"]
    return value


Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, allow_inf_nan=False)]


def _address(value: str) -> str:
    """`host:port` or nothing."""
    if value:
        try:
            split_address(value)
        except ConfigError as e:
            raise ValueError(str(e)) from e
    return value


Listen = Annotated[str, AfterValidator(_address)]

# What a header can carry.
Token = Annotated[str, Field(pattern=r"^([!-~]([ -~]*[!-~])?)?$", repr=False)]

# Where pydantic's own words don't say what to write.
_SIZE = "is not a size: write 64GiB, 500MB or a number of bytes"
_ADVICE = {
    "extra_forbidden": "there is no such setting",
    "byte_size": _SIZE,
    "byte_size_unit": _SIZE,
    "missing": "this must be set",
    "model_type": "must be a table, in flags and the environment a JSON object",
    "list_type": "must be a list, in flags and the environment a JSON list",
}
_SECRET = re.compile(r"token|secret|password|key", re.IGNORECASE)


def what_is_wrong(error: ValidationError) -> str:
    """Setting by setting, on one line, without the value of what may be a secret."""
    parts = []
    for wrong in error.errors(include_url=False):
        name = ".".join(str(part) for part in wrong["loc"])
        told = _ADVICE.get(wrong["type"]) or wrong["msg"].removeprefix("Value error, ")
        # A name that is no setting may be that of a secret, misspelt; our own errors quote.
        quiet = wrong["type"] in ("missing", "extra_forbidden", "value_error")
        given = "" if quiet or _SECRET.search(name) else f", got {wrong['input']!r:.200}"
        parts.append(f"{name}: {told}{given}" if name else told)
    return "; ".join(parts)


def run_dir() -> Path:
    """Where sockets of this user's nodes live: `$XDG_RUNTIME_DIR/kvstrata`, else a folder in /tmp.

    Raises `ConfigError` if somebody else can write to that.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return Path(base) / "kvstrata"
    folder = Path(tempfile.gettempdir()) / f"kvstrata-{os.getuid()}"
    with contextlib.suppress(FileNotFoundError):
        # Whoever makes it first in a /tmp of all could put a node of their own there.
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ConfigError(
                f"{folder} is not this user's alone: remove it, or set XDG_RUNTIME_DIR"
            )
    return folder


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class HostSettings(_Section):
    """The host tier: a cache in shared memory."""

    capacity: ByteSize = ByteSize(4 << 30)
    """Bytes of the shared region."""
    policy: str = "lru"
    """Eviction policy: `lru`, `arc`, `s3fifo` (resists scans), or `module:Class`.
    `kvstrata simulate` compares them on a trace."""
    shm_dir: Path = Path("/dev/shm")  # noqa: S108 - where the kernel mounts POSIX shm
    """A tmpfs that engines can map. Another file system is warned of in the log."""
    populate: bool = True
    """Touch every page at start: later page faults would cost more than the copies. `numa_node` or
    the node's own NUMA policy decides where they lie: start it under `numactl --interleave=all` to
    spread them."""
    huge_pages: Literal["auto", "never"] = "auto"
    """`auto` asks for huge pages; the kernel gives them where the tmpfs of `shm_dir` is mounted
    with `huge=advise`, `within_size` or `always`."""
    numa_node: Annotated[int, Field(ge=0, le=1022)] | None = None
    """NUMA node whose memory the region prefers, as that of the GPUs or the NIC; absent: the
    node's own policy decides. A kernel or container that refuses is told of in the log."""
    lease_ttl: Seconds = 30.0
    """How long a found chunk is kept for who asked, unless renewed or released."""
    reserve_ttl: Seconds = 60.0
    """How long a writer may take to commit a reserved slot."""
    pending_deadline: Seconds = 10.0
    """How long a lookup waits for a promotion; then the chunk is a miss."""
    promotion_budget: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Most of the region, as a fraction, that promotions in flight may take."""
    credit_budget: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Most of the region, as a fraction, that may be granted ahead to engines."""


CascadeMode = Literal["write_through", "second_touch", "on_evict"]

# What a metric's label, a flag and a TOML table all take without quotes.
_LABEL = r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,63})?$"


class WrapSettings(BaseModel):
    """One wrapper around a tier: `type` is `metered`, `checked`, `compressed`, `encrypted`, an
    entry point's name or `module:Class`. The other names are that wrapper's own options."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TierSettings(BaseModel):
    """One secondary tier: `type` is `fs`, an entry point's name or `module:Class`.

    The names below are the same for every tier; the others are that tier's own options.
    """

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    type: str
    """What kind of tier it is."""
    name: Annotated[str, Field(pattern=_LABEL)] = ""
    """Its label in metrics, logs and commands; empty: what its kind is called. Of two tiers of one
    kind at least one needs its own."""
    cascade: CascadeMode = "write_through"
    """What is stored in it: `write_through`: every chunk; `second_touch`: a chunk that is used once
    more; `on_evict`: what is about to leave the host tier, ahead of time."""
    wrap: list[WrapSettings] = []
    """What is put around it, innermost first: with `[{type="encrypted"}, {type="compressed"}]`
    bytes on their way to the tier are compressed, and then encrypted."""
    grace: Seconds = 2.0
    """How long after its deadline a call may still take. Then the node gives it up, and asks the
    tier nothing more until the call has returned or a probe was answered."""
    lookup_deadline: Seconds = 2.0
    """Longest that a lookup waits to be told by this tier what it has; then others are asked."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class PeerSettings(_Section):
    """Node to node: control over ZMQ, bytes over a transport."""

    listen: str = ""
    """Address of the peer port, as in `tcp://127.0.0.1:0`; empty: this node serves no peers."""
    advertise: str = ""
    """Address that other nodes should use; empty: the one bound."""
    secret: str = Field(default="", repr=False)
    """Shared by all nodes of a cluster. Required when `listen` is not a loopback address."""
    transports: list[str] = ["nixl", "tcp"]
    """In order of preference; one that can't run on this host is skipped."""
    static: list[str] = []
    """Peers to ask on a miss without a control plane: their peer addresses."""
    lease_ttl: Seconds = 30.0
    """How long a chunk granted to a peer stays readable for it."""


class ControlSettings(_Section):
    """The control plane this node reports to."""

    url: str = ""
    """As in `http://127.0.0.1:7800`; empty: none. Several servers of one database have commas
    between them: one is asked as long as it answers, and then the next."""
    ca: Path | None = None
    """Certificates to trust instead of the system's, PEM, for an `https` address."""
    token: Token = ""
    """Bearer token with the role `node`."""
    report_interval: Seconds = 0.1
    """How often placements that changed are reported."""
    heartbeat_interval: Seconds = 2.0
    """Well below `heartbeat_ttl` of the server."""


class EventSettings(_Section):
    """One publisher of KV events in vLLM's format, for routers such as llm-d's and Dynamo's."""

    listen: str
    """Where readers subscribe, as in `tcp://127.0.0.1:5557`; port 0: any free one."""
    replay: str = ""
    """Where readers ask for what they lost, as in `tcp://127.0.0.1:5558`; empty: nowhere."""
    advertise: str = ""
    """Address by which readers on other hosts find `listen`; empty: the one bound."""
    advertise_replay: str = ""
    """The same of `replay`."""
    topic: str = ""
    """llm-d wants `kv@<address:port of the engine's endpoint>@<model>`."""
    model: str = ""
    """Publish only chunks of this model; empty: of all. A reader takes all for its one model's."""
    rank: Annotated[int, Field(ge=0)] = 0
    """Data-parallel rank that events are stamped with."""
    format: Literal["map", "array"] = "map"
    """`array` for readers that don't know events as maps (llm-d-kv-cache until mid 2026)."""
    interval: Seconds = 0.05
    """How long changes are gathered before they are published."""
    repeat: Seconds = 1.0
    """With nothing to say, the last number is said again this often."""
    buffer_batches: Annotated[int, Field(ge=1)] = 10_000
    """Batches kept for replay. Who asks for an older one is told the state instead."""
    buffer_bytes: ByteSize = ByteSize(64 << 20)
    """Most bytes of those."""
    unprotected: bool = False
    """Allow addresses beyond loopback. The protocol knows no authentication, and events carry the
    tokens of prompts."""


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_nested_delimiter="__", extra="forbid", use_attribute_docstrings=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return sources_of(settings_cls, init_settings, env_settings)


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "node"


class NodeSettings(_Settings):
    """A node: the region and the tiers of one host."""

    model_config = SettingsConfigDict(env_prefix="KVSTRATA_NODE_", title="node")

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = Field(default_factory=_host_name)
    """Name of this node in the cluster; by default the host name."""
    socket: Path | None = None
    """Unix socket for engines; by default `<run dir>/<id>.sock`. Its directory is made where that
    is missing, but none above."""
    host: HostSettings = HostSettings()
    tiers: list[TierSettings] = []
    """Secondary tiers, in the order they are asked."""
    peers: PeerSettings = PeerSettings()
    control: ControlSettings = ControlSettings()
    events: list[EventSettings] = []
    """Publishers of KV events: one for each engine endpoint that a router knows."""
    event_memory: Path | None = None
    """File that remembers what engines told of chunks, so that after a restart what is in stores is
    published at once; empty: none, and it is published as engines tell of it again."""
    metrics: Listen = ""
    """`host:port` of the Prometheus endpoint; empty: none."""
    stop_deadline: Seconds = 15.0
    """How long a node that is told to end may take for it, whatever its tiers do."""
    exit_with_stdin: bool = False
    """End when standard input closes: how a private node ends with its engine."""

    @property
    def socket_path(self) -> Path:
        """Raises `ConfigError` if the kernel takes no path as long as that."""
        path = self.socket or run_dir() / f"{self.id}.sock"
        if len(os.fsencode(path)) > _MOST_SOCKET:
            raise ConfigError(
                f"`socket` {path} has more than the {_MOST_SOCKET} bytes that a Unix socket may "
                "have: choose a shorter path"
            )
        return path


class ServerSettings(_Settings):
    """The control plane."""

    model_config = SettingsConfigDict(env_prefix="KVSTRATA_SERVER_", title="server")

    listen: Listen = "127.0.0.1:7800"
    """`host:port`. Anything but loopback requires a token."""
    database: str = "sqlite+aiosqlite:///kvstrata.sqlite"
    """SQLAlchemy URL with an async driver. Migrations are applied at start; a database that a newer
    version made is refused. SQLite's file stays where it is while a server runs: one that is
    removed or replaced ends its writes (503) until it is back, or the server restarted."""
    token: Token = ""
    """Bearer token with the role `admin`, beside those made by `kvstrata token`. Without any token
    there is no authentication, and the server listens on loopback only."""
    heartbeat_ttl: Seconds = 10.0
    """A node silent for longer is no longer offered."""
    transfer_retention: Seconds = 86400.0
    """How long ended transfers can be read."""
    transfers_per_node: Annotated[int, Field(ge=1)] = 8
    """Most transfers under way to one node; the others wait for their turn."""
    transfers_per_link: Annotated[int, Field(ge=1)] = 4
    """And of those, most from one and the same node."""
    hash_seeds: list[str] = ["vllm-none-hash", "0", "42"]
    """Values of PYTHONHASHSEED that engines may run with, to find chunks by token ids. The first
    is vLLM's own where it isn't set."""
    rate_limit: Annotated[float, Field(ge=0)] = 0.0
    """Requests a second that one token may make on average, twice as many at once; 0: no limit."""
    audit_retention: Seconds = 90 * 86400.0
    """How long the audit log is kept."""
    tls_cert: Path | None = None
    """Certificate chain, PEM: serve HTTPS. Needs `tls_key`."""
    tls_key: Path | None = None
    """Private key of the certificate, PEM."""
    exit_with_stdin: bool = False
    """End when standard input closes, and so with the process that started this one."""
