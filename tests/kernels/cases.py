# SPDX-License-Identifier: Apache-2.0
"""Random inputs for every kernel, and the comparison with the fp64 reference.

A case is the op's keyword arguments. Caches are strided views of an arena poisoned with NaN, so
a read of an unwritten slot or a write to a foreign one shows.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from tests.nightly import covering
from vllm.kernels.attention import AttentionProblem, QueryRows
from vllm.kernels.chunks import chunk_metadata
from vllm.kernels.interface import Kernels
from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.rotary import RotaryProblem
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill

Case = dict[str, Any]
CACHES = {"kv_cache", "cache", "conv_state", "ssm_state"}
EPS = 1e-6
_MANY = 1 << 24


def over_dtypes(*choices: Sequence[Any]) -> list[Any]:
    """Parameter sets of the product of `choices` and the fixture `dtype`: those that cover every
    pair in the interpreter, all where bf16 is compiled."""
    bf16 = product(*choices, ("bfloat16",))
    return [*covering(*choices, ("float32", "float16")), *bf16]


def error_ratio(out: Tensor, ref: Tensor) -> float:
    """`||out - ref|| / ||ref||` where `ref` is defined (not NaN); NaN in `out` never passes."""
    defined = ~ref.isnan()
    assert defined.any(), "nothing to compare"
    out, ref = out.double()[defined], ref[defined]
    if ref.abs().max() == 0:
        return float(out.abs().max())
    return float((out - ref).norm() / ref.norm())


# Rounding the result alone costs 2.4e-4 (fp16) and 2e-3 (bf16) at worst.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def widen(value: Any) -> Any:
    """A copy of a tensor, floating ones in fp64."""
    if not isinstance(value, Tensor):
        return value
    dtype = torch.float64 if value.is_floating_point() else value.dtype
    return value.detach().to(dtype, copy=True)


#: of ops that take one; others take the case's entries as arguments
PROBLEMS = {
    "paged_attention": AttentionProblem,
    "latent_attention": LatentAttentionProblem,
    "qk_norm_rope_cache": RotaryProblem,
    "gdn_prefill": GdnPrefill,
    "gdn_decode": GdnDecode,
}


def run(kernels: Kernels, op: str, case: Case) -> Any:
    """The op's result for a case."""
    function = getattr(kernels, op)
    return function(PROBLEMS[op](**case)) if op in PROBLEMS else function(**case)


