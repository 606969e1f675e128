# SPDX-License-Identifier: Apache-2.0
"""Loading float8 weights: every checkpoint format, fused and sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from quantized_models import Format, quantise
from torch import Tensor, nn

from tests.model_executor.layers.ranks import as_rank
from vllm.kernels import fp8
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.fp8_config import Fp8Config
from vllm.model_executor.model_loader.base import initialize_dummy_weights
from vllm.model_executor.parameter import ShardId, WeightDtypeError, WeightShapeError
from vllm.model_executor.utils import AfterLoading

HIDDEN = 256
CONFIGS: dict[Format, Fp8Config] = {
    "tensor": Fp8Config(),
    "static": Fp8Config(static=True),
    "block": Fp8Config("block"),
    "compressed": Fp8Config(),
}
Shard = ShardId | tuple[ShardId, ...] | None


def matrix(rows: int, columns: int = HIDDEN, scale: float = 1.0) -> Tensor:
    """Rows of very different sizes, so that a scale in the wrong place shows."""
    return torch.randn(rows, columns) * torch.logspace(-1, 1, rows)[:, None] * scale


def load(layer: nn.Module, form: Format, weight: Tensor, shard: Shard = None) -> Tensor:
    """Give one stored matrix to the layer's loaders; returns what it stands for."""
    stored, plain = quantise(weight, form)
    for name, tensor in stored.items():
        param = getattr(layer, name)
        param.weight_loader(param, tensor, *(() if shard is None else (shard,)))
    return plain


def dequantised(layer: nn.Module) -> Tensor:
    """What the layer's parameters stand for, `[rows, columns]`."""
    weight = layer.weight.float()
    parameters = dict(layer.named_parameters())
    if "weight_scale" in parameters:
        return weight * layer.weight_scale[:, None]
    per_row = layer.weight_scale_inv.t().repeat_interleave(fp8.GROUP, 1)
    return weight * per_row[:, : weight.shape[1]]


def finish(layer: nn.Module) -> None:
    assert isinstance(layer, AfterLoading)
    layer.process_weights_after_loading()


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("size", [1, 2])
def test_fused_columns(form: Format, size: int) -> None:
    """Four matrices, two of them narrower than a block, one stored together with its neighbour."""
    sizes = [384, 128, 96, 32]
    weights = [matrix(n, scale=2.0**i) for i, n in enumerate(sizes)]
    for rank in range(size):
        with as_rank(rank, size):
            layer = MergedColumnParallelLinear(
                HIDDEN, sizes, bias=False, quant_config=CONFIGS[form]
            )
        both = load(layer, form, torch.cat(weights[:2]), (0, 1))
        plain = [*both.split(sizes[:2]), load(layer, form, weights[2], 2)]
        plain.append(load(layer, form, weights[3], 3))
        finish(layer)
        expected = torch.cat([part.chunk(size)[rank] for part in plain])
        torch.testing.assert_close(dequantised(layer), expected)


