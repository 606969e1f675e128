# SPDX-License-Identifier: Apache-2.0
"""Specs: bytes, blocks per request, merging, and what they answer for their kind."""

import ast
import re
from dataclasses import FrozenInstanceError, replace
from math import prod
from pathlib import Path

import pytest
import torch
from state_cases import full, hidden, recurrent, vllm_config, window

import vllm
from vllm.v1.core.single_type_kv_cache_manager import MANAGERS, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)


def mla(**changes):
    fields = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16, **changes}
    return MLAAttentionSpec(**{"block_size": 16, **fields})


def test_attention_bytes():
    assert full().page_size_bytes == 2 * 16 * 4 * 256 * 2
    assert full(head_size_v=128).page_size_bytes == 16 * 4 * (256 + 128) * 2
    assert window(8, head_size_v=128).page_size_bytes == 16 * 4 * (256 + 128) * 2
    assert mla().page_size_bytes == 16 * 576 * 2
    assert hidden().page_size_bytes == 16 * 3 * 2560 * 2


def test_mla_compression_and_alignment():
    spec = mla(compress_ratio=4, alignment=1000)
    assert spec.storage_block_size == 4
    assert spec.page_size_bytes == 5000  # 4 * 576 * 2 = 4608
    with pytest.raises(ValueError, match="compress_ratio"):
        mla(compress_ratio=3)


def test_padding_is_used_and_checked():
    assert full(page_size_padded=70000).page_size_bytes == 70000
    assert full(page_size_padded=70000).real_page_size_bytes == 65536
    with pytest.raises(ValueError, match="below the real size"):
        _ = full(page_size_padded=65535).page_size_bytes
    with pytest.raises(ValueError, match="below the real size"):
        _ = recurrent(page_size_padded=1).page_size_bytes


def test_one_shape_is_not_a_tuple_of_shapes():
    with pytest.raises(ValueError, match=r"state shapes \(64,\).*one for each state.*\(\(64,\),\)"):
        MambaSpec(block_size=16, shapes=(64,), dtypes=(torch.float32,))


def test_recurrent_state_layout():
    assert recurrent().state_bytes == (49152, 2097152)
    assert recurrent().state_offsets == (0, 49152)
    assert recurrent().page_size_bytes == 2146304
    odd = MambaSpec(16, ((3, 5), (4,), (1,)), (torch.float16, torch.float32, torch.float32))
    assert odd.state_offsets == (0, 32, 48)  # 30 bytes, then 16, then 4
    assert odd.page_size_bytes == 52
    assert MambaSpec(16, (), ()).page_size_bytes == 0
    with pytest.raises(ValueError, match="shapes"):
        MambaSpec(16, ((1,),), ())
    with pytest.raises(ValueError, match="mamba_cache_mode"):
        recurrent(mamba_cache_mode="some")


def test_memory_per_request():
    config = vllm_config(max_model_len=1000, max_num_batched_tokens=100)
    pages = {
        full(): 63,
        mla(): 63,
        hidden(): 63,
        window(50): 11,  # ceil((49 + 100) / 16) + 1
        window(5000): 64,
        recurrent(): 1,
        recurrent(num_speculative_blocks=2): 3,
        recurrent(mamba_cache_mode="align"): 2,
        recurrent(mamba_cache_mode="all", num_speculative_blocks=1): 64,
        ChunkedLocalAttentionSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=8,
            dtype=torch.float16,
            attention_chunk_size=128,
        ): 15,  # ceil((128 + 100) / 16)
    }
    for spec, count in pages.items():
        assert spec.max_memory_usage_bytes(config) == count * spec.page_size_bytes, spec


def test_frozen_hashable_and_replaceable():
    spec = hidden()
    with pytest.raises(FrozenInstanceError):
        spec.block_size = 3
    assert {spec: 1}[hidden()] == 1
    smaller = spec.copy_with_new_block_size(4)
    assert type(smaller) is HiddenStateCacheSpec
    assert type(replace(spec, head_size=8)) is HiddenStateCacheSpec
    assert smaller.block_size == 4
    assert smaller.page_size_bytes * 4 == spec.page_size_bytes


def test_hidden_states_merge_only_with_their_like():
    as_mla = MLAAttentionSpec(block_size=16, num_kv_heads=3, head_size=2560, dtype=torch.bfloat16)
    assert as_mla != hidden()
    assert HiddenStateCacheSpec.merge([hidden(), hidden()]) == hidden()
    for specs in ([hidden(), as_mla], [as_mla, hidden()], [hidden(), hidden(head_size=64)]):
        with pytest.raises(ValueError, match="equal specs"):
            type(specs[0]).merge(specs)
    with pytest.raises(ValueError):
        type(full()).merge([full(), hidden()])
    assert not full().is_uniform_with_collection({"a": full(), "b": hidden()})


