"""vLLM's `OffloadingConnector`, which also tells the node what its chunks are.

    --kv-transfer-config '{"kv_connector": "KVStrataConnector",
      "kv_connector_module_path": "kvstrata_adapters.engines.vllm.connector", ...}'

The rest is as for `OffloadingConnector` with `KVStrataOffloadingSpec`, and so is all that it does.
A manager of vLLM's knows chunks by hash; tokens are seen only where the connector keeps what KV
events need, its tracker of events (vLLM 0.32). A node that publishes KV events has to be told once
of each chunk; one that doesn't is told nothing.
"""

from __future__ import annotations

import array
import sys
from collections import OrderedDict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvstrata.errors import ConfigError
from kvstrata_adapters.engines.vllm.manager import KVStrataManager

__all__ = ["KVStrataConnector"]

_LOW = (1 << 64) - 1
_MOST_TOLD = 1 << 18


class KVStrataConnector(OffloadingConnector):
    """Raises `ConfigError` with a spec that isn't ours."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        scheduler = self.connector_scheduler
        if scheduler is None:
            return
        if not isinstance(scheduler.manager, KVStrataManager):
            raise ConfigError(
                "KVStrataConnector is for `spec_name` KVStrataOffloadingSpec: use vLLM's "
                "OffloadingConnector with any other"
            )
        scheduler._events_tracker = _Teller(scheduler._events_tracker, scheduler.manager)


class _Teller(OffloadingEventsTracker):
    """Sees each chunk that is stored or found while its request is at hand."""

    def __init__(self, tracker: OffloadingEventsTracker, manager: KVStrataManager) -> None:
        super().__init__(tracker.config)
        self._manager = manager
        self._told: OrderedDict[bytes, None] = OrderedDict()
        self._session = -1

    def record_store(self, req: Any, group_config: Any, chunk_idx: int, offload_key: Any) -> None:
        super().record_store(req, group_config, chunk_idx, offload_key)
        self._tell(req, group_config, chunk_idx, offload_key)

    def record_lookup(self, req: Any, group_config: Any, chunk_idx: int, offload_key: Any) -> None:
        super().record_lookup(req, group_config, chunk_idx, offload_key)
        self._tell(req, group_config, chunk_idx, offload_key)

    def _tell(self, req: Any, group_config: Any, chunk_idx: int, key: bytes) -> None:
        session = self._manager.tells
        if session is None or group_config.sliding_window_size_in_chunks is not None:
            return  # nobody to tell, or no prefix that a router could count
        if session != self._session:
            self._session = session
            self._told.clear()  # another node, or one that began anew
        if key in self._told:
            return
        self._told[key] = None
        if len(self._told) > _MOST_TOLD:
            self._told.popitem(last=False)
        meta = self._build_event_metadata(req, group_config, chunk_idx)
        parent = meta.parent_block_hash
        self._manager.tell(
            key,
            [_low(block) for block in meta.block_hashes],
            _little_endian(meta.token_ids),
            None if parent is None else _low(parent),
            meta.lora_name or "",
            req.cache_salt or "",
        )


def _low(block: bytes) -> int:
    """What vLLM's own events call a block."""
    return int.from_bytes(block, "big") & _LOW


def _little_endian(tokens: Any) -> bytes:
    packed = array.array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
