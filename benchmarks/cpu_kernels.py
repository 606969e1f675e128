# SPDX-License-Identifier: Apache-2.0
"""Time of each CPU op in a decode step and in a prefill, beside plain torch.

python benchmarks/cpu_kernels.py --threads 2 --dtype float32 --batch 8 --prompt 2048
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm.kernels.attention import AttentionProblem
from vllm.kernels.chunks import chunk_metadata
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.linear.cpu import skinny_linear
from vllm.kernels.moe import ExpertsProblem, RoutingProblem, RoutingRule, one_by_one
from vllm.kernels.moe.cpu import route_experts, run_experts
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.rotary import RotaryProblem
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill

HIDDEN = 640
GDN = dict(num_k_heads=8, num_v_heads=16, head_k_dim=64, head_v_dim=64)
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 8, 2, 128, 16
GDN_LAYERS, ATTENTION_LAYERS = 12, 4
ROWS = (1, 8, 16, 32, 128)
EXPERTS, TOP_K = (64, 1024, 512), 8
#: of one token
BATCHES = 8

Weights = tuple[torch.Tensor, torch.Tensor]


def microseconds(call: Callable[[], Any], seconds: float) -> float:
    """Shortest time of `call` over about `seconds`: the one least disturbed by other processes."""
    call()
    best, runs = float("inf"), 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or runs < 3:
        start = time.perf_counter()
        call()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best * 1e6


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention_inputs(lengths: list[tuple[int, int]], dtype: torch.dtype) -> dict[str, Any]:
    """`lengths` are (query_len, seq_len) pairs."""
    starts = [0]
    for query_len, _ in lengths:
        starts.append(starts[-1] + query_len)
    blocks = -(-max(seq_len for _, seq_len in lengths) // BLOCK)
    query = torch.randn(starts[-1], HEADS, HEAD_DIM).to(dtype)
    return dict(
        query=query,
        kv_cache=torch.randn(len(lengths) * blocks, 2, BLOCK, KV_HEADS, HEAD_DIM).to(dtype),
        block_table=torch.randperm(len(lengths) * blocks).int().view(len(lengths), blocks),
        seq_lens=int32(*(seq_len for _, seq_len in lengths)),
        query_start_loc=int32(*starts),
        max_query_len=max(query_len for query_len, _ in lengths),
        max_seq_len=max(seq_len for _, seq_len in lengths),
        scale=HEAD_DIM**-0.5,
        sliding_window=None,
        out=torch.empty_like(query),
    )


def gdn_inputs(tokens: int, seqs: int, dtype: torch.dtype) -> dict[str, Any]:
    heads = GDN["num_v_heads"]
    channels = 2 * GDN["num_k_heads"] * GDN["head_k_dim"] + heads * GDN["head_v_dim"]
    return dict(
        qkv=torch.randn(tokens, channels).to(dtype),
        a=torch.randn(tokens, heads).to(dtype),
        b=torch.randn(tokens, heads).to(dtype),
        A_log=torch.rand(heads),
        dt_bias=torch.rand(heads),
        ssm_state=torch.randn(seqs, heads, GDN["head_v_dim"], GDN["head_k_dim"]) * 0.1,
        state_indices=torch.arange(seqs, dtype=torch.int32),
        out=torch.empty(tokens, heads, GDN["head_v_dim"], dtype=dtype),
    )


def common_ops(kernels: Kernels, tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    x, weight = torch.randn(tokens, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
    gate_up = torch.randn(tokens, 4 * HIDDEN * 2).to(dtype)
    heads = torch.randn(tokens, GDN["num_v_heads"], GDN["head_v_dim"]).to(dtype)
    head_weight = torch.randn(GDN["head_v_dim"]).to(dtype)
    wide = torch.randn(tokens, HEADS, HEAD_DIM).to(dtype)
    qkv = torch.randn(tokens, (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
    norm = torch.randn(HEAD_DIM).to(dtype)
    cache = torch.zeros(tokens // BLOCK + 1, 2, BLOCK, KV_HEADS, HEAD_DIM, dtype=dtype)
    positions, cos_sin = torch.arange(tokens), torch.randn(4096, HEAD_DIM // 4)
    rope: dict[str, Any] = dict(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        gated=True,
        eps=1e-6,
        one_plus=True,
    )
    return {
        "fused_add_rms_norm": lambda: kernels.fused_add_rms_norm(x, x, weight, 1e-6, one_plus=True),
        "silu_and_mul": lambda: kernels.silu_and_mul(gate_up),
        "gated_rms_norm": lambda: kernels.gated_rms_norm(heads, heads, head_weight, 1e-6),
        "mul_sigmoid": lambda: kernels.mul_sigmoid(wide, wide),
        "qk_norm_rope_cache": lambda: kernels.qk_norm_rope_cache(
            RotaryProblem(qkv, positions, cos_sin, norm, norm, cache, positions, **rope)
        ),
    }


def decode_ops(kernels: Kernels, batch: int, context: int, dtype: torch.dtype) -> dict[str, Any]:
    gdn = gdn_inputs(batch, batch, dtype)
    channels = gdn["qkv"].shape[1]
    gdn |= dict(
        conv_weight=torch.randn(channels, 4).to(dtype),
        conv_bias=None,
        conv_state=torch.randn(batch, 3, channels).to(dtype),
    )
    attention = attention_inputs([(1, context)] * batch, dtype)
    return common_ops(kernels, batch, dtype) | {
        "gdn_decode": lambda: kernels.gdn_decode(GdnDecode(**gdn)),
        "paged_attention": lambda: kernels.paged_attention(AttentionProblem(**attention)),
    }


def prefill_ops(kernels: Kernels, prompt: int, dtype: torch.dtype) -> dict[str, Any]:
    gdn = gdn_inputs(prompt, 1, dtype)
    starts = int32(0, prompt)
    chunk_indices, chunk_offsets = chunk_metadata([0, prompt])
    fresh = dict(has_initial_state=torch.tensor([False]), query_start_loc=starts)
    gdn |= fresh | dict(chunk_indices=chunk_indices, chunk_offsets=chunk_offsets)
    channels = gdn["qkv"].shape[1]
    conv = fresh | dict(
        x=gdn["qkv"],
        weight=torch.randn(channels, 4).to(dtype),
        bias=None,
        conv_state=torch.zeros(1, 3, channels, dtype=dtype),
        state_indices=gdn["state_indices"],
        out=torch.empty_like(gdn["qkv"]),
    )
    attention = attention_inputs([(prompt, prompt)], dtype)
    return common_ops(kernels, prompt, dtype) | {
        "causal_conv1d": lambda: kernels.causal_conv1d(**conv),
        "gdn_prefill": lambda: kernels.gdn_prefill(GdnPrefill(**gdn)),
        "paged_attention": lambda: kernels.paged_attention(AttentionProblem(**attention)),
    }


# Calls per step of a 16-layer model with 12 GDN and 4 attention layers.
CALLS = {
    "fused_add_rms_norm": 2 * (GDN_LAYERS + ATTENTION_LAYERS),
    "silu_and_mul": GDN_LAYERS + ATTENTION_LAYERS,
    "gated_rms_norm": GDN_LAYERS,
    "causal_conv1d": GDN_LAYERS,
    "gdn_prefill": GDN_LAYERS,
    "gdn_decode": GDN_LAYERS,
    "mul_sigmoid": ATTENTION_LAYERS,
    "qk_norm_rope_cache": ATTENTION_LAYERS,
    "paged_attention": ATTENTION_LAYERS,
}


def report(
    title: str, ours: dict[str, Any], torch_ops: dict[str, Any] | None, seconds: float
) -> None:
    print(f"\n{title}\n{'op':22}{'us/call':>10}{'calls':>7}{'ms/step':>9}{'torch us':>12}")
    total = 0.0
    for name, call in ours.items():
        each = microseconds(call, seconds)
        step = each * CALLS[name] / 1e3
        total += step
        reference = f"{microseconds(torch_ops[name], seconds / 3):12.0f}" if torch_ops else ""
        print(f"{name:22}{each:10.1f}{CALLS[name]:7}{step:9.2f}{reference}")
    print(f"{'all':22}{'':17}{total:9.2f}")


def report_linear(dtype: torch.dtype, seconds: float) -> None:
    """`skinny_linear` beside torch: where it stops paying."""
    print(f"\n{'linear, us: ours / torch':28}" + "".join(f"{f'{m} rows':>18}" for m in ROWS))
    for k, n in ((HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 32000)):
        weight = torch.randn(n, k).to(dtype)
        line = f"{f'{k} -> {n}':28}"
        for m in ROWS:
            x = torch.randn(m, k).to(dtype)
            ours = microseconds(partial(skinny_linear, x, weight, None), seconds)
            theirs = partial(torch.nn.functional.linear, x, weight)
            torch_us = microseconds(theirs, seconds)
            line += f"{f'{ours:.0f} / {torch_us:.0f}':>18}"
        print(line)


def experts_problems(tokens: int, weights: Weights) -> list[ExpertsProblem]:
    """Some batches in turn, or few tokens would find their experts in a cache."""
    gate_up, down = weights
    problems = []
    for _ in range(max(1, BATCHES // tokens)):
        x = torch.randn(tokens, gate_up.shape[2]).to(gate_up.dtype)
        logits = torch.randn(tokens, len(gate_up))
        routing = route_experts(RoutingProblem(logits, len(gate_up), RoutingRule(TOP_K)))
        problems.append(ExpertsProblem(x, gate_up, down, routing))
    return problems


def run_all(run: Callable[[ExpertsProblem], Any], problems: list[ExpertsProblem]) -> None:
    for problem in problems:
        run(problem)


def report_experts(dtype: torch.dtype, counts: list[int], seconds: float) -> None:
    """A layer's experts, all in one call and one by one."""
    experts, hidden, inner = EXPERTS
    gate_up = torch.randn(experts, 2 * inner, hidden).mul_(hidden**-0.5).to(dtype)
    down = torch.randn(experts, hidden, inner).mul_(inner**-0.5).to(dtype)
    print(f"\n{experts} experts, top {TOP_K}, {hidden} -> {inner}")
    print(f"{'tokens':>6}{'hit':>7}{'us':>10}{'one by one':>12}{'GB/s':>8}{'GFLOP/s':>9}")
    for tokens in counts:
        problems = experts_problems(tokens, (gate_up, down))
        each = [
            microseconds(partial(run_all, run, problems), seconds) / len(problems)
            for run in (run_experts.run, one_by_one.run_experts)
        ]
        hit = sum(one.experts.unique().numel() for one in problems) / len(problems)
        size = 3 * hidden * inner
        rate, speed = hit * size * dtype.itemsize / each[0], 2 * tokens * TOP_K * size / each[0]
        times = f"{each[0]:10.0f}{each[1]:12.0f}"
        print(f"{tokens:6}{hit:7.1f}{times}{rate / 1e3:8.1f}{speed / 1e3:9.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=64, help="dk = dv of the GDN layers")
    parser.add_argument("--compare", action="store_true", help="time plain torch too")
    parser.add_argument(
        "--experts", type=int, nargs="*", default=[1, 8, 64, 1024], help="numbers of tokens"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="over which an op is timed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    GDN.update(head_k_dim=args.head_dim, head_v_dim=args.head_dim)
    dtype = getattr(torch, args.dtype)
    kernels, naive = CpuKernels(), NaiveKernels()
    print(f"{kernels.isa}, {args.threads} threads, {args.dtype}")
    with torch.inference_mode():
        report(
            f"decode, {args.batch} sequences of {args.context} tokens",
            decode_ops(kernels, args.batch, args.context, dtype),
            decode_ops(naive, args.batch, args.context, dtype) if args.compare else None,
            args.seconds,
        )
        report(
            f"prefill of {args.prompt} tokens",
            prefill_ops(kernels, args.prompt, dtype),
            prefill_ops(naive, args.prompt, dtype) if args.compare else None,
            args.seconds,
        )
        report_linear(dtype, args.seconds / 3)
        if args.experts:
            report_experts(dtype, args.experts, 4 * args.seconds)


if __name__ == "__main__":
    main()
