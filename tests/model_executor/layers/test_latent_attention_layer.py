# SPDX-License-Identifier: Apache-2.0
"""What a layer of latent attention keeps and refuses, how ranks share it, what a step launches."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.model_executor.harness import BLOCK_SIZE, Chunk, Harness, make_config
from tests.model_executor.layers.ranks import as_rank
from tests.tiny_models import hf_model, tiny_model
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.model_executor.layers.latent_attention import (
    LatentAttentionShape,
    MultiHeadLatentAttention,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.latent import LatentAttentionImpl, LatentAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

SHAPE = LatentAttentionShape(64, 4, nope_dim=16, shared_dim=8, value_dim=16, latent_dim=32)


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    config = make_config(tiny_model("kimi_linear"))
    with set_current_vllm_config(config):
        yield config


def test_it_keeps_one_row_per_token_whatever_the_ranks(config: VllmConfig) -> None:
    expected = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=40, dtype=torch.float32
    )
    for size in (1, 2, 4):
        with as_rank(0, size):
            layer = MultiHeadLatentAttention(SHAPE, "layer")
        assert layer.get_kv_cache_spec(config) == expected
        assert layer.num_heads == 4 // size
    assert config.model_config.use_mla and config.model_config.get_head_size() == 40
    assert config.model_config.get_num_kv_heads() == 1


def test_refusals(config: VllmConfig) -> None:
    with pytest.raises(ValueError, match="4 attention heads cannot be divided among 3"):
        with as_rank(0, 3):
            MultiHeadLatentAttention(SHAPE, "layer")
    config.attention_backend = "FLASHINFER"
    with pytest.raises(ValueError, match="FLASHINFER does not run latent attention"):
        MultiHeadLatentAttention(SHAPE, "layer")


@pytest.mark.parametrize("on_the_device", [True, False])
def test_a_float8_cache_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, on_the_device: bool
) -> None:
    """Another device would be of no help, so none is asked for."""
    monkeypatch.setattr(type(current_platform), "supports_fp8_cache", on_the_device)
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(ValueError, match="does not read a float8 cache; use --kv-cache-dtype auto"):
        MultiHeadLatentAttention(SHAPE, "layer")


@pytest.mark.parametrize("family", ["kimi_linear", "deepseek_v3"])
def test_norms_of_latents_have_an_epsilon_of_their_own(family: str) -> None:
    """The model's other norms may have another, which no output of a tiny model would show."""
    ours = Harness(tiny_model(family)).model.model.layers[1].self_attn
    theirs = hf_model(tiny_model(family)).model.layers[1].self_attn
    names = [name for name, _ in theirs.named_modules() if name.endswith("_a_layernorm")]
    assert len(names) == (2 if family == "deepseek_v3" else 1)
    for name in names:
        expected = theirs.get_submodule(name).variance_epsilon
        assert ours.get_submodule(name).variance_epsilon == expected


def test_ranks_add_up_to_the_whole_layer() -> None:
    """Each rank has its heads' parts of the projections and all of the latents."""
    harness = Harness(tiny_model("kimi_linear"))
    whole = harness.model.model.layers[1].self_attn
    hidden, seen = torch.randn(5, 64), {}

    def outputs(layer: Any) -> torch.Tensor:
        harness.layers[whole.layer_name] = layer
        layer.kv_cache = torch.full_like(whole.kv_cache, torch.nan)
        harness.model.forward = lambda ids, positions: layer(positions, hidden)
        out: torch.Tensor = harness.step([Chunk(0, 0, [1] * 5)])
        seen[id(layer)] = layer.kv_cache.nan_to_num()
        return out

    expected = outputs(whole)
    parts = []
    for rank in range(2):
        with set_current_vllm_config(harness.config):
            with as_rank(rank, 2):
                layer = MultiHeadLatentAttention(SHAPE, whole.layer_name)
        layer.o_proj.reduce_results = False
        for name, param in layer.named_parameters():
            loader = getattr(param, "weight_loader")  # noqa: B009
            loader(param, whole.get_parameter(name))
        parts.append(outputs(layer))
        assert torch.equal(seen[id(layer)], seen[id(whole)])
    torch.testing.assert_close(sum(parts), expected, rtol=1e-5, atol=1e-6)


def test_what_a_step_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes together, short prefills with their neighbours, long ones alone: no sequence's way
    depends on the others'."""
    problems: list[LatentAttentionProblem] = []
    kernels = SimpleNamespace(latent_attention=problems.append)
    monkeypatch.setitem(vars(current_platform), "kernels", kernels)
    lens = [(5, 5), (7, 90), (40, 40), (50, 60), (3, 3)]
    starts = torch.tensor([0, 5, 12, 52, 102, 105], dtype=torch.int32)
    contexts = np.array([30, 40, *(context for _, context in lens)])
    metadata = LatentAttentionMetadata(
        num_reqs=7,
        num_tokens=4 + 105,
        num_decodes=2,
        max_query_len=50,
        max_seq_len=90,
        query_start_loc_cpu=np.array([0, 2, 4, 9]),
        seq_lens_cpu=contexts,
        num_computed_tokens_cpu=contexts - [2, 2, *(query for query, _ in lens)],
        prefill_query_start_loc_cpu=starts.numpy(),
        block_table_cpu=np.zeros((7, 16), dtype=np.int32),
        decode_width=2,
        max_decode_len=256,
        query_start_loc=torch.tensor([0, 2, 4, 9], dtype=torch.int32),
        seq_lens=torch.tensor([30, 40], dtype=torch.int32),
        block_table=torch.zeros(7, 16, dtype=torch.int32),
        prefill_query_start_loc=starts,
        prefill_seq_lens=torch.tensor([context for _, context in lens], dtype=torch.int32),
        prefill_block_table=torch.zeros(5, 16, dtype=torch.int32),
        slot_mapping=torch.zeros(109, dtype=torch.int64),
        prefill_lens=lens,
    )
    query = torch.arange(112.0)[:, None, None].expand(-1, 4, 24)
    impl = LatentAttentionImpl(1.0, room=512)
    impl.forward(query, torch.zeros(4, 32, 32), torch.zeros(9, 16, 40), metadata, query[..., :16])
    found = [
        (
            int(p.query[0, 0, 0]),
            len(p.query),
            p.query_start_loc.tolist(),
            p.seq_lens.tolist(),
            p.max_query_len,
            p.max_seq_len,
        )
        for p in problems
    ]
    assert found == [
        (0, 4, [0, 2, 4], [30, 40], 2, 256),
        (4, 12, [0, 5, 12], [5, 90], 7, 90),
        (16, 40, [0, 40], [40], 40, 40),
        (56, 50, [0, 50], [60], 50, 60),
        (106, 3, [0, 3], [3], 3, 3),
    ]
    assert all(len(p.query) == len(p.out) and len(p.block_table) == p.num_seqs for p in problems)
