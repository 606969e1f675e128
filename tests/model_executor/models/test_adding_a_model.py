# SPDX-License-Identifier: Apache-2.0
"""The walk-through of docs/adding_a_model.md, done: a family in one file, registered by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.model_executor.harness import MAX_MODEL_LEN, Chunk, Harness
from tests.model_executor.layers.ranks import as_rank
from tests.tiny_models import hf_reference_generate, hf_reference_logits, tiny_model
from vllm import ModelRegistry
from vllm.config import LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.distributed.utils import per_rank
from vllm.engine.resolve import resolve
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.llama import LlamaForCausalLM


class PlainAttention(nn.Module):
    """Separate projections and the plain attention entry, as many models outside are written."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        hidden, head_dim = config.hidden_size, config.head_dim
        kv_size = config.num_key_value_heads * head_dim
        num_ranks = get_tensor_model_parallel_world_size()
        self.q_proj = ColumnParallelLinear(hidden, config.num_attention_heads * head_dim, False)
        self.k_proj = ColumnParallelLinear(hidden, kv_size, False)
        self.v_proj = ColumnParallelLinear(hidden, kv_size, False)
        self.o_proj = RowParallelLinear(config.num_attention_heads * head_dim, hidden, False)
        self.rotary_emb = get_rope(
            head_dim,
            vllm_config.model_config.max_model_len,
            rope_parameters=config.rope_parameters,
        )
        self.attn = Attention(
            per_rank("attention heads", config.num_attention_heads, num_ranks),
            head_dim,
            head_dim**-0.5,
            per_rank("key/value heads", config.num_key_value_heads, num_ranks),
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        q, _ = self.q_proj(hidden_states)
        k, _ = self.k_proj(hidden_states)
        v, _ = self.v_proj(hidden_states)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v))
        return out


class ExampleLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = PlainAttention(vllm_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.self_attn(positions, hidden_states)


class ExampleForCausalLM(DecoderForCausalLM):
    fused_names = (("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1))
    layer_class = ExampleLayer


def config_of(path: Path, architecture: str) -> VllmConfig:
    model = ModelConfig(
        model=str(path),
        dtype=torch.float32,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        hf_overrides={"architectures": [architecture]},
    )
    return resolve(VllmConfig(model_config=model, load_config=LoadConfig()))


@pytest.fixture
def path() -> Path:
    return tiny_model("llama")


@pytest.mark.parametrize("by_name", [True, False])
def test_registered_family_equals_transformers(path: Path, by_name: bool) -> None:
    """The plain entries (separate projections, rotation, cache write) serve as the fused ones."""
    given = f"{__name__}:ExampleForCausalLM" if by_name else ExampleForCausalLM
    ModelRegistry.register_model("ExampleForCausalLM", given)
    harness = Harness(path, config=config_of(path, "ExampleForCausalLM"))
    ids = list(range(60, 100))
    expected = hf_reference_logits(path, ids)
    found = harness.logits([Chunk(0, 0, ids)])
    assert float((found - expected).abs().max() / expected.std()) < 5e-5
    assert harness.generate(ids, 8, chunk_size=16, seq=1) == hf_reference_generate(path, ids, 8)


class ReadsMoreLayer(ExampleLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        self.size = vllm_config.model_config.hf_text_config.mixer_size


class ReadsMoreForCausalLM(ExampleForCausalLM):
    layer_class = ReadsMoreLayer


def test_a_field_that_the_config_has_not_is_named(path: Path) -> None:
    ModelRegistry.register_model("ReadsMoreForCausalLM", ReadsMoreForCausalLM)
    says = r"layers.0: 'LlamaConfig' object has no attribute 'mixer_size'; config.json has to give"
    with pytest.raises(ValueError, match=says):
        Harness(path, config=config_of(path, "ReadsMoreForCausalLM"))


def test_a_rank_has_its_heads(path: Path) -> None:
    config = config_of(path, "LlamaForCausalLM")
    with set_current_vllm_config(config), as_rank(0, 2):
        layer = PlainAttention(config, "layers.0.self_attn")
    sizes = config.model_config.hf_text_config
    assert (layer.attn.num_heads, layer.attn.num_kv_heads) == (
        sizes.num_attention_heads // 2,
        sizes.num_key_value_heads // 2,
    )


class ConstantModel(nn.Module):
    """Replaces the decoder under an existing head: stream k is the number k."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self.embed_tokens = nn.Embedding(self.config.vocab_size, self.config.hidden_size)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        like = torch.empty(len(input_ids), self.config.hidden_size)
        return like.fill_(9.0), [torch.full_like(like, i) for i in self.aux_hidden_state_layers]


class ConstantForCausalLM(LlamaForCausalLM):
    def _init_model(
        self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] | None = None
    ) -> ConstantModel:
        return ConstantModel(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: object) -> set[str]:
        return {name for name, _ in self.named_parameters()}


def test_model_hook_keeps_the_order_of_ids(path: Path) -> None:
    """A replaced decoder receives the ids as given; the head must not sort them."""
    ModelRegistry.register_model("ConstantForCausalLM", ConstantForCausalLM)
    harness = Harness(path, config=config_of(path, "ConstantForCausalLM"))
    harness.model.set_aux_hidden_state_layers((4, 2, 3))
    hidden, aux = harness.model(torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert hidden.unique().tolist() == [9.0]
    assert [a.unique().tolist() for a in aux] == [[4.0], [2.0], [3.0]]
