# SPDX-License-Identifier: Apache-2.0
"""The smaller example of docs/adding_a_layer_kind.md: a recurrent mixer with its own state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model_executor.harness import MAX_MODEL_LEN, Chunk, Harness
from tests.tiny_models import tiny_model
from vllm import ModelRegistry
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.engine.resolve import resolve
from vllm.kernels.journal import JournalStack
from vllm.model_executor.layers.attention_layer_base import KeepsJournal
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.recurrent_mixer import RecurrentMixer
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.interfaces import IsHybrid
from vllm.v1.attention.backends.gdn_attn import PrefillBatch
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum

DECAY = 0.9


class MovingAverage(RecurrentMixer):
    """`h_t = 0.9 h_(t-1) + 0.1 x_t` per channel; keeps `h [hidden]` of each sequence."""

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, hidden_size: int, prefix: str) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.layer_name = prefix

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.hidden_size,),)

    def state_dtypes(self, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        out = torch.empty_like(x)
        self.mix(out, x)
        return out

    def decode(self, blocks: Tensor, out: Tensor, *tokens: Tensor) -> None:
        (x,), (state,) = tokens, self.kv_cache
        # A row without a block takes the null block, and writes what is there.
        at, is_request = blocks.clamp(min=0).long(), (blocks >= 0)[:, None]
        before = state[at]
        out[:] = DECAY * before + (1 - DECAY) * x
        state[at] = torch.where(is_request, out, before)

    def prefill(self, batch: PrefillBatch, out: Tensor, *tokens: Tensor) -> None:
        (x,), (state,) = tokens, self.kv_cache
        starts = batch.query_start_loc.tolist()
        for i, index in enumerate(batch.state_indices.tolist()):
            if index < 0:
                continue
            h = state[index] if batch.has_initial_state[i] else torch.zeros_like(state[index])
            for t in range(starts[i], starts[i + 1]):
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


class AverageForCausalLM(DecoderForCausalLM, IsHybrid):
    layer_class = AverageLayer


def harness_of(model_class: type[DecoderForCausalLM]) -> Harness:
    ModelRegistry.register_model(model_class.__name__, model_class)
    model = ModelConfig(
        model=str(tiny_model("llama")),
        dtype=torch.float32,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        hf_overrides={"architectures": [model_class.__name__]},
    )
    config = resolve(VllmConfig(model_config=model, load_config=LoadConfig(load_format="dummy")))
    return Harness(tiny_model("llama"), config=config)


@pytest.fixture
def harness() -> Harness:
    return harness_of(AverageForCausalLM)


def test_state_is_bound_and_carried(harness: Harness) -> None:
    """Chunks, decodes and a batch of both give the logits of one pass."""
    ids = list(range(20, 50))
    whole = harness.logits([Chunk(0, 0, ids)])
    harness.logits([Chunk(1, 0, ids[:11])])
    rest = harness.logits([Chunk(1, 11, ids[11:29])])
    torch.testing.assert_close(rest, whole[11:29])
    mixed = harness.logits([Chunk(1, 29, ids[29:]), Chunk(2, 0, ids)])
    torch.testing.assert_close(mixed, torch.cat([whole[29:], whole]))


def test_absent_prefills_write_nothing() -> None:
    """A step that replays a graph has such sequences, empty and without a block."""
    layer = MovingAverage(2, "mixer")
    layer.kv_cache = (torch.ones(4, 2),)
    starts, blocks = torch.tensor([0, 1, 1]), torch.tensor([2, -1])
    absent = torch.zeros(2, 2, dtype=torch.int32)
    batch = PrefillBatch(slice(0, 1), blocks, torch.tensor([False, False]), starts, absent, starts)
    layer.prefill(batch, torch.empty(1, 2), torch.zeros(1, 2))
    torch.testing.assert_close(layer.kv_cache[0][:, 0], torch.tensor([1.0, 1.0, 0.0, 1.0]))


class JournalledAverage(MovingAverage, KeepsJournal):
    """Its state is not what a journal can replay."""

    @staticmethod
    def commit(stack: JournalStack, entries: Tensor) -> None:
        """Nothing."""


def test_a_state_that_no_journal_has_is_named(harness: Harness) -> None:
    layer = JournalledAverage(2, "mixer")
    with pytest.raises(ValueError, match=r"JournalledAverage keeps \[2\] float32.*KeepsJournal"):
        layer.journal_shape(layer.get_kv_cache_spec(harness.config))


class Undeclared(DecoderForCausalLM):
    """Not marked as `IsHybrid`."""

    layer_class = AverageLayer


def test_a_model_with_recurrent_layers_says_so() -> None:
    with pytest.raises(ValueError, match=r"Undeclared .*MovingAverage.*IsHybrid"):
        harness_of(Undeclared)


def test_rows_without_a_request_write_nothing() -> None:
    layer = MovingAverage(2, "mixer")
    layer.kv_cache = (torch.ones(4, 2),)
    out = torch.empty(3, 2)
    layer.decode(torch.tensor([1, -1, -1], dtype=torch.int32), out, torch.zeros(3, 2))
    torch.testing.assert_close(layer.kv_cache[0][:, 0], torch.tensor([1.0, DECAY, 1.0, 1.0]))


def test_layers_of_a_kind_share_a_spec(harness: Harness) -> None:
    specs = {layer.get_kv_cache_spec(harness.config) for layer in harness.layers.values()}
    assert len(harness.layers) == 4 and len(specs) == 1


class ReturningAverage(MovingAverage):
    """Gives its output back, as most layers do."""

    def decode(self, blocks: Tensor, out: Tensor, *tokens: Tensor) -> Tensor:  # type: ignore[override]
        return tokens[0] + 1


class ReturningLayer(AverageLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        self.mixer = ReturningAverage(self.mixer.hidden_size, f"{prefix}.mixer")


class ReturningForCausalLM(AverageForCausalLM):
    layer_class = ReturningLayer


def test_an_output_that_is_returned_is_not_filled_in() -> None:
    harness = harness_of(ReturningForCausalLM)
    harness.logits([Chunk(0, 0, [20, 21])])
    says = "layers.0.mixer: ReturningAverage.decode returned a Tensor; it has to fill `out`"
    with pytest.raises(TypeError, match=says):
        harness.logits([Chunk(0, 2, [22])])


class BareDtype(MovingAverage):
    def state_dtypes(self, vllm_config: VllmConfig) -> torch.dtype:  # type: ignore[override]
        return torch.float32


def test_a_bare_dtype_is_named(harness: Harness) -> None:
    with pytest.raises(ValueError, match=r"float32 are no tuple .* as \(torch.float32,\)"):
        BareDtype(2, "mixer").get_kv_cache_spec(harness.config)
