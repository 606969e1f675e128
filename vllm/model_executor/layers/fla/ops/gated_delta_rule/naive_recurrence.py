# SPDX-License-Identifier: Apache-2.0
"""Plain torch gated delta rule: the recurrence, and its chunked form.

Letters as in Gated DeltaNet (arXiv 2412.06464): `q, k [tokens, heads, dk]`,
`v [tokens, heads, dv]`, log decay `g` and `beta [tokens, heads]`, state `S [heads, dk, dv]`.
Everything here is one sequence, in the dtype of its inputs.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels.norm.naive import accumulation_dtype


def gdn_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, beta_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`(g, beta)` from `a, b [tokens, heads]`, in fp32 (fp64 for fp64 `a`)."""
    wide = accumulation_dtype(a)
    g = -A_log.to(wide).exp() * softplus(a.to(wide) + dt_bias.to(wide))
    return g, beta_scale * torch.sigmoid(b.to(wide))


def l2_normalise(x: Tensor) -> Tensor:
    """`x * rsqrt(sum(x^2) + 1e-6)` over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def split_qkv(
    qkv: Tensor, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`q, k [tokens, num_v_heads, head_k_dim]` (l2-normalised, repeated per value head) and
    `v [tokens, num_v_heads, head_v_dim]`, all in the accumulation dtype."""
    key_dim = num_k_heads * head_k_dim
    sections = [key_dim, key_dim, num_v_heads * head_v_dim]
    q, k, v = qkv.to(accumulation_dtype(qkv)).split(sections, dim=-1)
    group = num_v_heads // num_k_heads
    q, k = (
        l2_normalise(x.unflatten(-1, (num_k_heads, head_k_dim))).repeat_interleave(group, dim=1)
        for x in (q, k)
    )
    return q, k, v.unflatten(-1, (num_v_heads, head_v_dim))


def naive_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: `(o [tokens, heads, dv], final S)`; the definition of the op."""
    o = torch.empty_like(v)
    for t in range(len(q)):
        step = (q[t] * scale, k[t], v[t], g[t].exp(), beta[t])
        o[t], _, state = naive_recurrent_step(*step, state)
    return o, state


def naive_recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token, `q` scaled: `(o [heads, dv], d = beta * (v - S^T k), S + k d^T)`; `decay [heads]`,
    or `[heads, dk]` with one for each key channel."""
    state = state * (decay[:, None, None] if decay.dim() == 1 else decay[:, :, None])
    error = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
    state = state + k[:, :, None] * error[:, None, :]
    return torch.einsum("hkv,hk->hv", state, q), error, state


def naive_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    state: Tensor,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk, equal to the recurrence up to rounding (arXiv 2412.06464, section 3.3)."""
    outputs = []
    for i in range(0, len(q), chunk_size):
        part = slice(i, i + chunk_size)
        o, state = _one_chunk(q[part] * scale, k[part], v[part], g[part], beta[part], state)
        outputs.append(o)
    return torch.cat(outputs) if outputs else torch.empty_like(v), state


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    total = g.cumsum(0).T
    beta = beta.T[..., None]
    decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    A = (beta * (k @ k.mT) * decay).tril(-1)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    grown = total.exp()[..., None]
    rhs = torch.cat([beta * v, beta * grown * k], dim=-1)
    u, w = torch.linalg.solve_triangular(identity + A, rhs, upper=False).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    v_new = u - w @ state
    o = (grown * q) @ state + (q @ k.mT * decay) @ v_new
    to_end = (total[:, -1:] - total).exp()[..., None]
    state = state * total[:, -1].exp()[:, None, None] + (to_end * k).mT @ v_new
    return o.transpose(0, 1), state
