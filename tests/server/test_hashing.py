"""Hashes against what vLLM 0.32 and Dynamo 1.6.1 computed for the same tokens."""

from __future__ import annotations

import msgspec
import pytest

from kvstrata.errors import Malformed
from kvstrata.keys import Field, Group, Namespace
from kvstrata_server.lookups.hashing import (
    chunk_keys,
    local_hashes,
    prefix_hashes,
    sequence_hashes,
    sequence_prefixes,
)

BLOCK = 4
TOKENS = [70000 * j + i for i in range(3) for j in range(BLOCK)]

# (algorithm, PYTHONHASHSEED, cache salt of the first block) -> fingerprint of the seed as the vLLM
# adapter computes it, and the hashes of the three blocks by `hash_block_tokens`.
VLLM = {
    ("sha256", "None", ""): [
        "87bcb32eefe2f6253a2ac5f03040a9b0",
        "d0ee098698e119bed8fa7769bc9f2e26ae35630df1c2030be4b9c7ed6b5145ed",
        "97cf4e788b46efc8807d191b1e75c160973385a4e9aeeebd065eb846bbf432c2",
        "c51b50419599959a3d9114016f0d4c65fbc6c7aad380de1cb8962ed717dbccae",
    ],
    ("sha256", "None", "s"): [
        "87bcb32eefe2f6253a2ac5f03040a9b0",
        "f6aad90b1e53023129cfbd9d2735798274995c2c587bb55e8a4871a31bdca4c9",
        "f755cb155135b2304ad05c5c7df8cb4065c92e9ef6361ad38c1f2534df67d8d9",
        "5e77ea8bff735be298663db0e16fda8f44394a7fbcc4f571441adbc00fa5a571",
    ],
    ("sha256_cbor", "None", ""): [
        "af1d66864a65bf053e4b2136699aef08",
        "f81eefc36263bc1365ddf0166f490ae1b8099e96419090337b030192e630c25b",
        "37e56ccd627257b8d3ef08413f0a641820c92aa20b9fbd2f2cab4617ba062762",
        "14ff078b9a53fd06981e680ff6606d347d322bf1ca59d9192bba1bd923771879",
    ],
    ("sha256_cbor", "None", "s"): [
        "af1d66864a65bf053e4b2136699aef08",
        "b58bfb23035cfda2bb85e72872622627e400e29eb351ae2b1660ba690560aedd",
        "1111045bef5790fedfbeb3a2bfa074800066912c024c81abeb78e126c7e01ce2",
        "95de635b4acdc5ac7e5a9821059357d04583e9028601f79d03e6663155edf25c",
    ],
    ("sha256", "42", ""): [
        "555f60de4ca11c12e030e9a988cf3e6d",
        "62f1f558515e21fd5f25b4f34edb0fa5acd244dfcc872921f6c66dde0ade9802",
        "b53a683dac22fa3dab6579f4f19dda2885254b2ed92da7d42a15fc71b4d312db",
        "0e7207da8e6a2ab83cc0e35480f5335833cc1f76fe7abf99e5da5059df92c3f0",
    ],
    ("sha256", "42", "s"): [
        "555f60de4ca11c12e030e9a988cf3e6d",
        "6f0774a3b10f82444f5882b829aa35337f0336c8b5cf4719a2b74fbcf82732b7",
        "fd4060fb1c051240be747ddd1da29187beaaf316ab98d813cda912486b39ea06",
        "b1207ab0d3304ca1e05e979dca8950dc09a91954a06f8c7eb9711722df6c51bd",
    ],
    ("sha256_cbor", "42", ""): [
        "b440ceba1065e6747f96f6915b5a6875",
        "316c2e7ef0d84d9b23c7adfbe256bfea59912dd0c01db54f67a34bcf1037eaa9",
        "b3009bf34036c5eb0279d77ff1ead19c18525855d5e8ad6149997646565f4481",
        "ca03c04963cd84d66a2c5e38e53be971929f8b9ae2028385c16fd87f1c38ca25",
    ],
    ("sha256_cbor", "42", "s"): [
        "b440ceba1065e6747f96f6915b5a6875",
        "0b868b1429c1f367eb1e8a025e2757227e056a570375aaedb0b799478632fab0",
        "205b8092d642397fc9b95dfbf79f6b3ec5ffc45c52cd281a4359229dab6c433d",
        "f26b9890883d3bc98dcca6f4137ce19f74b208542f409858bf46bab897595ecb",
    ],
    ("xxhash", "42", ""): [
        "463810d2d1bc4ffceb914a40cb915e0f",
        "78bceeb0c484cb50cf7f362b831bb080",
        "9ce990b9f0862bee26c0b296d2b89571",
        "a25e4c77515020e92c8f8659d4362400",
    ],
    ("xxhash", "42", "s"): [
        "463810d2d1bc4ffceb914a40cb915e0f",
        "02cf381472fbd3c99a29129d5416cade",
        "324bcd41461ab59e49cd12d6c0c1373c",
        "6ec8cf8f0ea41bc06256e47917480437",
    ],
    ("xxhash_cbor", "42", ""): [
        "57d8f38888ca0ceeb2921b1d2177f662",
        "17c9f503d20c8f764963ebb6268ded9b",
        "87dde2cc88c302a4ff6b99563f6575cc",
        "40130ae3004b614bea0aaa040075a87f",
    ],
    ("xxhash_cbor", "42", "s"): [
        "57d8f38888ca0ceeb2921b1d2177f662",
        "b8547041b302f9684e62e961fe6dbd4c",
        "e33396e95ec9624b881fe43ba667011d",
        "d5d5b337a607a15b2de7cbe9d0d847ce",
    ],
}

