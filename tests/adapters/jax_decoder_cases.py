"""The JAX decoder at TP=4 and TP=2 with a real node; run by `test_jax_decoder.py`.

What equal means: on one set of devices every logit has the same bits, computed or reloaded.
Between numbers of devices, and between JAX and numpy, sums are rounded in another order: their
logits, of size 1 to 4, are equal within `ROUNDING`.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.errors import ConfigError
from kvstrata.testing.waiting import eventually
from kvstrata_adapters.engines.jax_decoder import JaxEngine, JaxModel
from kvstrata_adapters.engines.numpy_decoder import (
    DecoderConfig,
    DecoderModel,
    GenerateResult,
    NumpyEngine,
)

CONFIG = DecoderConfig(
    vocabulary=64, width=64, layers=3, heads=8, kv_heads=4, hidden=96, block_tokens=4, max_tokens=96
)
DECODER = DecoderModel(CONFIG)
NAMESPACE = JaxEngine.namespace_for(DECODER)
CHUNK = NAMESPACE.chunk_bytes[0]
TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, CONFIG.vocabulary, 90)]
PROMPT, OTHER = TOKENS[:45], TOKENS[45:]
ROUNDING = 2e-5


@cache
def model(ranks: int) -> JaxModel:
    return JaxModel(DECODER, jax.devices()[:ranks])


@cache
def recomputed(ranks: int, prompt: tuple[int, ...] = tuple(PROMPT), n: int = 4) -> GenerateResult:
    """Without a node."""
    engine = JaxEngine(model(ranks), num_blocks=24)
    result = engine.generate(prompt, n)
    engine.close()
    assert result.cached_tokens == 0
    return result


class NodeProcess:
    """A real node over a folder; `stop` and `start` again is a restart."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "a.sock"
        self._command = [
            *(sys.executable, "-m", "kvstrata", "node", "--id", "a"),
            *("--socket", str(self.socket), "--host.shm-dir", str(folder)),
            *("--host.capacity", str(32 * CHUNK)),
            *("--tiers", f'[{{"type": "fs", "root": "{folder}/fs"}}]'),
        ]
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._child = subprocess.Popen(self._command)
        eventually(lambda: self.connect()).close()

    def stop(self) -> None:
        if self._child is not None:
            self._child.terminate()
            self._child.wait(20)

    def kill(self) -> None:
        assert self._child is not None
        self._child.kill()
        self._child.wait(20)

    def connect(self) -> Client:
        return Client.connect(self.socket, "test", namespace=NAMESPACE)

    def in_fs(self, count: int) -> bool:
        with self.connect() as client:
            return next(t for t in client.status().tiers if t.name == "fs").chunks >= count


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path_factory.mktemp("node"))
    node.start()
    yield node
    node.stop()


@pytest.fixture
def node(process: NodeProcess) -> NodeProcess:
    """Empty."""
    with process.connect() as client:
        client.drop(["fs", "host"])
    return process


