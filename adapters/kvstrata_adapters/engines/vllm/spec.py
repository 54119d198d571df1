"""vLLM's way in: `OffloadingConnector` with this spec stores to and loads from a kvstrata node.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "KVStrataOffloadingSpec",
        "spec_module_path": "kvstrata_adapters.engines.vllm.spec",
        "kvstrata": {"node": "/run/kvstrata/host.sock"}}}'

See `Options` for what may stand under `"kvstrata"`. vLLM imports this module in its API server
too, so it imports little and does nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm.v1.kv_offload.base import OffloadingSpec

from kvstrata.errors import ConfigError, KVStrataError, Malformed
from kvstrata_adapters.engines.vllm.options import parse_options

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvstrata.client import Client
    from kvstrata.keys import Namespace
    from kvstrata_adapters.private_node import PrivateNode

__all__ = ["KVStrataOffloadingSpec"]

# A worker that has to find its node again while the engine runs waits at most this long.
_RECONNECT_SECONDS = 2.0


class KVStrataOffloadingSpec(OffloadingSpec):
    """One instance per process of the engine: the scheduler's makes the manager, each worker's
    the worker. Workers come first, and register the namespace that the scheduler is then told."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.options = parse_options(config.extra_config)
        self._private: PrivateNode | None = None

    def get_manager(self) -> OffloadingManager:
        """Raises `LinkBroken` if no node answers, and what the node refuses with."""
        from kvstrata_adapters.engines.vllm.faults import FaultLine, fault_path
        from kvstrata_adapters.engines.vllm.geometry import hash_seed_fingerprint
        from kvstrata_adapters.engines.vllm.link import NodeLink
        from kvstrata_adapters.engines.vllm.manager import KVStrataManager

        socket = self._socket()
        client = self._connect(socket, "scheduler", None, self.options.timeout)
        namespace = client.namespace
        try:
            if namespace is None:
                raise ConfigError(
                    f"no worker of engine {self.config.engine_id} has registered at {socket}"
                )
            if hash_seed_fingerprint(namespace.hash_algorithm) != namespace.hash_seed:
                raise ConfigError(
                    "the scheduler's prefix hashes start from another seed than its workers': "
                    "give both the same PYTHONHASHSEED"
                )
            faults = FaultLine(fault_path(self.config.engine_id))
        except KVStrataError:
            client.close()
            raise
        link = NodeLink(client, lambda: self._open(socket, "scheduler", namespace), time.monotonic)
        return KVStrataManager(
            link, namespace, faults, wait=self.options.wait, credits=self.options.credits
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Raises `ConfigError` if this model's KV can't be shared safely, or lies where no device
        of ours can copy from."""
        from vllm.config import get_current_vllm_config_or_none

        from kvstrata_adapters.devices.choose import cache_rows, open_device
        from kvstrata_adapters.engines.vllm.geometry import derive_geometry
        from kvstrata_adapters.engines.vllm.pages import GroupPages
        from kvstrata_adapters.engines.vllm.worker import KVStrataWorker

        vllm_config: Any = get_current_vllm_config_or_none()
        if vllm_config is None:
            raise ConfigError("vLLM's configuration is not at hand while KV caches are registered")
        geometry = derive_geometry(self.config, self.options, vllm_config, kv_caches)
        namespace = geometry.namespace
        pages = {group.id: group.page_bytes for group in namespace.groups}
        rows = [tensor.tensor for tensor in kv_caches.tensors]
        try:
            device = open_device(rows)
        except Malformed as e:
            raise ConfigError(str(e)) from e
        try:
            device.register_caches(
                [cache_rows(row) for row in rows], geometry.runs, pages, geometry.store_runs
            )
            socket = self._socket()
            client = self._connect(socket, "worker", namespace, self.options.timeout)
            worker = KVStrataWorker(
                device,
                client,
                lambda: self._connect(socket, "worker", namespace, _RECONNECT_SECONDS),
                [GroupPages(group.id, group.page_bytes) for group in namespace.groups],
                self.blocks_per_chunk,
                self._private,
            )
        except BaseException:
            device.close()
            raise
        return worker

    def _socket(self) -> Path:
        """The node's, after starting one of our own if none is configured."""
        if self.options.node is not None:
            return self.options.node
        from kvstrata_adapters.private_node import PrivateNode, private_socket

        if self._private is None:
            self._private = PrivateNode.ensure(
                self.config.engine_id,
                self.options.host_capacity,
                self.options.tiers,
                self.options.timeout,
            )
        return private_socket(self.config.engine_id)

    def _connect(
        self,
        socket: Path,
        role: Literal["scheduler", "worker"],
        namespace: Namespace | None,
        timeout: float,
    ) -> Client:
        from kvstrata.client import Client

        return Client.connect(socket, self.config.engine_id, role, namespace, timeout)

    def _open(
        self, socket: Path, role: Literal["scheduler", "worker"], namespace: Namespace | None
    ) -> Client:
        from kvstrata.client import Client

        return Client.open(socket, self.config.engine_id, role, namespace)
