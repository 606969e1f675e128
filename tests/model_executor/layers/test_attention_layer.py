# SPDX-License-Identifier: Apache-2.0
"""What the attention layer keeps, and what it refuses."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.compilation.fake_graphs import Tape
from tests.model_executor.harness import BLOCK_SIZE, make_config
from tests.tiny_models import tiny_model
from vllm.compilation.piecewise import capture
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.kernels.rotary import RotaryProblem
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.platforms import current_platform
from vllm.v1.attention.backends.paged import PagedAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    config = make_config(tiny_model("qwen3_sliding"))
    with set_current_vllm_config(config):
        yield config


def test_specs(config: VllmConfig) -> None:
    full = Attention(4, 32, 1.0, 2, prefix="full").get_kv_cache_spec(config)
    assert full == FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    layer = Attention(4, 32, 1.0, per_layer_sliding_window=24, prefix="sliding")
    assert layer.get_kv_cache_spec(config) == SlidingWindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=4, head_size=32, dtype=torch.float32, sliding_window=24
    )


def test_qwen3_slides_where_the_config_says(config: VllmConfig) -> None:
    model = Qwen3ForCausalLM(vllm_config=config)
    windows = [layer.sliding_window for layer in model.modules() if isinstance(layer, Attention)]
    assert windows == [None, None, 24, 24]


def test_unknown_layer_type(config: VllmConfig) -> None:
    config.model_config.hf_text_config.layer_types[1] = "chunked_attention"
    with pytest.raises(ValueError, match="layer 1 has type 'chunked_attention'; supported"):
        Qwen3ForCausalLM(vllm_config=config)


@pytest.mark.parametrize(
    "option", [{"alibi_slopes": [1.0]}, {"logits_soft_cap": 30.0}, {"quant_config": object()}]
)
def test_refused_options(config: VllmConfig, option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} is not supported"):
        Attention(4, 32, 1.0, prefix="layer", **option)


def test_refused_cache_dtype(config: VllmConfig) -> None:
    config.cache_config.cache_dtype = "bfloat16"
    with pytest.raises(ValueError, match="'bfloat16' is not supported.*supported: auto, float32"):
        Attention(4, 32, 1.0, prefix="layer")


def test_backends_without_sinks_refuse_them(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = torch.zeros(4)
    assert Attention(4, 32, 1.0, prefix="layer", sinks=sinks).impl.sinks is sinks
    monkeypatch.setattr(PagedAttentionBackend, "supports_sinks", False)
    with pytest.raises(ValueError, match="PAGED has no attention sinks; use --attention-backend"):
        Attention(4, 32, 1.0, prefix="layer", sinks=sinks)


def test_tied_and_biased_llama() -> None:
    config = make_config(tiny_model("llama3_rope"))
    with set_current_vllm_config(config):
        model = LlamaForCausalLM(vllm_config=config)
    names = {name for name, _ in model.named_parameters()}
    assert "model.layers.0.self_attn.qkv_proj.bias" in names
    assert "model.layers.0.mlp.down_proj.bias" in names
    assert not any(name.startswith("lm_head") for name in names)
    assert model.lm_head is model.model.embed_tokens


@pytest.mark.parametrize("connected", [None, "stores rows", "acts on every layer"])
def test_graphs_hold_rotation_unless_a_connector_loads_first(
    config: VllmConfig, connected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay without a connector rotates in a graph and attends between two."""
    acts = connected == "acts on every layer"
    tape, calls = Tape(), []
    slots, query = torch.arange(3), torch.zeros(3, 4, 32)
    qkv = torch.arange(3.0 * 4 * 64 + 3 * 4 * 32).view(3, -1)

    def rotate(problem: RotaryProblem) -> torch.Tensor:
        assert problem.slot_mapping is slots
        tape.launch(lambda: calls.append("rotate"))
        return query

    def attend(*args: Any) -> None:
        tape.launch(lambda: calls.append("attend"))
        gate = qkv[:, :256].view(3, 4, 2, 32)[:, :, 1]
        assert args[0] is query and torch.equal(args[4], gate)

    connector = SimpleNamespace(
        has_connector_metadata=lambda: True,
        wait_for_layer_load=lambda name: calls.append("wait"),
        save_kv_layer=lambda *_: calls.append("save"),
    )
    slot = kv_transfer_state.current_slot()
    monkeypatch.setattr(slot, "connector", connector if connected else None)
    monkeypatch.setattr(slot, "acts_on_every_layer", acts)
    kernels = SimpleNamespace(qk_norm_rope_cache=rotate)
    monkeypatch.setitem(vars(current_platform), "kernels", kernels)
    layer = Attention(4, 32, 1.0, 2, prefix="layer")
    layer.impl = SimpleNamespace(forward=attend)
    with set_forward_context(ForwardContext({}, {"layer": None}, {"layer": slots})):
        pieces, out = capture(
            lambda: layer.forward_qkv(qkv, slots, query, gated=True),
            tape.new_graph,
            split=True,
            alias=lambda tensor: tensor,
        )
        calls.clear()
        pieces.replay()
    assert out.shape == (3, 4, 32)
    assert calls == (["wait", "rotate", "attend", "save"] if acts else ["rotate", "attend"])
    assert [len(graph.calls) for graph in tape.graphs] == ([0, 0] if acts else [1, 0])
