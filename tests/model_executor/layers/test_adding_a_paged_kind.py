# SPDX-License-Identifier: Apache-2.0
"""The paged example of docs/adding_a_layer_kind.md: rows of the last tokens, and a backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.model_executor.harness import MAX_MODEL_LEN, Chunk, Harness
from tests.tiny_models import tiny_model
from vllm import ModelRegistry
from vllm.compilation.graph_break import graph_break
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.engine.resolve import resolve
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.utils import gated_mlp
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

WINDOW = 8


class WindowBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """The layer needs no more than every group has."""

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common


class WindowBackend(AttentionBackend):
    name = "WINDOW_MEAN"

    @staticmethod
    def get_builder_cls() -> type[WindowBuilder]:
        return WindowBuilder


class WindowMean(nn.Module, AttentionLayerBase):
    """`o_t`: the mean of `x_(t-7)` to `x_t`; keeps a row `[hidden]` of each of these."""

    kv_cache: Tensor

    def __init__(self, hidden_size: int, prefix: str) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.layer_name = prefix

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> SlidingWindowMLASpec:
        return SlidingWindowMLASpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.hidden_size,
            dtype=torch.float32,
            sliding_window=WINDOW,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        return WindowBackend

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        out = torch.zeros_like(x)
        self.with_connector(self.run, out, x)
        return out

    @graph_break
    def run(self, out: Tensor, x: Tensor) -> None:
        """Write the step's rows, then read those that each of its tokens sees."""
        step: CommonAttentionMetadata = self.metadata()
        size = self.kv_cache.shape[1]
        slots = step.slot_mapping[: step.num_tokens]
        self.kv_cache[slots // size, slots % size] = x[: step.num_tokens]
        starts, ends = step.query_start_loc.tolist(), step.seq_lens.tolist()
        for i in range(step.num_reqs):
            for token in range(starts[i], starts[i + 1]):
                position = ends[i] - starts[i + 1] + token
                seen = torch.arange(max(0, position - WINDOW + 1), position + 1)
                blocks = step.block_table[i, seen // size].long()
                out[token] = self.kv_cache[blocks, seen % size].mean(0)


class WindowLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = WindowMean(config.hidden_size, f"{prefix}.mixer")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = gated_mlp(vllm_config, f"{prefix}.mlp")

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.mixer(hidden_states)


class WindowForCausalLM(DecoderForCausalLM):
    layer_class = WindowLayer


@pytest.fixture
def harness() -> Harness:
    ModelRegistry.register_model("WindowForCausalLM", WindowForCausalLM)
    model = ModelConfig(
        model=str(tiny_model("llama")),
        dtype=torch.float32,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        hf_overrides={"architectures": ["WindowForCausalLM"]},
    )
    config = resolve(VllmConfig(model_config=model, load_config=LoadConfig(load_format="dummy")))
    return Harness(tiny_model("llama"), config=config)


def test_rows_are_kept_over_chunks_and_decodes(harness: Harness) -> None:
    ids = list(range(20, 60))
    whole = harness.logits([Chunk(0, 0, ids)])
    harness.logits([Chunk(1, 0, ids[:11])])
    rest = harness.logits([Chunk(1, 11, ids[11:39])])
    torch.testing.assert_close(rest, whole[11:39])
    mixed = harness.logits([Chunk(1, 39, ids[39:]), Chunk(2, 0, ids)])
    torch.testing.assert_close(mixed, torch.cat([whole[39:], whole]))


def test_tokens_before_the_window_do_not_count(harness: Harness) -> None:
    """Four layers see 4 * 7 tokens back and no further."""
    ids = list(range(20, 60))
    other = [99, *ids[1:]]
    first, second = (harness.logits([Chunk(seq, 0, t)]) for seq, t in enumerate((ids, other)))
    torch.testing.assert_close(first[29:], second[29:])
    assert not torch.allclose(first[28], second[28])
