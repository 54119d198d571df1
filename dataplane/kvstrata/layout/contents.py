"""What the bytes of a unit mean: the content formats, and the groups made of them.

Two engines share chunks if their content is equal, whatever form their devices keep it in. The
tag goes into the namespace's `content_format`, the units and sizes into its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvstrata.errors import Malformed
from kvstrata.keys import AttentionKind, Field, Group

__all__ = [
    "AttentionContent",
    "Content",
    "ConvOrder",
    "OpaqueContent",
    "Projection",
    "StateContent",
    "element_bytes",
]

ConvOrder = Literal["SD", "DS"]
"""How a convolution state keeps a unit: [steps][channels] (vLLM's default) or [channels][steps]."""

_ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


def element_bytes(dtype: str) -> int:
    """Raises `Malformed` for a dtype that no content here has."""
    if dtype not in _ELEMENT_BYTES:
        raise Malformed(f"dtype is {dtype!r}: it must be one of {sorted(_ELEMENT_BYTES)}")
    return _ELEMENT_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class AttentionContent:
    """A unit is one KV head: [tokens][key elements | value elements].

    `heads` is over all ranks. A latent (MLA, or an indexer's keys) is one head whose `value` is 0,
    and `key` all its elements: latent and rotary part together. Cells with scales inside are
    `uint8` of as many bytes, and `scheme` names what they mean (fp8_ds_mla, int8_per_token_head).
    """

    heads: int
    tokens: int
    key: int
    value: int
    dtype: str
    scheme: str = ""

    @property
    def cell_bytes(self) -> int:
        """Of one token of one head."""
        return (self.key + self.value) * element_bytes(self.dtype)

    @property
    def tag(self) -> str:
        sizes = f"{self.key}+{self.value}" if self.value else f"{self.key}"
        parts = ["kv-packed" if self.value else "latent", self.dtype, sizes, self.scheme]
        return "/".join(part for part in parts if part)

    def fields(self) -> tuple[Field, ...]:
        if min(self.heads, self.tokens, self.key) < 1 or self.value < 0:
            raise Malformed(f"heads, tokens and key must be at least 1, value at least 0: {self}")
        if self.dtype in ("int8", "uint8") and not self.scheme:
            raise Malformed(f"dtype is {self.dtype}: name the scheme that says what its bytes mean")
        return (Field("kv", self.heads, self.tokens * self.cell_bytes),)

    def group(
        self,
        number: int,
        kind: AttentionKind,
        layers: Sequence[str],
        window: int = 0,
        tokens: int = 0,
    ) -> Group:
        """`tokens` of a block, if a row stands for several of them."""
        return Group(number, kind, tuple(layers), self.fields(), tokens or self.tokens, window)


@dataclass(frozen=True, slots=True)
class OpaqueContent:
    """Bytes that only engines with the same tag understand.

    Per head (`units` is the KV heads over all ranks): TP may differ, as heads are outermost.
    Wholly opaque pages (`ranks` > 0, `units` = `ranks`): a unit is what one rank keeps of a layer,
    so TP is part of the tag and other sizes are refused.
    """

    name: str
    units: int
    unit_bytes: int
    tokens: int
    ranks: int = 0

    @property
    def tag(self) -> str:
        return f"opaque/{self.name}/{f'tp={self.ranks}' if self.ranks else self.unit_bytes}"

    def fields(self) -> tuple[Field, ...]:
        if min(self.units, self.unit_bytes, self.tokens) < 1 or not self.name:
            raise Malformed(f"an opaque content needs a name, units, bytes and tokens: {self}")
        if self.ranks and self.units != self.ranks:
            raise Malformed(
                f"units is {self.units}: wholly opaque pages of tp={self.ranks} have that many"
            )
        return (Field("page" if self.ranks else "kv", self.units, self.unit_bytes),)

    def group(
        self,
        number: int,
        kind: AttentionKind,
        layers: Sequence[str],
        window: int = 0,
        tokens: int = 0,
    ) -> Group:
        """`tokens` of a block, if a row stands for several of them."""
        return Group(number, kind, tuple(layers), self.fields(), tokens or self.tokens, window)


@dataclass(frozen=True, slots=True)
class Projection:
    """A part of a convolution state that is sharded by itself: x, B and C, or q, k and v.

    `units` (heads or groups) over all ranks, each of `channels`. With fewer units than ranks, the
    ranks hold copies.
    """

    name: str
    units: int
    channels: int


@dataclass(frozen=True, slots=True)
class StateContent:
    """The state of a Mamba or linear-attention layer at one block boundary, by named fields.

    `projections` in the order in which the convolution state keeps them, each over `steps` tokens
    (kernel - 1, and the speculative ones), units in `order`. The recurrent state is
    [heads][state elements] and comes last. `interior` names the order of a head's elements: two
    kernels that transpose them have equal sizes, and must not have equal tags.
    """

    name: str
    projections: tuple[Projection, ...]
    steps: int
    heads: int
    state: int
    conv_dtype: str
    state_dtype: str
    interior: str
    order: ConvOrder = "SD"

    @classmethod
    def mamba1(
        cls,
        intermediate: int,
        state: int,
        kernel: int,
        conv_dtype: str,
        state_dtype: str,
        shards: int,
        order: ConvOrder = "SD",
    ) -> StateContent:
        """Mamba 1 has no heads: `shards` ranges of channels are its units, and its largest TP."""
        if shards < 1 or intermediate % shards:
            raise Malformed(f"shards is {shards}: it must divide the {intermediate} channels")
        channels = intermediate // shards
        x = Projection("conv_x", shards, channels)
        return cls(
            "mamba1",
            (x,),
            kernel - 1,
            shards,
            channels * state,
            conv_dtype,
            state_dtype,
            "channel.state",
            order,
        )

    @classmethod
    def mamba2(
        cls,
        heads: int,
        head_dim: int,
        groups: int,
        state: int,
        kernel: int,
        conv_dtype: str,
        state_dtype: str,
        order: ConvOrder = "SD",
    ) -> StateContent:
        """x by heads, B and C by groups, [heads][head_dim][state]."""
        parts = (
            Projection("conv_x", heads, head_dim),
            Projection("conv_b", groups, state),
            Projection("conv_c", groups, state),
        )
        return cls(
            "mamba2",
            parts,
            kernel - 1,
            heads,
            head_dim * state,
            conv_dtype,
            state_dtype,
            "dim.state",
            order,
        )

    @classmethod
    def delta_net(
        cls,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        conv_dtype: str,
        state_dtype: str,
        order: ConvOrder = "SD",
        name: str = "gdn",
        interior: str = "v.k",
    ) -> StateContent:
        """Gated delta net and KDA: q and k by key heads, v and the state by value heads."""
        parts = (
            Projection("conv_q", key_heads, key_dim),
            Projection("conv_k", key_heads, key_dim),
            Projection("conv_v", value_heads, value_dim),
        )
        return cls(
            name,
            parts,
            kernel - 1,
            value_heads,
            value_dim * key_dim,
            conv_dtype,
            state_dtype,
            interior,
            order,
        )

    @property
    def tag(self) -> str:
        conv = f"conv-{self.order.lower()}/{self.conv_dtype}"
        return f"state-{self.name}/{conv}/{self.interior}/{self.state_dtype}"

    def fields(self) -> tuple[Field, ...]:
        counts = [self.steps, self.heads, self.state, len(self.projections)]
        counts += [n for p in self.projections for n in (p.units, p.channels)]
        if min(counts) < 1:
            raise Malformed(f"a state has an empty or negative part: {self}")
        row = self.steps * element_bytes(self.conv_dtype)
        conv = [Field(p.name, p.units, p.channels * row) for p in self.projections]
        return (*conv, Field("ssm", self.heads, self.state * element_bytes(self.state_dtype)))

    def group(self, number: int, layers: Sequence[str], tokens: int) -> Group:
        """`tokens` between two boundaries."""
        return Group(number, "mamba", tuple(layers), self.fields(), tokens)


Content = AttentionContent | OpaqueContent | StateContent
