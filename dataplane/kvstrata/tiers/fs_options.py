"""Options of the fs tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from kvstrata.config import Seconds, what_is_wrong
from kvstrata.errors import ConfigError

__all__ = ["Direct", "Durability", "FsOptions"]

Direct = Literal["auto", "on", "off"]
Durability = Literal["none", "data", "full"]


class FsOptions(BaseModel):
    """Options of an fs tier."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    root: Path
    """Directory of the store. Nodes that mount the same one share their chunks."""
    capacity: ByteSize | None = None
    """Most bytes of disk that chunks may use; None: no bound."""
    high_watermark: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Eviction starts above this fraction of `capacity`."""
    low_watermark: Annotated[float, Field(gt=0, le=1)] = 0.85
    """And ends below this one."""
    ttl: Seconds | None = None
    """Chunks that nobody used for so long are a miss, and are removed; None: kept."""
    durability: Durability = "none"
    """What a store waits for: `none` (a power cut may lose or damage chunks, which is noticed),
    `data` (the bytes are on disk), `full` (and their names)."""
    direct: Direct = "auto"
    """O_DIRECT: `auto` for chunks of 64 KiB and more where the file system and the memory allow
    it, `on` for all sizes and an error where the file system doesn't, `off` never."""
    read_threads: Annotated[int, Field(ge=1, le=256)] = 4
    write_threads: Annotated[int, Field(ge=1, le=256)] = 4
    deadline: Seconds = 30.0
    """How long a call may take that came without a deadline."""
    stuck_after: Seconds = 5.0
    """How long one chunk may take before the mount counts as hung."""
    recovery_wait: Seconds = 2.0
    """How long opening waits for the walk over the directory; then it goes on beside."""
    rescan: Seconds = 3600.0
    """How often the directory is walked again, to learn of what others did in silence."""
    quarantine_files: Annotated[int, Field(ge=0)] = 64
    """Most damaged files kept for people to look at."""
    quarantine_bytes: ByteSize = ByteSize(256 << 20)
    """And most bytes of them."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError("low_watermark is above high_watermark")
        return self

    @classmethod
    def parse(cls, options: dict[str, Any]) -> FsOptions:
        """Raises `ConfigError`, naming every option that is wrong."""
        try:
            return cls.model_validate(options)
        except ValidationError as e:
            raise ConfigError(f"fs tier: {what_is_wrong(e)}") from e
