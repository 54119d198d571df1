"""The published geometries against the configuration classes and the state shapes of vLLM."""

from __future__ import annotations

import importlib

import pytest
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvstrata.layout import LAYOUTS, StateContent, local_units
from kvstrata.testing.geometries import GEOMETRIES, Figure

pytestmark = pytest.mark.vllm

DEFAULTS = {
    f"{g.model} {f.name}": f for g in GEOMETRIES for f in g.figures if f.basis == "config default"
}
STATES = {
    g.model: p.content for g in GEOMETRIES for p in g.groups if isinstance(p.content, StateContent)
}


@pytest.mark.parametrize("figure", DEFAULTS.values(), ids=DEFAULTS)
def test_config_defaults(figure: Figure) -> None:
    module, name = figure.source.split(".")
    config = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    assert getattr(getattr(config, name)(), figure.name) == figure.value


def test_glm_53_layers_are_those_of_its_class() -> None:
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    types = Glm5NextTextConfig().layer_types
    [geometry] = [g for g in GEOMETRIES if g.model == "zai-org/GLM-5.3-Flash"]
    linear = [f"model.layers.{i}.attn" for i, t in enumerate(types) if t == "linear_attention"]
    assert list(geometry.groups[2].group.layers) == linear


def test_physical_layouts_are_those_of_vllm() -> None:
    assert set(LAYOUTS) == {layout.name for layout in KVCacheLayout}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", STATES)
def test_state_shapes_are_those_of_vllm(model: str, tp: int) -> None:
    content = STATES[model]
    first, second, third = content.projections
    shapes = MambaStateShapeCalculator
    if content.name == "mamba2":
        conv, ssm = shapes.mamba2_state_shape(
            tp_world_size=tp,
            intermediate_size=first.units * first.channels,
            n_groups=second.units,
            num_heads=content.heads,
            head_dim=first.channels,
            state_size=second.channels,
            conv_kernel=content.steps + 1,
        )
    elif content.name == "gdn":
        conv, ssm = shapes.gated_delta_net_state_shape(
            tp, first.units, third.units, first.channels, third.channels, content.steps + 1
        )
    else:
        conv, ssm = shapes.kda_state_shape(tp, content.heads, first.channels)
    channels = sum(local_units(p.units, tp) * p.channels for p in content.projections)
    assert tuple(conv) == (content.steps, channels)
    assert (ssm[0], ssm[1] * ssm[2]) == (local_units(content.heads, tp), content.state)
