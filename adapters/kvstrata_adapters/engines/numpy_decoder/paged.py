"""A small engine around a decoder: paged KV, chained hashes, offload to a node.

One request at a time. For each, the engine asks the node in one batch which leading chunks of
the prompt it has, copies those into its own pages, computes the rest, decodes greedily, and
hands the chunks that became full to the node. It keeps nothing between requests: what a later
request doesn't have to compute came from the node. Where the pages are and what computes on them
is its subclasses' part.

A node that is gone costs the hits, not the answer: the engine says so in the result and serves
on without.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

import numpy as np

from kvstrata.client import Found
from kvstrata.errors import Corrupt, Expired, KVStrataError, LinkBroken, Malformed, NoSpace
from kvstrata.keys import Key, Namespace, require_same
from kvstrata_adapters.devices.base import Copy, Device
from kvstrata_adapters.engines.numpy_decoder.model import DecoderModel, Floats, namespace_of

__all__ = [
    "BLOCKS_PER_CHUNK",
    "HASH_SEED",
    "GenerateResult",
    "NodeClient",
    "PagedEngine",
    "Seconds",
]

BLOCKS_PER_CHUNK = 2
HASH_SEED = b"kvstrata numpy decoder"
_COPY_DEADLINE = 30.0


class _Region(Protocol):
    @property
    def view(self) -> memoryview: ...


class NodeClient(Protocol):
    """What the engine uses of `kvstrata.client.Client`. Named apart so that a test can fail."""

    @property
    def namespace(self) -> Namespace | None: ...
    @property
    def region(self) -> _Region: ...
    def lookup(
        self, keys: Sequence[Key], want: Literal["prefix", "all"] = ..., wait: float = ...
    ) -> Found: ...
    def begin(self, lease: int, keys: Sequence[Key]) -> None: ...
    def end(self, lease: int, keys: Sequence[Key]) -> None: ...
    def release(self, lease: int) -> None: ...
    def reserve(self, keys: Sequence[Key]) -> Sequence[int]: ...
    def commit(self, keys: Sequence[Key]) -> Sequence[bool]: ...
    def abort(self, keys: Sequence[Key]) -> None: ...


@dataclass(slots=True)
class Seconds:
    """Where a request's time went. `first_token` is what a user waits for."""

    lookup: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    store: float = 0.0

    @property
    def first_token(self) -> float:
        return self.lookup + self.load + self.prefill


