# SPDX-License-Identifier: Apache-2.0
"""Inputs on which launch parameters are compared: bf16, sizes of a 4B hybrid and a 35B mixture."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from vllm.kernels.attention import AttentionProblem
from vllm.kernels.chunks import chunk_metadata
from vllm.kernels.interface import Kernels
from vllm.kernels.moe import ExpertsProblem, RoutingProblem, RoutingRule
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill

#: runs one op on prepared inputs
Run = Callable[[], object]

QUERY_HEADS, KV_HEADS, BLOCK_SIZE = 16, 4, 16
KEY_HEADS, VALUE_HEADS, HEAD_V_DIM, CONV_WIDTH = 16, 32, 128, 4


class Workloads:
    """Makes runs of `kernels` on `device`; lengths are tokens per sequence."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device

    def attention(self, head_dim: int, lengths: Sequence[tuple[int, int]]) -> Run:
        """Causal attention; `lengths` are (queries, context) pairs."""
        tokens = sum(queries for queries, _ in lengths)
        blocks = [-(-context // BLOCK_SIZE) for _, context in lengths]
        table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, (count, end) in enumerate(zip(blocks, accumulate(blocks), strict=True)):
            table[row, :count] = torch.arange(end - count, end)
        query = self._rows(tokens, QUERY_HEADS, head_dim)
        problem = AttentionProblem(
            query,
            self._rows(sum(blocks), 2, BLOCK_SIZE, KV_HEADS, head_dim),
            table.to(self._device),
            self._ints([context for _, context in lengths]),
            self._starts([queries for queries, _ in lengths]),
            max_query_len=max(queries for queries, _ in lengths),
            max_seq_len=max(context for _, context in lengths),
            scale=head_dim**-0.5,
            sliding_window=None,
            out=torch.empty_like(query),
        )
        return partial(self._kernels.paged_attention, problem)

    def delta_rule(self, head_k_dim: int, lengths: Sequence[int]) -> Run:
        """Prefill of the gated delta rule."""
        tokens, n = sum(lengths), len(lengths)
        starts = [0, *accumulate(lengths)]
        chunk_indices, chunk_offsets = chunk_metadata(starts)
        problem = GdnPrefill(
            self._rows(tokens, _channels(head_k_dim)),
            self._rows(tokens, VALUE_HEADS),
            self._rows(tokens, VALUE_HEADS),
            torch.zeros(VALUE_HEADS, device=self._device),
            torch.zeros(VALUE_HEADS, device=self._device),
            self._states(n, head_k_dim),
            self._ints(range(n)),
            torch.zeros(n, dtype=torch.bool, device=self._device),
            self._starts(lengths),
            chunk_indices.to(self._device),
            chunk_offsets.to(self._device),
            self._rows(tokens, VALUE_HEADS, HEAD_V_DIM),
        )
        return partial(self._kernels.gdn_prefill, problem)

    def delta_rule_decode(self, head_k_dim: int, num_seqs: int) -> Run:
        """One token of every sequence through convolution and gated delta rule."""
        channels = _channels(head_k_dim)
        problem = GdnDecode(
            self._rows(num_seqs, channels),
            self._rows(num_seqs, VALUE_HEADS),
            self._rows(num_seqs, VALUE_HEADS),
            torch.zeros(VALUE_HEADS, device=self._device),
            torch.zeros(VALUE_HEADS, device=self._device),
            self._states(num_seqs, head_k_dim),
            self._ints(range(num_seqs)),
            self._rows(channels, CONV_WIDTH),
            None,
            self._rows(num_seqs, CONV_WIDTH - 1, channels),
            self._rows(num_seqs, VALUE_HEADS, HEAD_V_DIM),
        )
        return partial(self._kernels.gdn_decode, problem)

    def convolution(self, lengths: Sequence[int]) -> Run:
        """Causal convolution of a prefill."""
        x, n = self._rows(sum(lengths), _channels(128)), len(lengths)
        return partial(
            self._kernels.causal_conv1d,
            x,
            self._rows(x.shape[1], CONV_WIDTH),
            None,
            self._rows(n, CONV_WIDTH - 1, x.shape[1]),
            self._ints(range(n)),
            torch.zeros(n, dtype=torch.bool, device=self._device),
            self._starts(lengths),
            out=torch.empty_like(x),
        )

    def experts(self, tokens: int, num_experts: int = 256, hidden: int = 2048) -> Run:
        """Eight experts of a quarter of the hidden size for every token, chosen evenly."""
        inner = hidden // 4
        logits = self._rows(tokens, num_experts)
        routing = self._kernels.route_experts(RoutingProblem(logits, num_experts, RoutingRule(8)))
        problem = ExpertsProblem(
            self._rows(tokens, hidden),
            self._rows(num_experts, 2 * inner, hidden),
            self._rows(num_experts, hidden, inner),
            routing,
        )
        return partial(self._kernels.run_experts, problem)

    def _rows(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self._device)

    def _states(self, count: int, head_k_dim: int) -> Tensor:
        return torch.zeros(count, VALUE_HEADS, HEAD_V_DIM, head_k_dim, device=self._device)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self._device)

    def _starts(self, lengths: Sequence[int]) -> Tensor:
        return self._ints([0, *accumulate(lengths)])


def _channels(head_k_dim: int) -> int:
    return 2 * KEY_HEADS * head_k_dim + VALUE_HEADS * HEAD_V_DIM
