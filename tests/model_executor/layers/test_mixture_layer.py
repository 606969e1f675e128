# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts as layers: the whole against plain torch, ranks against the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.model_executor.layers.ranks import as_rank
from vllm import decisions
from vllm.config import ParallelConfig, VllmConfig
from vllm.config.current import set_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.kernels.fp8 import FP8, GROUP
from vllm.kernels.moe import ClampedSwiglu, RoutingRule
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers import moe
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.quantization.fp8_config import Fp8Config, fp8_at_load
from vllm.model_executor.model_loader.base import initialize_dummy_weights
from vllm.model_executor.models.weights import AutoWeightsLoader, WeightsError
from vllm.model_executor.parameter import SHARED_EXPERT, WeightDtypeError, WeightShapeError
from vllm.model_executor.utils import get_weight_attr

HIDDEN, INNER, EXPERTS, VOCAB = 16, 12, 5, 7
PLAIN = MixtureShape(HIDDEN, INNER, EXPERTS, RoutingRule(2))
SHAPES = {
    "routed alone": PLAIN,
    "shared in the stack": replace(PLAIN, shared_intermediate_size=INNER),
    "gated, in the stack": replace(PLAIN, shared_intermediate_size=INNER, shared_gate=True),
    "shared apart": replace(PLAIN, shared_intermediate_size=24),
    "gated, apart": replace(PLAIN, shared_intermediate_size=24, shared_gate=True),
    "bias": replace(
        PLAIN, rule=RoutingRule(2, "sigmoid", epsilon=1e-20, scale=2.5), correction_bias=True
    ),
    "no gate": replace(PLAIN, gated=False, hidden_act="relu2", shared_intermediate_size=INNER),
    "by token": replace(PLAIN, rule=RoutingRule(2, "sqrtsoftplus", scale=1.5), hashed_vocab=VOCAB),
    "bounded": replace(
        PLAIN,
        clamp=ClampedSwiglu(1.0, 0.5, 0.0),
        shared_intermediate_size=INNER,
        hashed_vocab=VOCAB,
    ),
    "bounded, apart": replace(
        PLAIN, clamp=ClampedSwiglu(1.0, 0.5, 0.0), shared_intermediate_size=24
    ),
    "latent": replace(PLAIN, gated=False, hidden_act="relu2", latent_size=8, wide_router=True),
}


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: x.exp().log1p().sqrt(),
}
IDS = torch.tensor([0, 6, 3, 3, 1, 5, 2, 4, 6])


def checkpoint(shape: MixtureShape) -> dict[str, Tensor]:
    """Of the layer, under names of its own."""
    torch.manual_seed(0)
    shared = shape.shared_intermediate_size or 1
    parts, width = 1 + shape.gated, shape.expert_width
    return {
        "gate": torch.randn(EXPERTS, HIDDEN),
        "shared_gate": torch.randn(1, HIDDEN),
        "bias": torch.randn(EXPERTS),
        "gate_up": torch.randn(EXPERTS, parts * INNER, width) / 4,
        "down": torch.randn(EXPERTS, width, INNER) / 4,
        "shared_gate_up": torch.randn(parts * shared, HIDDEN) / 4,
        "shared_down": torch.randn(HIDDEN, shared) / 4,
        "to_latent": torch.randn(width, HIDDEN) / 4,
        "from_latent": torch.randn(HIDDEN, width) / 4,
        "tid2eid": torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(VOCAB)]),
    }


def load(param: nn.Parameter, *args: object) -> None:
    get_weight_attr(param, "weight_loader", None)(param, *args)