def test_a_window_of_rows_that_keeps_every_token():
    """One tensor either way, so a page holds as many tokens."""
    spec = window_rows(9)
    kept = spec.keeping_every_token()
    assert kept == MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=512, dtype=torch.bfloat16, sliding_window=9
    )
    assert kept.page_size_bytes == spec.page_size_bytes == 16 * 1024
    assert kept.window is None and spec.window == 9


def test_mla_merge_compares_every_field():
    with pytest.raises(ValueError, match="equal specs"):
        MLAAttentionSpec.merge([mla(), mla(head_size=64)])


def test_full_attention_merges_windows():
    merged = type(full()).merge([full(), full(sliding_window=7), full()])
    assert merged == full(sliding_window=7)
    with pytest.raises(ValueError, match="one sliding window"):
        type(full()).merge([full(sliding_window=7), full(sliding_window=8)])
    with pytest.raises(ValueError, match="equal specs"):
        type(full()).merge([full(), full(head_size=64)])


def test_uniform_collections():
    assert window(5).is_uniform_with_collection({"a": window(5, head_size=8)})
    assert not window(5).is_uniform_with_collection({"a": window(6)})
    assert not recurrent().is_uniform_with_collection({"a": recurrent(num_speculative_blocks=1)})
    other_chunks = replace(chunked(), attention_chunk_size=64)
    assert chunked().is_uniform_with_collection({"a": chunked(head_size=16)})
    assert not chunked().is_uniform_with_collection({"a": other_chunks})
    assert not window(5).is_uniform_with_collection({"a": full(sliding_window=5)})
    members = {"a": full(), "b": full(head_size=64)}
    uniform = UniformTypeKVCacheSpecs(16, members)
    assert uniform.page_size_bytes == 65536 + 16384
    config = vllm_config(max_model_len=1000)
    assert uniform.max_memory_usage_bytes(config) == 63 * uniform.page_size_bytes


# ---- specs answer for their kind ---------------------------------------------------------------


def window_rows(sliding_window, **changes):
    fields = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.bfloat16, **changes}
    return SlidingWindowMLASpec(block_size=16, sliding_window=sliding_window, **fields)


def chunked(**changes):
    fields = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16, **changes}
    return ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=128, **fields)


@pytest.mark.parametrize(
    ("spec", "kind", "label", "contents"),
    [
        (full(), "full_attention", "attention", "4 heads x 256 bfloat16"),
        (window(9), "sliding_window", "sliding window 9", "4 heads x 256 bfloat16"),
        (mla(), "mla_attention", "latent attention", "1 rows x 576 bfloat16"),
        (
            mla(compress_ratio=4),
            "mla_attention",
            "entries of 4 tokens",
            "1 rows x 576 bfloat16",
        ),
        (window_rows(9), "sliding_window", "sliding window 9", "1 rows x 512 bfloat16"),
        (hidden(), "hidden_states", "hidden states", "3 rows x 2560 bfloat16"),
        (
            MambaSpec(16, ((3, 5),), (torch.float32,)),
            "mamba",
            "recurrent (mamba2)",
            "[3, 5] float32",
        ),
        (chunked(), "chunked_local_attention", "attention", "1 heads x 8 float16"),
        (
            full(head_size_v=4),
            "full_attention",
            "attention",
            "4 heads x (256 keys, 4 values) bfloat16",
        ),
    ],
)
def test_specs_name_and_describe_their_kind(spec, kind, label, contents):
    assert (spec.kind, spec.label, spec.contents) == (kind, label, contents)


def test_capabilities():
    specs = [full(), full(sliding_window=7), window(9), mla(), hidden(), recurrent()]
    assert [spec.is_recurrent for spec in specs] == [False] * 5 + [True]
    assert [spec.is_hidden_states for spec in specs] == [False] * 4 + [True, False]
    assert [spec.window for spec in specs] == [None, None, 9, None, None, None]


