# SPDX-License-Identifier: Apache-2.0
"""Metadata builders and the choice of a backend."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.config.draft_methods.replay import ReplaySettings
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.chunks import chunk_metadata
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import MAX_PREFILLS, GDNAttentionBackend
from vllm.v1.attention.backends.paged import PagedAttentionBackend, PagedAttentionImpl
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum, MambaSpec

CPU = torch.device("cpu")
CONFIG: Any = SimpleNamespace(
    model_config=SimpleNamespace(max_model_len=512),
    cache_config=SimpleNamespace(splits_scans=False),
    scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=8192),
)


def _common() -> CommonAttentionMetadata:
    """Two decodes, then prefills of 5 (new) and 70 tokens (after 64)."""
    starts = np.array([0, 1, 2, 7, 77], dtype=np.int32)
    prefill = np.array([0, 5, 75], dtype=np.int32)
    lens = np.array([9, 30, 5, 134], dtype=np.int32)
    table = np.array([[4], [7], [1], [9]], dtype=np.int32)
    return CommonAttentionMetadata(
        num_reqs=4,
        num_tokens=77,
        num_decodes=2,
        max_query_len=70,
        max_seq_len=134,
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(lens),
        seq_lens_cpu=lens,
        num_computed_tokens_cpu=np.array([8, 29, 0, 64]),
        prefill_query_start_loc=torch.from_numpy(prefill),
        prefill_query_start_loc_cpu=prefill,
        block_table=torch.from_numpy(table),
        prefill_seq_lens=torch.from_numpy(lens[2:]),
        prefill_block_table=torch.from_numpy(table[2:]),
        slot_mapping=torch.arange(77),
        block_table_cpu=table,
    )


def test_recurrent_metadata() -> None:
    builder = GDNAttentionBackend.get_builder_cls()(None, [], CONFIG, CPU)  # type: ignore[arg-type]
    batch = builder.build(_common()).batch
    assert batch.rows == slice(2, 77) and batch.query_start_loc.tolist() == [0, 5, 75]
    assert batch.state_indices.tolist() == [1, 9]
    assert batch.has_initial_state.tolist() == [False, True]
    assert batch.chunk_indices.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert batch.chunk_offsets.tolist() == [0, 1, 3]


def test_recurrent_metadata_is_that_of_its_step() -> None:
    """A step has what `chunk_metadata` makes of its own lengths, whatever the step before had."""
    builder = GDNAttentionBackend.get_builder_cls()(None, [], CONFIG, CPU)  # type: ignore[arg-type]
    longer = replace(
        _common(),
        prefill_query_start_loc_cpu=np.array([0, 64, 193], dtype=np.int32),
        num_computed_tokens_cpu=np.array([8, 29, 7, 0]),
    )
    for common, initial in ((_common(), [False, True]), (longer, [True, False])):
        batch = builder.build(common).batch
        indices, offsets = chunk_metadata(common.prefill_query_start_loc_cpu.tolist())
        assert batch.has_initial_state.tolist() == initial
        assert torch.equal(batch.chunk_indices, indices)
        assert torch.equal(batch.chunk_offsets, offsets)


def test_recurrent_metadata_of_a_replayed_step_is_of_fixed_size() -> None:
    """Absolute rows, sequences without tokens or block, and chunks of one of them."""
    builder = GDNAttentionBackend.get_builder_cls()(None, [], CONFIG, CPU)  # type: ignore[arg-type]
    batch = builder.build(replace(_common(), padded_tokens=128)).batch
    absent = MAX_PREFILLS - 2 + 1
    assert batch.rows == slice(0, 128)
    assert batch.state_indices.tolist() == [1, 9] + absent * [-1]
    assert batch.has_initial_state.tolist() == [False, True] + absent * [False]
    assert batch.query_start_loc.tolist() == [2, 7, 77] + absent * [77]
    assert batch.chunk_offsets.tolist() == [0, 1, 3] + absent * [3]
    padding = 128 // 64 + MAX_PREFILLS - 3
    assert batch.chunk_indices.tolist() == [[0, 0], [1, 0], [1, 1]] + padding * [[MAX_PREFILLS, 0]]
    eager = builder.build(_common()).batch
    assert eager.rows == slice(2, 77) and eager.query_start_loc.tolist() == [0, 5, 75]
    assert eager.state_indices.tolist() == [1, 9] and not eager.is_empty


def test_recurrent_metadata_of_more_prefills_than_a_graph_holds() -> None:
    builder = GDNAttentionBackend.get_builder_cls()(None, [], CONFIG, CPU)  # type: ignore[arg-type]
    count = MAX_PREFILLS + 1
    starts = np.arange(count + 1, dtype=np.int32)
    many = replace(
        _common(), num_reqs=count + 2, prefill_query_start_loc_cpu=starts, padded_tokens=128,
        num_computed_tokens_cpu=np.zeros(count + 2),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="17 prefills in a graph for 16"):
        builder.build(many)


def test_recurrent_metadata_cuts_long_prefills() -> None:
    spec = MambaSpec(
        block_size=8192,
        shapes=((3, 64), (2, 64, 64)),
        dtypes=(torch.float32, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    )
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(splits_scans=True), scheduler_config=CONFIG.scheduler_config
    )
    builder = GDNAttentionBackend.get_builder_cls()(spec, [], config, CPU)
    assert builder.build(_common()).batch.segments is None
    starts = np.array([0, 5, 4101], dtype=np.int32)
    long = replace(_common(), prefill_query_start_loc_cpu=starts)
    segments = builder.build(long).batch.segments
    assert segments is not None and segments.firsts.tolist() == [0, 1, 9]
    assert segments.starts.tolist() == [0, *range(5, 4102, 512)]


def test_attention_runs_decodes_and_prefills_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = PagedAttentionBackend.get_builder_cls()(None, [], CONFIG, CPU)  # type: ignore[arg-type]
    metadata = builder.build(_common())
    calls: list[tuple[Any, ...]] = []

    def paged_attention(p: AttentionProblem) -> None:
        lengths = p.seq_lens.tolist(), p.query_start_loc.tolist()
        calls.append((p.query[:, 0, 0].tolist(), *lengths, p.max_query_len, p.max_seq_len))

    impl = PagedAttentionImpl(1, 1, 1.0, 1)
    kernels = SimpleNamespace(paged_attention=paged_attention)
    monkeypatch.setitem(vars(current_platform), "kernels", kernels)
    query = torch.arange(77.0).view(77, 1, 1)
    impl.forward(query, torch.empty(0), metadata, torch.empty_like(query))
    decode, prefill = calls
    # A decode's work is sized by the model's bound, so its bits do not depend on its neighbours.
    assert decode == ([0.0, 1.0], [9, 30], [0, 1, 2], 1, 512)
    assert prefill == (list(map(float, range(2, 77))), [5, 134], [0, 5, 75], 70, 134)


@pytest.mark.parametrize("asked", ["FLASHINFER", "flashinfer"])
def test_a_backend_that_cannot_run_here_is_an_error(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(attention_backend=asked)
    monkeypatch.setattr(selector, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(selector, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    with pytest.raises(ValueError, match="needs a CUDA device; use PAGED"):
        selector.get_attn_backend(128, torch.bfloat16)


def test_a_backend_that_plans_on_the_host_runs_without_a_drafter_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flashinfer = ModuleType("flashinfer")
    flashinfer.__spec__ = ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.delitem(sys.modules, "vllm.v1.attention.backends.flashinfer", raising=False)
    monkeypatch.setattr(selector, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    config = SimpleNamespace(attention_backend="FLASHINFER", drafter=None)
    monkeypatch.setattr(selector, "get_current_vllm_config", lambda: config)
    assert selector.get_attn_backend(128, torch.bfloat16).name == "FLASHINFER"
    config.drafter = ReplaySettings(num_speculative_tokens=3)
    with pytest.raises(ValueError, match="FLASHINFER plans.*with a drafter.*use PAGED"):
        selector.get_attn_backend(128, torch.bfloat16)
    config.attention_backend = "PAGED"
    assert selector.get_attn_backend(128, torch.bfloat16) is PagedAttentionBackend


def test_unknown_names_list_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(attention_backend="FLASH_ATTN")
    monkeypatch.setattr(selector, "get_current_vllm_config", lambda: config)
    with pytest.raises(ValueError, match="PAGED, FLASHINFER"):
        selector.get_attn_backend(128, torch.bfloat16)
    config.attention_backend = "my_package.plain.Plain"
    with pytest.raises(ValueError, match="--attention-backend: cannot import 'my_package.*PYTHONP"):
        selector.get_attn_backend(128, torch.bfloat16)
    with pytest.raises(ValueError, match="gdn_attn"):
        selector.get_mamba_attn_backend("linear_attention")
    assert selector.get_mamba_attn_backend("gdn_attn") is GDNAttentionBackend
    assert selector.get_mamba_attn_backend("kda_attn") is GDNAttentionBackend