def make(shape: MixtureShape, rank: int = 0, size: int = 1) -> MixtureOfExperts:
    """The layer with the checkpoint's weights."""
    with as_rank(rank, size):
        layer = MixtureOfExperts(shape, "mlp")
    tensors = checkpoint(shape)
    load(layer.router.weight, tensors["gate"], 0)
    if shape.shared == "gated":
        load(layer.router.weight, tensors["shared_gate"], 1)
    if layer.router.e_score_correction_bias is not None:
        load(layer.router.e_score_correction_bias, tensors["bias"], 0)
    if layer.router.tid2eid is not None:
        load(layer.router.tid2eid, tensors["tid2eid"], 0)
    load(layer.experts.gate_up_proj, tensors["gate_up"])
    load(layer.experts.down_proj, tensors["down"])
    halves = tensors["shared_gate_up"].chunk(1 + shape.gated)
    if layer.fc1_latent_proj is not None and layer.fc2_latent_proj is not None:
        load(layer.fc1_latent_proj.weight, tensors["to_latent"])
        load(layer.fc2_latent_proj.weight, tensors["from_latent"])
    if layer.shape.stacks_shared:
        for i, half in enumerate(halves):
            load(layer.experts.gate_up_proj, half, (SHARED_EXPERT, i))
        load(layer.experts.down_proj, tensors["shared_down"], (SHARED_EXPERT, 0))
    elif layer.shared_expert is not None:
        for i, half in enumerate(halves):
            up = layer.shared_expert.get_submodule("gate_up_proj" if shape.gated else "up_proj")
            load(up.get_parameter("weight"), half, *([i] if shape.gated else []))
        load(layer.shared_expert.down_proj.weight, tensors["shared_down"])
    return layer


