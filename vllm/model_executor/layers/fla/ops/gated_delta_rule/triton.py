# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in Triton. Importing this needs no GPU."""

from vllm.kernels.norm.triton import gated_rms_norm
from vllm.model_executor.layers.fla.ops.gated_delta_rule.chunk import run_chunked
from vllm.model_executor.layers.fla.ops.gated_delta_rule.commit import run_commit
from vllm.model_executor.layers.fla.ops.gated_delta_rule.decode import launch_for, run_decode
from vllm.model_executor.layers.fla.ops.gated_delta_rule.decode_inputs import (
    decode_inputs,
    overlaps_launches,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill

gdn_commit = run_commit


def gdn_prefill(p: GdnPrefill) -> None:
    """The chunked form: two launches, more with segments."""
    run_chunked(p.chunked, p.out, p.segments)


def gdn_decode(p: GdnDecode) -> None:
    """Two launches, the second of which reads the states meanwhile, and for many sequences the
    norm."""
    if len(p.state_indices) == 0:
        return
    overlaps = overlaps_launches(p.qkv.device)
    _, _, dk, dv = p.heads
    launch = launch_for(len(p.state_indices), dk, dv)
    fused = p.norm if launch.rows >= dv else None
    run_decode(p, decode_inputs(p, overlaps), fused, launch, overlaps)
    if p.norm is not None and fused is None:
        gated_rms_norm(p.out, p.norm.gate, p.norm.weight, p.norm.eps, p.out)
