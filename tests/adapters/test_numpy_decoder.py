"""The numpy engine: right logits, the same bits however the work was split, and honest reloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, takewhile
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.client import Found
from kvstrata.errors import LinkBroken, Malformed, NamespaceMismatch, NoSpace
from kvstrata.keys import Key, Namespace
from kvstrata.slots import Slots
from kvstrata.wire import State
from kvstrata_adapters.engines.numpy_decoder import DecoderConfig, DecoderModel, NumpyEngine
from kvstrata_adapters.engines.numpy_decoder.model import Floats

CONFIG = DecoderConfig(
    vocabulary=64, width=32, layers=3, heads=4, kv_heads=2, hidden=48, block_tokens=4, max_tokens=96
)
MODEL = DecoderModel(CONFIG)
CHUNK_TOKENS = 8
TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, CONFIG.vocabulary, 60)]


class _Memory:
    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))


class FakeNode:
    """A node's host tier in this process: enough to drive one engine, with faults to order."""

    def __init__(self, chunks: int, namespace: Namespace | None = None) -> None:
        self.namespace = namespace or NumpyEngine.namespace_for(MODEL)
        self.size = self.namespace.chunk_bytes[0]
        self.region = _Memory(chunks * Slots.rounded(self.size))
        self.slots = Slots(chunks * Slots.rounded(self.size))
        self.ready: dict[Key, int] = {}
        self.writing: dict[Key, int] = {}
        self.reading: set[Key] = set()
        self.leases: set[int] = set()
        self.broken_after = 1 << 30
        self.calls: list[str] = []
        self._ids = count(1)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) > self.broken_after:
            raise LinkBroken("node is gone")

    def lookup(
        self, keys: Sequence[Key], want: Literal["prefix", "all"] = "prefix", wait: float = 5.0
    ) -> Found:
        self._call("lookup")
        hits = len(list(takewhile(self.ready.__contains__, keys)))
        lease = next(self._ids)
        self.leases.add(lease)
        return Found(
            lease=lease,
            states=[State.HOST if i < hits else State.MISS for i in range(len(keys))],
            offsets=[self.ready[k] if i < hits else -1 for i, k in enumerate(keys)],
            promoted=[False] * len(keys),
            ttl=30.0,
        )

    def begin(self, lease: int, keys: Sequence[Key]) -> None:
        self._call("begin")
        assert lease in self.leases
        self.reading.update(keys)

    def end(self, lease: int, keys: Sequence[Key]) -> None:
        self._call("end")
        self.reading.difference_update(keys)

    def release(self, lease: int) -> None:
        self._call("release")
        self.leases.remove(lease)

    def reserve(self, keys: Sequence[Key]) -> list[int]:
        self._call("reserve")
        offsets = []
        for key in keys:
            if key in self.ready:
                offsets.append(-2)
                continue
            offset = self.slots.allocate(self.size)
            offsets.append(-1 if offset is None else offset)
            if offset is not None:
                self.writing[key] = offset
        return offsets

    def commit(self, keys: Sequence[Key]) -> list[bool]:
        self._call("commit")
        self.ready.update({key: self.writing.pop(key) for key in keys})
        return [True] * len(keys)

    def abort(self, keys: Sequence[Key]) -> None:
        self._call("abort")
        for key in keys:
            self.slots.free(self.writing.pop(key))

    def bytes_of(self, key: Key) -> memoryview:
        return self.region.view[self.ready[key] : self.ready[key] + self.size]


@pytest.fixture
def node() -> FakeNode:
    return FakeNode(chunks=16)


@pytest.fixture
def plain() -> Iterator[NumpyEngine]:
    engine = NumpyEngine(MODEL, num_blocks=24)
    yield engine
    engine.close()


@pytest.fixture
def engine(node: FakeNode) -> Iterator[NumpyEngine]:
    engine = NumpyEngine(MODEL, num_blocks=24, client=node)
    yield engine
    engine.close()


def restarted(node: FakeNode) -> NumpyEngine:
    """Another engine with empty pages on the same node."""
    return NumpyEngine(DecoderModel(CONFIG), num_blocks=24, client=node)


# ---------------------------------------------------------------- the model


