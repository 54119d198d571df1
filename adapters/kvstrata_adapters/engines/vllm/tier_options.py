"""What may stand beside `type` and `module_path` in an entry of vLLM's `secondary_tiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator

from kvstrata.config import Seconds, TierSettings, what_is_wrong
from kvstrata.errors import ConfigError

__all__ = ["TierOptions"]


class TierOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    tiers: Annotated[list[TierSettings], Field(min_length=1)]
    """Tiers of kvstrata, in the order they are asked, as in a node's settings:
    `[{"type": "fs", "root": "/var/lib/kvstrata", "capacity": "500GiB"}]`. Chunks are stored to
    all of them."""
    revision: str | None = None
    """Identifies the weights. Absent: taken from a local folder's files, or the hub's commit."""
    tenant: str = ""
    """Engines share chunks only with engines of the same tenant."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Where the tiers are, for requests that name in `kv_load_tiers` what they load from."""
    enable_kv_events: bool = False
    """Tell of chunks stored and removed, where vLLM's KV events are on."""
    lookup_deadline: Seconds = 1.0
    """A chunk that no tier has answered for by then is a miss."""
    load_deadline: Seconds = 10.0
    """A request waits this long for its chunks; those not loaded by then are computed."""
    store_deadline: Seconds = 30.0
    """What is not stored by then is not stored."""
    open_deadline: Seconds = 120.0
    """How long the tiers may take to open when the engine starts."""
    drain_deadline: Seconds = 10.0
    """How long resetting vLLM's cache or ending the engine may wait for what is under way."""
    staging: ByteSize = ByteSize(128 << 20)
    """Host memory per tier that loads pass through, so that one which hangs can't write into
    memory that vLLM has put to another use."""
    most_pinned: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest part of vLLM's host memory that stores under way may hold; more are dropped."""

    @field_validator("tiers")
    @classmethod
    def _stored_at_once(cls, tiers: list[TierSettings]) -> list[TierSettings]:
        if any(tier.cascade != "write_through" for tier in tiers):
            raise ValueError("vLLM offers a chunk once, so `cascade` can only be write_through")
        return tiers

    @classmethod
    def parse(cls, tier_type: str, options: Mapping[str, Any]) -> TierOptions:
        """Raises `ConfigError`, naming every option that is wrong."""
        try:
            return cls.model_validate(options)
        except ValidationError as e:
            raise ConfigError(f"secondary_tiers, {tier_type}: {what_is_wrong(e)}") from e
