"""The engine of the JAX decoder: its pages are sharded arrays, each device writes its share.

    model = JaxModel(DecoderModel(DecoderConfig()), jax.devices()[:4])
    with Client.connect(socket, "jax", namespace=JaxEngine.namespace_for(model.decoder)) as client:
        engine = JaxEngine(model, num_blocks=64, client=client)
        result = engine.generate(tokens, 20)
        engine.close()

Its namespace is that of the numpy decoder: the network and its weights are the same, so engines
of either kind and of any number of devices use each other's chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstrata.layout import AttentionContent, Packed, Ranks, plan_rank
from kvstrata_adapters.devices.base import Device
from kvstrata_adapters.devices.jax import JaxDevice, over_shards, shard_tensors
from kvstrata_adapters.engines.jax_decoder.model import JaxModel
from kvstrata_adapters.engines.numpy_decoder.model import Floats
from kvstrata_adapters.engines.numpy_decoder.paged import NodeClient, PagedEngine

__all__ = ["JaxEngine"]


class JaxEngine(PagedEngine):
    """See `PagedEngine`. All calls from one thread: it owns the arrays."""

    def __init__(
        self,
        model: JaxModel,
        num_blocks: int,
        client: NodeClient | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.sharded = model
        self._pages = model.new_pages(num_blocks)
        self._held: JaxDevice | None = None
        super().__init__(model.decoder, num_blocks, client, clock)

    def _forward(self, block: int, first: int, tokens: Sequence[int], table: list[int]) -> Floats:
        # A load has put other arrays in the place of those that it used up.
        pages = self._pages if self._held is None else self._held.arrays
        pages, logits = self.sharded.forward(block, first, tokens, pages, table)
        if self._held is None:
            self._pages = pages
        else:
            self._held.arrays = pages
        return logits

    def _open_device(self, region: memoryview) -> Device:
        config, ranks = self.model.config, self.sharded.ranks
        content = AttentionContent(
            config.kv_heads, config.block_tokens, config.head_size, config.head_size, "float32"
        )
        plans = []
        for rank in range(ranks):
            held = Packed("LBHNC").pages(content, shard_tensors(self._pages, rank), ranks)
            stages = (range(config.layers),)
            plans.append(plan_rank(self._group, Ranks(ranks, stages), 0, rank, held))
        device = JaxDevice()
        device.register_caches(
            self._pages,
            {self._group.id: over_shards([plan.load for plan in plans])},
            {self._group.id: self._group.page_bytes},
            {self._group.id: over_shards([plan.store for plan in plans])},
        )
        device.attach(region)
        self._held, self._pages = device, []
        return device
