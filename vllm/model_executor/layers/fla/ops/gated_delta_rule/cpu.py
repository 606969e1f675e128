# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on the CPU: `csrc/cpu/kernels/gdn*.cpp`."""

from torch import Tensor

from vllm._extension import cpu_ops
from vllm.kernels.journal import Journal, JournalStack
from vllm.kernels.norm.cpu import gated_rms_norm
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill

_ops = cpu_ops()
_gdn_prefill = _ops.gdn_prefill.default
_gdn_decode = _ops.gdn_decode.default
_gdn_commit = _ops.gdn_commit.default


def gdn_prefill(p: GdnPrefill) -> None:
    """A thread walks its sequence chunk by chunk, so the chunk index is not needed here.

    Raises ValueError with segments: threads have sequences and heads enough.
    """
    if p.segments is not None:
        raise ValueError("the CPU's kernels scan whole sequences; give no segments")
    _gdn_prefill(
        p.qkv,
        p.a,
        p.b,
        p.A_log,
        p.dt_bias,
        p.ssm_state,
        p.state_indices,
        p.has_initial_state,
        p.query_start_loc,
        *p.heads,
        p.out,
        p.beta_scale,
    )


def gdn_decode(p: GdnDecode) -> None:
    _gdn_decode(
        p.qkv,
        p.a,
        p.b,
        p.A_log,
        p.dt_bias,
        p.conv_weight,
        p.conv_bias,
        p.conv_state,
        p.ssm_state,
        p.state_indices,
        *p.heads,
        p.out,
        p.beta_scale,
        *journal_fields(p.journal),
    )
    if p.norm is not None:
        gated_rms_norm(p.out, p.norm.gate, p.norm.weight, p.norm.eps, p.out)


def gdn_commit(stack: JournalStack, entries: Tensor) -> None:
    counts = (stack.pending, stack.first, stack.taken)
    for i, (state, conv_state) in enumerate(zip(stack.states, stack.conv_states, strict=True)):
        kept = (stack.keys[i], stack.errors[i], stack.decays[i], stack.inputs[i])
        _gdn_commit(entries, *counts, *kept, state, conv_state)


def journal_fields(journal: Journal | None) -> tuple[Tensor | None, ...]:
    """A journal as the ops take it."""
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
