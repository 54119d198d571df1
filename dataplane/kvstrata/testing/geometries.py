"""KV-cache geometries of published models, as fixtures for layouts, devices and engines.

Nothing here was measured on the models. Each figure says where it comes from:

    published        a model card, a published configuration, or a public copy of it
    config default   the default of the configuration class in transformers 5.19
    engine source    how vLLM 0.32 keeps it
    assumed          chosen here: block sizes, the dtype of the cache

`GEOMETRIES` is all of them. Figures of speculative layers (MTP) are not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvstrata.keys import AttentionKind, Group
from kvstrata.layout import AttentionContent, Content, OpaqueContent, StateContent

__all__ = ["GEOMETRIES", "Basis", "Figure", "LayerGroup", "ModelGeometry"]

Basis = Literal["published", "config default", "engine source", "assumed"]


class Figure(NamedTuple):
    """`name` is the attribute's name where the basis is a configuration class."""

    name: str
    value: int | str
    basis: Basis
    source: str


class LayerGroup(NamedTuple):
    """A group, and what its pages contain."""

    group: Group
    content: Content


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    model: str
    figures: tuple[Figure, ...]
    groups: tuple[LayerGroup, ...]

    def value(self, name: str) -> int:
        return next(int(f.value) for f in self.figures if f.name == name)


def _names(indices: Sequence[int], part: str = "attn") -> tuple[str, ...]:
    return tuple(f"model.layers.{i}.{part}" for i in indices)


def _assumed(**figures: int | str) -> tuple[Figure, ...]:
    return tuple(Figure(n, v, "assumed", "chosen for the fixture") for n, v in figures.items())


def _defaults(config: str, **figures: int | str) -> tuple[Figure, ...]:
    return tuple(Figure(n, v, "config default", config) for n, v in figures.items())


def _published(source: str, **figures: int | str) -> tuple[Figure, ...]:
    return tuple(Figure(n, v, "published", source) for n, v in figures.items())


def _engine(source: str, **figures: int | str) -> tuple[Figure, ...]:
    return tuple(Figure(n, v, "engine source", f"vLLM 0.32 {source}") for n, v in figures.items())


