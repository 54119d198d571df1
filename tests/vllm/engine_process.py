"""A vLLM engine in a process of its own, told what to do by lines of JSON.

Run as a script by the tests: `python engine_process.py '<json settings>'`. Answers are lines of
JSON on the standard output that it was started with; whatever vLLM prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# One engine must not take both cores: another one, a node and the tests share them.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_USE_V1", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from vllm.config import KVTransferConfig
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    from vllm import LLM, SamplingParams

    extra = {
        "spec_name": "KVStrataOffloadingSpec",
        "spec_module_path": "kvstrata_adapters.engines.vllm.spec",
        "kvstrata": settings["kvstrata"],
        **settings.get("extra", {}),
    }
    llm = LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        dtype=settings.get("dtype", "bfloat16"),
        enforce_eager=True,
        max_model_len=settings.get("max_model_len", 1024),
        max_num_batched_tokens=settings.get("max_num_batched_tokens", 1024),
        block_size=settings["block_size"],
        num_gpu_blocks_override=settings.get("device_blocks"),
        enable_prefix_caching=True,
        tensor_parallel_size=settings.get("tp", 1),
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id=settings["engine"],
            kv_connector_extra_config=extra,
        ),
    )

    def say(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def generate(prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(
                temperature=0.0, max_tokens=max_tokens, logprobs=4, detokenize=False, seed=0
            ),
            use_tqdm=False,
        )
        return [
            {
                "tokens": list(o.outputs[0].token_ids),
                "logprobs": [
                    {str(token): value.logprob for token, value in step.items()}
                    for step in o.outputs[0].logprobs
                ],
                "cached": o.num_cached_tokens,
            }
            for o in outputs
        ]

    def hashes(prompt: list[int], size: int) -> list[str]:
        function = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(function)
        parent, chain = kv_cache_utils.NONE_HASH, []
        for i in range(0, len(prompt) - size + 1, size):
            parent = kv_cache_utils.hash_block_tokens(
                function, parent, tuple(prompt[i : i + size]), None
            )
            chain.append(parent.hex())
        return chain

    say("ready")
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["op"] == "generate":
            say(generate(ask["prompts"], ask["max_tokens"]))
        elif ask["op"] == "hashes":
            say(hashes(ask["prompt"], settings["block_size"]))
        elif ask["op"] == "reset":
            say(llm.reset_prefix_cache(reset_connector=ask.get("connector", False)))
        elif ask["op"] == "quit":
            break
    llm.llm_engine.engine_core.shutdown()
    say("bye")


if __name__ == "__main__":
    main()
