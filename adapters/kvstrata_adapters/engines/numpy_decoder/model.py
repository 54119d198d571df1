"""A small decoder-only transformer in numpy, the shape of Llama, over paged KV.

RMSNorm, rotary embedding, grouped-query attention, SwiGLU, untied output head; float32, with
weights drawn from a seed. It is a real model in all but training: the same tokens always give
the same logits, and other KV bytes give other logits.

Results do not depend on how the work was split. BLAS rounds differently for different shapes,
so one block of one sequence is the only unit of work: block `i` (tokens `i*N` to `i*N + N-1`)
is always computed as `N` rows, against the pages of blocks `0..i`, whether it holds one decoded
token or a full block of a prompt. Rows that aren't wanted are zeros, and keys a row may not see
get weight zero exactly. Logits after a reload can therefore be compared with `==`. On the CPUs
tried, GEMMs of 32 rows reach about 80 % of the speed of GEMMs of 512, so this costs little.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstrata.errors import ConfigError
from kvstrata.keys import Field, Group, Namespace

__all__ = ["DecoderConfig", "DecoderModel", "Floats", "LayerWeights", "Weights", "namespace_of"]

Floats = NDArray[np.float32]

_EPSILON = np.float32(1e-5)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes. One head has `width / heads` channels; queries share KV heads in equal parts."""

    vocabulary: int = 512
    width: int = 512
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 1408
    block_tokens: int = 32
    max_tokens: int = 2048
    rope_theta: float = 10_000.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads or self.head_size % 2:
            raise ConfigError(
                "a decoder needs width divisible by heads, heads divisible by kv_heads and an "
                f"even head size; got {self.width}, {self.heads}, {self.kv_heads}"
            )

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """One block of one layer: KV heads, tokens, K then V of a head."""
        return self.kv_heads, self.block_tokens, 2 * self.head_size

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return self.layers * self.kv_heads * 2 * self.head_size * 4


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer; matrices are (inputs, outputs)."""

    attention_norm: Floats
    qkv: Floats  # width -> heads + 2 * kv_heads, each head_size
    out: Floats
    mlp_norm: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. `cos` and `sin` are (max_tokens, head_size / 2), the rotary tables."""

    embedding: Floats  # (vocabulary, width)
    layers: tuple[LayerWeights, ...]
    final_norm: Floats
    head: Floats  # (width, vocabulary)
    cos: Floats
    sin: Floats


