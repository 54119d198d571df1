"""Real engines, nodes and a control plane as processes, for the end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvstrata.client import Client
from kvstrata.keys import Key, Namespace, split_key
from kvstrata.testing.waiting import eventually

BLOCK = 32
TOKEN = "of-the-tests"


def make_model(folder: Path) -> Path:
    """A tiny Llama with random weights, real enough that its text depends on its KV cache."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_windowed_model(folder: Path) -> Path:
    """A tiny Gemma: five layers with a sliding window, one without."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=64,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        query_pre_attn_scalar=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_prompt(seed: int, tokens: int = 300) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 512) for _ in range(tokens)]


@dataclass
class Process:
    """A child in a process group of its own."""

    child: subprocess.Popen[str]
    log: Path

    def kill(self) -> None:
        """SIGKILL to all of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()

    def cpu_seconds(self, name: str) -> float:
        """Of the processes of its group whose name begins so."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                before, _, after = path.read_text().rpartition(")")
            except OSError:
                continue
            fields = after.split()
            if int(fields[2]) == self.child.pid and before.partition("(")[2].startswith(name):
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def start(command: list[str], log: Path, environment: dict[str, str], **pipes: Any) -> Process:
    with log.open("a") as messages:
        child = subprocess.Popen(
            [sys.executable, *command],
            stderr=messages,
            text=True,
            env=os.environ | environment,
            start_new_session=True,
            **pipes,
        )
    return Process(child, log)


class Node:
    """A node with an fs tier; it may be killed and started again as it was."""

    def __init__(self, folder: Path, name: str, control: str = "", *flags: str) -> None:
        self.id = f"test-{os.getpid()}-{name}"
        self.socket = folder / f"{name}.sock"
        self.files = folder / f"fs-{name}"
        self._log = folder / f"node-{name}.log"
        self._command = [
            *("-m", "kvstrata", "node", "--id", self.id, "--socket", str(self.socket)),
            *("--host.capacity", "64MiB", "--peers.transports", '["tcp"]'),
            "--tiers",
            json.dumps([{"type": "fs", "root": str(self.files), "capacity": "256MiB"}]),
        ]
        if control:
            self._command += ["--control.url", control, "--peers.listen", "tcp://127.0.0.1:0"]
            self._command += ["--control.heartbeat-interval", "0.5"]
        self._command += flags
        self.process: Process | None = None

    def start(self) -> None:
        self.process = start(self._command, self._log, {"KVSTRATA_NODE_CONTROL__TOKEN": TOKEN})
        eventually(lambda: self.connect("probe").close() is None, 60)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None

    def connect(self, engine: str) -> Client:
        return Client.connect(self.socket, engine, "tool")


class Engine:
    """See `engine_process`. `connector`: another spec than ours, with its options. `tells`: by
    `KVStrataConnector`."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        name: str,
        kvstrata: dict[str, Any],
        *,
        ranks: int = 1,
        dtype: str = "bfloat16",
        blocks_per_chunk: int = 1,
        device_blocks: int = 64,
        batched_tokens: int = 1024,
        environment: dict[str, str] | None = None,
        connector: dict[str, Any] | None = None,
        tells: bool = False,
    ) -> None:
        self.name = name
        settings = {
            "model": str(model),
            "name": name,
            "block_size": BLOCK,
            "blocks_per_chunk": blocks_per_chunk,
            "device_blocks": device_blocks,
            "batched_tokens": batched_tokens,
            "kvstrata": kvstrata,
            "ranks": ranks,
            "dtype": dtype,
            "environment": environment or {},
            "connector": connector,
            "kv_connector": "KVStrataConnector" if tells else "OffloadingConnector",
            "kv_connector_module_path": (
                "kvstrata_adapters.engines.vllm.connector" if tells else None
            ),
        }
        script = str(Path(__file__).with_name("engine_process.py"))
        self.process = start(
            [script, json.dumps(settings)],
            folder / f"engine-{name}.log",
            environment or {},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._ready = False

    def ask(self, op: str, **arguments: Any) -> Any:
        if not self._ready:
            self._answer()
            self._ready = True
        self._pipe(self.process.child.stdin).write(json.dumps({"op": op, **arguments}) + "\n")
        self._pipe(self.process.child.stdin).flush()
        return self._answer()

    def generate(self, prompt: list[int], tokens: int = 12) -> dict[str, Any]:
        (answer,) = self.ask("generate", prompts=[prompt], tokens=tokens)
        return answer

    def reset(self, connector: bool = False, fill: bool = True) -> None:
        assert self.ask("reset", connector=connector, fill=fill)

    def quit(self) -> None:
        """End as a server does, so that vLLM removes its own shared memory."""
        self.ask("quit")
        self._pipe(self.process.child.stdin).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.child.wait(20)
        self.process.kill()

    def close(self) -> None:
        """`quit`, whatever state it is in."""
        try:
            self.quit()
        except (AssertionError, OSError):
            self.process.kill()

    def _answer(self) -> Any:
        line = self._pipe(self.process.child.stdout).readline()
        if not line:
            told = self.process.log.read_text()[-6000:]
            raise AssertionError(f"engine {self.name} has ended:\n{told}")
        return json.loads(line)

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def keys_of(
    engine: Engine, client: Client, prompt: list[int], blocks_per_chunk: int = 1, group: int = 0
) -> list[Key]:
    """The keys of a prompt's whole chunks."""
    namespace = client.namespace
    assert namespace is not None
    hashes = engine.ask("hashes", prompt=prompt)[blocks_per_chunk - 1 :: blocks_per_chunk]
    return [namespace.key(group, bytes.fromhex(h)) for h in hashes]


def read_chunks(client: Client, keys: list[Key], wait: float = 10.0) -> list[bytes]:
    """The bytes of these chunks, as far as they are found without a gap."""
    namespace: Namespace | None = client.namespace
    assert namespace is not None
    size = namespace.chunk_bytes[split_key(keys[0]).group]
    found = client.lookup(keys, wait=wait)
    view = client.region.view
    chunks = [bytes(view[o : o + size]) for o in found.offsets[: found.prefix]]
    client.release(found.lease)
    return chunks


def tier(client: Client, name: str) -> Any:
    (found,) = (t for t in client.status().tiers if t.name == name)
    return found
