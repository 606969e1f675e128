# SPDX-License-Identifier: Apache-2.0
"""Check every Triton kernel against the fp64 reference on a GPU, then time it.

    PYTHONPATH=. python benchmarks/gpu_kernels.py [--only gdn,paged] [--no-check]

Sizes are those of Qwen3.5-4B (16/4 heads of 256; 16/32 gated-delta heads of 128 x 128), and for
latent attention those of Kimi-Linear (32 heads of 128 + 64, rows of 512 + 64). Times are
medians of graph replays of launches one after another, in turn on inputs that together do not fit
in the L2 cache (those of small ops do, as in a step). The bytes or FLOP are the least the op must
move or do; the last column is their rate's share of 4.3 TB/s or 790 TFLOP/s, both measured on one
H200. Decode attention is given the bound on its context that an engine passes, not the context.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from tests.kernels import cases
from tests.kernels.cases import Case, strided
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.fp8 import FP8
from vllm.kernels.latent_attention import LatentAttentionProblem, expansion_pays
from vllm.kernels.latent_attention.hopper import attend_to_latents
from vllm.kernels.sampling.adjust import change_logits
from vllm.kernels.sampling.adjustment_fields import Field
from vllm.kernels.sampling.draw import argmax_rows, gumbel_sample
from vllm.kernels.sampling.filter import kept_tokens
from vllm.kernels.sampling.logprobs import ranked_logprobs
from vllm.model_executor.layers.fla.ops.gated_delta_rule.scan_segments import ScanCuts
from vllm.utils.math_utils import cdiv

GB_PER_S = 4300.0
TFLOP_PER_S = 790.0
HEADS = (16, 4, 256)
GDN_HEADS = (16, 32, 128, 128)
#: heads, dimensions of a key of its own, shared ones, of a value, of the latent
LATENT = (32, 128, 64, 128, 512)
#: queries and context of each sequence
ABSORBED = {
    "decode 64 x 4096": [(1, 4096)] * 64,
    "decode 1 x 12000": [(1, 12000)],
    "verify 64 x 4 of 4096": [(4, 4096)] * 64,
}
CHANNELS = 2 * 16 * 128 + 32 * 128
HIDDEN, FFN, VOCAB = 2560, 9216, 248320
BF16 = torch.bfloat16
STATE_BYTES = 32 * 128 * 128 * 4

L2_BYTES = 60e6
MOST_COPIES = 32
#: at least so many launches per graph, whose own start is then little of each
LAUNCHES = 20
#: how long an entry is measured
REPEAT_MS = 40
#: the bound on decodes' contexts
MAX_MODEL_LEN = 16384

#: of ops that round in between
TOLERANCES = {"gdn_prefill": 1e-2, "latent_attention": 1.5e-2}

#: what `report` printed, for `--output`
ROWS: list[dict[str, Any]] = []

DEVICE = "cuda"
MULTIPROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count
CAPABILITY = torch.cuda.get_device_capability()
kernels = CudaKernels(CAPABILITY)


@dataclass(frozen=True)
class Bench:
    """One op at one size; `make` builds its arguments, `bytes`/`flops` are the least it must do."""

    op: str
    shape: str
    make: Callable[[], Case]
    bytes: float = 0.0
    flops: float = 0.0


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def token_ops(t: int) -> Iterator[Bench]:
    """Norms, gates and cache writes of `t` tokens."""
    row = 2.0 * t * HIDDEN
    norm = dict(eps=1e-6, one_plus=True)
    yield Bench("rms_norm", f"{t} x {HIDDEN}",
                lambda: dict(x=rand(t, HIDDEN), weight=rand(HIDDEN), **norm), 2 * row)  # fmt: skip
    yield Bench("fused_add_rms_norm", f"{t} x {HIDDEN}",
                lambda: dict(x=rand(t, HIDDEN), residual=rand(t, HIDDEN), weight=rand(HIDDEN),
                             **norm), 4 * row)  # fmt: skip
    yield Bench("gated_rms_norm", f"{t} x 32 x 128",
                lambda: dict(x=rand(t, 32, 128), gate=strided(rand(t, 32, 128), 128),
                             weight=rand(128), eps=1e-6), 6.0 * t * 4096)  # fmt: skip
    yield Bench("silu_and_mul", f"{t} x {FFN}",
                lambda: dict(gate_up=rand(t, 2 * FFN)), 6.0 * t * FFN)  # fmt: skip
    yield Bench("mul_sigmoid", f"{t} x 16 x 256",
                lambda: dict(x=rand(t, 16, 256), gate=rand(t, 16, 512)[..., 256:]),
                6.0 * t * 4096)  # fmt: skip
    yield Bench("qk_norm_rope_cache", f"{t} tokens",
                lambda: dense_rope_case(t), 2.0 * t * 2 * 256 * (16 + 8))  # fmt: skip
    yield Bench("write_rows", f"{t} x 4 x {HIDDEN}",
                lambda: dict(rows=rand(t, 4, HIDDEN), cache=rand(t // 16 + 1, 16, 4, HIDDEN),
                             slot_mapping=torch.arange(t, device=DEVICE)), 8 * row)  # fmt: skip


def matmuls(t: int) -> Iterator[Bench]:
    """The matmuls of `t` tokens; those of few tokens alone, in steps: `benchmarks/skinny.py`."""
    for op, n, k in (
        ("linear", 12352, HIDDEN),
        ("linear", HIDDEN, FFN),
        ("linear", HIDDEN, 4096),
        ("linear_silu_and_mul", 2 * FFN, HIDDEN),
    ):
        make = partial(linear_case, t, n, k)
        read = 2.0 * n * k
        flops = 0.0 if t < 256 else t * read
        yield Bench(op, f"{t} x {k} x {n}", make, read, flops)


def linear_case(t: int, n: int, k: int) -> Case:
    return dict(x=rand(t, k), weight=rand(n, k) * k**-0.5, bias=None)


def dense_rope_case(tokens: int) -> Case:
    case = cases.rope_case(tokens, HEADS, BF16, DEVICE, rot=64)
    return case | dict(qkv=case["qkv"].contiguous())


def attention(
    name: str,
    lengths: list[tuple[int, int]],
    cache: torch.dtype = BF16,
    *,
    heads: tuple[int, int, int] = HEADS,
) -> Bench:
    """`lengths` are (query, context) pairs, `heads` query heads, kv heads and their size."""
    nh, nkv, hd = heads
    pairs = sum(q * (s - q) + q * (q + 1) / 2 for q, s in lengths)
    kv = sum(s for _, s in lengths) * 2.0 * nkv * hd * cache.itemsize
    qo = sum(q for q, _ in lengths) * 2 * nh * hd * 2.0
    longest = max(q for q, _ in lengths)
    compute_bound = longest > 16
    bound = {"max_seq_len": MAX_MODEL_LEN} if longest == 1 else {}

    def make() -> Case:
        case = cases.attention_case(lengths, heads, BF16, DEVICE) | bound
        return case | dict(kv_cache=_copy(case["kv_cache"], cache))

    return Bench(
        "paged_attention",
        name if cache == BF16 else f"{name}, fp8 cache",
        make,
        0.0 if compute_bound else kv + qo,
        4.0 * pairs * nh * hd if compute_bound else 0.0,
    )


def latents(name: str, lengths: list[tuple[int, int]]) -> Bench:
    """Latent attention: rows are read once, or keys and values are made of them for one prompt,
    which has to be long enough; `lengths` as in `attention`."""
    heads, nope, shared, value, latent = LATENT
    queries, context = (sum(each) for each in zip(*lengths, strict=True))
    longest = max(q for q, _ in lengths)
    pairs = sum(q * (s - q) + q * (q + 1) / 2 for q, s in lengths)
    compute_bound = len(lengths) == 1 and expansion_pays(longest, latent, nope, value)
    made = 2.0 * context * heads * latent * (nope + value)
    read = context * (latent + shared) + heads * (nope + value) * latent
    read += queries * heads * (nope + shared + value)
    bound = {"max_seq_len": MAX_MODEL_LEN} if longest == 1 else {}
    return Bench(
        "latent_attention",
        name,
        lambda: cases.latent_case(lengths, LATENT, BF16, DEVICE) | bound,
        0.0 if compute_bound else 2.0 * read,
        made + 2.0 * pairs * heads * (nope + shared + value) if compute_bound else 0.0,
    )


def convolution(name: str, lengths: list[int]) -> Bench:
    tokens, carried = sum(lengths), [False] * len(lengths)
    return Bench("causal_conv1d", name,
                 lambda: cases.conv_case(lengths, carried, CHANNELS, BF16, DEVICE)
                 | dict(x=rand(tokens, CHANNELS)), 4.0 * tokens * CHANNELS)  # fmt: skip


def delta_rule(
    name: str,
    lengths: list[int],
    heads: tuple[int, int] = GDN_HEADS[:2],
    *,
    split: bool = False,
    slow_decay: bool = False,
) -> Bench:
    """Chunked delta rule of a prefill batch with this many key and value heads of 128 x 128."""
    tokens, carried = sum(lengths), [False] * len(lengths)
    chunk = 2 * 64 * (5 * 64 * 128 + 3 * 128 * 128)
    cuts = ScanCuts(heads[1], 128, MULTIPROCESSORS)
    starts, device = cases.starts_of(lengths), torch.device(DEVICE)
    segments = cuts.of_batch(starts, device) if split else None
    return Bench("gdn_prefill", name,
                 lambda: cases.gdn_case(lengths, carried, (*heads, 128, 128), BF16, DEVICE,
                                        slow_decay=slow_decay)
                 | dict(qkv=rand(tokens, (2 * heads[0] + heads[1]) * 128),
                        segments=segments),
                 flops=1.0 * heads[1] * tokens / 64 * chunk)  # fmt: skip


def decode(n: int) -> Bench:
    state = n * (2.0 * STATE_BYTES + CHANNELS * 2 * 8 + 4096 * 2)
    return Bench("gdn_decode", f"{n} sequences",
                 lambda: cases.gdn_decode_case(n, GDN_HEADS, BF16, DEVICE)
                 | dict(qkv=rand(n, CHANNELS)), state)  # fmt: skip


def benches() -> list[Bench]:
    out = list(itertools.chain.from_iterable(token_ops(t) for t in (1, 256, 8192)))
    out += itertools.chain.from_iterable(matmuls(t) for t in (1, 8, 16, 17, 8192))
    out += [
        attention("decode 64 x 1024", [(1, 1024)] * 64),
        attention("decode 1 x 1024", [(1, 1024)]),
        attention("decode 1 x 12000", [(1, 12000)]),
        attention("decode 256 x 384", [(1, 384)] * 256),
        attention("decode 64 x 4096", [(1, 4096)] * 64),
        attention("verify 64 x 4 of 1024", [(4, 1024)] * 64),
        attention("prefill 2 x 4096", [(4096, 4096)] * 2),
        attention("prefill 1 x 8192", [(8192, 8192)]),
        attention("prefill 16 x 512", [(512, 512)] * 16),
        attention("prefill 2048 of 12000", [(2048, 12000)]),
        attention("prefill 2 x 8192", [(8192, 8192)] * 2),
        attention("prefill 2 x 8192, 32/8 x 128", [(8192, 8192)] * 2, heads=(32, 8, 128)),
        attention("prefill 2 x 8192, 32/8 x 64", [(8192, 8192)] * 2, heads=(32, 8, 64)),
        attention("decode 64 x 1024", [(1, 1024)] * 64, FP8),
        attention("decode 64 x 4096", [(1, 4096)] * 64, FP8),
        attention("prefill 2 x 4096", [(4096, 4096)] * 2, FP8),
        *(latents(name, lengths) for name, lengths in ABSORBED.items()),
        latents("prefill 1 x 4096, expanded", [(4096, 4096)]),
        latents("prefill 2048 of 12000, expanded", [(2048, 12000)]),
    ]
    for name, lengths in (("2 x 4096", [4096] * 2), ("1 x 8192", [8192]), ("16 x 512", [512] * 16)):
        out += [convolution(name, lengths), delta_rule(name, lengths)]
    # One shard of eight value heads: the sequential part has the least to overlap with.
    for n in (8192, 65536):
        name, shard = f"1 x {n}, 2/8 heads", partial(delta_rule, lengths=[n], heads=(2, 8))
        # In segments, and with states that no segment forgets, which costs the most.
        out += [shard(name), shard(f"{name}, split", split=True),
                shard(f"{name}, split, slow", split=True, slow_decay=True)]  # fmt: skip
    return out + [decode(n) for n in (1, 8, 64, 256, 1024)]


def time_us(runs: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of a launch, from replays of a graph of `runs` in turn."""
    runs = list(runs) * cdiv(LAUNCHES, len(runs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        runs[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    replay = float(triton.testing.do_bench(graph.replay, rep=REPEAT_MS, return_mode="median"))
    return 1e3 * replay / len(runs)


def copies(case: Case) -> list[Case]:
    """The case, and as many copies of it as outgrow the L2 cache; `MOST_COPIES` of a small one."""
    tensors = {key: value for key, value in case.items() if isinstance(value, torch.Tensor)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    count = min(MOST_COPIES, max(2, int(4 * L2_BYTES // max(1, size)) + 1))
    return [case] + [
        case | {key: _copy(tensor) for key, tensor in tensors.items()} for _ in range(count - 1)
    ]


def _copy(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """With the same strides, gaps included."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=tensor.device
    ).copy_(tensor)


def report(op: str, shape: str, us: float, num_bytes: float, flops: float) -> None:
    if flops:
        work, amount = {"flops": flops}, f"{flops * 1e-9:9.1f} GFLOP"
        rate, unit, share = flops / us * 1e-6, "TFLOP/s", flops / us * 1e-6 / TFLOP_PER_S
    else:
        work, amount = {"bytes": num_bytes}, f"{num_bytes * 1e-6:9.2f} MB   "
        rate, unit, share = num_bytes / us * 1e-3, "GB/s", num_bytes / us * 1e-3 / GB_PER_S
    line = f"{op:20s} {shape:32s} {us:9.1f} us {amount} {rate:8.0f} {unit:8s}{share:6.1%}"
    print(line, flush=True)
    row: dict[str, Any] = {"op": op, "shape": shape, "us": us, **work}
    ROWS.append(row | {"rate": rate, "unit": unit, "share": share})


def checks() -> list[Bench]:
    """Every op at sizes where the fp64 reference is quick, ragged, with padding and old states."""
    todo = [*token_ops(300), *matmuls(11)]
    todo += [
        attention("ragged decode", [(1, 1024)] * 8 + [(1, 37)]),
        attention("verify", [(4, 1024)] * 8),
        *(
            attention(f"ragged prefill {heads}", [(700, 2000), (1, 50), (130, 130)], heads=heads)
            for heads in (HEADS, (32, 8, 128), (32, 8, 64))
        ),
        latents("ragged decode", [(1, 1024)] * 8 + [(1, 37)]),
        latents("verify", [(4, 300)] * 8),
        latents("expanded", [(300, 700)]),
    ]
    lengths, carried = [500, 1, 64, 129], [True, False, True, False]
    for heads in (GDN_HEADS, (30, 30, 96, 192)):
        make = partial(cases.gdn_case, lengths, carried, heads, BF16, DEVICE, padding=1)
        todo.append(Bench("gdn_prefill", f"ragged {heads}", make))
    slow = partial(cases.gdn_case, [2000], [True], GDN_HEADS, BF16, DEVICE, slow_decay=True)
    conv = partial(cases.conv_case, lengths, carried, CHANNELS, BF16, DEVICE, padding=1)
    step = partial(cases.gdn_decode_case, 33, GDN_HEADS, BF16, DEVICE, padding=3)
    todo.append(Bench("gdn_prefill", "slow decay", slow))
    todo.append(Bench("causal_conv1d", "ragged", conv))
    todo.append(Bench("gdn_decode", "33 sequences", step))
    return todo


def check_all(only: list[str]) -> bool:
    """Every op against the fp64 reference; prints what differs, True if all agree."""
    good = True
    for bench in checks():
        if only and not any(name in bench.op for name in only):
            continue
        torch.manual_seed(0)
        try:
            cases.check(kernels, bench.op, bench.make(), TOLERANCES.get(bench.op, 5e-3))
        except Exception as error:
            good = False
            reason = f"{type(error).__name__}: {str(error)[:400]}"
            print(f"FAIL {bench.op} {bench.shape}: {reason}", flush=True)
    print("correctness:", "all ops agree with fp64" if good else "FAILURES above", flush=True)
    return good


def time_all(only: list[str]) -> None:
    for bench in benches():
        if only and not any(name in bench.op for name in only):
            continue
        with torch.device(DEVICE):  # random numbers are drawn there: a seed is not needed
            case = bench.make()
        us = time_us([partial(cases.run, kernels, bench.op, case) for case in copies(case)])
        report(bench.op, bench.shape, us, bench.bytes, bench.flops)
    if not only or any(name in "latent_attention" for name in only):
        for name, lengths in ABSORBED.items():
            time_attending(name, lengths)
    if only and "sampling" not in only:
        return
    for n in (1, 256):
        time_sampling(n)


def time_attending(name: str, lengths: list[tuple[int, int]]) -> None:
    """Latent attention without the products of small matrices before and after it."""
    heads, _, shared, _, latent = LATENT
    queries, context = (sum(each) for each in zip(*lengths, strict=True))
    with torch.device(DEVICE):
        case = cases.latent_case(lengths, LATENT, BF16, DEVICE) | {"max_seq_len": MAX_MODEL_LEN}
    query = rand(heads, queries, latent)
    problems = [LatentAttentionProblem(**copy) for copy in copies(case)]
    us = time_us([partial(attend_to_latents, problem, query) for problem in problems])
    numbers = context * (latent + shared) + queries * heads * (2 * latent + shared)
    report("attend_to_latents", name, us, 2.0 * numbers, 0)


def time_sampling(n: int) -> None:
    """Choosing a token per row, filtered and not, and its logprobs; bf16 logits as a model's."""
    logits, temperature = rand(n, VOCAB), torch.full((n,), 0.8, device=DEVICE)
    seeds = torch.arange(n, device=DEVICE)
    top_k, top_p = torch.full((n,), 20, device=DEVICE), torch.full((n,), 0.9, device=DEVICE)
    kept = kept_tokens(logits, temperature, top_k, top_p, None)
    penalised = np.zeros((n, len(Field)), dtype=np.int64)
    marks = torch.zeros(VOCAB, dtype=torch.int32, device=DEVICE)
    penalised[:, Field.MARKS] = marks.data_ptr()
    descriptors = torch.from_numpy(penalised).cuda()
    order = torch.arange(n, dtype=torch.int32, device=DEVICE)
    read = 2.0 * n * VOCAB
    for op, num_bytes, run in (
        ("argmax_rows", read, partial(argmax_rows, logits)),
        ("gumbel_sample", read, partial(gumbel_sample, logits, temperature, seeds, seeds)),
        ("draw of the kept", read, partial(gumbel_sample, logits, temperature, seeds, seeds, kept)),
        ("kept k 20 p 0.9", read, partial(kept_tokens, logits, temperature, top_k, top_p, None)),
        ("kept p 0.9", read, partial(kept_tokens, logits, temperature, None, top_p, None,
                                     top_p_alone=True)),
        ("change_logits", 5 * read, partial(change_logits, logits, descriptors, order)),
        ("ranked_logprobs 5", read, partial(ranked_logprobs.run, logits, seeds, 5)),
    ):  # fmt: skip
        report(op, f"{n} x {VOCAB}", time_us([run]), num_bytes, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="parts of op names, comma-separated")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--output", type=Path, help="write the timings here too, as JSON")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    good = args.no_check or check_all(only)
    time_all(only)
    if args.output is not None:
        args.output.write_text(json.dumps(ROWS, indent=1) + "\n")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
