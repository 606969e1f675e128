# SPDX-License-Identifier: Apache-2.0
"""Content hashes of blocks: chained, with everything that decides the content."""

import hashlib
import pickle
from types import SimpleNamespace

import pytest
from state_cases import BLOCK, request

from vllm.utils.hashing import get_hash_fn_by_name, sha256, sha256_cbor, xxhash, xxhash_cbor
from vllm.v1.core import kv_cache_utils as utils
from vllm.v1.request import Request


def media(identifier: str, offset: int, length: int) -> SimpleNamespace:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def lora(name: str) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name)


def test_hash_functions():
    value = (b"parent", (1, 2, 3), None)
    assert sha256(value) == hashlib.sha256(pickle.dumps(value, protocol=5)).digest()
    for name, function, width in (
        ("sha256", sha256, 32),
        ("sha256_cbor", sha256_cbor, 32),
        ("xxhash", xxhash, 16),
        ("xxhash_cbor", xxhash_cbor, 16),
    ):
        if name.endswith("cbor"):
            pytest.importorskip("cbor2")
        if name.startswith("xx"):
            pytest.importorskip("xxhash")
        assert get_hash_fn_by_name(name) is function
        assert len(function(value)) == width
        assert function(value) == function((b"parent", (1, 2, 3), None))
        assert function(value) != function((b"parent", (1, 2, 4), None))
    with pytest.raises(ValueError, match="md5"):
        get_hash_fn_by_name("md5")


def test_cbor_hash_is_of_canonical_cbor():
    pytest.importorskip("cbor2")
    # RFC 8949: array(2), unsigned 1, array(2) of 2 and null
    assert sha256_cbor((1, (2, None))) == hashlib.sha256(bytes([0x82, 1, 0x82, 2, 0xF6])).digest()


def test_only_full_blocks_and_only_new_ones():
    hasher = utils.get_request_block_hasher(BLOCK, sha256)
    req = request("a", range(BLOCK * 2 + BLOCK - 1))
    assert len(req.block_hashes) == 2
    assert hasher(req) == []
    req.append_output_token_ids(7)
    assert len(req.block_hashes) == 3
    assert req.block_hashes == request("b", [*range(BLOCK * 3 - 1), 7]).block_hashes


def test_hashes_are_chained():
    one = request("a", [1] * BLOCK + [2] * BLOCK).block_hashes
    two = request("b", [3] * BLOCK + [2] * BLOCK).block_hashes
    assert one[0] != two[0]
    assert one[1] != two[1], "equal tokens after different prefixes"
    assert one[0] == utils.hash_block_tokens(sha256, None, [1] * BLOCK)
    assert one[0] == sha256((utils.NONE_HASH, (1,) * BLOCK, None))
    assert one[1] == sha256((one[0], (2,) * BLOCK, None))


def test_extra_keys_separate_contents():
    tokens = range(BLOCK * 2)
    variants = [
        request("a", tokens),
        request("a", tokens, cache_salt="s"),
        request("a", tokens, cache_salt="t"),
        request("a", tokens, lora_request=lora("x")),
        request("a", tokens, lora_request=lora("y")),
        request("a", tokens, mm_features=[media("img", 0, 4)]),
        request("a", tokens, mm_features=[media("img", 1, 4)]),
    ]
    for index in (0, 1):
        assert len({req.block_hashes[index] for req in variants}) == len(variants)


def test_salt_is_in_the_first_block_only():
    req = request("a", range(BLOCK * 2), cache_salt="s")
    assert utils.generate_block_hash_extra_keys(req, 0, BLOCK) == (("s",), 0)
    assert utils.generate_block_hash_extra_keys(req, BLOCK, 2 * BLOCK) == (None, 0)


def test_media_keys_follow_their_positions():
    items = [media("a", 2, 4), media("b", 10, 20), media("c", 40, 1)]
    req = request("a", range(64), mm_features=items, lora_request=lora("x"), cache_salt="s")
    keys = utils.generate_block_hash_extra_keys
    assert keys(req, 0, 16) == (("x", ("a", 2), ("b", 10), "s"), 1)
    assert keys(req, 16, 32, 1) == (("x", ("b", -6)), 2)
    assert keys(req, 32, 48, 2) == (("x", ("c", 8)), 3)
    assert keys(req, 48, 64, 3) == (("x",), 3)


def test_media_hashed_incrementally_as_at_once():
    items = [media("a", 2, 4), media("b", 10, 20)]
    whole = request("a", range(48), mm_features=items)
    grown = request("a", range(30), mm_features=items)
    for token in range(30, 48):
        grown.append_output_token_ids(token)
    assert whole.block_hashes == grown.block_hashes


def test_group_id_suffix():
    key = utils.make_block_hash_with_group_id(utils.BlockHash(b"abc"), 258)
    assert key == b"abc\x00\x00\x01\x02"
    assert utils.get_block_hash(key) == b"abc"
    assert utils.get_group_id(key) == 258


def test_external_form(monkeypatch):
    block_hash = utils.BlockHash(bytes(range(32)))
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", raising=False)
    assert utils.maybe_convert_block_hash(block_hash) == int.from_bytes(block_hash[-8:], "big")
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert utils.maybe_convert_block_hash(block_hash) == block_hash


def test_root_hash_is_shared_only_with_a_seed(monkeypatch):
    monkeypatch.setattr(utils, "NONE_HASH", utils.NONE_HASH)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    utils.init_none_hash(sha256)
    assert sha256("7") == utils.NONE_HASH
    monkeypatch.delenv("PYTHONHASHSEED")
    utils.init_none_hash(sha256)
    first = utils.NONE_HASH
    utils.init_none_hash(sha256)
    assert utils.NONE_HASH not in (first, sha256("7"))


def test_output_is_hashed_when_somebody_asks(monkeypatch):
    hashed = []
    original = utils.BlockHasher.__call__
    monkeypatch.setattr(
        utils.BlockHasher, "__call__", lambda self, req: hashed.append(1) or original(self, req)
    )
    req = request("a", range(BLOCK + 3))
    assert len(hashed) == 1, "the prompt, at once"
    for token in range(3 * BLOCK):
        req.append_output_token_ids(token)
    assert len(hashed) == 1
    assert len(req.block_hashes) == 4 and len(hashed) == 2
    assert req.block_hashes == request("b", req.all_token_ids).block_hashes
    req.truncate_output(BLOCK)
    assert req.block_hashes == request("c", req.all_token_ids).block_hashes
    assert len(Request("d", [1, 2], None).block_hashes) == 0
