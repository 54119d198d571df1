"""Encryption: what is in the medium, who can read it, and key files."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from wrap_kit import blank, context_of, item, key, key_file, memory, secret, wrapped

from kvstrata.errors import ConfigError
from kvstrata.testing import FakeClock
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.tiers.base import Item, Outcome, TierContext, checksum
from kvstrata.tiers.wrappers.encrypted import Encrypted
from kvstrata.tiers.wrappers.frame import HEADER_BYTES, parse_frame

STORED, LOADED, MISSING = Outcome.STORED, Outcome.LOADED, Outcome.MISSING
FAILED, CORRUPT = Outcome.FAILED, Outcome.CORRUPT


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def inner(clock: FakeClock) -> MemoryTier:
    return memory(context_of(clock))


def around(inner: MemoryTier, path: Path, **options: Any) -> Encrypted:
    return Encrypted.wrap(inner, {"keys": str(path), **options}, inner.context)


async def loads(tier: Encrypted, stored: Item) -> Outcome:
    into = blank(stored)
    [outcome] = await tier.load([into])
    assert outcome is not LOADED or into.view == stored.view
    return outcome


# ---------------------------------------------------------------- what is in the medium


async def test_the_payload_can_be_read_with_the_secret_alone(
    inner: MemoryTier, tmp_path: Path
) -> None:
    tier = around(inner, key_file(tmp_path))
    stored = item(1)
    assert await tier.store([stored]) == [STORED]
    content = memoryview(inner.chunks[stored.key][0])
    frame, body = parse_frame(content, stored.key)
    plain = AESGCM(bytes([1]) * 32).decrypt(frame.nonce, body, content[:HEADER_BYTES])
    assert plain == stored.view
    assert frame.checksum == 0, "a checksum of the payload tells something of it"
    await tier.close()


async def test_nothing_of_the_payload_is_in_the_medium(inner: MemoryTier, tmp_path: Path) -> None:
    tier = around(inner, key_file(tmp_path))
    stored = item(1)
    stored.view[:] = b"secret words " * 769 + b"end"
    assert await tier.store([stored]) == [STORED]
    content = inner.chunks[stored.key][0]
    assert b"secret" not in content
    known = checksum(stored.view).to_bytes(8, "little")
    assert known not in content
    await tier.close()


async def test_nonces_are_never_used_twice(inner: MemoryTier, tmp_path: Path) -> None:
    tier = around(inner, key_file(tmp_path))
    nonces = set()
    for _ in range(20):
        items = [item(i, 100) for i in range(10)]
        assert await tier.store(items) == [STORED] * 10
        for stored in items:
            content = memoryview(inner.chunks[stored.key][0])
            nonces.add(parse_frame(content, stored.key)[0].nonce)
        await tier.evict([stored.key for stored in items])
    assert len(nonces) == 200
    await tier.close()


async def test_objects_cannot_be_exchanged(inner: MemoryTier, tmp_path: Path) -> None:
    """Even with the other's key written into the header, which anyone can: it is authenticated."""
    tier = around(inner, key_file(tmp_path))
    first, second = item(1), item(2)
    await tier.store([first, second])
    forged = bytearray(inner.chunks[second.key][0])
    forged[12 : 12 + len(first.key)] = first.key
    forged[120:128] = checksum(memoryview(forged)[:120]).to_bytes(8, "little")
    inner.chunks[first.key] = bytes(forged), 0
    assert parse_frame(memoryview(forged), first.key)[0].key == first.key
    assert await loads(tier, first) is CORRUPT
    assert await loads(tier, second) is LOADED
    assert tier.usage().counters["corrupt"] == 1
    await tier.close()