@dataclass(slots=True)
class GenerateResult:
    """`logits[i]`, float32 of shape `(n, vocabulary)`, chose `tokens[i]`.

    `cached_tokens` of the `prompt_tokens` were not computed: their KV was loaded, as
    `loaded_chunks` chunks and `loaded_bytes` bytes; `promoted_chunks` of them came from a
    secondary tier for this request. `trouble` tells what offloading failed on.
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    logits: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))
    cached_tokens: int = 0
    loaded_chunks: int = 0
    loaded_bytes: int = 0
    promoted_chunks: int = 0
    stored_chunks: int = 0
    stored_bytes: int = 0
    seconds: Seconds = field(default_factory=Seconds)
    trouble: list[str] = field(default_factory=list)


class PagedEngine(ABC):
    """Generates with `model` over `num_blocks` pages; `client` is the node, None: no offload.

    The client's session must have been opened with `namespace_for(model)`; another namespace
    raises `NamespaceMismatch`. Not thread-safe. `close` it: it owns copy threads.

    A subclass has its pages before it calls `__init__` here.
    """

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        client: NodeClient | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.namespace = self.namespace_for(model)
        self._client = client
        self._clock = clock
        self._free = list(range(num_blocks))
        self._jobs = count(1)
        self._group = self.namespace.groups[0]
        self._device: Device | None = None
        if client is not None:
            if client.namespace is not None:
                require_same(self.namespace, client.namespace)
            self._device = self._open_device(client.region.view)

    @abstractmethod
    def _open_device(self, region: memoryview) -> Device:
        """A device over the pages, attached to `region`. Called once, if there is a node."""

    @abstractmethod
    def _forward(self, block: int, first: int, tokens: Sequence[int], table: list[int]) -> Floats:
        """As `DecoderModel.forward`, over the engine's own pages."""

    @staticmethod
    def namespace_for(model: DecoderModel) -> Namespace:
        return namespace_of(model, BLOCKS_PER_CHUNK, HASH_SEED)

    @property
    def chunk_tokens(self) -> int:
        return self._group.tokens_per_block * self.namespace.blocks_per_chunk

    def chunk_keys(self, tokens: Sequence[int]) -> list[Key]:
        """Keys of the full chunks of a sequence, each of a hash chained over all before it."""
        n = self._group.tokens_per_block
        keys, parent = [], hashlib.sha256(HASH_SEED).digest()
        for block in range(len(tokens) // n):
            own = np.asarray(tokens[block * n : (block + 1) * n], dtype="<u4").tobytes()
            parent = hashlib.sha256(parent + own).digest()
            if (block + 1) % self.namespace.blocks_per_chunk == 0:
                keys.append(self.namespace.key(self._group.id, parent))
        return keys

    def generate(self, tokens: Sequence[int], n: int) -> GenerateResult:
        """Continue `tokens` greedily by `n` tokens. Raises `NoSpace` if they need more pages."""
        config = self.model.config
        if not tokens or n < 1:
            raise Malformed("a request needs at least one token, and asks for at least one")
        if min(tokens) < 0 or max(tokens) >= config.vocabulary:
            raise Malformed(f"tokens must be 0 to {config.vocabulary - 1}")
        total = len(tokens) + n - 1  # the last token's KV is never computed
        blocks = -(-total // config.block_tokens)
        if blocks > len(self._free) or total > config.max_tokens:
            raise NoSpace(
                f"{total} tokens need {blocks} pages of {len(self._free)} and at most "
                f"{config.max_tokens} positions: give the engine more of both"
            )
        table, self._free = self._free[:blocks], self._free[blocks:]
        try:
            return self._generate(list(tokens), n, table)
        finally:
            self._free += table

    def close(self) -> None:
        """End the copy threads. The client stays open: it isn't ours."""
        if self._device is not None:
            self._device.close()
            self._device = None

    # ------------------------------------------------------------ computing

    def _generate(self, tokens: list[int], n: int, table: list[int]) -> GenerateResult:
        result = GenerateResult(prompt_tokens=len(tokens))
        self._reload(tokens, table, result)
        with self._timed(result, "prefill"):
            steps = [self._compute(tokens, result.cached_tokens, table)]
        with self._timed(result, "decode"):
            result.tokens.append(int(steps[-1].argmax()))
            while len(result.tokens) < n:
                tokens.append(result.tokens[-1])
                steps.append(self._compute(tokens, len(tokens) - 1, table))
                result.tokens.append(int(steps[-1].argmax()))
        result.logits = np.stack(steps)
        self._offload(tokens, table, result)
        return result

    def _compute(self, tokens: Sequence[int], start: int, table: list[int]) -> Floats:
        """KV of `tokens[start:]`, block after block; the logits after the last."""
        n = self.model.config.block_tokens
        while True:
            block, first = divmod(start, n)
            part = tokens[start : (block + 1) * n]
            logits = self._forward(block, first, part, table)
            start += len(part)
            if start == len(tokens):
                return logits

    # ------------------------------------------------------------ moving

    def _reload(self, tokens: list[int], table: list[int], result: GenerateResult) -> None:
        """Load the leading chunks that the node has; at least one token is left to compute."""
        client = self._client
        keys = self.chunk_keys(tokens[:-1])
        if client is None or not keys:
            return
        with self._guarded(result):
            with self._timed(result, "lookup"):
                found = client.lookup(keys, want="prefix")
            try:
                with self._timed(result, "load"):
                    self._load(client, keys, found, table, result)
            finally:
                client.release(found.lease)

    def _load(
        self,
        client: NodeClient,
        keys: list[Key],
        found: Found,
        table: list[int],
        result: GenerateResult,
    ) -> None:
        hits = found.prefix
        if not hits:
            return
        client.begin(found.lease, keys[:hits])
        try:
            nbytes = self._copy("load", self._pages_of(range(hits), found.offsets, table))
        finally:
            client.end(found.lease, keys[:hits])
        result.loaded_chunks, result.loaded_bytes = hits, nbytes
        result.promoted_chunks = sum(found.promoted[:hits])
        result.cached_tokens = hits * self.chunk_tokens

    def _offload(self, tokens: list[int], table: list[int], result: GenerateResult) -> None:
        """Store the chunks that became full in this request and that the node hasn't got."""
        client = self._client
        first = result.loaded_chunks
        keys = self.chunk_keys(tokens)[first:]
        if client is None or not keys:
            return
        with self._guarded(result), self._timed(result, "store"):
            offsets = client.reserve(keys)
            mine = [i for i, offset in enumerate(offsets) if offset >= 0]
            if not mine:
                return
            try:
                chunks = [first + i for i in mine]
                nbytes = self._copy(
                    "store", self._pages_of(chunks, [offsets[i] for i in mine], table)
                )
            except KVStrataError:
                client.abort([keys[i] for i in mine])
                raise
            done = client.commit([keys[i] for i in mine])
            result.stored_chunks, result.stored_bytes = sum(done), nbytes

    def _pages_of(self, chunks: Sequence[int], offsets: Sequence[int], table: list[int]) -> Copy:
        """The pages of some chunks: our page numbers, and where they lie in the region."""
        per = np.arange(self.namespace.blocks_per_chunk)
        logical = np.asarray(chunks)[:, None] * len(per) + per
        places = np.asarray(offsets[: len(chunks)])[:, None] + per * self._group.page_bytes
        return Copy(
            group=self._group.id,
            blocks=np.asarray(table, np.int64)[logical.ravel()],
            offsets=places.ravel().astype(np.int64),
        )

    def _copy(self, direction: Literal["load", "store"], copy: Copy) -> int:
        """Bytes copied. Raises what the copy failed on."""
        if self._device is None:
            raise LinkBroken("this engine is closed")
        job = next(self._jobs)
        (self._device.load if direction == "load" else self._device.store)(job, [copy])
        try:
            self._device.wait([job], _COPY_DEADLINE)
        except Expired as e:
            self.close()  # waits: pages must not be computed on while a copy may still write
            raise LinkBroken(f"offloading is off from now on: {e}") from e
        (ended,) = self._device.finished()
        if ended.error is not None:
            raise ended.error
        expected = copy.blocks.size * self._group.page_bytes
        if ended.nbytes != expected:
            raise Corrupt(f"a copy moved {ended.nbytes} bytes of {expected}")
        return ended.nbytes

    # ------------------------------------------------------------ bookkeeping

    @contextmanager
    def _timed(self, result: GenerateResult, part: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            setattr(result.seconds, part, getattr(result.seconds, part) + self._clock() - start)

    @contextmanager
    def _guarded(self, result: GenerateResult) -> Iterator[None]:
        """Offloading may fail, the request may not. A broken link is not tried again."""
        try:
            yield
        except KVStrataError as e:
            result.trouble.append(str(e))
            if isinstance(e, LinkBroken):
                self._client = None
