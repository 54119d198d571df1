"""Options of the obj tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from kvstrata.config import Seconds, what_is_wrong
from kvstrata.errors import ConfigError

__all__ = ["ObjOptions"]

# S3's own bound, for all parts but the last; the largest chunk has fewer parts than it allows.
_LEAST_PART = 5 << 20

_Count = Annotated[int, Field(ge=1, le=1024)]
_Rate = Annotated[ByteSize, Field(ge=1)]


class ObjOptions(BaseModel):
    """A bucket of an S3-compatible store, which several nodes may share. Credentials come from the
    usual chain of AWS tools: environment, shared files (`profile`), web identity, container and
    instance roles; never from here."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    bucket: Annotated[str, Field(min_length=3, max_length=255)]
    """Bucket of the store; it must exist."""
    prefix: str = ""
    """Names of all objects begin with it. Nodes with one bucket and prefix share their chunks."""
    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+/?$")] | None = None
    """`https://host:port` of an S3-compatible service; None: AWS."""
    region: str | None = None
    """None: what the environment or the profile says, else `us-east-1`."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket stands in the path or in the host name; `auto`: in the path wherever an
    `endpoint` is set."""
    ca: Path | None = None
    """PEM bundle of the authorities to trust instead of the system's."""
    profile: str | None = None
    """Section of the shared AWS files to take credentials and region from."""

    eviction: Literal["list", "lifecycle"] = "list"
    """`list`: this node deletes, by `capacity`. `lifecycle`: the bucket's own rules delete."""
    capacity: ByteSize | None = None
    """Most bytes that chunks under the prefix may use; None: no bound."""
    high_watermark: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Eviction starts above this fraction of `capacity`."""
    low_watermark: Annotated[float, Field(gt=0, le=1)] = 0.85
    """And ends below this one."""
    refresh: Seconds = 600.0
    """How often the prefix is listed, for usage and for what others stored and removed."""
    known_for: Seconds = 600.0
    """How long a chunk that was seen counts as there without being asked for again."""
    missing_for: Seconds = 10.0
    """How long a chunk that was not there counts as missing without being asked for again."""
    exclusive: bool = False
    """No other node writes here: once listed, what is not known is missing, without a request."""

    load_concurrency: _Count = 16
    """Most loads under way at once."""
    store_concurrency: _Count = 8
    """Most stores under way at once."""
    lookup_concurrency: _Count = 32
    """Most requests for a chunk's metadata under way at once."""
    upload_rate: _Rate | None = None
    """Most bytes sent a second; None: no bound."""
    download_rate: _Rate | None = None
    """Most bytes received a second; None: no bound."""
    multipart_above: ByteSize = ByteSize(64 << 20)
    """Larger chunks are sent in parts."""
    part_size: Annotated[ByteSize, Field(ge=_LEAST_PART)] = ByteSize(16 << 20)
    """Bytes of a part."""
    orphans_after: Seconds = 86_400.0
    """Age at which an unfinished upload under the prefix is aborted."""
    head_above: ByteSize = ByteSize(1 << 20)
    """Before a larger chunk is sent, ask whether it is there; a smaller one is sent on condition
    that it isn't."""

    deadline: Seconds = 30.0
    """How long a call may take that came without a deadline."""
    connect_timeout: Seconds = 3.0
    """How long a connection may take."""
    attempts: Annotated[int, Field(ge=1, le=20)] = 5
    """How often a request is tried, if its deadline allows."""
    cool_off: Seconds = 1.0
    """How long the store is left alone after it failed; grows to 30 times this."""
    nixl: bool = False
    """Load payloads through NIXL's OBJ plugin (extra `nixl`). What it can't load, and every store,
    goes the usual way."""

    @field_validator("prefix")
    @classmethod
    def _without_slashes(cls, value: str) -> str:
        parts = value.strip("/").split("/") if value.strip("/") else []
        if any(part in ("", ".", "..") for part in parts):
            raise ValueError("has an empty, `.` or `..` part: write it as a/b/c")
        return "/".join(parts)

    @field_validator("endpoint")
    @classmethod
    def _without_credentials(cls, value: str | None) -> str | None:
        if value is not None and "@" in value:
            raise ValueError(
                "has a user or password in it, which logs would show: leave them to the "
                "environment or `profile`"
            )
        return value

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError("low_watermark is above high_watermark")
        if self.eviction == "lifecycle" and self.capacity is not None:
            raise ValueError('`capacity` needs eviction = "list": a lifecycle rule has no size')
        return self

    @property
    def bucket_in_host(self) -> bool:
        """Whether the bucket stands in the host name."""
        if self.addressing == "auto":
            return self.endpoint is None
        return self.addressing == "virtual"

    @classmethod
    def parse(cls, options: dict[str, Any]) -> ObjOptions:
        """Raises `ConfigError`, naming every option that is wrong."""
        try:
            return cls.model_validate(options)
        except ValidationError as e:
            raise ConfigError(f"obj tier: {what_is_wrong(e)}") from e
