# SPDX-License-Identifier: Apache-2.0
"""Tensors of single experts: their names, and the one report of what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.model_executor.harness import get_model, make_config
from tests.tiny_models import tiny_model
from vllm.kernels.moe import RoutingRule
from vllm.model_executor.layers.gated_delta_net import GatedDeltaNetShape
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.router import Router
from vllm.model_executor.models.interfaces import VllmModel
from vllm.model_executor.models.qwen3_next import ungrouped
from vllm.model_executor.models.weights import AutoWeightsLoader, WeightsError
from vllm.model_executor.parameter import ExpertStack, WeightShapeError

FUSED = (("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1), *Router.CHECKPOINT_NAMES)


def toy(shared: int) -> nn.Module:
    """Three experts of 4 rows in `mlp`; a shared one of `shared` rows."""
    model = nn.Module()
    shape = MixtureShape(8, 4, 3, RoutingRule(1), shared_intermediate_size=shared)
    model.mlp = MixtureOfExperts(shape, "mlp")
    return model


def tensors(shared: int) -> dict[str, Tensor]:
    made = {"mlp.gate.weight": torch.randn(3, 8)}
    for expert, rows in [*((f"experts.{i}", 4) for i in range(3)), ("shared_expert", shared)]:
        made[f"mlp.{expert}.gate_proj.weight"] = torch.randn(rows, 8)
        made[f"mlp.{expert}.up_proj.weight"] = torch.randn(rows, 8)
        made[f"mlp.{expert}.down_proj.weight"] = torch.randn(8, rows)
    return made


def load(model: nn.Module, weights: dict[str, Tensor]) -> set[str]:
    loader = AutoWeightsLoader(model, fused=FUSED, stacked=Experts.CHECKPOINT_NAMES)
    return loader.load_weights(weights.items())


@pytest.mark.parametrize("shared", [4, 6])
def test_single_experts_find_their_places(shared: int) -> None:
    """A shared expert of the others' size is the last of the stack, another one a network."""
    model, weights = toy(shared), tensors(shared)
    assert load(model, weights) == {name for name, _ in model.named_parameters()}
    experts = model.mlp.experts
    names = [f"experts.{i}" for i in range(3)] + (["shared_expert"] if shared == 4 else [])
    assert len(experts.gate_up_proj) == len(names)
    for i, name in enumerate(names):
        gate, up, down = (
            weights[f"mlp.{name}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        assert torch.equal(experts.gate_up_proj[i], torch.cat([gate, up]))
        assert torch.equal(experts.down_proj[i], down)
    if shared == 6:
        network = model.mlp.shared_expert
        assert torch.equal(network.down_proj.weight, weights["mlp.shared_expert.down_proj.weight"])


def test_what_is_missing_or_too_much_is_listed_by_its_name() -> None:
    weights = tensors(4)
    del weights["mlp.experts.1.up_proj.weight"]
    del weights["mlp.shared_expert.down_proj.weight"]
    weights["mlp.experts.3.up_proj.weight"] = torch.zeros(4, 8)
    weights["mlp.experts.0.down_proj.weight"] = torch.zeros(8, 5)
    with pytest.raises(WeightsError) as caught:
        load(toy(4), weights)
    assert set(caught.value.problems) == {
        "missing: mlp.experts.1.up_proj.weight",
        "missing: mlp.shared_expert.down_proj.weight",
        "surplus: mlp.experts.3.up_proj.weight [4, 8]",
        "mis-shaped: mlp.experts.0.down_proj.weight: expected shape [8, 4], found [8, 5]",
    }


def test_a_stack_does_not_stand_for_the_shared_expert() -> None:
    weights = {name: t for name, t in tensors(4).items() if ".experts." not in name}
    weights["mlp.experts.gate_up_proj"] = torch.randn(3, 8, 8)
    weights["mlp.experts.down_proj"] = torch.randn(3, 8, 4)
    model = toy(4)
    load(model, weights)
    assert torch.equal(model.mlp.experts.down_proj[:3], weights["mlp.experts.down_proj"])
    del weights["mlp.shared_expert.up_proj.weight"]
    with pytest.raises(WeightsError) as caught:
        load(toy(4), weights)
    assert caught.value.problems == ("missing: mlp.shared_expert.up_proj.weight",)


def test_grouped_projections_of_another_size_are_reported() -> None:
    """By their own names, with all else that does not fit."""
    path = tiny_model("qwen3_next")
    model: VllmModel = get_model(make_config(path))
    weights = load_file(path / "model.safetensors")
    name = "model.layers.0.linear_attn.in_proj_ba.weight"
    weights[name] = weights[name][:-1]
    with pytest.raises(WeightsError) as caught:
        model.load_weights(weights.items())
    assert f"surplus: {name} [7, 64]" in caught.value.problems
    assert any("missing: model.layers.0.linear_attn.in_proj_b" in p for p in caught.value.problems)


def test_granites_experts_may_come_one_by_one() -> None:
    """As llm-compressor names them."""
    source = tiny_model("granite_h")
    model: VllmModel = get_model(make_config(source))
    expected = {name: param.clone() for name, param in model.named_parameters()}
    weights = load_file(source / "model.safetensors")
    whole = ".block_sparse_moe.input_linear.weight"
    one = ".block_sparse_moe.experts.{}.{}_proj.weight"
    for layer in [name.removesuffix(whole) for name in weights if name.endswith(whole)]:
        gate_up = weights.pop(f"{layer}{whole}")
        down = weights.pop(f"{layer}{whole.replace('input', 'output')}")
        for i in range(len(down)):
            matrices = (*gate_up[i].chunk(2), down[i])
            for part, matrix in zip(("gate", "up", "down"), matrices, strict=True):
                weights[f"{layer}{one.format(i, part)}"] = matrix
    for param in model.parameters():
        param.data.zero_()
    model.load_weights(weights.items())
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name]), name


