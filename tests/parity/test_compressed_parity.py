# SPDX-License-Identifier: Apache-2.0
"""A decoder of compressed attention, served: its outputs are those of the layers of transformers,
whatever happens to a request and whatever drafts it verifies."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_scenarios import Run, a_conversation, batches, preemptions
from mixer_decoders import (
    expect_equal_with_and_without_drafts,
    expect_own_drafts_accepted,
    make_checkpoint,
)
from parity_checks import (
    LAYOUT,
    MakeEngine,
    assert_equals,
    core_in_this_process,
    generate,
    one_stage,
    prompts,
)
from tiny_models import hf_model, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4RotaryEmbedding,
)

from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.compressed_attention import (
    CompressedAttention,
    CompressedAttentionShape,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.utils import extract_layer_index

pytestmark = [
    pytest.mark.parity,
    one_stage,
    core_in_this_process,
    pytest.mark.skipif(LAYOUT.tp > 2, reason="no more ranks can share two groups of the output"),
]

RATIOS = (0, 4, 128, 4)
THEIRS = DeepseekV4Config(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    max_position_embeddings=4096,
    compress_ratios=[*RATIOS, 0],
    sliding_window=16,
    o_groups=2,
    o_lora_rank=16,
    index_n_heads=32,
    index_head_dim=16,
    index_topk=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling={
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
)
THEIRS._attn_implementation = "eager"
#: transformers' names -> the release's
NAMES = {
    r"^sinks": "attn_sink",
    r"^compressor\.indexer\.scorer\.": "indexer.",
    r"^compressor\.indexer\.q_b_proj": "indexer.wq_b",
    r"^compressor\.indexer\.": "indexer.compressor.",
    r"^q_a_norm": "q_norm",
    r"^q_a_proj": "wq_a",
    r"^q_b_proj": "wq_b",
    r"^o_a_proj": "wo_a",
    r"^o_b_proj": "wo_b",
    r"compressor\.kv_norm": "compressor.norm",
    r"gate_proj": "wgate",
    r"kv_proj": "wkv",
    r"position_bias": "ape",
}


class CompressedDecoderLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        ratio = RATIOS[extract_layer_index(prefix)]
        shape = CompressedAttentionShape(
            hidden_size=64,
            num_heads=4,
            head_dim=32,
            rotary_dim=8,
            query_low_rank=24,
            output_groups=2,
            output_low_rank=16,
            window=16,
            ratio=ratio,
            index_heads=32,
            index_dim=16,
            index_topk=8,
            eps=1e-6,
        )
        rope = {"rope_theta": 10000.0}
        if ratio:
            rope = {
                "rope_type": "yarn",
                "rope_theta": 160000.0,
                "factor": 16,
                "original_max_position_embeddings": 256,
                "attention_factor": 1.0,
            }
        rotary_emb = get_rope(8, 1024, rope_parameters=rope)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = CompressedAttention(shape, rotary_emb, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, prefix=f"{prefix}.mlp")

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.self_attn(positions, hidden_states)


class CompressedForCausalLM(DecoderForCausalLM):
    layer_class = CompressedDecoderLayer


class ReferenceAttention(nn.Module):
    """transformers' layer in the place of another, over whole sequences."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = DeepseekV4Attention(THEIRS, index)
        self.rotary_emb = DeepseekV4RotaryEmbedding(THEIRS)
        generator = torch.Generator().manual_seed(index)
        for name, param in self.layer.named_parameters():
            drawn = torch.randn(param.shape, generator=generator)
            scale = 0.5 if param.dim() == 1 or "position_bias" in name else param.shape[1] ** -0.5
            param.data = drawn * scale
            if "norm" in name:
                param.data = 1 + 0.3 * drawn
        self.eval()

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        length = hidden_states.shape[1]
        positions = torch.arange(length)[None]
        angles = {
            kind: self.rotary_emb(hidden_states, positions, layer_type=kind)
            for kind in ("main", "compress")
        }
        behind = positions[0][:, None] - positions
        hidden = (behind < 0) | (behind >= THEIRS.sliding_window)
        mask = torch.zeros(1, 1, length, length).masked_fill(hidden, float("-inf"))
        return self.layer(hidden_states, angles, positions, mask)[0], None

    def tensors(self) -> dict[str, Tensor]:
        """As the release checkpoint names them."""
        named = {}
        for name, value in self.layer.state_dict().items():
            if "rotary_emb" in name:
                continue
            for pattern, ours in NAMES.items():
                name = re.sub(pattern, ours, name)
            named[name] = value.contiguous()
        return named


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    model = copy.deepcopy(hf_model(tiny_model("qwen3")))
    for i in range(len(RATIOS)):
        model.model.layers[i].self_attn = ReferenceAttention(i)
    return model


@pytest.fixture(scope="module")
def checkpoint(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ModelRegistry.register_model("CompressedForCausalLM", CompressedForCausalLM)
    layers = enumerate(reference.model.layers)
    mixers = {i: layer.self_attn.tensors() for i, layer in layers}
    return make_checkpoint(tmp_path_factory.mktemp("compressed"), "CompressedForCausalLM", mixers)


@pytest.mark.parametrize(
    "scenario", [batches, a_conversation, preemptions], ids=lambda f: f.__name__
)
def test_outputs_are_those_of_transformers_with_and_without_drafts(
    scenario: Callable[[Run], None],
    checkpoint: Path,
    reference: PreTrainedModel,
    make_engine: MakeEngine,
) -> None:
    """In chunks, from cached prefixes, after preemptions, one token or four at a time."""
    expect_equal_with_and_without_drafts(scenario, checkpoint, reference, make_engine)


def test_cached_prefixes_end_where_the_largest_block_does(
    checkpoint: Path, reference: PreTrainedModel, make_engine: MakeEngine
) -> None:
    """128 tokens are one entry of the coarsest layer; the sanitizer looks at every row."""
    llm = make_engine(
        "qwen3", model=str(checkpoint), enable_prefix_caching=True, sanitize=True, block_size=16
    )
    shared, one, other = prompts((290, 30, 40))
    for tail in (one, other):
        (output,) = generate(llm, [shared + tail], max_tokens=20)
        assert_equals(output, reference)
    assert output.num_cached_tokens == 256


def test_its_drafts_for_itself_are_all_accepted(
    checkpoint: Path, reference: PreTrainedModel, make_engine: MakeEngine
) -> None:
    """As a draft model it computes what it drafted again, entries included."""
    expect_own_drafts_accepted(checkpoint, reference, make_engine, prompt_len=120, family="qwen3")