# `dynamo._core.compute_block_hash_for_seq(TOKENS, 4, lora_name=..., cache_namespace=...)`
DYNAMO = {
    ("", ""): [9414777909227115396, 17147077410009177440, 2738935417956871735],
    ("l", ""): [10629789691662853735, 12716454829297557271, 10183508540542436476],
    ("", "s"): [10597390953360562074, 2688141619474949364, 7187055323657637200],
    ("l", "s"): [16891436100574702026, 14906409098524868323, 16521554956486618577],
}


def a_group(number: int = 0, kind: str = "full", tokens: int = BLOCK) -> Group:
    return Group(number, kind, ("l",), (Field("kv", 1, 8),), tokens)  # type: ignore[arg-type]


def a_namespace(
    algorithm: str, seed: str = "", per_chunk: int = 1, groups: tuple[Group, ...] = (a_group(),)
) -> Namespace:
    return Namespace(*("m", "r", "c", "bf16", "f"), groups, per_chunk, algorithm, seed).checked()


@pytest.mark.parametrize(("algorithm", "seed", "salt"), VLLM)
def test_what_vllm_computes(algorithm: str, seed: str, salt: str) -> None:
    fingerprint, *hashes = VLLM[algorithm, seed, salt]
    namespace = a_namespace(algorithm, fingerprint)
    assert chunk_keys(namespace, TOKENS, salt=salt) == {
        0: [namespace.key(0, bytes.fromhex(h)) for h in hashes]
    }


@pytest.mark.parametrize(("lora", "salt"), DYNAMO)
def test_what_dynamo_computes(lora: str, salt: str) -> None:
    local = DYNAMO[lora, salt]
    assert local_hashes(TOKENS, BLOCK, lora, salt) == local
    namespace = a_namespace("xxh3")
    keys = chunk_keys(namespace, TOKENS, lora=lora, salt=salt)
    assert keys[0][0] == namespace.key(0, local[0].to_bytes(8, "big"))
    sequence = sequence_prefixes(namespace, sequence_hashes(local))
    assert sequence == prefix_hashes(namespace, TOKENS, lora=lora, salt=salt)
    assert [namespace.key(0, h) for h in sequence] == keys[0]
    # As they travel in JSON of a client that counts in signed numbers.
    signed = [h - (1 << 64) if h >> 63 else h for h in local]
    assert sequence_hashes(signed) == sequence_hashes(local)


def test_a_chunk_is_named_by_its_last_block_and_has_no_part() -> None:
    fingerprint, *hashes = VLLM["sha256", "None", ""]
    namespace = a_namespace("sha256", fingerprint, per_chunk=2)
    assert chunk_keys(namespace, TOKENS) == {0: [namespace.key(0, bytes.fromhex(hashes[1]))]}
    assert chunk_keys(namespace, TOKENS[:7]) == {0: []}
    assert chunk_keys(namespace, []) == {0: []}


def test_each_group_has_its_keys() -> None:
    groups = (a_group(0, "sliding_window"), a_group(1, "mla"), a_group(2, "mamba"))
    namespace = a_namespace("xxh3", groups=groups)
    keys = chunk_keys(namespace, TOKENS)
    assert set(keys) == {0, 1, 2}
    assert [key[-8:] for key in keys[0]] == [key[-8:] for key in keys[2]]


def test_groups_of_several_sizes_where_the_document_tells_what_hashes_cover() -> None:
    """As vLLM does: a chunk of more tokens has the hash of its last ones."""
    fingerprint, *hashes = VLLM["sha256_cbor", "None", ""]
    groups = (a_group(0, "full", 3 * BLOCK), a_group(1, "mamba", BLOCK))
    namespace = msgspec.structs.replace(
        a_namespace("sha256_cbor", fingerprint, groups=groups), tokens_per_hash=BLOCK
    ).checked()
    assert chunk_keys(namespace, TOKENS) == {
        0: [namespace.key(0, bytes.fromhex(hashes[2]))],
        1: [namespace.key(1, bytes.fromhex(h)) for h in hashes],
    }


@pytest.mark.parametrize(
    ("namespace", "kwargs", "message"),
    [
        (a_namespace("sha256", "of another seed"), {}, "`hash_seeds`"),
        (a_namespace("md5"), {}, "hashes by md5, which this server can't compute"),
        (a_namespace("sha256"), {"lora": "l"}, "LoRA"),
        (a_namespace("xxh3", groups=(a_group(), a_group(1, "mamba", 8))), {}, r"\[4, 8\] tokens"),
    ],
)
def test_what_can_not_be_computed_is_refused(
    namespace: Namespace, kwargs: dict[str, str], message: str
) -> None:
    with pytest.raises(Malformed, match=message):
        chunk_keys(namespace, TOKENS, **kwargs)


def test_tokens_have_32_bits() -> None:
    for token in (-1, 1 << 32):
        with pytest.raises(Malformed, match="32 bits"):
            chunk_keys(a_namespace("xxh3"), [0, 0, 0, token])


def test_hashes_of_a_scheme_that_the_engine_does_not_use() -> None:
    with pytest.raises(Malformed, match="hashes by sha256, and these are hashes by xxh3"):
        sequence_prefixes(a_namespace("sha256"), [1])
    with pytest.raises(Malformed, match="`tokens_per_hash`"):
        sequence_prefixes(a_namespace("xxh3", groups=(a_group(), a_group(1, "mamba", 8))), [1])