def ffn(shape: MixtureShape, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    if not shape.gated:
        return (x @ gate_up.t()).relu().square() @ down.t()
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    if shape.clamp is not None:
        gate, up = (
            gate.clamp(max=shape.clamp.limit),
            up.clamp(-shape.clamp.limit, shape.clamp.limit),
        )
    return (nn.functional.silu(gate) * up) @ down.t()


def expected(shape: MixtureShape, x: Tensor) -> Tensor:
    """Every expert on every token, most of them with weight 0; in fp64."""
    tensors = {name: tensor.double() for name, tensor in checkpoint(shape).items()}
    x = x.double()
    logits = x @ tensors["gate"].t()
    scores = SCORES[shape.rule.scores](logits)
    choice = scores + tensors["bias"] if shape.correction_bias else scores
    chosen = choice.topk(shape.rule.top_k).indices
    if shape.hashed_vocab:
        chosen = tensors["tid2eid"].long()[IDS]
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    weights = weights / weights.sum(-1, keepdim=True) * shape.rule.scale
    read = x @ tensors["to_latent"].t() if shape.latent_size else x
    out = torch.zeros_like(read)
    for expert in range(EXPERTS):
        out += weights[:, expert, None] * ffn(
            shape, read, tensors["gate_up"][expert], tensors["down"][expert]
        )
    if shape.latent_size:
        out = out @ tensors["from_latent"].t()
    if shape.shared is not None:
        gate = (x @ tensors["shared_gate"].t()).sigmoid() if shape.shared_gate else 1.0
        out += gate * ffn(shape, x, tensors["shared_gate_up"], tensors["shared_down"])
    return out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_layer_is_the_sum_of_its_experts(shape: MixtureShape) -> None:
    x = torch.randn(9, HIDDEN)
    torch.testing.assert_close(
        make(shape)(x, IDS).double(), expected(shape, x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [n for n, s in SHAPES.items() if not s.hashed_vocab])
def test_a_mixture_is_a_branch_of_the_stream_that_it_normalises(
    name: str, size: int, pending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "tensor_model_parallel_all_reduce", lambda x, in_place: x)
    layer, norm = make(SHAPES[name], 0, size), RMSNorm(HIDDEN)
    nn.init.normal_(norm.weight)
    x, branch = torch.randn(9, HIDDEN), torch.randn(9, HIDDEN)
    stream = ResidualStream(x, branch if pending else None)
    added = x + branch if pending else x
    after, total = layer.after_norm(norm, stream)
    assert torch.equal(total, added)
    assert torch.equal(after.total, added + layer(norm.normalise(added)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ranks_add_up_to_the_whole(shape: MixtureShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has half of every expert's intermediate size."""
    monkeypatch.setattr(moe, "tensor_model_parallel_all_reduce", lambda x, in_place: x)
    x = torch.randn(9, HIDDEN)
    ranks = [make(shape, rank, 2) for rank in range(2)]
    width, rows = shape.expert_width, (1 + shape.gated) * INNER // 2
    assert ranks[0].experts.gate_up_proj.shape[1:] == (rows, width)
    assert ranks[0].experts.down_proj.shape[1:] == (width, INNER // 2)
    halves = [rank(x, IDS) for rank in ranks]
    if shape.shared is None:
        assert not torch.allclose(halves[0], halves[1], atol=1e-2)
    torch.testing.assert_close(sum(halves), make(shape)(x, IDS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_whole_experts_add_up(
    shape: MixtureShape, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that do not divide the five experts, too; each has its part of the shared network."""
    monkeypatch.setattr(moe, "tensor_model_parallel_all_reduce", lambda x, in_place: x)
    config = VllmConfig(parallel_config=ParallelConfig(enable_expert_parallel=True))
    x = torch.randn(9, HIDDEN)
    with set_current_vllm_config(config):
        ranks = [make(shape, rank, size) for rank in range(size)]
    counts = [len(rank.experts.gate_up_proj) for rank in ranks]
    assert sum(counts) == EXPERTS and max(counts) - min(counts) <= 1
    for rank in ranks:
        assert rank.experts.gate_up_proj.shape[1:] == (
            (1 + shape.gated) * INNER,
            shape.expert_width,
        )
        assert (rank.shared_expert is None) == (shape.shared is None)
    total = sum(rank(x, IDS) for rank in ranks)
    torch.testing.assert_close(total, make(shape)(x, IDS), rtol=1e-4, atol=1e-5)


class Replicas:
    """What threads exchange that stand for replicas; each has its place in the group."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class Replica(GroupCoordinator):
    """One of them."""

    def __init__(self, replicas: Replicas, rank: int) -> None:
        super().__init__(tuple(range(len(replicas.given))), rank)
        object.__setattr__(self, "replicas", replicas)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self.replicas.exchange(self.rank_in_group, x), dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        parts = self.replicas.exchange(self.rank_in_group, x)
        return sum(part.chunk(self.world_size)[self.rank_in_group] for part in parts)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_replicas_share_experts(shape: MixtureShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the sums of its own rows, of which one has none but padding."""
    replicas, counts, rows = Replicas(3), (9, 4, 1), 10
    config = VllmConfig(parallel_config=ParallelConfig(enable_expert_parallel=True))
    layers = []
    with set_current_vllm_config(config), monkeypatch.context() as patch:
        for rank in range(3):
            group = Replica(replicas, rank)
            patch.setattr(moe, "get_dp_group", lambda group=group: group)
            layers.append(make(shape))
    assert sum(len(layer.experts.gate_up_proj) for layer in layers) == EXPERTS
    inputs = [torch.randn(count, HIDDEN) for count in counts]
    outputs: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        with set_forward_context(ForwardContext({}, {}, exchange_rows=rows)):
            outputs[rank] = layers[rank](inputs[rank], IDS[: counts[rank]])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = make(shape)
    for rank, x in enumerate(inputs):
        torch.testing.assert_close(outputs[rank], alone(x, IDS[: len(x)]), rtol=1e-4, atol=1e-5)


def test_experts_by_token_need_tokens() -> None:
    with pytest.raises(ValueError, match="needs token ids, not embeddings"):
        make(SHAPES["by token"])(torch.randn(2, HIDDEN))


def test_experts_one_by_one_are_experts_stacked() -> None:
    stacked, single = make(PLAIN), MixtureOfExperts(PLAIN, "mlp")
    tensors = checkpoint(PLAIN)
    for expert in range(EXPERTS):
        for i, half in enumerate(tensors["gate_up"][expert].chunk(2)):
            load(single.experts.gate_up_proj, half, (expert, i))
        load(single.experts.down_proj, tensors["down"][expert], (expert, 0))
    assert torch.equal(single.experts.gate_up_proj, stacked.experts.gate_up_proj)
    assert torch.equal(single.experts.down_proj, stacked.experts.down_proj)


def test_wrong_shapes_say_what_was_expected() -> None:
    layer = MixtureOfExperts(PLAIN, "mlp")
    with pytest.raises(WeightShapeError, match=r"shape \[5, 24, 16\], found \[4, 24, 16\]"):
        load(layer.experts.gate_up_proj, torch.zeros(4, 24, 16))
    with pytest.raises(WeightShapeError, match=r"expected shape \[12, 16\], found \[24, 16\]"):
        load(layer.experts.gate_up_proj, torch.zeros(24, 16), (0, 1))


def dequantised(values: Tensor, scale: Tensor) -> Tensor:
    """Of a float8 stack, with scales by rows or by blocks."""
    if scale.dim() == 2:
        return values.float() * scale[:, :, None]
    return values.float() * scale.mT.repeat_interleave(GROUP, 2)[..., : values.shape[2]]


def test_experts_quantised_here_are_what_was_loaded() -> None:
    """Whole and by ranks, stacked and one by one, within float8's half unit of the last place."""
    tensors, name = checkpoint(PLAIN), "model.layers.0.mlp"
    for rank, size in ((0, 1), (1, 2)):
        with as_rank(rank, size):
            layer = MixtureOfExperts(PLAIN, name, fp8_at_load())
        with as_rank(rank, size):
            other = MixtureOfExperts(PLAIN, name, fp8_at_load())
        load(layer.experts.gate_up_proj, tensors["gate_up"])
        load(layer.experts.down_proj, tensors["down"])
        for expert in range(EXPERTS):
            for i, half in enumerate(tensors["gate_up"][expert].chunk(2)):
                load(other.experts.gate_up_proj, half, (expert, i))
            load(other.experts.down_proj, tensors["down"][expert], (expert, 0))
        scales = layer.experts.method.scales(layer.experts)
        assert scales is not None
        with as_rank(rank, size):
            whole = MixtureOfExperts(PLAIN, name)
        load(whole.experts.gate_up_proj, tensors["gate_up"])
        load(whole.experts.down_proj, tensors["down"])
        for param, scale in (("gate_up_proj", scales.gate_up), ("down_proj", scales.down)):
            values = layer.experts.get_parameter(param)
            expected = whole.experts.get_parameter(param)
            assert torch.equal(
                values.view(torch.uint8), other.experts.get_parameter(param).view(torch.uint8)
            )
            torch.testing.assert_close(
                dequantised(values, scale), expected.data, rtol=2**-4, atol=float(scale.max())
            )
    with pytest.raises(WeightShapeError, match=r"shape \[5, 24, 16\], found \[4, 24, 16\]"):
        load(layer.experts.gate_up_proj, torch.zeros(4, 24, 16))


def test_block_scales_are_cut_with_their_experts() -> None:
    """Ranks hold whole blocks of the intermediate size."""
    shape = replace(PLAIN, intermediate_size=256, num_experts=3)
    blocks = torch.rand(3, 1, 2)
    values = torch.randn(3, HIDDEN, 256).to(FP8)
    for rank in range(2):
        with as_rank(rank, 2):
            layer = MixtureOfExperts(shape, "mlp", Fp8Config("block"))
        load(layer.experts.down_proj, values)
        load(layer.experts.down_proj_scale_inv, blocks)
        part = layer.experts.down_proj_scale_inv
        assert torch.equal(part, blocks[:, :, rank : rank + 1].expand(3, 1, HIDDEN))
        assert torch.equal(
            layer.experts.down_proj.float(), values.float()[..., 128 * rank : 128 * rank + 128]
        )
    with pytest.raises(WeightDtypeError, match="expected float8_e4m3fn, found torch.float32"):
        load(layer.experts.down_proj, values.float())
    with pytest.raises(ValueError, match="cuts the 128-wide scale blocks"):
        with as_rank(0, 2):
            MixtureOfExperts(PLAIN, "mlp", Fp8Config("block"))


def test_what_a_checkpoint_leaves_in_16_bits() -> None:
    """All experts, or the shared one alone, which then cannot lie among the others."""
    shape = replace(PLAIN, shared_intermediate_size=INNER)
    assert shape.stacks_shared
    prefix = "model.layers.0.mlp"
    kept = MixtureOfExperts(shape, prefix, Fp8Config("block", excluded=[f"{prefix}.experts"]))
    assert kept.experts.gate_up_proj.dtype == torch.float32
    assert kept.shared_expert is not None
    assert kept.shared_expert.down_proj.weight.dtype == FP8
    apart = MixtureOfExperts(shape, prefix, Fp8Config(excluded=["mlp.shared_expert"]))
    assert apart.shared_expert is not None and len(apart.experts.gate_up_proj) == EXPERTS
    assert apart.shared_expert.down_proj.weight.dtype == torch.float32
    together = MixtureOfExperts(shape, prefix, Fp8Config())
    assert together.shared_expert is None and len(together.experts.gate_up_proj) == EXPERTS + 1


def test_fixed_activation_scales_are_left_out_where_a_checkpoint_has_them() -> None:
    """Those of a shared expert that is a network of its own are used."""
    shape = replace(PLAIN, shared_intermediate_size=INNER + 16)
    names = (*Experts.CHECKPOINT_NAMES,)
    fused = (("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1))
    kinds = ("experts.0.up_proj", "experts.1.down_proj", "shared_expert.down_proj")
    tensors = {f"mlp.{kind}.input_scale": torch.tensor(0.5) for kind in kinds}

    def problems(config: Fp8Config) -> str:
        model = nn.Module()
        model.mlp = MixtureOfExperts(shape, "mlp", config)
        with pytest.raises(WeightsError) as caught:
            AutoWeightsLoader(model, fused=fused, stacked=names).load_weights(tensors.items())
        return "\n".join(caught.value.problems)

    decisions.clear()
    assert "surplus" not in problems(Fp8Config(static=True))
    (record,) = [d for d in decisions.decisions() if "experts' activations" in d.what]
    assert record.chosen == "per token"
    assert problems(Fp8Config()).count("surplus") == 3


def test_what_cannot_be_routed_or_activated_is_refused() -> None:
    with pytest.raises(ValueError, match="9 experts of 5"):
        MixtureOfExperts(replace(PLAIN, rule=RoutingRule(9)), "mlp")
    with pytest.raises(ValueError, match="'gelu' is not supported"):
        MixtureOfExperts(replace(PLAIN, hidden_act="gelu"), "mlp")


def test_dummy_weights_keep_a_signals_scale() -> None:
    for config in (None, Fp8Config(), Fp8Config("block")):
        layer = MixtureOfExperts(replace(PLAIN, num_experts=64), "mlp", config)
        initialize_dummy_weights(layer)
        stacks = [layer.experts.gate_up_proj.data, layer.experts.down_proj.data]
        if (scales := layer.experts.method.scales(layer.experts)) is not None:
            pairs = zip(stacks, (scales.gate_up, scales.down), strict=True)
            stacks = [dequantised(*pair) for pair in pairs]
        for stack in stacks:
            assert float(stack.std()) == pytest.approx(stack.shape[-1] ** -0.5, rel=0.1)