def grouped(
    kind: str, scale: Tensor, module: str = "in_proj_qkvz", **sizes: int
) -> dict[str, Tensor]:
    """Parts of a scale of a layer with 2 key heads, 4 value heads."""
    heads = {"head_k_dim": 128, "head_v_dim": 128, **sizes}
    shape = GatedDeltaNetShape(64, 2, 4, conv_kernel_size=4, eps=1e-6, **heads)
    return dict(ungrouped([(f"a.{module}.{kind}", scale)], shape))


def test_scales_of_grouped_projections_follow_their_rows() -> None:
    """Of a group of 768 rows q and k are blocks 0 and 1, v 2 and 3, z 4 and 5."""
    blocks = torch.arange(12.0)[:, None] + torch.tensor([0.0, 0.5])
    found = grouped("weight_scale_inv", blocks)
    first, last = found["a.in_proj_qkv.weight_scale_inv"], found["a.in_proj_z.weight_scale_inv"]
    assert first[:, 0].tolist() == [0, 6, 1, 7, 2, 3, 8, 9]
    assert last.tolist() == [[4, 4.5], [5, 5.5], [10, 10.5], [11, 11.5]]
    by_row = blocks[:, :1].repeat_interleave(128, 0)
    found = grouped("weight_scale", by_row)
    assert torch.equal(found["a.in_proj_qkv.weight_scale"], first[:, :1].repeat_interleave(128, 0))
    assert torch.equal(found["a.in_proj_z.weight_scale"], last[:, :1].repeat_interleave(128, 0))
    for whole in (torch.tensor(0.5), torch.tensor([[0.5, 0.25]])):  # the block holds all rows
        found = grouped("weight_scale_inv", whole, "in_proj_ba")
        assert found.keys() == {f"a.in_proj_{part}.weight_scale_inv" for part in "ba"}
        assert all(torch.equal(scale, whole) for scale in found.values())


def test_blocks_of_scales_that_hold_rows_of_several_heads_are_refused() -> None:
    scales = torch.arange(9.0)[:, None]  # 2 * (2 * 96 + 2 * 2 * 96) = 1152 rows
    with pytest.raises(WeightsError, match="in_proj_qkvz.weight_scale_inv: a block of 128 rows"):
        grouped("weight_scale_inv", scales, head_k_dim=96, head_v_dim=96)


#: how a family's released checkpoints name a tensor
RELEASED = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.7.w1.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.7.gate_proj.weight",
    "qwen3_next": "model.layers.0.mlp.experts.7.gate_proj.weight",
    "qwen3_5_moe_wrapper": "model.language_model.layers.0.mlp.experts.gate_up_proj",
}


def respelt(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint with experts stacked instead of one by one, or the reverse."""
    found = load_file(path / "model.safetensors")
    parts = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    parts |= {"w1": "gate", "w3": "up", "w2": "down"}
    out: dict[str, Tensor] = {}
    single: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in found.items():
        stem, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            out[name] = tensor
        elif rest == "gate_up_proj":
            for i, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                out[f"{stem}.experts.{i}.gate_proj.weight"] = gate.contiguous()
                out[f"{stem}.experts.{i}.up_proj.weight"] = up.contiguous()
        elif rest == "down_proj":
            for i, matrix in enumerate(tensor):
                out[f"{stem}.experts.{i}.down_proj.weight"] = matrix
        else:
            number, part, _ = rest.split(".")
            single.setdefault(stem, {}).setdefault(parts[part], {})[int(number)] = tensor
    for stem, kinds in single.items():
        gate, up, down = (
            torch.stack([tensor for _, tensor in sorted(kinds[kind].items())])
            for kind in ("gate", "up", "down")
        )
        out[f"{stem}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        out[f"{stem}.experts.down_proj"] = down
    return out


@pytest.mark.parametrize("family", RELEASED)
def test_both_spellings_of_a_checkpoint_are_one_model(family: str) -> None:
    path = tiny_model(family)
    other = respelt(path)
    assert RELEASED[family] in {**load_file(path / "model.safetensors"), **other}
    model: VllmModel = get_model(make_config(path))
    assert isinstance(model, nn.Module)
    expected = {name: param.clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.data.fill_(torch.nan)
    model.load_weights(other.items())
    for name, param in model.named_parameters():
        # The router's last rows are padding that nothing reads.
        rows = 8 if "router" in name else len(param)
        assert torch.equal(param[:rows], expected[name][:rows]), name


@pytest.mark.parametrize("shape", [(), (2, 4)])
def test_a_tensor_that_is_no_stack_of_all_experts(shape: tuple[int, ...]) -> None:
    """One number for all of them, as a scale may be, is none either."""
    stack = ExpertStack(num_experts=3, experts=(0, 1, 2), shared=False)
    with pytest.raises(WeightShapeError, match=r"expected shape \[3.*found \["):
        stack.part(torch.zeros(shape))
