"""Rows of sharded JAX arrays: their shape by shard, and the gather and scatter that XLA compiles.

XLA moves rows as unsigned integers of the elements' size: bits, whatever they mean. On CPUs it
rounds narrow floats through float32 when it moves them as such, which changes NaNs; casting the
whole cache instead is exact, and costs a copy of it. Keep caches there as float32 or integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import SingleDeviceSharding
from numpy.typing import NDArray

from kvstrata.errors import Malformed
from kvstrata.layout import CopyRun, Tensor

__all__ = ["Form", "gatherer", "over_shards", "scatterer", "shard_tensors"]

_BITS: Mapping[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_REFUSED = ("bool", "int2", "uint2", "int4", "uint4", "float4_e2m1fn")  # not of whole bytes


def over_shards(runs_of_rank: Sequence[Sequence[CopyRun]]) -> tuple[CopyRun, ...]:
    """The runs of all ranks of this process as runs over shards.

    `runs_of_rank[r]` is of shard r; the `cache` of its runs is the number of an array.
    """
    ranks = len(runs_of_rank)
    return tuple(
        replace(run, cache=run.cache * ranks + rank)
        for rank, runs in enumerate(runs_of_rank)
        for run in runs
    )


def shard_tensors(arrays: Sequence[jax.Array], rank: int) -> list[Tensor]:
    """Shard `rank` of each array, for the forms of `kvstrata.layout`: dense, each by itself."""
    tensors = []
    for i, array in enumerate(arrays):
        shape, item = array.addressable_shards[rank].data.shape, array.dtype.itemsize
        strides = tuple(item * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        tensors.append(Tensor(tuple(shape), strides, item, item * math.prod(shape), buffer=i))
    return tensors


@dataclass(frozen=True, slots=True)
class Form:
    """What stays the same of an array, however often it is replaced."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any
    devices: tuple[Any, ...]  # by shard
    row_shapes: tuple[tuple[int, ...], ...]  # by shard
    whole: bool
    """All of it must be cast to integers to move some rows exactly (see the module)."""

    @classmethod
    def of(cls, index: int, array: jax.Array, ranks: int) -> Form:
        """Raises `Malformed` on arrays whose rows can't be moved."""
        dtype = np.dtype(array.dtype)
        if array.ndim < 2 or not array.size:
            raise Malformed(f"array {index} is of shape {array.shape}: it has no rows to copy")
        if dtype.itemsize not in _BITS or dtype.name in _REFUSED:
            raise Malformed(f"array {index} is of dtype {dtype}: its elements can't be copied")
        shards = array.addressable_shards
        if len(shards) != ranks:
            raise Malformed(f"array {index} has {len(shards)} shards, array 0 has {ranks}")
        if any(shard.data.shape[0] != array.shape[0] for shard in shards):
            raise Malformed(f"array {index} is sharded over its blocks: keep its first axis whole")
        narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return cls(
            tuple(array.shape),
            dtype,
            array.sharding,
            tuple(shard.device for shard in shards),
            tuple(tuple(shard.data.shape[1:]) for shard in shards),
            bool(narrow) and shards[0].device.platform == "cpu",
        )

    @property
    def row_bytes(self) -> list[int]:
        """By shard."""
        return [self.dtype.itemsize * math.prod(shape) for shape in self.row_shapes]

    def check(self, index: int, array: jax.Array) -> None:
        """Raises `Malformed` unless `array` can stand in the place of the first one."""
        if (tuple(array.shape), array.dtype) != (self.shape, self.dtype):
            raise Malformed(
                f"array {index} is {array.dtype}{array.shape}, "
                f"registered was {self.dtype}{self.shape}"
            )
        if not array.sharding.is_equivalent_to(self.sharding, array.ndim):
            raise Malformed(
                f"array {index} is sharded as {array.sharding}, registered was {self.sharding}"
            )

    def host_rows(self, rank: int, rows: NDArray[np.uint8]) -> NDArray[Any]:
        """Row bytes of one shard as what `assemble` takes."""
        return rows.view(_BITS[self.dtype.itemsize]).reshape(len(rows), *self.row_shapes[rank])

    def assemble(self, parts: Sequence[NDArray[Any]], pinned: bool) -> jax.Array:
        """An array sharded like this one, of its shards on the host.

        JAX may use `parts` for as long as it likes: never write to them again.
        """
        kind = "pinned_host" if pinned else self.sharding.memory_kind
        placed = jax.device_put(
            list(parts), [SingleDeviceSharding(d, memory_kind=kind) for d in self.devices]
        )
        shape = (len(parts[0]), *self.shape[1:])
        array = jax.make_array_from_single_device_arrays(
            shape, self.sharding.with_memory_kind(kind), placed
        )
        return jax.device_put(array, self.sharding) if pinned else array

    def mask(self, index: int, runs: Sequence[Sequence[CopyRun]]) -> jax.Array | None:
        """Which elements of a row the runs write, (1, ...); None if all. `runs` by shard.

        Raises `Malformed` if they cut elements.
        """
        parts = []
        for rank, nbytes in enumerate(self.row_bytes):
            hit = np.zeros(nbytes, np.bool_)
            for run in runs[rank]:
                for i in range(run.count):
                    start = run.device_offset + i * run.device_stride
                    hit[start : start + run.nbytes] = True
            elements = hit.reshape(-1, self.dtype.itemsize)
            if (elements.any(axis=1) != elements.all(axis=1)).any():
                raise Malformed(f"runs of array {index}, shard {rank} cut elements of {self.dtype}")
            parts.append(elements.all(axis=1).reshape(1, *self.row_shapes[rank]))
        return None if all(part.all() for part in parts) else self.assemble(parts, pinned=False)


