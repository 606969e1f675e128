# SPDX-License-Identifier: Apache-2.0
"""The ops of the gated delta rule in plain torch, in fp32 or, for fp64 inputs, fp64.

Recurrence per value head (Gated DeltaNet, arXiv 2412.06464): `S *= exp(g); d = beta * (v - S^T k);
S += k d^T; o = S^T q`. q and k are l2-normalised (`x * rsqrt(sum(x^2) + 1e-6)`), q times
`dk ** -0.5`; value head j uses key head `j // (v heads // k heads)`.

Of one sequence: `q, k [tokens, heads, dk]`, `v [tokens, heads, dv]`, log decay `g` and
`beta [tokens, heads]`, state `S [heads, dk, dv]`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels import naive_journal
from vllm.kernels.journal import Journal, JournalStack
from vllm.kernels.norm.naive import accumulation_dtype, gated_rms_norm
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill
from vllm.model_executor.layers.mamba.ops.causal_conv1d.naive import causal_conv1d


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


#: `(log decay, beta)` of some of a batch's tokens: `[tokens, v heads]` each, in the accumulation
#: dtype; a log decay may have one value per key channel, `[tokens, v heads, dk]`
Gates = Callable[[slice], tuple[Tensor, Tensor]]


def gdn_prefill(p: GdnPrefill) -> None:
    """The gated delta rule over a ragged batch: fills `out`, and each sequence's block with its
    final state.

    Raises:
        ValueError: segments; sequences are scanned whole.
    """
    if p.segments is not None:
        raise ValueError("the reference scans whole sequences; give no segments")
    gated_delta_rule(
        p.qkv,
        _gates_of(p),
        p.ssm_state,
        p.state_indices,
        p.has_initial_state,
        p.query_start_loc,
        p.heads,
        p.out,
    )


def gdn_decode(p: GdnDecode) -> None:
    """Few tokens per sequence: convolution update, gating, the recurrent steps, and `norm`.

    Raises:
        ValueError: the journal has too few places for what is pending and these tokens.
    """
    conv = (p.conv_weight, p.conv_bias, p.conv_state, p.state_indices)
    decode(p.qkv, conv, _gates_of(p), p.ssm_state, p.heads, p.out, p.journal, p.width)
    if p.norm is not None:
        gated_rms_norm(p.out, p.norm.gate, p.norm.weight, p.norm.eps, p.out)


def gdn_commit(stack: JournalStack, entries: Tensor) -> None:
    """Write to their blocks, for all layers, the tokens that some batch rows have pending.

    `entries [n, 2]` int32: batch row and block. What is pending is counted on the device, and
    still counted afterwards.
    """
    naive_journal.commit(stack, entries)


def _gates_of(p: GdnPrefill | GdnDecode) -> Gates:
    wide = accumulation_dtype(p.a)

    def gates(part: slice) -> tuple[Tensor, Tensor]:
        a, b = p.a[part].to(wide), p.b[part].to(wide)
        return gdn_gates(a, b, p.A_log, p.dt_bias, p.beta_scale)

    return gates


def decode(
    qkv: Tensor,
    conv: tuple[Tensor, Tensor | None, Tensor, Tensor],
    gates: Gates,
    state: Tensor,
    heads: tuple[int, int, int, int],
    out: Tensor,
    journal: Journal | None,
    width: int,
) -> None:
    """Convolution and recurrence of `width` tokens per sequence; `conv` are weight, bias, state and
    the sequences' blocks, `heads` the last arguments of `split_qkv`."""
    indices = conv[3]
    if journal is not None:
        mixed = naive_journal.convolve_tokens(qkv, *conv, journal, width)
        _decode_with(journal, mixed, gates, state, indices, heads, out, width)
        return
    carried = torch.ones(len(indices), dtype=torch.bool)
    starts = torch.arange(len(indices) + 1)
    mixed = torch.empty_like(qkv)
    causal_conv1d(qkv, *conv, carried, starts, out=mixed)
    gated_delta_rule(mixed, gates, state, indices, carried, starts, heads, out)


def _decode_with(
    journal: Journal,
    mixed: Tensor,
    gates: Gates,
    ssm_state: Tensor,
    state_indices: Tensor,
    heads: tuple[int, int, int, int],
    out: Tensor,
    width: int,
) -> None:
    for seq, index in enumerate(state_indices.tolist()):
        if index < 0:
            continue
        row, pending, commits, first = journal.steps[seq].tolist()
        naive_journal.check_places(journal, row, pending + width - commits)
        part = slice(seq * width, (seq + 1) * width)
        q, k, v = split_qkv(mixed[part], *heads)
        g, beta = gates(part)
        decay = g.exp()
        stored = naive_journal.replay(ssm_state[index], journal, row, first, pending)
        for t in range(width):
            state = stored.mT.to(q.dtype)
            step = (q[t] * heads[2] ** -0.5, k[t], v[t], decay[t], beta[t])
            o, error, state = naive_recurrent_step(*step, state)
            out[seq * width + t] = o.to(out.dtype)
            stored = state.mT.to(ssm_state.dtype)
            if commits and t == 0:
                ssm_state[index] = stored
                continue
            place = (first + pending + t - commits) % journal.places
            journal.keys[row, place] = k[t, :: heads[1] // heads[0]]
            journal.errors[row, place] = error
            journal.decays[row, place] = decay[t]


def gated_delta_rule(
    qkv: Tensor,
    gates: Gates,
    ssm_state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    query_start_loc: Tensor,
    heads: tuple[int, int, int, int],
    out: Tensor,
) -> None:
    """The recurrence, one sequence at a time; `heads` are the last arguments of `split_qkv`."""
    starts = query_start_loc.tolist()
    carried = has_initial_state.tolist()
    for seq, index in enumerate(state_indices.tolist()):
        start, end = starts[seq], starts[seq + 1]
        if index < 0 or start == end:
            continue
        part = slice(start, end)
        q, k, v = split_qkv(qkv[part], *heads)
        g, beta = gates(part)
        stored = ssm_state[index].mT.to(q.dtype)
        state = stored if carried[seq] else torch.zeros_like(stored)
        scale = heads[2] ** -0.5
        o, state = naive_recurrent_gated_delta_rule(q, k, v, g, beta, scale, state)
        out[part] = o.to(out.dtype)
        ssm_state[index] = state.mT.to(ssm_state.dtype)