def dense_logits(model: DecoderModel, tokens: Sequence[int]) -> np.ndarray:
    """The same network in float64, without pages, blocks or masks: one query at a time."""
    c = model.config

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain

    def rope(x: np.ndarray, position: int) -> np.ndarray:
        half = c.head_size // 2
        angle = position * c.rope_theta ** (-np.arange(half) / half)
        turn = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([turn.real, turn.imag], axis=1)

    x = model._embedding[list(tokens)].astype(np.float64)
    kv = c.kv_heads
    for layer in model._layers:
        heads = (norm(x, layer.attention_norm) @ layer.qkv).reshape(len(x), -1, c.head_size)
        q = np.stack([rope(h[: c.heads], p) for p, h in enumerate(heads)])
        k = np.stack([rope(h[c.heads : c.heads + kv], p) for p, h in enumerate(heads)])
        v = heads[:, c.heads + kv :]
        mixed = np.zeros_like(q)
        for p in range(len(x)):
            for h in range(c.heads):
                own = h // (c.heads // kv)
                score = k[: p + 1, own] @ q[p, h] / np.sqrt(c.head_size)
                weight = np.exp(score - score.max())
                mixed[p, h] = (weight / weight.sum()) @ v[: p + 1, own]
        x = x + mixed.reshape(len(x), -1) @ layer.out
        gate, up = np.split(norm(x, layer.mlp_norm) @ layer.gate_up, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down
    return norm(x, model._final_norm)[-1] @ model._head


def paged_logits(model: DecoderModel, tokens: Sequence[int], parts: Iterator[int]) -> Floats:
    """Through pages in a shuffled order, full of old numbers, in parts of the given sizes."""
    n = model.config.block_tokens
    blocks = -(-len(tokens) // n)
    random = np.random.default_rng(3)
    pages = model.new_pages(blocks + 2)
    for page in pages:
        page[:] = random.standard_normal(page.shape)
    table = [int(b) for b in random.permutation(blocks + 2)[:blocks]]
    done, logits = 0, np.empty(0, np.float32)
    while done < len(tokens):
        block, first = divmod(done, n)
        size = min(next(parts), n - first, len(tokens) - done)
        logits = model.forward(block, first, tokens[done : done + size], pages, table)
        done += size
    return logits


@pytest.mark.parametrize("length", [1, 4, 5, 33])
def test_logits_are_those_of_the_network(length: int) -> None:
    ours = paged_logits(MODEL, TOKENS[:length], iter(lambda: 4, 0))
    np.testing.assert_allclose(ours, dense_logits(MODEL, TOKENS[:length]), rtol=2e-4, atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 60), sizes=st.lists(st.integers(1, 4), min_size=60, max_size=60))
def test_splitting_the_work_changes_no_bit(length: int, sizes: list[int]) -> None:
    whole = paged_logits(MODEL, TOKENS[:length], iter(lambda: 4, 0))
    assert np.array_equal(paged_logits(MODEL, TOKENS[:length], iter(sizes)), whole)


def test_the_demo_s_sizes_are_as_exact_as_the_small_ones() -> None:
    model = DecoderModel(DecoderConfig(layers=1))
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, 512, 150)]
    whole = paged_logits(model, tokens, iter(lambda: 32, 0))
    mixed = np.random.default_rng(2).integers(1, 33, 150)
    assert np.array_equal(paged_logits(model, tokens, iter(mixed.tolist())), whole)


def test_other_weights_are_another_namespace() -> None:
    ours = NumpyEngine.namespace_for(MODEL)
    other = NumpyEngine.namespace_for(DecoderModel(replace(CONFIG, seed=1)))
    assert ours.revision != other.revision
    assert ours.digest != other.digest
    longer = NumpyEngine.namespace_for(DecoderModel(replace(CONFIG, max_tokens=200)))
    assert longer.digest == ours.digest


@pytest.mark.parametrize(
    "wrong", [{"width": 33}, {"kv_heads": 3}, {"width": 36, "heads": 12, "kv_heads": 2}]
)
def test_impossible_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(Exception, match="a decoder needs"):
        replace(CONFIG, **wrong)


# ---------------------------------------------------------------- the engine


def test_keys_name_the_whole_prefix(plain: NumpyEngine) -> None:
    keys = plain.chunk_keys(TOKENS[:35])
    assert len(keys) == len(set(keys)) == 35 // CHUNK_TOKENS
    changed = [*TOKENS[:10], (TOKENS[10] + 1) % CONFIG.vocabulary, *TOKENS[11:35]]
    other = plain.chunk_keys(changed)
    assert other[0] == keys[0]
    assert not set(other[1:]) & set(keys)
    assert plain.chunk_keys(TOKENS[:60])[:4] == keys


