"""Keys by the thousand: columns of numbers instead of an object a key.

A key is `namespace (16 B) + group (4 B) + hash (1 to 32 B)`. Keys that differ in the hash alone
are of one *family*, a small number here; the hash is four words, padded with zeros. So a batch
of n keys is `families` (n uint32) and `words` (n x 4 uint64), and whatever is done to it is done
to all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstrata.bulk import KeyRun
from kvstrata.keys import DIGEST_BYTES, MAX_HASH_BYTES, Key

__all__ = ["DEAD", "Families", "Family", "KeyBatch", "KeyRows", "Numbers", "Words", "joined"]

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.uint32]

DEAD = 0
"""The family of no key."""
_UNKNOWN = 0xFFFFFFFF
_PREFIX_BYTES = DIGEST_BYTES + 4
_WORDS = MAX_HASH_BYTES // 8
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_FOLD = np.uint64(29)


class Family(NamedTuple):
    namespace: bytes
    prefix: bytes
    """Namespace and group: what each of its keys begins with."""
    size: int
    """Bytes of its hashes."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyBatch:
    """Keys in the order given; `hashes` (n uint64) says where the table looks for them first."""

    families: Numbers
    words: Words
    hashes: Words

    def __len__(self) -> int:
        return len(self.families)

    def part(self, which: slice) -> KeyBatch:
        return KeyBatch(self.families[which], self.words[which], self.hashes[which])


class KeyRows(NamedTuple):
    """Rows for SQL: `packed` holds, for each one, group and hash in `stride` bytes."""

    namespace: bytes
    stride: int
    packed: bytes
    positions: npt.NDArray[np.int64]
    """Which of the keys that were asked for."""


