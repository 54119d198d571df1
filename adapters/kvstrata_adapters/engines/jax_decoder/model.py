"""The decoder of `numpy_decoder` in JAX: the same weights, tensor-parallel over devices.

KV heads with their queries, and the hidden channels of the MLP, are sharded; two all-reduces a
layer. The pages are float32 arrays `[block][KV head][token][K|V]`, one per layer, sharded over
their heads; a step donates them.

As there, one block of one sequence is the only unit of work, `N` rows against a context of the
model's full length: one program, whatever is computed. So on one set of devices the same tokens
give the same bits however the work was split, and whether their prefix was computed or loaded.
Another number of devices adds the same terms in another order: its logits differ by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvstrata.errors import ConfigError
from kvstrata_adapters.engines.numpy_decoder.model import DecoderConfig, DecoderModel, Floats

__all__ = ["JaxModel"]

_AXIS = "tp"
_EPSILON = 1e-5
# TPUs multiply float32 in bfloat16 otherwise.
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class _Layer(NamedTuple):
    """k: KV heads, g: queries of each, d: channels of a head, w: width, f: hidden."""

    attention_norm: Any  # w
    query: Any  # wkgd
    key: Any  # wkd
    value: Any  # wkd
    out: Any  # kgdw
    mlp_norm: Any  # w
    gate: Any  # wf
    up: Any  # wf
    down: Any  # fw


class _Weights(NamedTuple):
    embedding: Any
    layers: tuple[_Layer, ...]
    final_norm: Any
    head: Any
    cos: Any
    sin: Any


_LAYER_SPECS = _Layer(
    attention_norm=P(),
    query=P(None, _AXIS),
    key=P(None, _AXIS),
    value=P(None, _AXIS),
    out=P(_AXIS),
    mlp_norm=P(),
    gate=P(None, _AXIS),
    up=P(None, _AXIS),
    down=P(_AXIS),
)


class JaxModel:
    """`decoder` on `devices`: as many ranks as there are devices, by default all of JAX's.

    Raises `ConfigError` unless they divide the KV heads and the hidden channels.
    """

    def __init__(self, decoder: DecoderModel, devices: Sequence[jax.Device] | None = None) -> None:
        self.decoder = decoder
        config = decoder.config
        mesh = Mesh(np.array(jax.devices() if devices is None else list(devices)), (_AXIS,))
        self.ranks = int(mesh.size)
        if config.kv_heads % self.ranks or config.hidden % self.ranks:
            raise ConfigError(
                f"{config.kv_heads} KV heads and {config.hidden} hidden channels can't be shared "
                f"by {self.ranks} devices: use a number that divides both"
            )
        self.page_sharding = NamedSharding(mesh, P(None, _AXIS))
        self._context_blocks = -(-config.max_tokens // config.block_tokens)
        layers = (_LAYER_SPECS,) * config.layers
        specs = _Weights(P(), layers, P(), P(), P(), P())
        self._weights = jax.device_put(
            _weights_of(decoder),
            jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec),
        )
        pages = [P(None, _AXIS)] * config.layers
        step = jax.shard_map(
            partial(_block, config),
            mesh=mesh,
            in_specs=(specs, pages, P(), P(), P(), P(), P()),
            out_specs=(pages, P()),
        )
        self._step = jax.jit(step, donate_argnums=1)

    def new_pages(self, num_blocks: int) -> list[jax.Array]:
        """An empty paged KV cache, per layer `[block][head][token][K|V]`, zeroed."""
        shape = (num_blocks, *self.decoder.config.page_shape)
        zeros = jax.jit(partial(jnp.zeros, shape, np.float32), out_shardings=self.page_sharding)
        return [zeros() for _ in range(self.decoder.config.layers)]

    def forward(
        self,
        block: int,
        first: int,
        tokens: Sequence[int],
        pages: list[jax.Array],
        table: Sequence[int],
    ) -> tuple[list[jax.Array], Floats]:
        """As `DecoderModel.forward`; `pages` are used up, the new ones come with the logits."""
        rows = np.zeros(self.decoder.config.block_tokens, np.int32)
        rows[first : first + len(tokens)] = tokens
        context = np.zeros(self._context_blocks, np.int32)
        context[: block + 1] = table[: block + 1]
        pages, logits = self._step(self._weights, pages, context, block, first, len(tokens), rows)
        result: Floats = np.array(logits)
        return pages, result


def _block(
    config: DecoderConfig,
    weights: _Weights,
    pages: list[jax.Array],
    table: jax.Array,
    block: jax.Array,
    first: jax.Array,
    count: jax.Array,
    tokens: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """On each rank, its heads. Keys of the context that a row may not see get weight zero."""
    n, size = config.block_tokens, config.head_size
    rows = jnp.arange(n)
    wanted = (rows >= first) & (rows < first + count)
    seen = jnp.arange(len(table) * n) <= (block * n + rows)[:, None]
    cos, sin = (lax.dynamic_slice_in_dim(t, block * n, n) for t in (weights.cos, weights.sin))
    x = jnp.where(wanted[:, None], weights.embedding[tokens], 0)
    new_pages = []
    for layer, page in zip(weights.layers, pages, strict=True):
        h = _norm(x, layer.attention_norm)
        query = _rotate(_einsum("nw,wkgd->kgnd", h, layer.query), cos, sin)
        key = _rotate(_einsum("nw,wkd->knd", h, layer.key), cos, sin)
        value = _einsum("nw,wkd->knd", h, layer.value)
        number = table[block]
        own = jnp.concatenate((key, value), axis=-1)
        page = page.at[number].set(jnp.where(wanted[:, None], own, page[number]))
        new_pages.append(page)
        context = page[table].transpose(1, 0, 2, 3).reshape(len(key), -1, 2 * size)
        scores = _einsum("kgnd,ksd->kgns", query, context[..., :size]) * size**-0.5
        scores = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        mixed = _einsum("kgns,ksd->kgnd", scores, context[..., size:])
        x += lax.psum(_einsum("kgnd,kgdw->nw", mixed, layer.out), _AXIS)
        h = _norm(x, layer.mlp_norm)
        h = jax.nn.silu(_einsum("nw,wf->nf", h, layer.gate)) * _einsum("nw,wf->nf", h, layer.up)
        x += lax.psum(_einsum("nf,fw->nw", h, layer.down), _AXIS)
    last = _norm(x[first + count - 1], weights.final_norm)
    return new_pages, _einsum("w,wv->v", last, weights.head)


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPSILON) * gain


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def _weights_of(decoder: DecoderModel) -> _Weights:
    config, weights = decoder.config, decoder.weights
    width, heads, kv, size = config.width, config.heads, config.kv_heads, config.head_size
    layers = []
    for own in weights.layers:
        query, key, value = np.split(own.qkv, [heads * size, (heads + kv) * size], axis=1)
        gate, up = np.split(own.gate_up, 2, axis=1)
        layers.append(
            _Layer(
                own.attention_norm,
                query.reshape(width, kv, heads // kv, size),
                key.reshape(width, kv, size),
                value.reshape(width, kv, size),
                own.out.reshape(kv, heads // kv, size, width),
                own.mlp_norm,
                gate,
                up,
                own.down,
            )
        )
    return _Weights(
        weights.embedding,
        tuple(layers),
        weights.final_norm,
        weights.head,
        weights.cos,
        weights.sin,
    )


def _is_spec(x: object) -> bool:
    return isinstance(x, P)
