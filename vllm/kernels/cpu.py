# SPDX-License-Identifier: Apache-2.0
"""The CPU's kernels: C++ in `csrc/cpu`, vectorised for the instruction set found at run time."""

from torch import Tensor

from vllm._extension import cpu_ops
from vllm.kernels.interface import Kernels
from vllm.kernels.journal import GatedNorm, Journal, JournalStack
from vllm.kernels.scan_segments import ScanSegments


class CpuKernels(Kernels):
    """`Kernels` for float32, bfloat16 and float16 on the CPU.

    Arguments are checked in C++; a wrong dtype, shape or stride raises `RuntimeError`. Results do
    not depend on the number of threads or on what else is in the batch.
    """

    platform = "cpu"

    def __init__(self) -> None:
        super().__init__()
        ops = cpu_ops()
        self.isa: str = ops.isa()
        self._causal_conv1d = ops.causal_conv1d.default
        self._gdn_prefill = ops.gdn_prefill.default
        self._gdn_decode = ops.gdn_decode.default
        self._gdn_commit = ops.gdn_commit.default

    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        state_indices: Tensor,
        has_initial_state: Tensor,
        query_start_loc: Tensor,
        *,
        out: Tensor,
    ) -> None:
        self._causal_conv1d(
            x, weight, bias, conv_state, state_indices, has_initial_state, query_start_loc, out
        )

    def gdn_prefill(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_state: Tensor,
        state_indices: Tensor,
        has_initial_state: Tensor,
        query_start_loc: Tensor,
        chunk_indices: Tensor,
        chunk_offsets: Tensor,
        *,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        out: Tensor,
        segments: ScanSegments | None = None,
    ) -> None:
        """A thread walks its sequence chunk by chunk, so the chunk index is not needed here.

        Raises ValueError with segments: threads have sequences and heads enough.
        """
        if segments is not None:
            raise ValueError("the CPU's kernels scan whole sequences; give no segments")
        self._gdn_prefill(
            qkv,
            a,
            b,
            A_log,
            dt_bias,
            ssm_state,
            state_indices,
            has_initial_state,
            query_start_loc,
            num_k_heads,
            num_v_heads,
            head_k_dim,
            head_v_dim,
            out,
        )

    def gdn_decode(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        conv_state: Tensor,
        ssm_state: Tensor,
        state_indices: Tensor,
        *,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        out: Tensor,
        journal: Journal | None = None,
        norm: GatedNorm | None = None,
    ) -> None:
        self._gdn_decode(
            qkv,
            a,
            b,
            A_log,
            dt_bias,
            conv_weight,
            conv_bias,
            conv_state,
            ssm_state,
            state_indices,
            num_k_heads,
            num_v_heads,
            head_k_dim,
            head_v_dim,
            out,
            *_journal_fields(journal),
        )
        if norm is not None:
            self.gated_rms_norm(out, norm.gate, norm.weight, norm.eps, out)

    def gdn_commit(self, stack: JournalStack, entries: Tensor) -> None:
        counts = (stack.pending, stack.first, stack.taken)
        for i, (state, conv_state) in enumerate(zip(stack.states, stack.conv_states, strict=True)):
            kept = (stack.keys[i], stack.errors[i], stack.decays[i], stack.inputs[i])
            self._gdn_commit(entries, *counts, *kept, state, conv_state)


def _journal_fields(journal: Journal | None) -> tuple[Tensor | None, ...]:
    if journal is None:
        return (None,) * 6
    return (
        journal.steps,
        journal.taken,
        journal.keys,
        journal.errors,
        journal.decays,
        journal.inputs,
    )