class Families:
    """Numbers of families, and batches made from the ways in which keys travel."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[bytes, int], int] = {}
        self._families: list[Family] = [Family(b"", b"", 0)]
        self._seeds: Words = np.zeros(64, np.uint64)

    def __len__(self) -> int:
        """One more than the highest number."""
        return len(self._families)

    def __getitem__(self, number: int) -> Family:
        return self._families[number]

    def number(self, prefix: bytes, size: int, intern: bool) -> int:
        number = self._numbers.get((prefix, size))
        if number is not None:
            return number
        if not intern:
            return _UNKNOWN
        number = self._numbers[prefix, size] = len(self._families)
        self._families.append(Family(prefix[:DIGEST_BYTES], prefix, size))
        if number >= len(self._seeds):
            self._seeds = np.concatenate([self._seeds, np.zeros_like(self._seeds)])
        # Equal in all processes: several servers may have to give a key the same number.
        self._seeds[number] = xxhash.xxh3_64_intdigest(prefix + bytes([size]))
        return number

    def of_keys(self, keys: Sequence[bytes], intern: bool = True) -> KeyBatch:
        """Keys of checked sizes. `intern=False` to look up: keys of unknown families are absent."""
        if not keys:
            return self._batch(np.empty(0, np.uint32), np.empty((0, _WORDS), np.uint64))
        size = len(keys[0])
        if len(set(map(len, keys))) == 1:
            return self._of_equal(b"".join(keys), size, intern)
        families = np.empty(len(keys), np.uint32)
        padded = bytearray(len(keys) * MAX_HASH_BYTES)
        for i, key in enumerate(keys):
            hash_ = key[_PREFIX_BYTES:]
            families[i] = self.number(key[:_PREFIX_BYTES], len(hash_), intern)
            padded[i * MAX_HASH_BYTES : i * MAX_HASH_BYTES + len(hash_)] = hash_
        return self._batch(families, np.frombuffer(padded, np.uint64).reshape(-1, _WORDS))

    def of_hex(self, texts: Sequence[str], intern: bool = True) -> KeyBatch:
        """Keys as they travel in JSON, checked."""
        if len(set(map(len, texts))) == 1:
            return self._of_equal(bytes.fromhex("".join(texts)), len(texts[0]) // 2, intern)
        return self.of_keys([bytes.fromhex(text) for text in texts], intern)

    def of_runs(self, runs: Sequence[KeyRun], intern: bool = True) -> KeyBatch:
        """Keys as they travel in msgpack. Raises `Malformed`."""
        parts = [self._of_run(run, intern) for run in runs]
        if len(parts) == 1:
            return parts[0]
        return joined(parts) if parts else self.of_keys(())

    def of_columns(
        self, prefixes: Sequence[bytes], which: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint8]
    ) -> KeyBatch:
        """To look up n keys: the one of `prefixes` (namespace and group) that each begins with, and
        hashes (n x size)."""
        numbers = [self.number(prefix, hashes.shape[1], intern=False) for prefix in prefixes]
        return self._batch(np.array(numbers, np.uint32)[which], _padded(hashes))

    def _of_run(self, run: KeyRun, intern: bool) -> KeyBatch:
        run.check()
        families = np.full(
            len(run), self.number(run.namespace + run.group.to_bytes(4, "big"), run.size, intern)
        )
        hashes = np.frombuffer(run.hashes, np.uint8).reshape(-1, run.size)
        return self._batch(families.astype(np.uint32), _padded(hashes))

    def _of_equal(self, raw: bytes, size: int, intern: bool) -> KeyBatch:
        """Keys of one size, one after the other."""
        table = np.frombuffer(raw, np.uint8).reshape(-1, size)
        prefixes = table[:, :_PREFIX_BYTES]
        size -= _PREFIX_BYTES
        if (prefixes == prefixes[0]).all():
            number = self.number(prefixes[0].tobytes(), size, intern)
            families = np.full(len(table), number, np.uint32)
        else:
            as_items = np.ascontiguousarray(prefixes).view(f"V{_PREFIX_BYTES}")[:, 0]
            different, inverse = np.unique(as_items, return_inverse=True)
            numbers = [self.number(p.tobytes(), size, intern) for p in different]
            families = np.array(numbers, np.uint32)[inverse]
        return self._batch(families, _padded(table[:, _PREFIX_BYTES:]))

    def _batch(self, families: Numbers, words: Words) -> KeyBatch:
        return KeyBatch(families, words, self.hashes(families, words))

    def hashes(self, families: Numbers, words: Words) -> Words:
        """64 well mixed bits a key, the same in all processes.

        Of hashes that are not: an engine's may be counters, in either order of bytes, so each
        step folds what a multiplication only carries upwards.
        """
        mixed = self._seeds[np.where(families == _UNKNOWN, DEAD, families)]
        for column in range(_WORDS):
            mixed = (mixed ^ words[:, column]) * _MULTIPLIER
            mixed ^= mixed >> _FOLD
        mixed *= np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))

    def namespaces(self, batch: KeyBatch) -> set[bytes]:
        return {self._families[n].namespace for n in _numbers(batch.families)}

    def keys(self, families: Numbers, words: Words) -> list[Key]:
        """The keys themselves, in order."""
        raw = np.ascontiguousarray(words).tobytes()
        known = {n: self._families[n] for n in _numbers(families)}
        return [
            Key(f.prefix + raw[i * MAX_HASH_BYTES : i * MAX_HASH_BYTES + f.size])
            for i, f in enumerate(map(known.__getitem__, families.tolist()))
        ]

    def rows(self, families: Numbers, words: Words) -> Iterator[KeyRows]:
        """The same keys for SQL, by family."""
        for number in _numbers(families):
            family = self._families[number]
            positions = np.flatnonzero(families == number)
            packed = np.empty((len(positions), 4 + family.size), np.uint8)
            packed[:, :4] = np.frombuffer(family.prefix[DIGEST_BYTES:], np.uint8)
            hashes = np.ascontiguousarray(words[positions]).view(np.uint8)
            packed[:, 4:] = hashes.reshape(-1, MAX_HASH_BYTES)[:, : family.size]
            yield KeyRows(family.namespace, 4 + family.size, packed.tobytes(), positions)

    def runs(self, batch: KeyBatch) -> list[KeyRun]:
        """For another process: keys by family, which changes their order."""
        return [
            KeyRun(
                row.namespace,
                int.from_bytes(row.packed[:4], "big"),
                row.stride - 4,
                np.frombuffer(row.packed, np.uint8).reshape(-1, row.stride)[:, 4:].tobytes(),
            )
            for row in self.rows(batch.families, batch.words)
        ]


def _numbers(families: Numbers) -> list[int]:
    """Each once. Most batches have one."""
    if len(families) and (families == families[0]).all():
        return [int(families[0])]
    return [int(number) for number in np.unique(families)]


def _padded(hashes: npt.NDArray[np.uint8]) -> Words:
    if hashes.shape[1] == MAX_HASH_BYTES and hashes.flags.c_contiguous:
        return hashes.view(np.uint64)
    padded = np.zeros((len(hashes), MAX_HASH_BYTES), np.uint8)
    padded[:, : hashes.shape[1]] = hashes
    return padded.view(np.uint64)


def joined(parts: Sequence[KeyBatch]) -> KeyBatch:
    return KeyBatch(
        np.concatenate([part.families for part in parts]),
        np.concatenate([part.words for part in parts]),
        np.concatenate([part.hashes for part in parts]),
    )
