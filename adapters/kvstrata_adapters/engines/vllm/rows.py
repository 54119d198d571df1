"""Runs over the tensors that layers compute with, as runs over the rows that vLLM registers.

vLLM gives an offloading worker byte rows, one tensor for all layers that share its memory, and
says which row each layer has. The layout package knows the layers' own tensors. That both mean
the same memory is checked, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor

from kvstrata.errors import ConfigError
from kvstrata.layout import Cache, CopyRun, RankRuns
from kvstrata_adapters.devices.tensors import describe

__all__ = ["runs_in_rows"]


def runs_in_rows(
    runs: RankRuns,
    caches: Sequence[Cache],
    names: Sequence[str],
    refs: Sequence[CanonicalKVCacheRef],
    rows: Sequence[CanonicalKVCacheTensor],
) -> RankRuns:
    """`caches` are those of `runs`, equally many for each of the layers `names`, in their order.

    Raises `ConfigError` naming a layer that does not lie in its row.
    """
    each = len(caches) // len(names)
    places = [
        _place(name, cache, ref, rows[ref.tensor_idx])
        for i, (name, ref) in enumerate(zip(names, refs, strict=True))
        for cache in caches[i * each : (i + 1) * each]
    ]
    return RankRuns(_moved(runs.load, places), _moved(runs.store, places))


def _place(
    name: str, cache: Cache, ref: CanonicalKVCacheRef, row: CanonicalKVCacheTensor
) -> tuple[int, int]:
    """Which row, and from which byte of it, `cache` is."""
    whole = describe(row.tensor)
    shift = cache.offset - whole.offset
    good = (cache.buffer, cache.block_stride) == (whole.buffer, whole.strides[0])
    good &= cache.blocks == whole.shape[0]
    if not (good and shift >= 0 and shift + cache.row_bytes <= ref.page_size_bytes):
        raise ConfigError(
            f"layer {name}: its tensor ({cache}) does not lie in the {ref.page_size_bytes} bytes "
            f"that vLLM gives as its page ({whole})"
        )
    return ref.tensor_idx, shift


def _moved(runs: Sequence[CopyRun], places: Sequence[tuple[int, int]]) -> tuple[CopyRun, ...]:
    return tuple(
        replace(
            run,
            cache=places[run.cache][0],
            device_offset=places[run.cache][1] + run.device_offset,
        )
        for run in runs
    )
