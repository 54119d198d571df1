"""What happens in the demo, phase by phase, and what must be true of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstrata import api
from kvstrata.api import LookupRequest, TransferInfo, TransferRequest, TransferState
from kvstrata.errors import ConfigError
from kvstrata.keys import Key
from kvstrata.wire import StatusReply
from kvstrata_adapters.demo.children import until
from kvstrata_adapters.demo.cluster import Cluster, open_cluster
from kvstrata_adapters.demo.conversations import Conversation, Turn, Workload
from kvstrata_adapters.demo.engine_process import EngineProcess
from kvstrata_adapters.engines.numpy_decoder import DecoderConfig, DecoderModel, NumpyEngine

__all__ = ["FIRST", "MOVED", "RESTARTED", "Check", "Phase", "Story", "tell"]

_TRANSFER_SECONDS = 30.0
# The host tier of node A, as a part of the KV that its conversations produce.
_HOST_SHARE = 0.4

FIRST, RESTARTED, MOVED = "on node A", "restarted", "on node B"


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold; `detail` tells the numbers it was judged by."""

    what: str
    holds: bool
    detail: str


@dataclass(slots=True)
class Phase:
    """`hits` are chunks by tier, as the node itself counted them in this phase."""

    name: str
    turns: list[Turn] = field(default_factory=list)
    hits: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Story:
    """All that was measured."""

    chunk_bytes: int
    chunk_tokens: int
    host_bytes: int
    working_set: int = 0
    phases: list[Phase] = field(default_factory=list)
    transfer: TransferInfo | None = None
    transfer_seconds: float = 0.0
    evicted: int = 0
    checks: list[Check] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]

    @property
    def turns(self) -> list[Turn]:
        return [turn for phase in self.phases for turn in phase.turns]


class _Host:
    """Chunks that a node answered from host memory and from its file system since the last look."""

    def __init__(self, status: Callable[[], StatusReply]) -> None:
        self._status = status
        self._seen = self._now()

    def since(self) -> dict[str, int]:
        now, before = self._now(), self._seen
        self._seen = now
        return {tier: count - before[tier] for tier, count in now.items()}

    def _now(self) -> dict[str, int]:
        counters = self._status().counters
        return {tier: counters.get(f"{tier}_hits", 0) for tier in ("host", "fs")}


