"""AES-256-GCM around a tier, with a secret per tenant.

Whoever reads the medium learns which chunks there are and how long they are, not what is in
them, and can't change or exchange them unnoticed: the frame's header, with the chunk's key in
it, is authenticated with the payload. A chunk whose tenant has no secret is not stored. Each
object has a random nonce of 96 bits: rotate a secret before it has encrypted 2^32 chunks.
Extra `encrypt`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from kvstrata.config import Seconds
from kvstrata.errors import Corrupt, Missing
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata.tiers.base import Item, Tier, TierContext, checksum
from kvstrata.tiers.wrappers.base import extra_module
from kvstrata.tiers.wrappers.checked import payload_view
from kvstrata.tiers.wrappers.frame import (
    HEADER_BYTES,
    NONCE_BYTES,
    Codec,
    Frame,
    pack_frame,
    parse_frame,
)
from kvstrata.tiers.wrappers.framed import Framed, FramedOptions, Unreadable
from kvstrata.tiers.wrappers.keyring import Keyring, Secret

__all__ = ["Encrypted", "EncryptedOptions"]

_TAG_BYTES = 16


class EncryptedOptions(FramedOptions):
    """Options of the wrapper `encrypted`."""

    keys: Path
    """File of the tenants' secrets, for its owner alone to read: see `docs/wrappers.md`."""
    reload: Seconds = 10.0
    """How often a look is taken whether that file has changed."""


class Encrypted(Framed):
    """Counts chunks `refused` for want of a secret and `unreadable` for want of an old one."""

    kind: ClassVar[str] = "encrypted"
    overhead: ClassVar[int] = HEADER_BYTES + _TAG_BYTES

    def __init__(
        self,
        inner: Tier,
        options: EncryptedOptions,
        context: TierContext,
        keyring: Keyring,
        invalid_tag: type[Exception],
    ) -> None:
        """Use `wrap`."""
        super().__init__(inner, options, context)
        self._namespace_of = context.namespace_of
        self._keyring = keyring
        self._invalid_tag = invalid_tag
        self._reload = options.reload
        self._refresh_at = context.clock() + options.reload
        self._counters |= {"refused": 0, "unreadable": 0}

    @classmethod
    def wrap(cls, inner: Tier, options: dict[str, Any], context: TierContext) -> Encrypted:
        parsed = EncryptedOptions.parse(cls.kind, options)
        ciphers = "cryptography.hazmat.primitives.ciphers.aead"
        aead = extra_module(ciphers, "encrypt", cls.kind)
        errors = extra_module("cryptography.exceptions", "encrypt", cls.kind)
        keyring = Keyring(parsed.keys, aead.AESGCM)
        return cls(inner, parsed, context, keyring, errors.InvalidTag)

    def trouble(self) -> str:
        return self._keyring.trouble

    def encode(self, item: Item, into: memoryview) -> int:
        secrets = self._secrets(item.key)
        if not secrets:
            self.count("refused")
            raise Missing("no secret for the tenant of its namespace: add it to the key file")
        nbytes = item.view.nbytes
        nonce = os.urandom(NONCE_BYTES)
        frame = Frame(
            item.key,
            Codec.AES_256_GCM,
            nbytes,
            nbytes + _TAG_BYTES,
            secret=secrets[0].id,
            nonce=nonce,
        )
        pack_frame(into, frame)
        body = into[HEADER_BYTES : HEADER_BYTES + frame.body_bytes]
        secrets[0].cipher.encrypt_into(nonce, item.view, bytes(into[:HEADER_BYTES]), body)
        # Nothing that depends on the payload may stand in the clear, so its checksum is not
        # stored: it is checked now, and from here on the tag does its work. Not before it was
        # encrypted: an engine may have put the memory to another use meanwhile.
        if item.checksum is not None and checksum(item.view) != item.checksum:
            raise Corrupt("payload checksum differs before it was stored")
        return HEADER_BYTES + frame.body_bytes

    def decode(self, item: Item, stored: memoryview) -> None:
        frame, body = parse_frame(stored, item.key)
        if frame.codec is not Codec.AES_256_GCM:
            raise Corrupt(f"not encrypted: its codec is {frame.codec.name}")
        into = payload_view(item, frame)
        if body.nbytes != into.nbytes + _TAG_BYTES:
            raise Corrupt(f"body of {body.nbytes} bytes for a payload of {into.nbytes}")
        secret = next((s for s in self._secrets(item.key) if s.id == frame.secret), None)
        if secret is None:
            self.count("unreadable")
            raise Unreadable("encrypted with a secret that the key file lacks for its tenant")
        try:
            secret.cipher.decrypt_into(frame.nonce, body, bytes(stored[:HEADER_BYTES]), into)
        except self._invalid_tag as e:
            raise Corrupt("it was changed: its tag differs") from e

    def _secrets(self, key: Key) -> tuple[Secret, ...]:
        """Of the tenant that the key's namespace belongs to. Raises `Missing` if unknown."""
        namespace = self._namespace_of(key[:DIGEST_BYTES])
        if namespace is None:
            raise Missing("its namespace is not known here, so its tenant is not either")
        if self._clock() >= self._refresh_at:
            self._refresh_at = self._clock() + self._reload
            self._keyring.refresh()
        return self._keyring.secrets(namespace.tenant)
