# SPDX-License-Identifier: Apache-2.0
"""A whole weight loaded into shards computes what the whole layer computes."""

import pytest
import torch
from torch import Tensor

from tests.model_executor.layers.ranks import as_rank
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.parameter import WeightShapeError, WeightShardError

HIDDEN = 24
SIZES = [1, 2, 4]


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def load(layer: LinearBase, weight: Tensor, bias: Tensor | None = None, *shard: object) -> None:
    layer.weight.weight_loader(layer.weight, weight, *shard)
    if bias is not None:
        assert layer.bias is not None
        layer.bias.weight_loader(layer.bias, bias, *shard)


@pytest.mark.parametrize("size", SIZES)
def test_column_shards_concatenate(size: int) -> None:
    weight, bias, x = weights(16, HIDDEN), weights(16), weights(5, HIDDEN)
    parts = []
    for rank in range(size):
        with as_rank(rank, size):
            layer = ColumnParallelLinear(HIDDEN, 16)
        load(layer, weight, bias)
        parts.append(layer(x)[0])
    torch.testing.assert_close(torch.cat(parts, -1), x @ weight.T + bias)


@pytest.mark.parametrize("size", SIZES)
def test_row_shards_sum(size: int) -> None:
    weight, bias, x = weights(16, HIDDEN), weights(16), weights(5, HIDDEN)
    total = torch.zeros(5, 16)
    for rank in range(size):
        with as_rank(rank, size):
            layer = RowParallelLinear(HIDDEN, 16, input_is_parallel=False, reduce_results=False)
        load(layer, weight, bias)
        total += layer(x)[0]
    torch.testing.assert_close(total, x @ weight.T + bias)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_merged_shards_keep_matrices_apart(size: int, fused: bool) -> None:
    gate, up, x = weights(8, HIDDEN), weights(16, HIDDEN), weights(5, HIDDEN)
    found: list[list[Tensor]] = []
    for rank in range(size):
        with as_rank(rank, size):
            layer = MergedColumnParallelLinear(HIDDEN, [8, 16], bias=False)
        if fused:
            load(layer, torch.cat([gate, up]))
        else:
            load(layer, gate, None, 0)
            load(layer, up, None, 1)
        found.append(list(layer(x)[0].split(layer.output_partition_sizes, -1)))
    for i, expected in enumerate((gate, up)):
        torch.testing.assert_close(torch.cat([p[i] for p in found], -1), x @ expected.T)


