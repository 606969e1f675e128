# SPDX-License-Identifier: Apache-2.0
"""The layer's parameters, its shards and what it tells the engine."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compilation.fake_graphs import Tape
from tests.model_executor.harness import make_config
from tests.model_executor.layers.mixer_steps import run
from tests.model_executor.layers.ranks import as_rank
from tests.tiny_models import tiny_model
from vllm.compilation.piecewise import capture
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.exceptions import VLLMValidationError
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode
from vllm.model_executor.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetShape
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.model_executor.models.weights import AutoWeightsLoader
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import PrefillBatch
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="builds layers on the CPU")

SHAPE = GatedDeltaNetShape(
    hidden_size=32,
    num_k_heads=2,
    num_v_heads=4,
    head_k_dim=8,
    head_v_dim=12,
    conv_kernel_size=4,
    eps=1e-6,
)
KEY, VALUE = SHAPE.key_dim, SHAPE.value_dim


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    config = make_config(tiny_model("qwen3_5"))
    with set_current_vllm_config(config):
        yield config


def checkpoint() -> dict[str, Tensor]:
    shapes = {
        "in_proj_qkv.weight": (2 * KEY + VALUE, 32),
        "in_proj_z.weight": (VALUE, 32),
        "in_proj_b.weight": (4, 32),
        "in_proj_a.weight": (4, 32),
        "conv1d.weight": (2 * KEY + VALUE, 1, 4),
        "A_log": (4,),
        "dt_bias": (4,),
        "norm.weight": (12,),
        "out_proj.weight": (32, VALUE),
    }
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(*shape, generator=generator, dtype=torch.float32) * 0.5
        for name, shape in shapes.items()
    }


def build(prefix: str, rank: int, size: int) -> GatedDeltaNet:
    with as_rank(rank, size):
        layer = GatedDeltaNet(SHAPE, prefix)
    AutoWeightsLoader(layer, fused=GatedDeltaNet.CHECKPOINT_NAMES).load_weights(
        checkpoint().items()
    )
    return layer


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_sum_to_the_whole_layer(ranks: int, config: VllmConfig) -> None:
    """q, k, v and the convolution are cut per section and head; partial outputs add up. Four ranks
    have copies of two key heads."""
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    whole = run(build("whole", 0, 1), config, hidden, decodes=2)
    layers = [build(f"part{rank}", rank, ranks) for rank in range(ranks)]
    parts = [run(layer, config, hidden, decodes=2) for layer in layers]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(parts[0], whole, atol=1e-3)


def test_convolution_shard_is_cut_per_section(config: VllmConfig) -> None:
    loaded = checkpoint()["conv1d.weight"][:, 0]
    q, k, v = loaded.split([KEY, KEY, VALUE])
    shard = build("layer", 1, 2).conv1d.weight
    expected = torch.cat([q[KEY // 2 :], k[KEY // 2 :], v[VALUE // 2 :]])
    assert torch.equal(shard, expected)
    third = build("other", 2, 4).conv1d.weight
    expected = torch.cat([q[KEY // 2 :], k[KEY // 2 :], v[VALUE // 2 : VALUE * 3 // 4]])
    assert torch.equal(third, expected)


def test_heads_that_ranks_cannot_share_are_refused(config: VllmConfig) -> None:
    for shape, ranks, what in (
        (replace(SHAPE, num_k_heads=3, num_v_heads=12), 2, "3 recurrent key heads"),
        (SHAPE, 3, "2 recurrent key heads"),
        (SHAPE, 8, "4 recurrent value heads"),
    ):
        with pytest.raises(VLLMValidationError, match=what):
            shape.state_shape(ranks)
        with as_rank(0, ranks), pytest.raises(VLLMValidationError, match=what):
            GatedDeltaNet(shape, what)


def test_decays_stay_fp32_in_a_16_bit_model(config: VllmConfig) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = build("layer", 0, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert torch.equal(layer.A_log, checkpoint()["A_log"])
    assert layer.in_proj.weight.dtype == layer.norm.weight.dtype == torch.bfloat16


def test_state_spec(config: VllmConfig) -> None:
    spec = GatedDeltaNet(SHAPE, "layer").get_kv_cache_spec(config)
    assert spec.shapes == ((3, 2 * KEY + VALUE), (4, 12, 8))
    assert spec.dtypes == (torch.float32, torch.float32)
    assert spec.block_size == config.model_config.max_model_len
    assert spec.mamba_type is MambaAttentionBackendEnum.GDN_ATTN
    with as_rank(0, 2):
        sharded = GatedDeltaNet(SHAPE, "other").get_kv_cache_spec(config)
    assert sharded.shapes == ((3, KEY + VALUE // 2), (2, 12, 8))
    with as_rank(3, 4):
        layer = GatedDeltaNet(SHAPE, "copies")
    spec = layer.get_kv_cache_spec(config)
    assert spec.shapes == ((3, KEY + VALUE // 4), (1, 12, 8))
    shape = layer.journal_shape(spec)
    assert (shape.num_k_heads, shape.num_v_heads, shape.channels) == (1, 1, KEY + VALUE // 4)


def test_state_dtypes() -> None:
    choose = MambaStateDtypeCalculator.gated_delta_net_state_dtype
    assert choose(torch.bfloat16, "auto", "auto") == (torch.bfloat16, torch.float32)
    assert choose(torch.bfloat16, "float32", "bfloat16") == (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="mamba_ssm_cache_dtype='int8'; supported: auto, float32"):
        choose(torch.bfloat16, "auto", "int8")


@pytest.mark.parametrize("connected", [None, "stores rows", "acts on every layer"])
def test_graphs_hold_the_layer_unless_a_connector_loads_first(
    config: VllmConfig, connected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes over all rows that may be some, prefills over all rows, then the norm."""
    acts = connected == "acts on every layer"
    tape, calls = Tape(), []

    def decode(p: GdnDecode) -> None:
        rows = (len(p.qkv), p.state_indices.tolist())
        tape.launch(lambda: calls.append(rows))

    connector = SimpleNamespace(
        has_connector_metadata=lambda: True,
        wait_for_layer_load=lambda name: calls.append("wait"),
        save_kv_layer=lambda *_: calls.append("save"),
    )
    kernels = SimpleNamespace(
        gdn_decode=decode,
        causal_conv1d=lambda x, *_, **__: tape.launch(lambda: calls.append(len(x))),
        gdn_prefill=lambda p: None,
        gated_rms_norm=lambda x, *_: tape.launch(lambda: calls.append("norm")),
    )
    slot = kv_transfer_state.current_slot()
    monkeypatch.setattr(slot, "connector", connector if connected else None)
    monkeypatch.setattr(slot, "acts_on_every_layer", acts)
    layer = build("layer", 0, 1)
    layer.kv_cache = (torch.zeros(0), torch.zeros(0))
    monkeypatch.setitem(vars(current_platform), "kernels", kernels)
    one = torch.zeros(1)
    metadata = SimpleNamespace(batch=PrefillBatch(slice(0, 6), one, one, one, one, one))
    blocks = torch.tensor([3, -1], dtype=torch.int32)
    qkv, gates, z = torch.zeros(6, 2 * KEY + VALUE), torch.zeros(6, 4), torch.zeros(6, VALUE)

    def captured(only_decodes: bool, split: bool) -> list[Any]:
        context = ForwardContext(
            {}, {"layer": metadata}, decode_blocks={"layer": blocks}, only_decodes=only_decodes
        )
        with set_forward_context(context):
            pieces, _ = capture(
                lambda: layer.mixed(qkv, z, gates, gates),
                tape.new_graph,
                split=split,
                alias=lambda tensor: tensor,
            )
            calls.clear()
            pieces.replay()
        return calls

    mixed = [(2, [3, -1]), 6]
    found = captured(only_decodes=False, split=True)
    assert found == (["wait", *mixed, "save", "norm"] if acts else [*mixed, "norm"])
    assert [len(graph.calls) for graph in tape.graphs] == ([0, 1] if acts else [3])
    if not acts:
        assert captured(only_decodes=True, split=False) == mixed[:1]
