# SPDX-License-Identifier: Apache-2.0
"""A decoder of Mamba2 and attention, served: its outputs are transformers' layers', whatever
happens to a request and whatever drafts it verifies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mixer_decoders import (
    expect_equal_with_and_without_drafts,
    expect_own_drafts_accepted,
    make_checkpoint,
)
from parity_checks import MakeEngine, core_in_this_process, one_stage
from test_drafts import Run, a_conversation, batches, preemptions
from tiny_models import hf_model, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)

from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba2 import Mamba2, Mamba2Shape
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
from vllm.model_executor.models.utils import extract_layer_index

pytestmark = [pytest.mark.parity, one_stage, core_in_this_process]

SHAPE = Mamba2Shape(
    hidden_size=64,
    num_heads=8,
    head_dim=16,
    state_size=24,
    num_groups=2,
    conv_kernel_size=4,
    eps=1e-5,
    norm_groups=2,
    dt_limit=(0.05, 2.0),
)
#: the other layers of the four are attention
RECURRENT = (0, 2)


class Mamba2DecoderLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Mamba2(SHAPE, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, prefix=f"{prefix}.mlp")

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.self_attn(hidden_states)


def _layer(vllm_config: VllmConfig, prefix: str = "") -> DecoderLayer:
    recurrent = extract_layer_index(prefix) in RECURRENT
    return (Mamba2DecoderLayer if recurrent else Qwen3DecoderLayer)(vllm_config, prefix)


class Mamba2ForCausalLM(DecoderForCausalLM, IsHybrid):
    layer_class = _layer


class ReferenceMixer(nn.Module):
    """transformers' layer in the place of an attention layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        config: Any = SimpleNamespace(
            hidden_size=SHAPE.hidden_size,
            mamba_n_heads=SHAPE.num_heads,
            mamba_d_head=SHAPE.head_dim,
            mamba_d_state=SHAPE.state_size,
            mamba_n_groups=SHAPE.num_groups,
            mamba_d_conv=SHAPE.conv_kernel_size,
            mamba_expand=SHAPE.width / SHAPE.hidden_size,
            mamba_chunk_size=32,
            mamba_conv_bias=True,
            mamba_proj_bias=False,
            hidden_act="silu",
            rms_norm_eps=SHAPE.eps,
            time_step_limit=SHAPE.dt_limit,
            layer_types=["mamba"],
        )
        self.layer = GraniteMoeHybridMambaLayer(config, 0)
        # Before transformers 5.23 Granite's own norm has no groups.
        self.layer.norm = FalconH1RMSNormGated(
            SHAPE.width, SHAPE.eps, n_groups=SHAPE.norm_groups, norm_before_gate=False
        )
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.layer.named_parameters():
            uniform = torch.rand(param.shape, generator=generator)
            decays = name.endswith(("A_log", "dt_bias"))
            # Decays near 1, so that the state matters; see tiny_models.
            scale = 0.15 if param.dim() == 2 else 0.7
            param.data = uniform * 2 - 3 if decays else (uniform * 2 - 1) * scale
            if name == "norm.weight":
                param.data += 1

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return self.layer(hidden_states), None


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    model = copy.deepcopy(hf_model(tiny_model("qwen3")))
    for i in RECURRENT:
        model.model.layers[i].self_attn = ReferenceMixer(seed=i)
    return model


@pytest.fixture(scope="module")
def checkpoint(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ModelRegistry.register_model("Mamba2ForCausalLM", Mamba2ForCausalLM)
    layers = reference.model.layers
    mixers = {i: layers[i].self_attn.layer.state_dict() for i in RECURRENT}
    return make_checkpoint(tmp_path_factory.mktemp("mamba2"), "Mamba2ForCausalLM", mixers)


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
    expect_equal_with_and_without_drafts(
        scenario, checkpoint, reference, make_engine, methods=("replay",)
    )


def test_its_drafts_for_itself_are_all_accepted(
    checkpoint: Path, reference: PreTrainedModel, make_engine: MakeEngine
) -> None:
    """As a draft model it takes back what it drafted, states and convolutions."""
    expect_own_drafts_accepted(checkpoint, reference, make_engine, prompt_len=50)
