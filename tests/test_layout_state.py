"""States of Mamba and linear attention: stored by some ranks, loaded by others."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.errors import Malformed
from kvstrata.layout import (
    Projection,
    Ranks,
    StateContent,
    StatePages,
    Tensor,
    plan_rank,
    stage_layers,
)
from layout_kit import BLOCKS, check_load, store
from layout_state_kit import local_of, page_of, state_device, truth_of

ORDERS = ["SD", "DS"]
# One fragment per byte makes wide states slow to try, and no better tested.
SMALL = st.integers(1, 4)


@st.composite
def contents(draw: st.DrawFn) -> StateContent:
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    kernel = draw(st.integers(2, 5))
    dtypes = draw(st.sampled_from([("bfloat16", "float32"), ("float32", "float32")]))
    order = draw(st.sampled_from(ORDERS))
    head_dim, state = draw(SMALL), draw(SMALL)
    kind = draw(st.sampled_from(["mamba1", "mamba2", "gdn"]))
    if kind == "mamba1":
        return StateContent.mamba1(heads * head_dim, state, kernel, *dtypes, heads, order)
    fewer = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0]))
    if kind == "mamba2":
        return StateContent.mamba2(heads, head_dim, fewer, state, kernel, *dtypes, order)
    return StateContent.delta_net(fewer, heads, head_dim, state, kernel, *dtypes, order)


def degrees(content: StateContent) -> list[int]:
    units = [content.heads, *(p.units for p in content.projections)]
    return [n for n in (1, 2, 4, 8, 16) if all(u % n == 0 or n % u == 0 for u in units)]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(contents(), st.integers(1, 3), st.data())
def test_any_order_and_any_ranks_read_what_any_others_wrote(
    content: StateContent, layers: int, data: st.DataObject
) -> None:
    group = content.group(1, [f"m{i}" for i in range(layers)], tokens=16)

    def draw() -> tuple[object, Ranks, int]:
        make = partial(
            state_device,
            content,
            data.draw(st.sampled_from(ORDERS)),
            4 * data.draw(st.integers(0, 2)),
            data.draw(st.booleans()),
        )
        tp = data.draw(st.sampled_from(degrees(content)))
        stages = stage_layers(layers, data.draw(st.integers(1, 2)))
        return make, Ranks(tp, stages), data.draw(st.integers(0, BLOCKS - 1))

    truth = truth_of(content, layers)
    make, ranks, block = draw()
    page = store(group, make, ranks, local_of(truth), block)
    np.testing.assert_array_equal(page, page_of(content, truth))
    make, ranks, block = draw()
    check_load(group, make, ranks, local_of(truth), block, page)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "content",
    [
        StateContent.mamba1(16, 3, 4, "bfloat16", "float32", shards=8),
        StateContent.mamba2(8, 2, 1, 3, 4, "bfloat16", "float32"),  # B and C copied on all ranks
        StateContent.mamba2(8, 2, 4, 3, 4, "bfloat16", "float32"),
        StateContent.delta_net(2, 4, 3, 2, 4, "bfloat16", "bfloat16"),
    ],
    ids=lambda value: value.name if isinstance(value, StateContent) else value,
)
def test_all_degrees_make_one_page(content: StateContent, order: str) -> None:
    group = content.group(0, ["a", "b", "c"], tokens=16)
    truth = truth_of(content, 3)
    make = partial(state_device, content, order, 4, False)
    for tp in degrees(content):
        for stages in (1, 3):
            ranks = Ranks(tp, stage_layers(3, stages))
            page = store(group, make, ranks, local_of(truth), 1)
            np.testing.assert_array_equal(page, page_of(content, truth))
            check_load(group, make, ranks, local_of(truth), 0, page)


def test_fields_of_the_known_kinds() -> None:
    mamba2 = StateContent.mamba2(8, 64, 2, 128, 4, "bfloat16", "float32")
    assert [(f.name, f.units, f.unit_bytes) for f in mamba2.fields()] == [
        ("conv_x", 8, 64 * 3 * 2),
        ("conv_b", 2, 128 * 3 * 2),
        ("conv_c", 2, 128 * 3 * 2),
        ("ssm", 8, 64 * 128 * 4),
    ]
    assert mamba2.tag == "state-mamba2/conv-sd/bfloat16/dim.state/float32"
    gdn = StateContent.delta_net(16, 32, 128, 128, 4, "bfloat16", "float32", "DS")
    assert [(f.name, f.units) for f in gdn.fields()] == [
        ("conv_q", 16),
        ("conv_k", 16),
        ("conv_v", 32),
        ("ssm", 32),
    ]
    assert gdn.tag == "state-gdn/conv-ds/bfloat16/v.k/float32"


def test_a_state_in_its_own_order_is_copied_in_rows() -> None:
    content = StateContent.mamba2(8, 4, 2, 3, 4, "bfloat16", "float32")
    group = content.group(0, ["a"], tokens=16)
    device = state_device(content, "SD", 0, False, 2, 1, range(1))
    runs = plan_rank(group, Ranks(2, (range(1),)), 0, 1, device.pages(2)).load
    # x is 4 heads x 3 steps of 4 channels; B and C are 3 steps of one group; the state is one run.
    assert sorted((r.count, r.nbytes) for r in runs) == [
        (1, 4 * 4 * 3 * 4),
        (3, 6),
        (3, 6),
        (4, 8),
        (4, 8),
        (4, 8),
    ]


CONTENT = StateContent.mamba2(4, 2, 1, 3, 4, "bfloat16", "float32")
# TP 2: x has 4 channels, B and C 3 each, copied; 2 heads of 6 floats. 60 + 48 of 112 bytes.
CONV = Tensor((5, 3, 10), (112, 20, 2), 2, 560)
SSM = Tensor((5, 2, 6), (112, 24, 4), 4, 560, offset=60)


def changed(good: Tensor, **fields: object) -> Tensor:
    return Tensor(**({name: getattr(good, name) for name in good.__slots__} | fields))


@pytest.mark.parametrize(
    ("conv", "ssm", "message"),
    [
        (changed(CONV, element_bytes=4), SSM, "layer 0, conv: element_bytes is 4"),
        (changed(CONV, shape=(5, 3, 8)), SSM, r"conv: shape\[conv channels\] is 8, it must be 10"),
        (changed(CONV, shape=(5, 4, 10)), SSM, r"shape\[conv steps\] is 4, it must be 3"),
        (
            changed(CONV, strides=(112, 2, 6)),
            SSM,
            r"stride\[conv steps\] is 2 bytes, it must be 20",
        ),
        (
            changed(CONV, strides=(108, 20, 2)),
            SSM,
            r"stride\[blocks\] is 108 bytes, it must be 112",
        ),
        (CONV, changed(SSM, shape=(5, 4, 6)), r"ssm: shape\[ssm heads\] is 4, it must be 2"),
        (CONV, changed(SSM, shape=(5, 2, 5)), r"shape\[ssm state\] is 5, it must be 6"),
        (CONV, changed(SSM, strides=(112, 28, 4)), r"stride\[ssm heads\] is 28 bytes"),
        (CONV, changed(SSM, element_bytes=2), "ssm: element_bytes is 2"),
        (CONV, changed(SSM, offset=58), "offset: two tensors share bytes"),
        (CONV, changed(SSM, offset=66), "it needs 496 bytes, buffer_bytes is 560"),
    ],
)
def test_a_tensor_that_is_not_what_the_geometry_says_is_refused(
    conv: Tensor, ssm: Tensor, message: str
) -> None:
    StatePages("SD", 112).pages(CONTENT, [(CONV, SSM)], 2)
    with pytest.raises(Malformed, match=message):
        StatePages("SD", 112).pages(CONTENT, [(conv, ssm)], 2)


def test_what_can_not_be_a_state_is_refused() -> None:
    with pytest.raises(Malformed, match=r"order is 'DS', the content has 'SD'.*_LAYOUT=SD"):
        StatePages("DS").pages(CONTENT, [], 2)
    with pytest.raises(Malformed, match="order is 'NHD'"):
        StatePages("NHD").pages(CONTENT, [], 2)  # type: ignore[arg-type]
    with pytest.raises(Malformed, match="page_bytes is 107, but the state takes 108 bytes"):
        StatePages("SD", 107).pages(CONTENT, [], 2)
    with pytest.raises(Malformed, match="4 units can't be shared evenly by 3 ranks"):
        StatePages("SD").pages(CONTENT, [], 3)
    with pytest.raises(Malformed, match="shards is 3"):
        StateContent.mamba1(16, 2, 4, "bfloat16", "float32", 3)
    with pytest.raises(Malformed, match="empty or negative"):
        StateContent("x", (Projection("a", 1, 0),), 3, 1, 1, "bfloat16", "float32", "y").fields()