def tell(
    folder: Path, workload: Workload, config: DecoderConfig, step: Callable[[str, bool], None]
) -> Story:
    """Run it all. `step(what, turn)` is told what happens next; `turn`: a turn has been done.

    Raises `KVStrataError` where the story can't go on; what merely came out wrong is a check.
    """
    step("weights of the model, and an engine without offload", False)
    plain = NumpyEngine(DecoderModel(config), config.max_tokens // config.block_tokens)
    chunk_bytes = plain.namespace.chunk_bytes[0]
    host_bytes = _host_chunks(workload, plain.chunk_tokens) * chunk_bytes
    story = Story(chunk_bytes, plain.chunk_tokens, host_bytes)
    step("a control plane and two nodes", False)
    with open_cluster(folder, {"node-a": host_bytes, "node-b": 2 * host_bytes}) as cluster:
        conversations = _on_a(cluster, story, plain, workload, config, step)
        _on_b(cluster, story, plain, workload, config, conversations[0], step)
    _check_logits(story)
    _check_end(cluster, story)
    return story


def _host_chunks(workload: Workload, chunk_tokens: int) -> int:
    """Chunks of node A's host tier: less than the conversations need, enough for any one of them.

    Raises `ConfigError` if there is no such number.
    """
    system = workload.system // chunk_tokens
    longest = workload.longest_on_a // chunk_tokens
    produced = system + workload.conversations * (longest - system)
    chunks = max(int(produced * _HOST_SHARE), longest + 2)
    if chunks >= produced:
        raise ConfigError("too little is said to fill a host tier: raise --conversations")
    return chunks


def _on_a(
    cluster: Cluster,
    story: Story,
    plain: NumpyEngine,
    workload: Workload,
    config: DecoderConfig,
    step: Callable[[str, bool], None],
) -> list[Conversation]:
    system = np.random.default_rng(workload.seed).integers(0, config.vocabulary, workload.system)
    conversations = [
        Conversation((workload.seed, number), system.tolist())
        for number in range(workload.conversations)
    ]
    counted = _Host(cluster.a.status)
    for name, rounds in ((FIRST, workload.turns), (RESTARTED, workload.turns_after_restart)):
        phase = Phase(name)
        story.phases.append(phase)
        step(f"{name}: starting an engine", False)
        with EngineProcess("engine-a", cluster.a.socket, config) as engine:
            for _ in range(rounds):
                # Round robin: whoever comes back finds that the others took the host tier.
                for conversation in conversations:
                    phase.turns.append(conversation.go_on(engine, plain, workload))
                    step(f"{name}: conversations", True)
            phase.hits = counted.since()
            cluster.a.settle()
        # The block has killed the engine with SIGKILL.
    keys = {key for c in conversations for key in plain.chunk_keys(c.history[: c.known])}
    story.working_set = len(keys) * story.chunk_bytes
    _check_a(cluster, story)
    return conversations


def _on_b(
    cluster: Cluster,
    story: Story,
    plain: NumpyEngine,
    workload: Workload,
    config: DecoderConfig,
    conversation: Conversation,
    step: Callable[[str, bool], None],
) -> None:
    keys = plain.chunk_keys(conversation.history[: conversation.known])
    step("a transfer to node B, by REST", False)
    info = _transfer(cluster, story, keys)
    pulled = cluster.b.status().counters.get("pulled", 0)
    stored = sum(1 for key in info.keys if key.outcome is api.Outcome.STORED)
    story.checks.append(
        Check(
            "the transfer brought every chunk to node B",
            info.state is TransferState.DONE and stored == pulled == len(keys),
            f"{info.state}: {stored} of {len(keys)} stored, node B pulled {pulled}. {info.detail}",
        )
    )
    counted = _Host(cluster.b.status)
    phase = Phase(MOVED)
    story.phases.append(phase)
    arrived = set(keys)
    with EngineProcess("engine-b", cluster.b.socket, config) as engine:
        for _ in range(workload.turns_on_b):
            phase.turns.append(conversation.go_on(engine, plain, workload, arrived))
            step("the conversation goes on at node B", True)
        phase.hits = counted.since()
        cluster.b.settle()
    phase.hits["peer"] = sum(turn.from_peer for turn in phase.turns)
    phase.hits["host"] -= phase.hits["peer"]
    story.checks.append(
        Check(
            "node B's first answer there used what was transferred",
            phase.hits["peer"] == phase.turns[0].ours.loaded_chunks > 0,
            f"{phase.hits['peer']} chunks transferred and read",
        )
    )


def _transfer(cluster: Cluster, story: Story, keys: list[Key]) -> TransferInfo:
    """Schedule it once the control plane knows that node A has the chunks; wait until it ends."""
    control = cluster.control
    names = [key.hex() for key in keys]

    def offered() -> bool | None:
        reply = control.lookup(LookupRequest(keys=names, nodes=[cluster.a.id]))
        return True if any(node.prefix == len(names) for node in reply.nodes) else None

    until("the index to know node A's chunks", offered, _TRANSFER_SECONDS, *cluster.children)
    began = time.perf_counter()
    created = control.create_transfer(
        TransferRequest(target=cluster.b.id, source=cluster.a.id, keys=names),
        idempotency_key=f"demo-{os.getpid()}",
    )

    def ended() -> TransferInfo | None:
        info = control.get_transfer(created.id)
        return info if info.state.ended else None

    story.transfer = until("the transfer", ended, _TRANSFER_SECONDS, *cluster.children)
    story.transfer_seconds = time.perf_counter() - began
    return story.transfer


def _check_a(cluster: Cluster, story: Story) -> None:
    status = cluster.a.status()
    host = next(tier for tier in status.tiers if tier.name == "host")
    story.evicted = host.counters.get("evicted", 0)
    restarted = story.phases[-1]
    from_fs, from_memory = (sum(p.hits[tier] for p in story.phases) for tier in ("fs", "host"))
    story.checks += [
        Check(
            "the conversations did not fit in node A's host tier",
            story.working_set > story.host_bytes and story.evicted > 0,
            f"{story.working_set} bytes of KV, {story.host_bytes} of memory, "
            f"{story.evicted} chunks evicted",
        ),
        Check(
            "chunks went to the file system and came back",
            from_fs > 0,
            f"{from_fs} chunks, {from_memory} from memory",
        ),
        Check(
            "the restarted engine reloaded every conversation",
            all(turn.ours.cached_tokens > 0 for turn in restarted.turns),
            f"{sum(turn.ours.cached_tokens for turn in restarted.turns)} tokens",
        ),
    ]
    for phase in story.phases:
        loaded = sum(turn.ours.loaded_chunks for turn in phase.turns)
        promoted = sum(turn.ours.promoted_chunks for turn in phase.turns)
        story.checks.append(
            Check(
                f"engine and node counted the same hits ({phase.name})",
                sum(phase.hits.values()) == loaded and promoted <= loaded,
                f"the engine loaded {loaded}, the node counted {phase.hits}",
            )
        )


def _check_logits(story: Story) -> None:
    reloads = [turn for turn in story.turns if turn.ours.cached_tokens]
    different = sum(not turn.same for turn in story.turns)
    lost = sum(max(0, turn.reusable - turn.ours.cached_tokens) for turn in story.turns)
    trouble = sorted({text for turn in story.turns for text in turn.ours.trouble})
    story.checks += [
        Check(
            "logits after every reload equal those without offload, bit for bit",
            bool(reloads) and not different,
            f"{len(reloads)} reloads, {different} of {len(story.turns)} turns different",
        ),
        Check(
            "nothing was computed twice: each prefix came back whole",
            lost == 0,
            f"{lost} tokens recomputed",
        ),
        Check("offloading met no trouble", not trouble, "; ".join(trouble) or "none"),
    ]


def _check_end(cluster: Cluster, story: Story) -> None:
    left = [node.region.name for node in (cluster.a, cluster.b) if node.region.exists()]
    story.checks.append(
        Check(
            "every process ended well and left no shared memory",
            not left and not any(cluster.exits.values()),
            f"exit status {cluster.exits}, left {left or 'nothing'}",
        )
    )