def test_several_sections_stored_as_one_tensor() -> None:
    q, k, z = weights(8, HIDDEN), weights(4, HIDDEN), weights(6, HIDDEN)
    with as_rank(1, 2):
        layer = MergedColumnParallelLinear(HIDDEN, [8, 4, 6], bias=False)
    load(layer, torch.cat([q, k]), None, (0, 1))
    load(layer, z, None, 2)
    assert torch.equal(layer.weight, torch.cat([q[4:], k[2:], z[3:]]))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_qkv_shards_by_heads_and_copies_kv_heads(size: int) -> None:
    """8 query heads on 2 kv heads: beyond two ranks each kv head has copies."""
    head, heads, kv_heads = 3, 8, 2
    q, k, v = (weights(n * head, HIDDEN) + i for i, n in enumerate((heads, kv_heads, kv_heads)))
    bias = weights((heads + 2 * kv_heads) * head)
    sizes = [heads * head, kv_heads * head, kv_heads * head]
    biases = dict(zip("qkv", bias.split(sizes), strict=True))
    for rank in range(size):
        with as_rank(rank, size):
            layer = QKVParallelLinear(HIDDEN, head, heads, kv_heads)
        for name, weight in (("q", q), ("k", k), ("v", v)):
            load(layer, weight, biases[name], name)
        per_rank = heads // size
        first_kv = rank * per_rank // (heads // kv_heads)
        rows = slice(rank * per_rank * head, (rank + 1) * per_rank * head)
        kv_rows = slice(first_kv * head, (first_kv + layer.num_kv_heads) * head)
        expected = torch.cat([q[rows], k[kv_rows], v[kv_rows]])
        assert torch.equal(layer.weight, expected)
        assert layer.num_heads == per_rank and layer.num_kv_heads == max(1, kv_heads // size)
        assert layer.bias is not None
        assert torch.equal(layer.bias[: layer.q_size], biases["q"][rows])
        x = weights(3, HIDDEN)
        torch.testing.assert_close(layer.keys_and_values(x), layer(x)[0][:, layer.q_size :])


def test_replicated_is_whole() -> None:
    weight, x = weights(7, HIDDEN), weights(2, HIDDEN)
    layer = ReplicatedLinear(HIDDEN, 7, bias=False)
    load(layer, weight)
    torch.testing.assert_close(layer(x), (x @ weight.T, None))


def test_output_forms() -> None:
    weight, bias, x = weights(7, HIDDEN), weights(7), weights(2, HIDDEN)
    kept = ReplicatedLinear(HIDDEN, 7, skip_bias_add=True)
    load(kept, weight, bias)
    output, output_bias = kept(x)
    torch.testing.assert_close(output, x @ weight.T)
    assert output_bias is kept.bias
    alone = ReplicatedLinear(HIDDEN, 7, return_bias=False)
    load(alone, weight, bias)
    torch.testing.assert_close(alone(x), x @ weight.T + bias)


def test_weights_of_another_shape_are_refused() -> None:
    with as_rank(0, 2):
        layer = QKVParallelLinear(HIDDEN, 4, 4, 2)
    with pytest.raises(WeightShapeError, match=r"expected shape \[8, 24\], found \[16, 24\]"):
        load(layer, weights(16, HIDDEN), None, "k")
    with pytest.raises(WeightShardError, match=r"shard 'x' of .* has the shards \['q', 'k', 'v'\]"):
        load(layer, weights(8, HIDDEN), None, "x")


def test_unsupported_options_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot gather"):
        MergedColumnParallelLinear(4, [4, 4], gather_output=True)
    with pytest.raises(ValueError, match="cannot be divided among 2"):
        with as_rank(0, 2):
            ColumnParallelLinear(4, 5)


@pytest.mark.parametrize("size", SIZES)
def test_vocabulary_shards(size: int) -> None:
    """Each rank holds consecutive rows; padding rows are zero and never reach the logits."""
    vocab = 70
    weight, hidden = weights(vocab, HIDDEN), weights(3, HIDDEN)
    tables, logits = [], []
    for rank in range(size):
        with as_rank(rank, size):
            head = ParallelLMHead(vocab, HIDDEN, padding_size=8)
        head.weight.weight_loader(head.weight, weight)
        tables.append(head.weight)
        logits.append(hidden @ head.weight.T)
    table = torch.cat(tables)
    assert len(table) % (8 * size) == 0
    assert torch.equal(table[:vocab], weight) and not table[vocab:].any()
    torch.testing.assert_close(torch.cat(logits, -1)[:, :vocab], hidden @ weight.T)


def test_sharded_lookup_sums_to_the_embedding() -> None:
    weight, ids = weights(10, HIDDEN), torch.tensor([0, 9, 4, 5, 3])
    total = torch.zeros(5, HIDDEN)
    for rank in range(2):
        with as_rank(rank, 2):
            table = VocabParallelEmbedding(10, HIDDEN, padding_size=1)
        table.weight.weight_loader(table.weight, weight)
        total += table(ids)
    assert torch.equal(total, weight[ids])


def test_logits_processor_options() -> None:
    head = ParallelLMHead(70, HIDDEN)
    weight, hidden = weights(70, HIDDEN), weights(3, HIDDEN)
    head.weight.weight_loader(head.weight, weight)
    plain = hidden @ weight.T
    torch.testing.assert_close(LogitsProcessor(70)(head, hidden), plain)
    torch.testing.assert_close(LogitsProcessor(70, 60)(head, hidden), plain[:, :60])
    capped = LogitsProcessor(70, scale=0.5, soft_cap=2.0)(head, hidden)
    torch.testing.assert_close(capped, torch.tanh(plain / 2))
