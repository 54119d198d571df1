"""Which weights an engine runs: equal copies agree, other weights differ.

The revision of a local folder is a hash over its `config.json` and its weight files. Small models
are hashed whole. Of larger ones the safetensors headers and samples of every tensor are: a
fine-tune changes values all over a tensor, so it shows, in a second rather than minutes. An edit
of single rows of a large matrix may not show: set `kvstrata.revision` where that can happen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from kvstrata.errors import ConfigError

__all__ = ["folder_revision"]

WHOLE_BYTES = 2 << 30
SAMPLE_BYTES = 4096
SAMPLES = 8
_HEADER_LIMIT = 100 << 20  # safetensors' own
_READ = 16 << 20


def folder_revision(folder: Path, whole_bytes: int = WHOLE_BYTES) -> str:
    """Revision of the weights in `folder`. Raises `ConfigError` if it holds none."""
    files = sorted(
        path for pattern in ("*.safetensors", "*.bin", "*.pt") for path in folder.glob(pattern)
    )
    if not files:
        raise ConfigError(f"no weight files in {folder}: set `kvstrata.revision`")
    total = sum(path.stat().st_size for path in files)
    digest = xxhash.xxh3_128()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for path in files:
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            ranges = [(0, size)] if total <= whole_bytes else _samples(fd, path, size)
            for start, end in ranges:
                for at in range(start, end, _READ):
                    digest.update(os.pread(fd, min(_READ, end - at), at))
        finally:
            os.close(fd)
    return f"files-{digest.hexdigest()}"


def _samples(fd: int, path: Path, size: int) -> Iterator[tuple[int, int]]:
    """The header, and evenly spaced pages of each tensor (of the file, if it has no header)."""
    tensors = [(0, size)]
    if path.suffix == ".safetensors":
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if length > min(size, _HEADER_LIMIT):
            raise ConfigError(f"{path} is not a safetensors file")
        body = 8 + length
        yield 0, body
        header = json.loads(os.pread(fd, length, 8))
        tensors = sorted(
            (body + start, body + end)
            for name, entry in header.items()
            if name != "__metadata__"
            for start, end in [entry["data_offsets"]]
        )
    for start, end in tensors:
        last = max(start, end - SAMPLE_BYTES)
        for i in range(SAMPLES):
            at = start + (last - start) * i // (SAMPLES - 1)
            yield at, min(at + SAMPLE_BYTES, end)
            if last == start:
                break