def test_a_restart_reloads_and_changes_no_bit(
    node: FakeNode, engine: NumpyEngine, plain: NumpyEngine
) -> None:
    first = engine.generate(TOKENS[:45], 3)
    assert (first.cached_tokens, first.stored_chunks) == (0, 47 // CHUNK_TOKENS)

    again = restarted(node)
    reloaded = again.generate(TOKENS[:45], 3)
    again.close()
    expected = plain.generate(TOKENS[:45], 3)
    assert reloaded.cached_tokens == 40
    assert reloaded.loaded_chunks == 5
    assert reloaded.loaded_bytes == 5 * node.size
    assert reloaded.tokens == expected.tokens
    assert np.array_equal(reloaded.logits, expected.logits)
    assert reloaded.logits.shape == (3, CONFIG.vocabulary)
    assert not node.reading
    assert not node.leases


def test_turns_of_a_conversation_reuse_answers_too(engine: NumpyEngine, plain: NumpyEngine) -> None:
    history: list[int] = []
    for turn, cached in enumerate((0, 16, 32)):
        history += TOKENS[turn * 12 : turn * 12 + 12]
        ours, theirs = engine.generate(history, 6), plain.generate(history, 6)
        assert ours.cached_tokens == cached
        assert np.array_equal(ours.logits, theirs.logits)
        history += ours.tokens


def test_wrong_bytes_would_be_seen(node: FakeNode, engine: NumpyEngine, plain: NumpyEngine) -> None:
    engine.generate(TOKENS[:45], 1)
    key = engine.chunk_keys(TOKENS[:45])[2]
    as_floats = np.frombuffer(node.bytes_of(key), np.float32)
    as_floats[len(as_floats) // 2] += 0.5
    assert not np.array_equal(
        engine.generate(TOKENS[:45], 1).logits, plain.generate(TOKENS[:45], 1).logits
    )


def test_at_least_one_token_is_computed(engine: NumpyEngine, plain: NumpyEngine) -> None:
    engine.generate(TOKENS[:16], 1)
    result = engine.generate(TOKENS[:16], 1)
    assert result.cached_tokens == 8
    assert result.stored_chunks == 0
    assert np.array_equal(result.logits, plain.generate(TOKENS[:16], 1).logits)


def test_chunks_lie_in_the_canonical_layout(node: FakeNode, engine: NumpyEngine) -> None:
    engine.generate(TOKENS[:8], 1)
    pages = MODEL.new_pages(2)
    for block in range(2):
        MODEL.forward(block, 0, TOKENS[block * 4 : block * 4 + 4], pages, [0, 1])
    canonical = np.stack(pages).transpose(1, 2, 0, 3, 4)  # [block][head][layer][token][K|V]
    (key,) = engine.chunk_keys(TOKENS[:8])
    assert node.bytes_of(key).tobytes() == canonical.tobytes()


def test_without_room_the_rest_is_stored() -> None:
    node = FakeNode(chunks=2)
    engine = NumpyEngine(MODEL, num_blocks=24, client=node)
    result = engine.generate(TOKENS[:45], 1)
    assert result.stored_chunks == 2
    assert engine.generate(TOKENS[:45], 1).cached_tokens == 16
    engine.close()


@pytest.mark.parametrize("calls", range(8))
def test_a_node_that_dies_costs_hits_not_answers(
    calls: int, node: FakeNode, plain: NumpyEngine
) -> None:
    filled = restarted(node)
    filled.generate(TOKENS[:20], 1)
    filled.close()
    node.calls.clear()
    node.broken_after = calls
    engine = restarted(node)
    expected = plain.generate(TOKENS[:45], 2)
    for _ in range(2):
        result = engine.generate(TOKENS[:45], 2)
        assert np.array_equal(result.logits, expected.logits)
    assert not result.trouble or calls >= 6, "it was not asked again"
    assert len(node.calls) <= max(calls + 3, 8)
    engine.close()


def test_an_engine_of_another_model_is_refused() -> None:
    other = NumpyEngine.namespace_for(DecoderModel(replace(CONFIG, seed=1)))
    with pytest.raises(NamespaceMismatch, match="revision"):
        NumpyEngine(MODEL, num_blocks=4, client=FakeNode(1, namespace=other))


def test_pages_come_back_and_bounds_are_told(plain: NumpyEngine) -> None:
    for tokens, n in (([], 1), ([1], 0), ([CONFIG.vocabulary], 1), ([-1], 1)):
        with pytest.raises(Malformed):
            plain.generate(tokens, n)
    with pytest.raises(NoSpace, match="97 tokens need 25 pages of 24"):
        plain.generate([1] * 97, 1)
    for _ in range(3):
        plain.generate([1] * 96, 1)


def test_times_are_where_the_work_was(node: FakeNode) -> None:
    ticks = count()
    engine = NumpyEngine(MODEL, 24, node, clock=lambda: float(next(ticks)))
    result = engine.generate(TOKENS[:20], 2)
    s = result.seconds
    assert (s.lookup, s.load, s.prefill, s.decode, s.store) == (1, 1, 1, 1, 1)
    assert s.first_token == 3
    engine.close()