class DecoderModel:
    """The weights, and the forward pass of one block. One thread at a time: it has buffers."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        random = np.random.default_rng(config.seed)

        def matrix(rows: int, columns: int) -> Floats:
            scale = np.float32(rows**-0.5)
            return random.standard_normal((rows, columns), dtype=np.float32) * scale

        def gain() -> Floats:
            return 1 + 0.1 * random.standard_normal(config.width, dtype=np.float32)

        width, size = config.width, config.head_size
        self._embedding = random.standard_normal((config.vocabulary, width), dtype=np.float32)
        self._layers = [
            LayerWeights(
                attention_norm=gain(),
                qkv=matrix(width, (config.heads + 2 * config.kv_heads) * size),
                out=matrix(width, width),
                mlp_norm=gain(),
                gate_up=matrix(width, 2 * config.hidden),
                down=matrix(config.hidden, width),
            )
            for _ in range(config.layers)
        ]
        self._final_norm = gain()
        self._head = matrix(width, config.vocabulary)
        angles = np.outer(
            np.arange(config.max_tokens), config.rope_theta ** (-np.arange(0, size, 2) / size)
        )
        self._cos = np.cos(angles).astype(np.float32)
        self._sin = np.sin(angles).astype(np.float32)
        # Which keys of its own block a row may not see, rows repeated per query head of a group.
        n = config.block_tokens
        self._hidden = np.tile(~np.tri(n, dtype=np.bool_), (config.heads // config.kv_heads, 1))
        # The pages under attention, gathered: `[head][block][token][K|V]`.
        blocks = -(-config.max_tokens // n)
        self._context = np.empty((config.kv_heads, blocks, n, 2 * size), np.float32)

    @property
    def weights(self) -> Weights:
        """For another implementation of the same network: not to be written to."""
        return Weights(
            self._embedding,
            tuple(self._layers),
            self._final_norm,
            self._head,
            self._cos,
            self._sin,
        )

    @cached_property
    def revision(self) -> str:
        """A digest of all weights: two models with other weights have another one."""
        digest = hashlib.sha256()
        arrays = [self._embedding, self._final_norm, self._head]
        for layer in self._layers:
            arrays += [layer.attention_norm, layer.qkv, layer.out]
            arrays += [layer.mlp_norm, layer.gate_up, layer.down]
        for array in arrays:
            digest.update(array.data)
        return digest.hexdigest()

    def new_pages(self, num_blocks: int) -> list[Floats]:
        """An empty paged KV cache: per layer `[block][head][token][K|V]`, zeroed.

        Zeroed because what a masked key's value is multiplied with is 0.0: it must be finite.
        """
        shape = (num_blocks, *self.config.page_shape)
        return [np.zeros(shape, np.float32) for _ in range(self.config.layers)]

    def forward(
        self, block: int, first: int, tokens: Sequence[int], pages: list[Floats], table: list[int]
    ) -> Floats:
        """Compute consecutive tokens of one block, write their KV, return the last one's logits.

        `tokens` are rows `first, first + 1, ...` of logical block `block`; `table[:block + 1]`
        are the pages of blocks `0..block`, whose earlier rows hold their KV already. Returns
        `(vocabulary,)` float32.
        """
        config = self.config
        n, last = config.block_tokens, first + len(tokens)
        positions = slice(block * n, (block + 1) * n)
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        x = np.zeros((n, config.width), np.float32)
        x[first:last] = self._embedding[list(tokens)]
        for layer, page in zip(self._layers, pages, strict=True):
            q, k, v = self._project(_norm(x, layer.attention_norm) @ layer.qkv, cos, sin)
            own = page[table[block]]
            own[:, first:last, : config.head_size] = k[:, first:last]
            own[:, first:last, config.head_size :] = v[:, first:last]
            x += self._attend(q, page, table[: block + 1]) @ layer.out
            x += _swiglu(_norm(x, layer.mlp_norm) @ layer.gate_up) @ layer.down
        logits: Floats = _norm(x[last - 1 : last], self._final_norm)[0] @ self._head
        return logits

    def _project(self, qkv: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats, Floats]:
        """Rotated queries `(kv_heads, group * N, size)`, rotated keys and values per KV head."""
        config = self.config
        n, size, kv = config.block_tokens, config.head_size, config.kv_heads
        heads = qkv.reshape(n, -1, size)
        rotated = _rotate(heads[:, : config.heads + kv], cos, sin)
        queries = rotated[:, : config.heads].transpose(1, 0, 2).reshape(kv, -1, size)
        keys = rotated[:, config.heads :].transpose(1, 0, 2)
        return queries, keys, heads[:, config.heads + kv :].transpose(1, 0, 2)

    def _attend(self, queries: Floats, page: Floats, table: list[int]) -> Floats:
        """Attention of the last block's rows over all blocks of `table`: `(N, width)`."""
        config = self.config
        n, size = config.block_tokens, config.head_size
        for i, number in enumerate(table):
            self._context[:, i] = page[number]
        kv = self._context[:, : len(table)].reshape(config.kv_heads, -1, 2 * size)
        weights: Floats = queries @ kv[:, :, :size].transpose(0, 2, 1)
        weights *= np.float32(size**-0.5)
        np.copyto(weights[:, :, -n:], np.float32(-np.inf), where=self._hidden)
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed: Floats = weights @ kv[:, :, size:]
        return mixed.reshape(config.heads, n, size).transpose(1, 0, 2).reshape(n, config.width)


def namespace_of(model: DecoderModel, blocks_per_chunk: int, hash_seed: bytes) -> Namespace:
    """What must match for this model's KV bytes to be interchangeable.

    `hash_seed` is what starts the engine's chain of block hashes. The maximum length is left
    out of the configuration: it bounds the rotary tables and changes no byte.
    """
    config = model.config
    sizes = {name: value for name, value in asdict(config).items() if name != "max_tokens"}
    heads, tokens, channels = config.page_shape
    group = Group(
        id=0,
        kind="full",
        layers=tuple(f"layers.{i}" for i in range(config.layers)),
        fields=(Field(name="kv", units=heads, unit_bytes=tokens * channels * 4),),
        tokens_per_block=tokens,
    )
    return Namespace(
        model="numpy-decoder",
        revision=model.revision,
        config=hashlib.sha256(msgspec.json.encode(sizes, order="sorted")).hexdigest(),
        dtype="float32",
        content_format="token-k-v",
        groups=(group,),
        blocks_per_chunk=blocks_per_chunk,
        hash_algorithm="sha256",
        hash_seed=hashlib.sha256(hash_seed).hexdigest(),
    ).checked()


def _norm(x: Floats, gain: Floats) -> Floats:
    scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPSILON)
    normed: Floats = x / scale * gain
    return normed


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _swiglu(x: Floats) -> Floats:
    """`silu(gate) * up` of `x = [gate | up]`, in few temporaries: page faults cost more."""
    gate, up = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    out = np.exp(-gate, dtype=np.float32)
    out += 1
    np.divide(gate, out, out=out)
    out *= up
    return out