@contextmanager
def engine(node: NodeProcess, ranks: int, blocks: int = 24) -> Iterator[JaxEngine]:
    with node.connect() as client:
        engine = JaxEngine(model(ranks), blocks, client)
        try:
            yield engine
        finally:
            engine.close()


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_are_those_of_the_network(ranks: int) -> None:
    plain = NumpyEngine(DECODER, num_blocks=24)
    expected, ours = plain.generate(PROMPT, 4), recomputed(ranks)
    assert ours.tokens == expected.tokens
    assert np.abs(expected.logits).max() > 1
    np.testing.assert_allclose(ours.logits, expected.logits, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("ranks", [2, 4])
def test_splitting_the_work_changes_no_bit(ranks: int) -> None:
    decoded = recomputed(ranks)
    for n in range(1, 4):
        again = recomputed(ranks, (*PROMPT, *decoded.tokens[:n]), 1)
        assert np.array_equal(again.logits[0], decoded.logits[n])


def test_devices_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 KV heads"):
        model(3)


# ---------------------------------------------------------------- with a node


@pytest.mark.parametrize("ranks", [4, 2])
def test_offload_evict_restart_reload(node: NodeProcess, ranks: int) -> None:
    with engine(node, ranks, blocks=12) as first:
        stored = first.generate(PROMPT, 4)
        assert (stored.cached_tokens, stored.stored_chunks, stored.trouble) == (0, 6, [])
        # All pages are used by another sequence: what comes back comes from the node.
        other = first.generate(OTHER, 4)
        again = first.generate(PROMPT, 4)
        assert (again.cached_tokens, again.loaded_bytes) == (40, 5 * CHUNK)
        assert np.array_equal(again.logits, stored.logits)

    eventually(lambda: node.in_fs(12))
    node.stop()
    node.start()  # its host tier is empty: chunks are promoted from files
    with engine(node, ranks) as second:
        reloaded, also = second.generate(PROMPT, 4), second.generate(OTHER, 4)
    assert (reloaded.cached_tokens, reloaded.promoted_chunks) == (40, 5)
    assert reloaded.tokens == recomputed(ranks).tokens
    assert np.array_equal(reloaded.logits, recomputed(ranks).logits)
    assert np.array_equal(also.logits, other.logits)
    assert np.array_equal(also.logits, recomputed(ranks, tuple(OTHER)).logits)


@pytest.mark.parametrize(("writer", "reader"), [(4, 2), (2, 4), (4, 1)])
def test_another_number_of_devices_reuses_what_was_stored(
    node: NodeProcess, writer: int, reader: int
) -> None:
    with engine(node, writer) as first:
        first.generate(PROMPT, 4)
    with engine(node, reader) as second:
        ours = second.generate(PROMPT, 4)
        assert (ours.cached_tokens, ours.loaded_chunks, ours.trouble) == (40, 5, [])
        again = second.generate(PROMPT, 4)
    expected = recomputed(reader)
    assert ours.tokens == expected.tokens
    np.testing.assert_allclose(ours.logits, expected.logits, rtol=0, atol=ROUNDING)
    assert np.array_equal(ours.logits, again.logits)


@pytest.mark.parametrize("ranks", [4, 2])
def test_numpy_and_jax_use_each_other_s_chunks(node: NodeProcess, ranks: int) -> None:
    with node.connect() as client:
        numpy_engine = NumpyEngine(DECODER, 24, client)
        numpy_engine.generate(PROMPT, 4)
        with engine(node, ranks) as ours:
            reused = ours.generate(PROMPT, 4)
            ours.generate(OTHER, 4)
        back = numpy_engine.generate(OTHER, 4)
        numpy_engine.close()
    assert reused.cached_tokens == back.cached_tokens == 40
    np.testing.assert_allclose(reused.logits, recomputed(ranks).logits, rtol=0, atol=ROUNDING)
    expected = recomputed(ranks, tuple(OTHER))
    np.testing.assert_allclose(back.logits, expected.logits, rtol=0, atol=ROUNDING)


def test_wrong_bytes_would_be_seen(node: NodeProcess) -> None:
    """Heads of a chunk exchanged between two ranks: far outside the tolerance."""
    with engine(node, 4) as first:
        first.generate(PROMPT, 4)
        keys = first.chunk_keys(PROMPT)
    with node.connect() as client:
        found = client.lookup(keys)
        share = NAMESPACE.groups[0].page_bytes // CONFIG.kv_heads
        at = found.offsets[1]
        page = np.frombuffer(client.region.view, np.uint8)[at : at + 2 * share]
        page[:] = np.roll(page, share)
        del page
        client.release(found.lease)
    with engine(node, 2) as second:
        ours = second.generate(PROMPT, 4)
    assert ours.cached_tokens == 40
    assert np.abs(ours.logits - recomputed(2).logits).max() > 1000 * ROUNDING


def test_a_node_that_dies_costs_hits_not_answers(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path)
    node.start()
    with engine(node, 4) as ours:
        ours.generate(PROMPT, 4)
        node.kill()
        for _ in range(2):
            result = ours.generate(PROMPT, 4)
            assert result.cached_tokens == 0
            assert np.array_equal(result.logits, recomputed(4).logits)