async def test_memory_that_changes_while_it_is_encrypted_is_not_stored(
    inner: MemoryTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = around(inner, key_file(tmp_path))
    stored = item(1)
    known = replace(stored, checksum=checksum(stored.view))
    [used] = tier._keyring.secrets("")

    class Late:
        """The memory gets another chunk just before it is read."""

        def encrypt_into(self, nonce: bytes, data: memoryview, aad: bytes, into: memoryview) -> int:
            stored.view[:] = bytes(len(stored.view))
            length: int = AESGCM(bytes([1]) * 32).encrypt_into(nonce, data, aad, into)
            return length

    monkeypatch.setattr(used, "cipher", Late())
    assert await tier.store([known]) == [FAILED]
    assert inner.chunks == {}
    await tier.close()


# ---------------------------------------------------------------- tenants and rotation


async def test_each_tenant_has_its_own_secret(inner: MemoryTier, tmp_path: Path) -> None:
    path = key_file(tmp_path)
    tier = around(inner, path)
    ours, theirs = item(1), item(1, tenant="other")
    assert await tier.store([ours, theirs]) == [STORED] * 2
    assert [await loads(tier, ours), await loads(tier, theirs)] == [LOADED] * 2
    await tier.close()
    inner2 = memory(inner.context)
    inner2.chunks = inner.chunks
    key_file(tmp_path, {"": [secret(1)], "other": [secret(1)]})
    swapped = around(inner2, path)
    assert [await loads(swapped, ours), await loads(swapped, theirs)] == [LOADED, MISSING]
    await swapped.close()


async def test_a_tenant_without_a_secret_is_refused(inner: MemoryTier, tmp_path: Path) -> None:
    tier = around(inner, key_file(tmp_path, {"other": [secret(2)]}))
    assert await tier.store([item(1), item(1, tenant="other")]) == [FAILED, STORED]
    assert list(inner.chunks) == [key(1, "other")], "never plaintext"
    assert tier.usage().counters["refused"] == 1
    await tier.close()


async def test_a_namespace_nobody_knows_is_refused(clock: FakeClock, tmp_path: Path) -> None:
    inner = memory(TierContext("node", clock))
    tier = around(inner, key_file(tmp_path))
    assert await tier.store([item(1)]) == [FAILED]
    assert inner.chunks == {}
    await tier.close()


async def test_rotation(inner: MemoryTier, clock: FakeClock, tmp_path: Path) -> None:
    path = key_file(tmp_path, {"": [secret(1)]})
    tier = around(inner, path, reload="10s")
    old = item(1)
    await tier.store([old])
    key_file(tmp_path, {"": [secret(9), secret(1)]})
    clock.advance(11)
    new = item(2)
    assert await tier.store([new]) == [STORED]
    ids = [parse_frame(memoryview(inner.chunks[i.key][0]), i.key)[0].secret for i in (old, new)]
    assert ids[0] != ids[1], "the newest secret encrypts"
    assert [await loads(tier, old), await loads(tier, new)] == [LOADED] * 2
    key_file(tmp_path, {"": [secret(9)], "more": []})
    clock.advance(11)
    assert [await loads(tier, old), await loads(tier, new)] == [MISSING, LOADED]
    assert tier.usage().counters["unreadable"] == 1
    assert old.key in inner.chunks, "another node may be able to read it"
    assert await tier.lookup([old.key]) == [False]
    assert await tier.store([old]) == [STORED], "what can't be read is replaced"
    assert await loads(tier, old) is LOADED
    await tier.close()


async def test_a_key_file_that_breaks_leaves_all_as_it_was(
    inner: MemoryTier, clock: FakeClock, tmp_path: Path
) -> None:
    path = key_file(tmp_path)
    tier = around(inner, path)
    stored = item(1)
    path.write_text("{")
    clock.advance(60)
    assert await tier.store([stored]) == [STORED]
    assert await loads(tier, stored) is LOADED
    assert "no valid JSON; the secrets read before stay in use" in tier.usage().detail
    key_file(tmp_path)
    clock.advance(60)
    assert await loads(tier, stored) is LOADED
    assert tier.usage().detail == ""
    await tier.close()


async def test_memory_that_changed_before_it_was_stored(inner: MemoryTier, tmp_path: Path) -> None:
    tier = around(inner, key_file(tmp_path))
    stored = item(1)
    known = checksum(stored.view)
    stored.view[5] ^= 1
    assert await tier.store([Item(stored.key, stored.view, checksum=known)]) == [FAILED]
    assert inner.chunks == {}
    await tier.close()


async def test_compression_comes_before_encryption(clock: FakeClock, tmp_path: Path) -> None:
    context = context_of(clock)
    inner = memory(context)
    tier = wrapped(inner, ["encrypted", "compressed"], tmp_path, context)
    soft = item(1, 50_000)
    soft.view[:] = b"\1" * 50_000
    assert await tier.store([soft]) == [STORED]
    [(content, _)] = inner.chunks.values()
    assert len(content) < 1000
    into = blank(soft)
    assert await tier.load([into]) == [LOADED]
    assert into.view == soft.view
    await tier.close()


# ---------------------------------------------------------------- key files


def test_toml(inner: MemoryTier, tmp_path: Path) -> None:
    path = tmp_path / "secrets.toml"
    path.write_text(f'[tenants]\n"" = ["{secret(1)}"]\nacme = ["{secret(2)}", "{secret(3)}"]\n')
    path.chmod(0o600)
    tier = around(inner, path)
    assert [len(tier._keyring.secrets(t)) for t in ("", "acme", "nobody")] == [1, 2, 0]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o666])
