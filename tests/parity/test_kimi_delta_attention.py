# SPDX-License-Identifier: Apache-2.0
"""A decoder of Kimi delta attention and attention, served: its outputs are transformers' layers',
whatever happens to a request and whatever drafts it verifies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_scenarios import Run, a_conversation, batches, preemptions
from mixer_decoders import (
    expect_equal_with_and_without_drafts,
    expect_own_drafts_accepted,
    make_checkpoint,
)
from parity_checks import MakeEngine, core_in_this_process, one_stage
from tiny_models import hf_model, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.kimi_delta_attention import (
    KimiDeltaAttention,
    KimiDeltaAttentionShape,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
from vllm.model_executor.models.utils import extract_layer_index

pytestmark = [pytest.mark.parity, one_stage, core_in_this_process]

HEADS, DIM, TAPS, EPS = 4, 16, 4, 1e-5
#: the other layers of the four are attention
RECURRENT = (0, 2)


class KdaDecoderLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        shape = KimiDeltaAttentionShape(config.hidden_size, HEADS, DIM, TAPS, EPS)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = KimiDeltaAttention(shape, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, prefix=f"{prefix}.mlp")

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.self_attn(hidden_states)


def _layer(vllm_config: VllmConfig, prefix: str = "") -> DecoderLayer:
    recurrent = extract_layer_index(prefix) in RECURRENT
    return (KdaDecoderLayer if recurrent else Qwen3DecoderLayer)(vllm_config, prefix)


class KdaForCausalLM(DecoderForCausalLM, IsHybrid):
    fused_names = DecoderForCausalLM.fused_names + KimiDeltaAttention.CHECKPOINT_NAMES
    layer_class = _layer


class ReferenceMixer(nn.Module):
    """transformers' layer in the place of an attention layer."""

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        config: Any = SimpleNamespace(
            hidden_size=hidden_size,
            linear_num_heads=HEADS,
            linear_head_dim=DIM,
            linear_conv_kernel_dim=TAPS,
            hidden_act="silu",
            rms_norm_eps=EPS,
            layer_types=["linear_attention"],
        )
        self.layer = KimiLinearDeltaAttention(config, 0)
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.layer.named_parameters():
            uniform = torch.rand(param.shape, generator=generator)
            decays = name.endswith(("A_log", "dt_bias"))
            # Decays near 1, so that the state matters; see tiny_models.
            scale = 0.15 if param.dim() == 2 else 0.7
            param.data = uniform * 2 - 3 if decays else (uniform * 2 - 1) * scale
            if name == "o_norm.weight":
                param.data += 1

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return self.layer(hidden_states), None

    def tensors(self) -> dict[str, Tensor]:
        """As a Kimi-Linear checkpoint names them."""
        state = {k.removeprefix("forget_gate."): v for k, v in self.layer.state_dict().items()}
        parts = state.pop("conv1d.weight").chunk(3)
        return state | {f"{n}_conv1d.weight": part for n, part in zip("qkv", parts, strict=True)}


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    model = copy.deepcopy(hf_model(tiny_model("qwen3")))
    for i in RECURRENT:
        model.model.layers[i].self_attn = ReferenceMixer(model.config.hidden_size, seed=i)
    return model


@pytest.fixture(scope="module")
def checkpoint(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ModelRegistry.register_model("KdaForCausalLM", KdaForCausalLM)
    layers = reference.model.layers
    mixers = {i: layers[i].self_attn.tensors() for i in RECURRENT}
    return make_checkpoint(tmp_path_factory.mktemp("kda"), "KdaForCausalLM", mixers)


@pytest.mark.parametrize(
    "scenario", [batches, a_conversation, preemptions], ids=lambda f: f.__name__
)
def test_outputs_are_those_of_transformers_with_and_without_drafts(
    scenario: Callable[[Run], None],
    checkpoint: Path,
    reference: PreTrainedModel,
    make_engine: MakeEngine,
) -> None:
    """In chunks, from checkpoints of the state, after preemptions, one token or four at a time."""
    expect_equal_with_and_without_drafts(scenario, checkpoint, reference, make_engine)


def test_its_drafts_for_itself_are_all_accepted(
    checkpoint: Path, reference: PreTrainedModel, make_engine: MakeEngine
) -> None:
    """As a draft model it takes back what it drafted, states and convolutions."""
    expect_own_drafts_accepted(checkpoint, reference, make_engine, prompt_len=50)