def gatherer(forms: Sequence[Form]) -> Any:
    """`gather(arrays, ids)`: the rows `ids` of each array, sharded like it, as integers."""
    return _gatherer(tuple(form.whole for form in forms), tuple(form.sharding for form in forms))


def scatterer(forms: Sequence[Form]) -> Any:
    """`scatter(arrays, updates, masks, ids)`: the arrays, which it donates, with their rows `ids`
    replaced, and an event that is ready when that has been done. Equal ids take equal rows."""
    return _scatterer(tuple(form.whole for form in forms), tuple(form.sharding for form in forms))


# Kept, so that another device over the same kind of arrays finds them compiled.
@cache
def _gatherer(whole: tuple[bool, ...], shardings: tuple[Any, ...]) -> Any:
    return jax.jit(partial(_gather, whole), out_shardings=shardings)


@cache
def _scatterer(whole: tuple[bool, ...], shardings: tuple[Any, ...]) -> Any:
    return jax.jit(partial(_scatter, whole), donate_argnums=0, out_shardings=(shardings, None))


def _gather(
    whole: tuple[bool, ...], arrays: tuple[jax.Array, ...], ids: jax.Array
) -> tuple[jax.Array, ...]:
    return tuple(_rows_of(*pair, ids) for pair in zip(whole, arrays, strict=True))


def _scatter(
    whole: tuple[bool, ...],
    arrays: tuple[jax.Array, ...],
    updates: tuple[jax.Array, ...],
    masks: tuple[jax.Array | None, ...],
    ids: jax.Array,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    new = []
    for cast, array, update, mask in zip(whole, arrays, updates, masks, strict=True):
        rows = update if mask is None else jnp.where(mask, update, _rows_of(cast, array, ids))
        if cast:
            bits = _bits_of(array).at[ids].set(rows, mode="promise_in_bounds")
            new.append(jax.lax.bitcast_convert_type(bits, array.dtype))
        else:
            rows = jax.lax.bitcast_convert_type(rows, array.dtype)
            new.append(array.at[ids].set(rows, mode="promise_in_bounds"))
    return tuple(new), ids.sum()


def _rows_of(cast: bool, array: jax.Array, ids: jax.Array) -> jax.Array:
    if cast:
        return _bits_of(array).at[ids].get(mode="promise_in_bounds")
    return _bits_of(array.at[ids].get(mode="promise_in_bounds"))


def _bits_of(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, _BITS[array.dtype.itemsize])