@pytest.mark.parametrize("form", CONFIGS)
def test_qkv_heads(form: Format) -> None:
    """Three ranks' worth of query heads, key and value heads replicated."""
    sizes: Sequence[tuple[ShardId, int]] = (("q", 4 * 48), ("k", 2 * 48), ("v", 2 * 48))
    weights = {name: matrix(rows) for name, rows in sizes}
    for rank in range(4):
        with as_rank(rank, 4):
            layer = QKVParallelLinear(HIDDEN, 48, 4, 2, bias=False, quant_config=CONFIGS[form])
        plain = {name: load(layer, form, weight, name) for name, weight in weights.items()}
        head = slice(48 * (rank // 2), 48 * (rank // 2 + 1))
        expected = [plain["q"].chunk(4)[rank], plain["k"][head], plain["v"][head]]
        torch.testing.assert_close(dequantised(layer), torch.cat(expected))
        finish(layer)
        x = torch.randn(3, HIDDEN)
        assert torch.equal(layer.keys_and_values(x), layer(x)[0][:, layer.q_size :])


@pytest.mark.parametrize("form", CONFIGS)
def test_row_shards(form: Format) -> None:
    weight, x = matrix(80, 512), torch.randn(3, 512)
    outputs = []
    for rank in range(2):
        with as_rank(rank, 2):
            layer = RowParallelLinear(
                512, 80, bias=False, reduce_results=False, return_bias=False,
                quant_config=CONFIGS[form]
            )  # fmt: skip
        plain = load(layer, form, weight)
        finish(layer)
        torch.testing.assert_close(dequantised(layer), plain.chunk(2, 1)[rank])
        outputs.append(layer(x.chunk(2, 1)[rank]))
    exact = x @ plain.T
    assert (sum(outputs) - exact).norm() < 0.06 * exact.norm()


def test_block_shards_must_be_whole_along_the_input() -> None:
    with pytest.raises(ValueError, match="over 2 ranks cuts the 128-wide.*input of 384"):
        with as_rank(0, 2):
            RowParallelLinear(384, 80, quant_config=CONFIGS["block"])


def test_block_scales_for_libraries_need_whole_blocks() -> None:
    layer = MergedColumnParallelLinear(HIDDEN, [256, 128], False, quant_config=CONFIGS["block"])
    stored = [quantise(matrix(n), "block")[0] for n in (256, 128)]
    for i, tensors in enumerate(stored):
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, tensors["weight_scale_inv"], i)
    finish(layer)
    expected = torch.cat([tensors["weight_scale_inv"] for tensors in stored])
    assert torch.equal(layer.block_scale, expected)
    ragged = MergedColumnParallelLinear(HIDDEN, [256, 32], False, quant_config=CONFIGS["block"])
    assert ragged.block_scale is None


def test_static_scales_of_a_fused_layer_are_the_largest() -> None:
    layer = MergedColumnParallelLinear(HIDDEN, [64, 64], False, quant_config=CONFIGS["static"])
    for shard, scale in enumerate((0.5, 0.25)):
        param = layer.input_scale
        param.weight_loader(param, torch.tensor([scale]), shard)
    finish(layer)
    assert layer.static_scale.tolist() == [0.5]
    with pytest.raises(WeightShapeError):
        layer.input_scale.weight_loader(layer.input_scale, torch.ones(2), 0)


@pytest.mark.parametrize("dim", [0, 1])
def test_quantising_at_load(dim: int) -> None:
    config = Fp8Config(from_16_bit=True)
    weight = matrix(96, 512).bfloat16()
    for rank in range(2):
        layer: nn.Module
        if dim == 0:
            with as_rank(rank, 2):
                layer = MergedColumnParallelLinear(512, [64, 32], False, quant_config=config)
            layer.weight.weight_loader(layer.weight, weight)
            part = torch.cat([weight[:64].chunk(2)[rank], weight[64:].chunk(2)[rank]])
        else:
            with as_rank(rank, 2):
                layer = RowParallelLinear(512, 96, False, quant_config=config)
            layer.weight.weight_loader(layer.weight, weight)
            part = weight.chunk(2, 1)[rank]
        values, scale = fp8.quantize_rows(part)
        assert torch.equal(layer.weight.float(), values.float())
        assert torch.equal(layer.weight_scale, scale[:, 0])
        error = (dequantised(layer) - part.float()).norm(dim=1) / part.float().norm(dim=1)
        assert error.max() < 0.04


def test_wrong_dtypes_are_refused() -> None:
    """Copying would drop the scale without a word."""
    stored = MergedColumnParallelLinear(HIDDEN, [64], False, quant_config=CONFIGS["tensor"])
    with pytest.raises(WeightDtypeError, match="expected float8_e4m3fn, found torch.bfloat16"):
        stored.weight.weight_loader(stored.weight, torch.zeros(64, HIDDEN, dtype=torch.bfloat16))
    config = Fp8Config(from_16_bit=True)
    fresh = MergedColumnParallelLinear(HIDDEN, [64], False, quant_config=config)
    with pytest.raises(WeightDtypeError, match="16-bit or wider"):
        fresh.weight.weight_loader(fresh.weight, torch.zeros(64, HIDDEN).to(fp8.FP8))
    block = MergedColumnParallelLinear(HIDDEN, [64], False, quant_config=CONFIGS["block"])
    with pytest.raises(WeightShapeError, match=r"\[1, 2\], found \[2, 2\]"):
        block.weight_scale_inv.weight_loader(block.weight_scale_inv, torch.ones(2, 2))


@pytest.mark.parametrize("config", [*CONFIGS.values(), Fp8Config(from_16_bit=True)])
def test_dummy_weights_keep_a_signal_s_size(config: Fp8Config) -> None:
    layer = RowParallelLinear(512, 256, False, return_bias=False, quant_config=config)
    initialize_dummy_weights(layer)
    finish(layer)
    out = layer(torch.randn(64, 512))
    assert 0.8 < out.std() < 1.2
