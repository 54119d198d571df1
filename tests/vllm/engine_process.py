"""A vLLM engine in a process of its own, told what to do by lines of JSON.

Run as a script by the tests: `python engine_process.py '<json settings>'`. Answers are lines of
JSON on the standard output that it was started with; whatever vLLM prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

ENVIRONMENT = {
    # Another engine, a node and the tests share the machine with this one.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Compiling the code that picks log-probabilities takes 6 to 20 s of a first request.
    "TORCHDYNAMO_DISABLE": "1",
    # `collective_rpc` with functions of ours.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}


def fill_caches(worker: Any) -> int:
    """Overwrite the device's KV caches, so that nothing can come from what was there."""
    for cache in worker.model_runner.kv_caches:
        cache.fill_(7.0)
    return len(worker.model_runner.kv_caches)


def read_caches(worker: Any) -> list[list[str]]:
    """Per layer and block the bytes of this rank, as hex."""
    import torch

    return [
        [block.contiguous().view(torch.uint8).numpy().tobytes().hex() for block in cache]
        for cache in worker.model_runner.kv_caches
    ]


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm.config import KVTransferConfig

        from vllm import LLM

        self.block_size = settings["block_size"]
        self.llm = LLM(
            model=settings["model"],
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            enforce_eager=True,
            max_model_len=1024,
            max_num_batched_tokens=settings["batched_tokens"],
            max_num_seqs=min(256, settings["batched_tokens"]),
            block_size=settings["block_size"],
            num_gpu_blocks_override=settings["device_blocks"],
            enable_prefix_caching=True,
            tensor_parallel_size=settings["ranks"],
            seed=0,
            kv_transfer_config=KVTransferConfig(
                kv_connector=settings["kv_connector"],
                kv_connector_module_path=settings["kv_connector_module_path"],
                kv_role="kv_both",
                engine_id=settings["name"],
                kv_connector_extra_config=settings["connector"]
                or {
                    "spec_name": "KVStrataOffloadingSpec",
                    "spec_module_path": "kvstrata_adapters.engines.vllm.spec",
                    "blocks_per_chunk": settings["blocks_per_chunk"],
                    "kvstrata": settings["kvstrata"],
                },
            ),
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=4, detokenize=False)
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    {str(token): value.logprob for token, value in step.items()}
                    for step in output.outputs[0].logprobs or []
                ],
                "cached": output.num_cached_tokens,
            }
            for output in self.llm.generate(asked, sampling, use_tqdm=False)
        ]

    def hashes(self, prompt: list[int]) -> list[str]:
        """vLLM's hash at the end of each block."""
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils

        kv_cache_utils.init_none_hash(sha256)
        parent, chain, size = kv_cache_utils.NONE_HASH, [], self.block_size
        for i in range(0, len(prompt) - size + 1, size):
            tokens = tuple(prompt[i : i + size])
            parent = kv_cache_utils.hash_block_tokens(sha256, parent, tokens, None)
            chain.append(parent.hex())
        return chain

    def reset(self, connector: bool, fill: bool) -> bool:
        """Forget the prefix cache, and what the device's memory holds with it."""
        done = self.llm.reset_prefix_cache(reset_connector=connector)
        if fill:
            self.llm.collective_rpc(fill_caches)
        return bool(done)

    def read(self) -> Any:
        """Per rank: see `read_caches`."""
        return self.llm.collective_rpc(read_caches)

    def quit(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def main() -> None:
    os.environ.update(ENVIRONMENT)
    settings = json.loads(sys.argv[1])
    os.environ.update(settings.get("environment", {}))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine(settings)
    operations: dict[str, Callable[..., Any]] = {
        name: getattr(engine, name) for name in ("generate", "hashes", "reset", "read", "quit")
    }
    answers.write('"ready"\n')
    answers.flush()
    for line in sys.stdin:
        ask = json.loads(line)
        answers.write(json.dumps(operations[ask.pop("op")](**ask)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
