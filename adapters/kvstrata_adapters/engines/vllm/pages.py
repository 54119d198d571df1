"""What travels from the scheduler to the workers: which pages of the region to copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec

from kvstrata.errors import Malformed
from kvstrata.keys import split_key
from kvstrata_adapters.devices.base import Copy

__all__ = ["ChunkSpec", "GroupPages", "copies"]


@dataclass
class ChunkSpec(LoadStoreSpec):
    """Chunks at `offsets` (int64) of one node's region, ordered by group as vLLM orders them.

    `faults` is where a worker tells that it could not store them.
    """

    shm_dir: str
    region: str
    region_bytes: int
    keys: list[bytes]
    offsets: NDArray[np.int64]
    faults: str = ""


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Of one group, in vLLM's order: its id and the bytes of a page over all ranks."""

    id: int
    page_bytes: int


def copies(
    blocks: GPULoadStoreSpec,
    chunks: ChunkSpec,
    groups: Sequence[GroupPages],
    blocks_per_chunk: int,
) -> list[Copy]:
    """Pair each device block with its page in the region.

    A group's blocks follow each other in its chunks. A load may start inside the first chunk
    (`block_indices`): the pages before it are skipped. Raises `Malformed` if the two sides do not
    cover the same chunks.
    """
    result = []
    block_at = chunk_at = 0
    ids = blocks.block_ids.astype(np.int64)
    for group, count, first in zip(groups, blocks.group_sizes, blocks.block_indices, strict=True):
        if not count:
            continue
        page = first % blocks_per_chunk + np.arange(count, dtype=np.int64)
        used = int(page[-1]) // blocks_per_chunk + 1
        if {split_key(key).group for key in chunks.keys[chunk_at : chunk_at + used]} != {group.id}:
            raise Malformed(
                f"chunks {chunk_at} to {chunk_at + used} are not all of group {group.id}"
            )
        starts = chunks.offsets[chunk_at : chunk_at + used]
        if len(starts) != used:
            raise Malformed(f"{count} blocks of group {group.id} need {used} chunks")
        offsets = starts[page // blocks_per_chunk] + page % blocks_per_chunk * group.page_bytes
        result.append(Copy(group.id, ids[block_at : block_at + count], offsets))
        block_at += count
        chunk_at += used
    if chunk_at != len(chunks.keys):
        raise Malformed(f"{len(chunks.keys)} chunks for blocks that fill {chunk_at}")
    return result
