"""Secrets of tenants, from a file that only its owner may read.

    [tenants]
    acme = ["<newest, base64 of 32 bytes>", "<the one before>"]
    "" = ["..."]        # namespaces without a tenant

The same as JSON: `{"tenants": {"acme": ["..."]}}`, in a file called `*.json`. What is stored is
encrypted with the first secret of its tenant; all of them can be read. To rotate, put a new one
in front on every node; remove the old one when what it encrypted is no longer of use.
`openssl rand -base64 32` makes one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
import threading
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from kvstrata.errors import ConfigError

__all__ = ["Keyring", "Secret"]

_SECRET_BYTES = 32
_MOST_BYTES = 1 << 20


class Secret:
    """One AES-256 key. Its `repr` tells nothing of it."""

    def __init__(self, raw: bytes, cipher: Any) -> None:
        """`cipher(raw)` is what encrypts with it."""
        # One way, and of 256 random bits: what is stored may name it.
        digest = hashlib.sha256(b"kvstrata secret id" + raw).digest()
        self.id = int.from_bytes(digest[:8], "little")
        self.cipher = cipher(raw)

    def __repr__(self) -> str:
        return "Secret(...)"


class Keyring:
    """The secrets of every tenant, newest first. Thread-safe."""

    def __init__(self, path: Path, cipher: Any) -> None:
        """Raises `ConfigError`, which never quotes the file's content."""
        self._path = path
        self._cipher = cipher
        self._lock = threading.Lock()
        self._seen = self._identity()
        self._tenants = self._read()
        self.trouble = ""

    def __repr__(self) -> str:
        return f"Keyring({str(self._path)!r}, {len(self._tenants)} tenants)"

    def secrets(self, tenant: str) -> tuple[Secret, ...]:
        """Newest first; none for a tenant the file doesn't name."""
        return self._tenants.get(tenant, ())

    def refresh(self) -> None:
        """Read the file again if it has changed; what can't be read leaves all as it was."""
        with self._lock:
            try:
                seen = self._identity()
                if seen == self._seen:
                    return
                self._tenants = self._read()
                self._seen, self.trouble = seen, ""
            except ConfigError as e:
                self.trouble = f"{e}; the secrets read before stay in use"

    def _identity(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)
        except OSError as e:
            raise ConfigError(f"key file {self._path}: {e.strerror}") from e
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> dict[str, tuple[Secret, ...]]:
        try:
            with open(self._path, "rb") as file:
                self._check_mode(os.fstat(file.fileno()))
                raw = file.read(_MOST_BYTES + 1)
        except OSError as e:
            raise ConfigError(f"key file {self._path}: {e.strerror}") from e
        if len(raw) > _MOST_BYTES:
            raise ConfigError(f"key file {self._path} has more than {_MOST_BYTES} bytes")
        tenants = self._parse(raw)
        return {
            tenant: tuple(
                self._secret(tenant, number, text) for number, text in enumerate(texts, 1)
            )
            for tenant, texts in tenants.items()
        }

    def _check_mode(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"key file {self._path} is not a file")
        # As a secret that is mounted into a container: root's, readable by its group.
        mine = found.st_uid in (os.getuid(), 0)
        allowed = 0o740 if found.st_uid == 0 else 0o700
        mode = stat.S_IMODE(found.st_mode)
        if not mine or mode & 0o777 & ~allowed:
            raise ConfigError(
                f"key file {self._path} of user {found.st_uid} with mode {mode:o} may be read "
                f"by others: chmod 600 {self._path}"
            )

    def _parse(self, raw: bytes) -> dict[str, list[str]]:
        # `from None`: the errors of parsers quote what they read.
        try:
            if self._path.suffix == ".json":
                document = msgspec.json.decode(raw)
            else:
                document = tomllib.loads(raw.decode())
        except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError):
            kind = "JSON" if self._path.suffix == ".json" else "TOML"
            raise ConfigError(f"key file {self._path} is no valid {kind}") from None
        try:
            return msgspec.convert(document, _File, strict=True).tenants
        except msgspec.ValidationError:
            raise ConfigError(
                f"key file {self._path}: it must hold a table `tenants` of lists of secrets"
            ) from None

    def _secret(self, tenant: str, number: int, text: str) -> Secret:
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != _SECRET_BYTES:
            raise ConfigError(
                f"key file {self._path}: secret {number} of tenant {tenant!r} is not the base64 "
                f"of {_SECRET_BYTES} bytes: openssl rand -base64 {_SECRET_BYTES}"
            )
        return Secret(raw, self._cipher)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: dict[str, list[str]]