def check(kernels: Kernels, op: str, case: Case, tolerance: float) -> None:
    """Run `op` and the fp64 reference on copies of `case`; compare results and every argument."""
    wide = {name: widen(value) for name, value in case.items()}
    expected = run(NaiveKernels(), op, wide)
    result = run(kernels, op, case)
    if not isinstance(result, tuple):
        result, expected = (result,), (expected,)
    pairs = {f"result {i}": p for i, p in enumerate(zip(result, expected, strict=True))}
    pairs |= {
        name: (case[name], wide[name])
        for name, value in case.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    for name, (out, ref) in pairs.items():
        if out is None:
            continue
        assert out.shape == ref.shape, f"{op}: shape of {name}"
        if name in CACHES:
            assert torch.equal(out.isnan(), ref.isnan()), f"{op}: {name} touched elsewhere"
        if not ref.isnan().all():
            ratio = error_ratio(out, ref)
            assert ratio < tolerance, f"{op}: {name} differs by {ratio:.2e}"


def randn(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    """Normal values drawn on the CPU, so a seed gives the same case on every device; so many that
    only a GPU computes with them are drawn there."""
    source = "cpu" if prod(shape) < _MANY else device
    return (torch.randn(*shape, device=source) * scale).to(dtype).to(device)


def strided(rows: Tensor, extra: int = 8) -> Tensor:
    """The same rows as a slice of a wider NaN tensor (last dimension contiguous)."""
    wide = rows.new_full((*rows.shape[:-1], rows.shape[-1] + extra), float("nan"))
    wide[..., : rows.shape[-1]] = rows
    return wide[..., : rows.shape[-1]]


def arena_cache(num_blocks: int, *inner: int, dtype: torch.dtype, device: str) -> Tensor:
    """NaN cache `[num_blocks, *inner]` whose block stride exceeds its block (an arena's layer)."""
    size = 1
    for n in inner:
        size *= n
    arena = torch.full((num_blocks, size + 64), float("nan"), dtype=dtype, device=device)
    return arena[:, 32 : 32 + size].unflatten(1, inner)


def starts_of(lengths: list[int]) -> list[int]:
    """`query_start_loc` of these lengths."""
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    return starts


def attention_case(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    window: int | None = None,
    block_size: int = 16,
    padding: int = 0,
    gated: bool = False,
    rows: QueryRows = QueryRows.TOKENS,
) -> Case:
    """`lengths` are (query_len, seq_len) pairs; `padding` adds sequences of length 0. A gate is
    packed behind each head of another tensor, as in a projection."""
    num_heads, num_kv_heads, head_dim = heads
    starts = starts_of([q for q, _ in lengths])
    blocks = [-(-s // block_size) for _, s in lengths]
    num_blocks = sum(blocks) + 2
    order = torch.randperm(num_blocks).tolist()
    table = torch.zeros(len(lengths) + padding, max(blocks) + 1, dtype=torch.int32)
    kv = arena_cache(num_blocks, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
    for seq, count in enumerate(blocks):
        own, order = order[:count], order[count:]
        table[seq, :count] = torch.tensor(own, dtype=torch.int32)
        drawn = randn(2, lengths[seq][1], num_kv_heads, head_dim, dtype=dtype, device=device)
        for i, block in enumerate(own):
            part = drawn[:, i * block_size : (i + 1) * block_size]
            kv[block, :, : part.shape[1]] = part
    query = strided(randn(starts[-1] + padding, num_heads, head_dim, dtype=dtype, device=device), 8)
    seq_lens = [s for _, s in lengths] + [0] * padding
    packed = randn(len(query), num_heads, 2 * head_dim if gated else 0, dtype=dtype, device=device)
    return dict(
        query=query,
        kv_cache=kv,
        block_table=table.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_start_loc=torch.tensor(
            starts + [starts[-1]] * padding, dtype=torch.int32, device=device
        ),
        max_query_len=max(q for q, _ in lengths),
        max_seq_len=max(s for _, s in lengths),
        scale=head_dim**-0.5,
        sliding_window=window,
        out=torch.full(query.shape, float("nan"), dtype=dtype, device=device),
        gate=packed[..., head_dim:] if gated else None,
        rows=rows,
    )


def latent_case(
    lengths: list[tuple[int, int]],
    size: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    **options: Any,
) -> Case:
    """`size`: heads, dimensions of a key of its own, shared ones, of a value, of the latent; the
    rest as in `attention_case`."""
    heads, nope, shared, value, latent = size
    case = attention_case(lengths, (heads, 1, latent + shared), dtype, device, **options)
    tokens = len(case["query"])
    for name in ("gate", "sliding_window", "rows"):
        del case[name]
    return case | dict(
        query=randn(tokens, heads, nope + shared, dtype=dtype, device=device),
        kv_b=randn(heads, nope + value, latent, dtype=dtype, device=device, scale=latent**-0.5),
        cache=case.pop("kv_cache")[:, 0, :, 0],
        scale=(nope + shared) ** -0.5,
        out=torch.full((tokens, heads, value), torch.nan, dtype=dtype, device=device),
        room=10**6,
    )


def rope_case(
    tokens: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    gated: bool = True,
    normed: bool = True,
    one_plus: bool = True,
    rot: int | None = None,
) -> Case:
    """Tokens in random slots of a 16-token paged cache; the last row is padding."""
    num_heads, num_kv_heads, head_dim = heads
    rot = head_dim // 2 if rot is None else rot
    width = num_heads * head_dim * (2 if gated else 1) + 2 * num_kv_heads * head_dim
    num_blocks = -(-tokens // 16) + 1
    slots = torch.randperm(num_blocks * 16)[:tokens]
    slots[-1] = -1
    positions = torch.randint(0, 512, (tokens,))
    positions[-1] = 0
    angles = torch.arange(512)[:, None] / 1e4 ** (torch.arange(0, rot, 2) / rot)
    weights = (
        [randn(head_dim, dtype=dtype, device=device, scale=0.3) for _ in range(2)]
        if normed
        else [None, None]
    )
    return dict(
        qkv=strided(randn(tokens, width, dtype=dtype, device=device)),
        positions=positions.to(device),
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=-1).float().to(device),
        q_norm_weight=weights[0],
        k_norm_weight=weights[1],
        kv_cache=arena_cache(num_blocks, 2, 16, num_kv_heads, head_dim, dtype=dtype, device=device),
        slot_mapping=slots.to(device),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        gated=gated,
        eps=EPS,
        one_plus=one_plus,
    )


def ragged(lengths: list[int], carried: list[bool], device: str, padding: int) -> tuple[Case, int]:
    """State bookkeeping of a ragged batch, and the number of state blocks (one never used)."""
    num_blocks = len(lengths) + 2
    indices = torch.randperm(num_blocks - 1)[: len(lengths)].to(torch.int32)
    indices = torch.cat([indices, torch.full((padding,), -1, dtype=torch.int32)])
    starts = starts_of(lengths)
    return dict(
        state_indices=indices.to(device),
        has_initial_state=torch.tensor(carried + [False] * padding).to(device),
        query_start_loc=torch.tensor(starts + [starts[-1]] * padding, dtype=torch.int32).to(device),
    ), num_blocks


def conv_case(
    lengths: list[int],
    carried: list[bool],
    channels: int,
    dtype: torch.dtype,
    device: str,
    *,
    width: int = 4,
    bias: bool = False,
    padding: int = 0,
) -> Case:
    """Blocks of sequences that start fresh hold NaN."""
    batch, num_blocks = ragged(lengths, carried, device, padding)
    state = arena_cache(num_blocks, width - 1, channels, dtype=dtype, device=device)
    for index, carry in zip(batch["state_indices"].tolist(), carried, strict=False):
        if carry:
            state[index] = randn(width - 1, channels, dtype=dtype, device=device)
    tokens = sum(lengths) + padding
    return batch | dict(
        x=strided(randn(tokens, channels, dtype=dtype, device=device)),
        weight=randn(channels, width, dtype=dtype, device=device),
        bias=randn(channels, dtype=dtype, device=device) if bias else None,
        conv_state=state,
        out=torch.full((tokens, channels), float("nan"), dtype=dtype, device=device),
    )


def gdn_case(
    lengths: list[int],
    carried: list[bool],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    state_dtype: torch.dtype = torch.float32,
    padding: int = 0,
    slow_decay: bool = False,
) -> Case:
    """`heads` are (k heads, v heads, dk, dv); `slow_decay` gives decays near 0.999."""
    nk, nv, dk, dv = heads
    batch, num_blocks = ragged(lengths, carried, device, padding)
    state = arena_cache(num_blocks, nv, dv, dk, dtype=state_dtype, device=device)
    for index, carry in zip(batch["state_indices"].tolist(), carried, strict=False):
        if carry:
            state[index] = randn(nv, dv, dk, dtype=state_dtype, device=device, scale=0.3)
    tokens = sum(lengths) + padding
    chunk_indices, chunk_offsets = chunk_metadata(batch["query_start_loc"].tolist())
    low, high = (-8.0, -7.0) if slow_decay else (-3.0, 0.5)
    return batch | dict(
        qkv=strided(randn(tokens, 2 * nk * dk + nv * dv, dtype=dtype, device=device)),
        a=strided(randn(tokens, nv, dtype=dtype, device=device, scale=0.5)),
        b=strided(randn(tokens, nv, dtype=dtype, device=device)),
        A_log=torch.empty(nv).uniform_(low, high).to(device),
        dt_bias=torch.empty(nv).uniform_(-1, 1).to(device),
        ssm_state=state,
        chunk_indices=chunk_indices.to(device),
        chunk_offsets=chunk_offsets.to(device),
        out=torch.full((tokens, nv, dv), float("nan"), dtype=dtype, device=device),
    )


def gdn_decode_case(
    num_seqs: int,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    width: int = 4,
    bias: bool = False,
    state_dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> Case:
    """One token per sequence; the last `padding` rows have state index -1."""
    case = gdn_case(
        [1] * num_seqs,
        [True] * num_seqs,
        heads,
        dtype,
        device,
        state_dtype=state_dtype,
        padding=padding,
    )
    channels = case["qkv"].shape[1]
    conv = arena_cache(case["ssm_state"].shape[0], width - 1, channels, dtype=dtype, device=device)
    for index in case["state_indices"].tolist()[:num_seqs]:
        conv[index] = randn(width - 1, channels, dtype=dtype, device=device)
    for name in ("has_initial_state", "query_start_loc", "chunk_indices", "chunk_offsets"):
        del case[name]
    return case | dict(
        conv_weight=randn(channels, width, dtype=dtype, device=device),
        conv_bias=randn(channels, dtype=dtype, device=device) if bias else None,
        conv_state=conv,
    )