def test_a_file_that_others_may_read(inner: MemoryTier, tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    if mode == 0o640 and path.stat().st_uid == 0:
        around(inner, path)  # root's, and readable by a group: as containers get secrets
        return
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        around(inner, path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no valid JSON"),
        ('{"tenants": {"acme": "x"}}', "table `tenants` of lists"),
        ('{"tenant": {}}', "table `tenants` of lists"),
        ('{"tenants": {"acme": ["SGVsbG8sIHRvcCBzZWNyZXQh"]}}', "secret 1 of tenant 'acme'"),
        ('{"tenants": {"acme": ["$$$$ top secret"]}}', "openssl rand -base64 32"),
        ("[1]", "table `tenants` of lists"),
    ],
)
def test_what_is_wrong_with_a_key_file(
    inner: MemoryTier, tmp_path: Path, content: str, says: str
) -> None:
    path = key_file(tmp_path)
    path.write_text(content)
    with pytest.raises(ConfigError, match=says) as told:
        around(inner, path)
    assert "SGVsbG8" not in str(told.value)
    assert "top secret" not in str(told.value)


def test_toml_errors_quote_nothing(inner: MemoryTier, tmp_path: Path) -> None:
    path = tmp_path / "secrets.toml"
    path.write_text(f"[tenants]\nacme = [{secret(1)}\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="no valid TOML") as told:
        around(inner, path)
    assert secret(1)[:6] not in str(told.value)
    assert told.value.__cause__ is None


def test_no_file(inner: MemoryTier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        around(inner, tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match=r"keys: this must be set"):
        Encrypted.wrap(inner, {}, inner.context)
    os.mkdir(tmp_path / "folder.json", 0o700)
    with pytest.raises(ConfigError, match="key file"):
        around(inner, tmp_path / "folder.json")


async def test_nothing_secret_is_logged_or_printed(
    inner: MemoryTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    path = key_file(tmp_path, {"": [secret(1)]})
    tier = around(inner, path)
    await tier.store([item(1), item(1, tenant="other")])
    inner.chunks[key(1)] = b"x" * 100, 0
    await loads(tier, item(1))
    told = caplog.text + repr(tier) + repr(vars(tier)) + json.dumps(tier.usage().counters)
    told += repr(tier._keyring._tenants)
    assert secret(1) not in told
    assert repr(bytes([1]) * 32)[2:20] not in told
    await tier.close()


def test_a_missing_package_says_what_to_install(
    inner: MemoryTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "cryptography.hazmat.primitives.ciphers.aead"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstrata\[encrypt\]'"):
        around(inner, key_file(tmp_path))