def _llama() -> ModelGeometry:
    figures = _published(
        "meta-llama/Llama-3.1-8B config.json, as copied in public repositories",
        num_hidden_layers=32,
        num_key_value_heads=8,
        hidden_size=4096,
        num_attention_heads=32,
    )
    content = AttentionContent(8, 16, 4096 // 32, 4096 // 32, "bfloat16")
    group = content.group(0, "full", _names(range(32)))
    return ModelGeometry(
        "meta-llama/Llama-3.1-8B",
        figures + _assumed(tokens_per_block=16, dtype="bfloat16"),
        (LayerGroup(group, content),),
    )


def _gemma3() -> ModelGeometry:
    figures = _published(
        "google/gemma-3-4b-it, as published with simaai/gemma-3-4b-it-a16w4",
        num_hidden_layers=34,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=1024,
        sliding_layers_per_full=5,
    )
    content = AttentionContent(4, 16, 256, 256, "bfloat16")
    full = [i for i in range(34) if i % 6 == 5]
    window = [i for i in range(34) if i % 6 != 5]
    return ModelGeometry(
        "google/gemma-3-4b-it",
        figures + _assumed(tokens_per_block=16, dtype="bfloat16"),
        (
            LayerGroup(content.group(0, "sliding_window", _names(window), 1024), content),
            LayerGroup(content.group(1, "full", _names(full)), content),
        ),
    )


def _gpt_oss() -> ModelGeometry:
    figures = _defaults(
        "gpt_oss.GptOssConfig",
        num_hidden_layers=36,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
    )
    content = AttentionContent(8, 16, 64, 64, "bfloat16")
    return ModelGeometry(
        "openai/gpt-oss-120b",
        figures + _assumed(tokens_per_block=16, dtype="bfloat16"),
        (
            LayerGroup(content.group(0, "sliding_window", _names(range(0, 36, 2)), 128), content),
            LayerGroup(content.group(1, "full", _names(range(1, 36, 2))), content),
        ),
    )


def _indexer(tokens: int, head_dim: int) -> OpaqueContent:
    """fp8 keys and a float32 scale for each 128 of them; how a page orders them is the kernel's."""
    size = tokens * (head_dim + head_dim // 128 * 4)
    return OpaqueContent(f"indexer-fp8/{head_dim}", 1, size, tokens)


def _deepseek_v3() -> ModelGeometry:
    figures = _defaults(
        "deepseek_v3.DeepseekV3Config", num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64
    )
    content = AttentionContent(1, 64, 512 + 64, 0, "bfloat16")
    return ModelGeometry(
        "deepseek-ai/DeepSeek-V3",
        figures + _assumed(tokens_per_block=64, dtype="bfloat16"),
        (LayerGroup(content.group(0, "mla", _names(range(61))), content),),
    )


def _deepseek_v4() -> ModelGeometry:
    """Layers 0 and 1 have a window alone, then those with 4 and with 128 tokens a row alternate."""
    figures = (
        *_defaults(
            "deepseek_v4.DeepseekV4Config",
            num_hidden_layers=43,
            head_dim=512,
            sliding_window=128,
            index_head_dim=128,
        ),
        *_published(
            "deepseek-ai/DeepSeek-V4-Flash model card, as summarised by antirez/ds4 MODEL_CARD.md",
            window_only_layers=2,
            even_layers_ratio=4,
            odd_layers_ratio=128,
        ),
        *_engine("models/deepseek_v4/compressor.py", c4_state_rows=4, c128_state_rows=8),
        *_engine("attention/backends/mla/sparse_swa.py", cell_bytes=584, swa_tokens=64),
        *_assumed(tokens_per_block=256),
    )
    c4, c128 = _names(range(2, 43, 2)), _names(range(3, 43, 2))
    cell, scheme = 584, "fp8_ds_mla"
    window = AttentionContent(1, 64, cell, 0, "uint8", scheme)
    rows4, rows128 = (
        AttentionContent(1, n, cell, 0, "uint8", scheme) for n in (256 // 4, 256 // 128)
    )
    keys = _indexer(256 // 4, 128)
    # The compressor's running sums: values and scores in float32, two halves where they overlap.
    state4 = AttentionContent(1, 4, 2 * 2 * 512, 0, "float32")
    state_keys = AttentionContent(1, 4, 2 * 2 * 128, 0, "float32")
    state128 = AttentionContent(1, 8, 2 * 512, 0, "float32")
    mla: AttentionKind = "sliding_window_mla"
    groups: tuple[LayerGroup, ...] = (
        LayerGroup(window.group(0, mla, _names(range(43), "swa"), 128), window),
        LayerGroup(rows4.group(1, "mla", c4, tokens=256), rows4),
        LayerGroup(rows128.group(2, "mla", c128, tokens=256), rows128),
        LayerGroup(keys.group(3, "mla", _names(range(2, 43, 2), "indexer"), tokens=256), keys),
        LayerGroup(state4.group(4, mla, _names(range(2, 43, 2), "state"), 8), state4),
        LayerGroup(state_keys.group(5, mla, _names(range(2, 43, 2), "idx"), 8), state_keys),
        LayerGroup(state128.group(6, mla, _names(range(3, 43, 2), "state"), 128), state128),
    )
    return ModelGeometry("deepseek-ai/DeepSeek-V4-Flash", figures, groups)


def _glm5() -> ModelGeometry:
    """Of GLM 5.3 only Flash has a configuration class; the larger GLM-5 class is beside it."""
    figures = _defaults(
        "glm_moe_dsa.GlmMoeDsaConfig",
        num_hidden_layers=78,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
    )
    latent = AttentionContent(1, 64, 512 + 64, 0, "bfloat16")
    keys = _indexer(64, 128)
    return ModelGeometry(
        "zai-org/GLM-5",
        figures + _assumed(tokens_per_block=64, dtype="bfloat16"),
        (
            LayerGroup(latent.group(0, "mla", _names(range(78))), latent),
            LayerGroup(keys.group(1, "mla", _names(range(78), "indexer")), keys),
        ),
    )


def _glm53_flash() -> ModelGeometry:
    figures = (
        *_defaults(
            "glm5_next.Glm5NextTextConfig",
            num_hidden_layers=45,
            kv_lora_rank=512,
            qk_rope_head_dim=0,
            index_head_dim=128,
            linear_num_heads=64,
            linear_head_dim=128,
            linear_conv_kernel_dim=4,
        ),
        *_engine("layers/mamba/mamba_utils.py (KDA)", state_dtype="float32"),
        *_assumed(tokens_per_block=64, dtype="bfloat16", indexer_cell="as in DeepSeek V3.2"),
    )
    indexed = [i for i in range(45) if i % 4 == 3]
    linear = [i for i in range(45) if i % 4 != 3]
    latent = AttentionContent(1, 64, 512, 0, "bfloat16")
    keys = _indexer(64, 128)
    kda = StateContent.delta_net(
        64, 64, 128, 128, 4, "bfloat16", "float32", name="kda", interior="vllm"
    )
    return ModelGeometry(
        "zai-org/GLM-5.3-Flash",
        figures,
        (
            LayerGroup(latent.group(0, "mla", _names(indexed)), latent),
            LayerGroup(keys.group(1, "mla", _names(indexed, "indexer")), keys),
            LayerGroup(kda.group(2, _names(linear), tokens=64), kda),
        ),
    )


def _qwen36() -> ModelGeometry:
    figures = (
        *_published(
            "Qwen/Qwen3.6-35B-A3B model card, quoted at mera.a-ai.ru/en/industrial/submits/181",
            num_hidden_layers=40,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_layers_per_full=3,
        ),
        *_defaults("qwen3_5_moe.Qwen3_5MoeTextConfig", linear_conv_kernel_dim=4),
        *_assumed(tokens_per_block=256, dtype="bfloat16", state_dtype="float32"),
    )
    full = AttentionContent(2, 256, 256, 256, "bfloat16")
    gdn = StateContent.delta_net(16, 32, 128, 128, 4, "bfloat16", "float32")
    return ModelGeometry(
        "Qwen/Qwen3.6-35B-A3B",
        figures,
        (
            LayerGroup(gdn.group(0, _names([i for i in range(40) if i % 4 != 3]), 256), gdn),
            LayerGroup(full.group(1, "full", _names(range(3, 40, 4))), full),
        ),
    )


def _nemotron3() -> ModelGeometry:
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    figures = (
        *_published(
            "NVIDIA Megatron-Bridge, tests of its Nemotron 3 Nano provider",
            hybrid_override_pattern=pattern,
            num_key_value_heads=2,
            head_dim=128,
            mamba_num_heads=64,
            mamba_head_dim=64,
            ssm_state_size=128,
        ),
        *_defaults(
            "nemotron_h.NemotronHConfig",
            n_groups=8,
            conv_kernel=4,
            mamba_ssm_cache_dtype="float32",
        ),
        *_assumed(tokens_per_block=256, dtype="bfloat16"),
    )
    full = AttentionContent(2, 256, 128, 128, "bfloat16")
    mamba = StateContent.mamba2(64, 64, 8, 128, 4, "bfloat16", "float32")
    return ModelGeometry(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        figures,
        (
            LayerGroup(
                mamba.group(0, _names([i for i, c in enumerate(pattern) if c == "M"]), 256), mamba
            ),
            LayerGroup(
                full.group(1, "full", _names([i for i, c in enumerate(pattern) if c == "*"])), full
            ),
        ),
    )


GEOMETRIES: tuple[ModelGeometry, ...] = (
    _llama(),
    _gemma3(),
    _gpt_oss(),
    _deepseek_v3(),
    _deepseek_v4(),
    _glm5(),
    _glm53_flash(),
    _qwen36(),
    _nemotron3(),
)