def test_views_fill_a_block_exactly():
    """In bytes, up to the alignment of recurrent parts; the token dimension counts the rows."""
    for spec in (full(), window(9), mla(), mla(compress_ratio=4), hidden(), window_rows(9)):
        (view,) = spec.views
        assert prod(view.shape) * view.dtype.itemsize == spec.real_page_size_bytes
        assert view.token_dim is not None
        assert view.shape[view.token_dim] == spec.storage_block_size
        assert spec.tokens_per_row == (4 if spec == mla(compress_ratio=4) else 1)
    for spec in (full(head_size_v=4), window(9, head_size_v=64)):
        keys, values = spec.views
        size = spec.dtype.itemsize
        rows = (16, spec.num_kv_heads)
        assert keys.shape == (*rows, spec.head_size) and values.shape == (*rows, spec.head_size_v)
        assert values.offset == prod(keys.shape) * size
        assert values.offset + prod(values.shape) * size == spec.real_page_size_bytes
    odd = MambaSpec(16, ((3, 5), (4,)), (torch.float16, torch.float32))
    assert [(v.shape, v.dtype, v.offset, v.token_dim) for v in odd.views] == [
        ((3, 5), torch.float16, 0, None),
        ((4,), torch.float32, 32, None),
    ]
    with pytest.raises(NotImplementedError, match="UniformTypeKVCacheSpecs"):
        _ = UniformTypeKVCacheSpecs(16, {"a": full()}).views


def test_blocks_of_a_request():
    assert [full().blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert window(50).blocks_for(1000) == 63, "dropped blocks keep their place in the list"
    assert [recurrent(num_speculative_blocks=2).blocks_for(n) for n in (1, 1000)] == [3, 3]
    assert window(50).blocks_per_request(100, 1000) == 11
    assert window(50).blocks_per_request(100, 16) == 1, "no more than its tokens fill"
    assert recurrent(num_speculative_blocks=2).blocks_per_request(100, 1) == 3


def test_layers_that_keep_every_token():
    fields = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    kept = FullAttentionSpec(block_size=16, attention_chunk_size=128, **fields)
    assert chunked().keeping_every_token() == kept
    noted = window(9, head_size_v=64).keeping_every_token()
    assert noted == full(head_size_v=64, sliding_window=9) and noted.window is None
    for spec in (full(), mla(), hidden(), recurrent()):
        assert spec.keeping_every_token() is spec


def test_expected_classes():
    assert MambaSpec.expect(recurrent()) == recurrent()
    with pytest.raises(TypeError, match="expected MambaSpec, got FullAttentionSpec"):
        MambaSpec.expect(full())


def test_what_the_arena_keeps_has_a_manager_and_a_view():
    for spec in (full(), window(9), mla(), hidden(), recurrent()):
        assert spec.refusal(16) is None and spec.kind in MANAGERS and spec.views
    for spec in (chunked(), UniformTypeKVCacheSpecs(16, {"a": full()})):
        assert "no cache manager" in spec.refusal(16) and spec.kind not in MANAGERS


def test_a_group_knows_the_spec_of_every_layer():
    members = {"a": full(), "b": hidden()}
    group = KVCacheGroupSpec(["a", "b"], UniformTypeKVCacheSpecs(16, members))
    assert group.layer_specs == members
    assert KVCacheGroupSpec(["a", "b"], full()).layer_specs == {"a": full(), "b": full()}


def subclasses(cls):
    return {cls.__name__}.union(*(subclasses(sub) for sub in cls.__subclasses__()))


def class_questions(source, classes):
    """Lines that ask whether a value is of one of these classes."""
    for node in ast.walk(ast.parse(source)):
        asked = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("isinstance", "issubclass"):
                asked = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.Compare):
            is_type = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq, ast.In, ast.NotIn)
            asked = node.comparators if isinstance(node.ops[0], is_type) else []
        words = {word for part in asked for word in re.findall(r"\w+", ast.unparse(part))}
        if words & classes:
            yield asked[0].lineno


def test_nobody_asks_for_the_class_of_a_spec_or_manager():
    classes = subclasses(KVCacheSpec) | subclasses(SingleTypeKVCacheManager)
    package = Path(vllm.__file__).parent
    allowed = package / "v1/kv_cache_specs"
    asked = [
        f"{path.relative_to(package)}:{line}"
        for path in package.rglob("*.py")
        if allowed not in path.parents
        for line in class_questions(path.read_text(encoding="utf-8"), classes)
    ]
    assert asked == []


def test_questions_for_a_class_are_seen():
    source = (
        "isinstance(spec, (int, MambaSpec))\n"
        "type(group.spec) is m.MambaSpec\n"
        "match spec:\n"
        "    case MambaSpec(): pass\n"
        "MambaSpec.expect(spec)\n"
        "isinstance(spec, MambaSpecs)\n"
    )
    assert list(class_questions(source, {"MambaSpec"})) == [1, 2, 4]
