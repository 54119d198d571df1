"""A small namespace, for chunks of any size."""

from __future__ import annotations

from kvstrata.keys import Field, Group, Namespace

__all__ = ["a_namespace"]


def a_namespace(
    page_bytes: int = 4096,
    blocks_per_chunk: int = 1,
    model: str = "test",
    revision: str = "0",
    dtype: str = "bfloat16",
    tenant: str = "",
) -> Namespace:
    """One group of two layers with two heads: chunks of `page_bytes * blocks_per_chunk` bytes.

    Another `model`, `revision`, `dtype` or `tenant` gives another digest.
    """
    heads = Field(name="kv", units=2, unit_bytes=page_bytes // 4)
    group = Group(id=0, kind="full", layers=("0", "1"), fields=(heads,), tokens_per_block=16)
    return Namespace(
        model=model,
        revision=revision,
        config="0",
        dtype=dtype,
        content_format="test",
        groups=(group,),
        blocks_per_chunk=blocks_per_chunk,
        hash_algorithm="sha256",
        hash_seed="0",
        tenant=tenant,
    )
