"""Options of the fs tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from kvstrata.config import Seconds, what_is_wrong
from kvstrata.errors import ConfigError

__all__ = ["FsOptions"]


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
    read_threads: Annotated[int, Field(ge=1, le=256)] = 4
    write_threads: Annotated[int, Field(ge=1, le=256)] = 4
    deadline: Seconds = 30.0
    """How long a call may take that came without a deadline."""

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
