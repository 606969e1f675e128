# SPDX-License-Identifier: Apache-2.0
"""Inputs on which launch parameters are compared: bf16, and float8 experts, of given shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from vllm.kernels.attention import AttentionProblem
from vllm.kernels.chunks import chunk_metadata
from vllm.kernels.fp8 import FP8
from vllm.kernels.interface import Kernels
from vllm.kernels.moe import ExpertScales, ExpertsProblem, Routing
from vllm.kernels.tuning.shapes import (
    AttentionShape,
    ConvolutionShape,
    DeltaRuleShape,
    ExpertsShape,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnPrefill

#: runs one op on prepared inputs
Run = Callable[[], object]

BLOCK_SIZE = 16


@dataclass(frozen=True)
class _Stacks:
    """Weights of experts: see `ExpertsProblem`."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    scales: ExpertScales | None


class Workloads:
    """Makes runs of `kernels` on `device`; lengths are tokens per sequence."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device
        self._stacks: tuple[ExpertsShape, _Stacks] | None = None

    def attention(self, shape: AttentionShape, lengths: Sequence[tuple[int, int]]) -> Run:
        """Causal attention; `lengths` are (queries, context) pairs."""
        tokens = sum(queries for queries, _ in lengths)
        blocks = [-(-context // BLOCK_SIZE) for _, context in lengths]
        table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, (count, end) in enumerate(zip(blocks, accumulate(blocks), strict=True)):
            table[row, :count] = torch.arange(end - count, end)
        query = self._rows(tokens, shape.num_heads, shape.head_dim)
        problem = AttentionProblem(
            query,
            self._rows(sum(blocks), 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim),
            table.to(self._device),
            self._ints([context for _, context in lengths]),
            self._starts([queries for queries, _ in lengths]),
            max_query_len=max(queries for queries, _ in lengths),
            max_seq_len=max(context for _, context in lengths),
            scale=shape.head_dim**-0.5,
            sliding_window=shape.sliding_window,
            out=torch.empty_like(query),
            sinks=self._zeros(shape.num_heads) if shape.sinks else None,
        )
        return partial(self._kernels.paged_attention, problem)

    def delta_rule(self, shape: DeltaRuleShape, lengths: Sequence[int]) -> Run:
        """Prefill of the gated delta rule."""
        tokens, n, heads = sum(lengths), len(lengths), shape.num_v_heads
        starts = [0, *accumulate(lengths)]
        chunk_indices, chunk_offsets = chunk_metadata(starts)
        problem = GdnPrefill(
            self._rows(tokens, shape.channels),
            self._rows(tokens, heads),
            self._rows(tokens, heads),
            self._zeros(heads),
            self._zeros(heads),
            self._zeros(n, heads, shape.head_v_dim, shape.head_k_dim),
            self._ints(range(n)),
            torch.zeros(n, dtype=torch.bool, device=self._device),
            self._starts(lengths),
            chunk_indices.to(self._device),
            chunk_offsets.to(self._device),
            self._rows(tokens, heads, shape.head_v_dim),
            beta_scale=shape.beta_scale,
        )
        return partial(self._kernels.gdn_prefill, problem)

    def delta_rule_tokens(self, shape: DeltaRuleShape, num_seqs: int) -> Run:
        """One token of every sequence through the recurrent op that other packages call."""
        # Triton is not needed to list tables.
        from vllm.model_executor.layers.fla.ops.gated_delta_rule.recurrent import (
            fused_recurrent_gated_delta_rule,
        )

        keys = (1, num_seqs, shape.num_k_heads, shape.head_k_dim)
        heads = shape.num_v_heads
        return partial(
            fused_recurrent_gated_delta_rule,
            self._rows(*keys),
            self._rows(*keys),
            self._rows(1, num_seqs, heads, shape.head_v_dim),
            self._zeros(1, num_seqs, heads),
            self._zeros(1, num_seqs, heads),
            cu_seqlens=self._starts([1] * num_seqs),
            use_qk_l2norm_in_kernel=True,
        )

    def convolution(self, shape: ConvolutionShape, lengths: Sequence[int]) -> Run:
        """Causal convolution of a prefill."""
        x, n = self._rows(sum(lengths), shape.channels), len(lengths)
        return partial(
            self._kernels.causal_conv1d,
            x,
            self._rows(shape.channels, shape.taps),
            self._rows(shape.channels) if shape.bias else None,
            self._rows(n, shape.taps - 1, shape.channels),
            self._ints(range(n)),
            torch.zeros(n, dtype=torch.bool, device=self._device),
            self._starts(lengths),
            out=torch.empty_like(x),
        )

    def experts(self, shape: ExpertsShape, tokens: int) -> Run:
        """The experts' products, chosen evenly; batches of one shape share the weights."""
        if self._stacks is None or self._stacks[0] != shape:
            self._stacks = shape, self._make_stacks(shape)
        stacks = self._stacks[1]
        problem = ExpertsProblem(
            self._rows(tokens, shape.hidden),
            stacks.gate_up,
            stacks.down,
            self._routing(shape, tokens),
            gated=shape.gated,
            gate_up_bias=stacks.gate_up_bias,
            down_bias=stacks.down_bias,
            clamp=shape.clamp,
            scales=stacks.scales,
        )
        return partial(self._kernels.run_experts, problem)

    def _make_stacks(self, shape: ExpertsShape) -> _Stacks:
        count, hidden, inner = shape.num_experts, shape.hidden, shape.inner
        rows = (1 + shape.gated) * inner
        gate_up, down = self._rows(count, rows, hidden), self._rows(count, hidden, inner)
        scales = None
        if shape.scales is not None:
            gate_up, down = gate_up.to(FP8), down.to(FP8)
            scales = ExpertScales(*(torch.ones(s, device=self._device) for s in shape.scales))
        return _Stacks(
            gate_up,
            down,
            self._rows(count, rows) if shape.biases else None,
            self._rows(count, hidden) if shape.biases else None,
            scales,
        )

    def _routing(self, shape: ExpertsShape, tokens: int) -> Routing:
        routed = shape.num_experts - shape.shared
        scores = torch.rand(tokens, routed, device=self._device).topk(shape.top_k)
        weights, experts = scores.values, scores.indices
        if shape.shared:
            weights = torch.cat([weights, weights.new_ones(tokens, 1)], dim=1)
            experts = torch.cat([experts, experts.new_full((tokens, 1), routed)], dim=1)
        return Routing(weights, experts.int())

    def _rows(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self._device)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self._device)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self._device)

    def _starts(self, lengths: Sequence[int]) -> Tensor:
        return self._ints([0, *accumulate(lengths)])
