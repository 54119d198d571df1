"""A node whose fs tier is wrapped: encrypted on disk, served again, and metered."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import httpx
import pytest
from pydantic import ByteSize
from tier_kit import NAMESPACE, PAGE, key, payload, put

from kvstrata.check.fs import FsCheck
from kvstrata.config import HostSettings, NodeSettings, TierSettings
from kvstrata.node.process import Node
from kvstrata.testing.waiting import until


def settings(folder: Path, order: list[str]) -> NodeSettings:
    secrets = folder / "secrets.json"
    secret = base64.b64encode(bytes(32)).decode()
    secrets.write_text(json.dumps({"tenants": {NAMESPACE.tenant: [secret]}}))
    secrets.chmod(0o600)
    wrap = [
        {"type": name, "keys": str(secrets)} if name == "encrypted" else {"type": name}
        for name in order
    ]
    return NodeSettings(
        id="a",
        socket=folder / "a.sock",
        host=HostSettings(capacity=ByteSize(16 * PAGE), shm_dir=folder),
        tiers=[TierSettings(type="fs", root=str(folder / "store"), name="disk", wrap=wrap)],  # type: ignore[call-arg, arg-type]
        metrics="127.0.0.1:0",
    )


@pytest.mark.parametrize(
    "order", [["encrypted", "compressed", "metered"], ["metered", "checked", "encrypted"]]
)
async def test_chunks_come_back_after_a_restart(tmp_path: Path, order: list[str]) -> None:
    config = settings(tmp_path, order)
    node = await Node.start(config)
    node.namespaces.add(NAMESPACE)
    put(node.store, 1, 2, 3)
    [tier] = node.store.tiers
    await until(lambda: tier.usage().chunks == 3)
    await node.close()

    files = list((tmp_path / "store").rglob("*.kv"))
    assert len(files) == 3
    for file in files:
        content = file.read_bytes()
        assert not any(payload(key(i))[:32] in content for i in (1, 2, 3)), "not encrypted"
    assert FsCheck(tmp_path / "store").run().wrong == 0

    again = await Node.start(config)
    again.namespaces.add(NAMESPACE)
    found = await again.store.find("reader", 1, [key(i) for i in (1, 2, 3)], "all", 30.0)
    assert sorted(found) == sorted(key(i) for i in (1, 2, 3))
    for i in (1, 2, 3):
        chunk = found[key(i)]
        view = again.store.region[chunk.offset : chunk.offset + chunk.nbytes]
        assert view == payload(key(i))
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{again.metrics_port}/metrics")
    assert 'kvstrata_tier_items_total{op="load",outcome="loaded",tier="disk"} 3.0' in answer.text
    assert 'kvstrata_tier_call_seconds_count{op="load",tier="disk"}' in answer.text
    await again.close()
