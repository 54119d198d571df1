"""What is said in the demo, and what became of each turn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstrata.keys import Key
from kvstrata_adapters.demo.engine_process import EngineProcess
from kvstrata_adapters.engines.numpy_decoder import GenerateResult, NumpyEngine

__all__ = ["Conversation", "Turn", "Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """How much is said. Sizes are tokens; all conversations share their first `system` tokens."""

    conversations: int = 6
    turns: int = 4
    turns_after_restart: int = 1
    turns_on_b: int = 2
    system: int = 128
    message: int = 120
    answer: int = 8
    seed: int = 1

    @property
    def longest_on_a(self) -> int:
        """Tokens of a conversation when it leaves node A."""
        turns = self.turns + self.turns_after_restart
        return self.system + turns * (self.message + self.answer)

    @property
    def longest(self) -> int:
        """Tokens of the conversation that goes on at node B, at its end."""
        return self.longest_on_a + self.turns_on_b * (self.message + self.answer)

    @property
    def steps(self) -> int:
        """Turns in all."""
        return self.conversations * (self.turns + self.turns_after_restart) + self.turns_on_b


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer, computed twice: with the node's chunks, and from nothing."""

    ours: GenerateResult
    plain: GenerateResult
    reusable: int
    """Tokens before the last that lie in full chunks which an earlier turn of this conversation
    has computed. What another conversation shares with it comes on top."""
    from_peer: int = 0
    """Chunks loaded that the node had got by a transfer and nobody had read before."""

    @property
    def same(self) -> bool:
        """Bit for bit."""
        return self.ours.tokens == self.plain.tokens and np.array_equal(
            self.ours.logits, self.plain.logits
        )


@dataclass(slots=True)
class Conversation:
    """The tokens so far. `known` of them had their KV computed by an engine on our nodes."""

    seed: tuple[int, int]
    history: list[int]
    known: int = 0
    turns: int = field(default=0)

    def go_on(
        self,
        engine: EngineProcess,
        plain: NumpyEngine,
        workload: Workload,
        arrived: set[Key] | None = None,
    ) -> Turn:
        """One more turn. `arrived`: keys a transfer brought; those read now are taken out."""
        random = np.random.default_rng((*self.seed, self.turns))
        vocabulary = plain.model.config.vocabulary
        self.history += random.integers(0, vocabulary, workload.message).tolist()
        self.turns += 1
        chunk = plain.chunk_tokens
        reusable = min(self.known, len(self.history) - 1) // chunk * chunk
        ours = engine.generate(self.history, workload.answer)
        theirs = plain.generate(self.history, workload.answer)
        read = set(plain.chunk_keys(self.history)[: ours.loaded_chunks]) & (arrived or set())
        if arrived:
            arrived -= read
        self.known = len(self.history) + workload.answer - 1
        self.history += theirs.tokens
        return Turn(ours, theirs, reusable, len(read))
