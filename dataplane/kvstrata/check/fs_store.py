"""The documents of an fs store: which one it is, and what its namespaces are."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from kvstrata.errors import ConfigError, Malformed
from kvstrata.keys import Namespace
from kvstrata.tiers.fs_root import IDENTITY

__all__ = ["DESCRIPTION", "described", "identity_of"]

DESCRIPTION = "namespace.json"

_MOST_DESCRIPTION = 16 << 20


def identity_of(root: str) -> str | None:
    """Id of the store at `root`, None if its identity file is damaged.

    Raises `ConfigError` if there is no store.
    """
    path = f"{root}/{IDENTITY}"
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{root} is not a store: it has no {IDENTITY}; name the root of an fs tier"
        ) from None
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}: run as the user that the node runs as") from e
    with contextlib.suppress(msgspec.DecodeError):
        document = msgspec.json.decode(raw)
        if isinstance(document, dict) and document.get("format") == 1:
            return str(document.get("id", "")) or None
    return None


def described(root: str, namespace: str) -> Namespace | None:
    """The namespace document in a folder, None if there is none.

    Raises `Malformed` if it isn't the one that the folder is named after, and `OSError`.
    """
    try:
        with open(f"{root}/{namespace}/{DESCRIPTION}", "rb") as file:
            if os.fstat(file.fileno()).st_size > _MOST_DESCRIPTION:
                raise Malformed("too large for a namespace's document")
            raw = file.read()
    except FileNotFoundError:
        return None
    found = Namespace.parse(raw)
    if found.digest.hex() != namespace:
        raise Malformed(f"describes {found.digest.hex()}")
    return found
