# SPDX-License-Identifier: Apache-2.0
"""The smaller example of docs/adding_a_layer_kind.md: a recurrent mixer with its own state."""

from __future__ import annotations

from functools import partial

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
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaAttentionBackendEnum, MambaSpec

DECAY = 0.9


class MovingAverage(nn.Module, AttentionLayerBase):
    """`h_t = 0.9 h_(t-1) + 0.1 x_t` per channel; keeps `h [hidden]` of each sequence."""

    def __init__(self, hidden_size: int, prefix: str) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.layer_name = prefix

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return MambaSpec(
            block_size=vllm_config.model_config.max_model_len,
            shapes=((self.hidden_size,),),
            dtypes=(torch.float32,),
            mamba_type=MambaAttentionBackendEnum.LINEAR,
        )

    def get_attn_backend(self) -> type[GDNAttentionBackend]:
        return GDNAttentionBackend

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        out = torch.empty_like(x)
        self.average(x, out)
        return out

    @graph_break
    def average(self, x: Tensor, out: Tensor) -> None:
        """Decodes come first, then prefills; rows of `out` past them are padding."""
        metadata: GDNAttentionMetadata = self.metadata()
        (state,) = self.kv_cache
        decodes = metadata.num_decodes
        carried = state[metadata.state_indices[:decodes].long()]
        decoded = DECAY * carried + (1 - DECAY) * x[:decodes]
        state[metadata.state_indices[:decodes].long()] = decoded
        out[:decodes] = decoded
        starts = decodes + metadata.prefill_query_start_loc
        for i, index in enumerate(metadata.prefill_state_indices.tolist()):
            h = state[index] if metadata.has_initial_state[i] else torch.zeros_like(state[index])
            for t in range(int(starts[i]), int(starts[i + 1])):
                h = DECAY * h + (1 - DECAY) * x[t]
                out[t] = h
            state[index] = h


class AverageLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.mixer = MovingAverage(config.hidden_size, f"{prefix}.mixer")
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.mixer(hidden_states)


class AverageForCausalLM(DecoderForCausalLM):
    def _init_model(
        self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] | None = None
    ) -> DecoderModel:
        config = vllm_config.model_config.hf_text_config
        return DecoderModel(config, partial(AverageLayer, vllm_config), RMSNorm, prefix)


@pytest.fixture
def harness() -> Harness:
    ModelRegistry.register_model("AverageForCausalLM", AverageForCausalLM)
    model = ModelConfig(
        model=str(tiny_model("llama")),
        dtype=torch.float32,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        hf_overrides={"architectures": ["AverageForCausalLM"]},
    )
    config = resolve(VllmConfig(model_config=model, load_config=LoadConfig(load_format="dummy")))
    return Harness(tiny_model("llama"), config=config)


def test_state_is_bound_and_carried(harness: Harness) -> None:
    """Chunks, decodes and a batch of both give the logits of one pass."""
    ids = list(range(20, 50))
    whole = harness.logits([Chunk(0, 0, ids)])
    harness.logits([Chunk(1, 0, ids[:11])])
    rest = harness.logits([Chunk(1, 11, ids[11:29])])
    torch.testing.assert_close(rest, whole[11:29])
    mixed = harness.logits([Chunk(1, 29, ids[29:]), Chunk(2, 0, ids)])
    torch.testing.assert_close(mixed, torch.cat([whole[29:], whole]))


def test_layers_of_a_kind_share_a_spec(harness: Harness) -> None:
    specs = {layer.get_kv_cache_spec(harness.config) for layer in harness.layers.values()}
    assert len(harness.layers) == 4 and len(specs) == 1
