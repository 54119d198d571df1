"""Our part of vLLM's `kv_connector_extra_config`: what stands under `"kvstrata"`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from kvstrata.config import Seconds, TierSettings
from kvstrata.errors import ConfigError

__all__ = ["Options", "parse_options"]


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    node: Path | None = None
    """Socket of this host's node. Absent: the engine starts a node of its own, which ends with
    it and whose cache no other engine shares."""
    revision: str | None = None
    """Identifies the weights. Absent: taken from a local folder's files, or the hub's commit."""
    tenant: str = ""
    """Engines share chunks only with engines of the same tenant."""
    wait: Seconds = 10.0
    """How long a request waits for chunks on their way to host memory; then they are misses."""
    credits: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Most free slots held ahead of need, by chunk size."""
    timeout: Seconds = 30.0
    """How long to wait for the node when the engine starts."""
    host_capacity: ByteSize = ByteSize(4 << 30)
    """Of a node of our own: bytes of its host tier."""
    tiers: list[TierSettings] = []
    """Of a node of our own: its secondary tiers."""

    @model_validator(mode="after")
    def _one_place(self) -> Options:
        own = {"host_capacity", "tiers"} & self.model_fields_set
        if self.node is not None and own:
            raise ValueError(
                f"{sorted(own)} are settings of the node at {self.node}: set them there"
            )
        return self


def parse_options(extra_config: Mapping[str, Any]) -> Options:
    """The options in an engine's `kv_connector_extra_config`. Raises `ConfigError`."""
    try:
        return Options.model_validate(extra_config.get("kvstrata") or {})
    except ValidationError as e:
        told = "; ".join(
            f"{'.'.join(map(str, wrong['loc'])) or 'kvstrata'}: {wrong['msg']}"
            for wrong in e.errors(include_url=False)
        )
        raise ConfigError(f"kv_connector_extra_config.kvstrata: {told}") from e
