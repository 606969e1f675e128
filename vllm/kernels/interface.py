# SPDX-License-Identifier: Apache-2.0
"""The layers' kernels: every op, and what computes it on which platform.

Layers call `current_platform.kernels.<op>(...)`. An op's reference in plain torch (any float dtype
including fp64, in the `naive.py` of the op's folder) is its contract; beside it lie the CPU's C++
(`cpu.py`), Triton kernels (`triton.py`) and CUDA C++. Recurrent layers' folders are under
`vllm/model_executor/layers`.

Conventions, for every op:

- token-major activations; the last dimension is contiguous, the row stride is arbitrary, so a
  slice of a wider projection can be passed without a copy;
- statistics, gates, softmax and recurrent accumulation run in fp32 (fp64 for fp64 inputs);
- a *slot* is a token's place in a paged cache, `block_id * block_size + offset`; a *state index*
  is a recurrent state's block id. Rows whose slot or state index is negative are padding: they
  are never read from or written to a cache, and their output rows are unspecified;
- caches are strided views over the page arena: dimension 0 (blocks) has an arbitrary stride, the
  inner dimensions are dense;
- ops return fresh tensors or fill `out`; they never modify an activation in place.
"""

from torch import Tensor

from vllm.kernels.activation import naive as activation
from vllm.kernels.attention import naive as attention
from vllm.kernels.cache import naive as cache
from vllm.kernels.compressed_attention import naive as compressed
from vllm.kernels.fp8 import Fp8Rows, as_rows
from vllm.kernels.fp8 import naive as fp8
from vllm.kernels.hyper_connection import naive as hyper
from vllm.kernels.latent_attention import naive as latents
from vllm.kernels.linear import naive as matmul
from vllm.kernels.moe import naive as moe
from vllm.kernels.norm import naive as norms
from vllm.kernels.registry import Op, Registry, composed
from vllm.kernels.residual_stream import Norm, ResidualStream
from vllm.kernels.rotary import naive as rotary
from vllm.kernels.sampling import naive as sampling
from vllm.model_executor.layers.fla.ops.gated_delta_rule import naive as gdn
from vllm.model_executor.layers.fla.ops.kda import naive as kda
from vllm.model_executor.layers.mamba.ops.causal_conv1d import naive as conv
from vllm.model_executor.layers.mamba.ops.mamba1 import naive as mamba1
from vllm.model_executor.layers.mamba.ops.mamba2 import naive as mamba2


class Kernels(Registry):
    """Operations used by the layers; see the module docstring for the conventions."""

    rms_norm = Op(norms.rms_norm)
    fused_add_rms_norm = Op(norms.fused_add_rms_norm)
    gated_rms_norm = Op(norms.gated_rms_norm)
    silu_and_mul = Op(activation.silu_and_mul)
    gelu_tanh_and_mul = Op(activation.gelu_tanh_and_mul)
    clamped_swiglu = Op(activation.clamped_swiglu)
    mul_sigmoid = Op(activation.mul_sigmoid)
    relu_squared = Op(activation.relu_squared, cpu=("naive",))
    qk_norm_rope_cache = Op(rotary.qk_norm_rope_cache)
    write_kv_cache = Op(cache.write_kv_cache)
    write_rows = Op(cache.write_rows)
    paged_attention = Op(attention.paged_attention, cuda=("hopper", "hopper_prefill", "triton"))
    latent_attention = Op(latents.latent_attention, cuda=("expanded", "hopper", "triton"))
    compress = Op(compressed.compress)
    choose_entries = Op(compressed.choose_entries)
    compressed_attention = Op(compressed.compressed_attention)
    linear = Op(matmul.linear, cuda=("narrow", "skinny", "naive"))
    linear_fp8 = Op(fp8.linear_fp8, cuda=("cuda",))
    linear_fp8_block = Op(fp8.linear_fp8_block, cuda=("cuda",))

    route_experts = Op(moe.route_experts)
    run_experts = Op(
        moe.run_experts, cpu=("cpu", "one_by_one"), cuda=("few_tokens", "hopper", "triton")
    )

    connect_streams = Op(hyper.connect_streams, cuda=("reference",))
    join_streams = Op(hyper.join_streams, cuda=("reference",))
    collapse_streams = Op(hyper.collapse_streams, cuda=("reference",))

    causal_conv1d = Op(conv.causal_conv1d)
    gdn_prefill = Op(gdn.gdn_prefill, cuda=("hopper", "triton"))
    gdn_decode = Op(gdn.gdn_decode, cuda=("hopper", "triton"))
    gdn_commit = Op(gdn.gdn_commit)
    kda_prefill = Op(kda.kda_prefill, cuda=("hopper", "triton"))
    kda_decode = Op(kda.kda_decode, cuda=("hopper", "triton"))
    kda_commit = Op(kda.kda_commit)

    mamba1_prefill = Op(mamba1.mamba1_prefill)
    mamba1_decode = Op(mamba1.mamba1_decode)
    mamba1_commit = Op(mamba1.mamba1_commit)
    mamba2_prefill = Op(mamba2.mamba2_prefill)
    mamba2_decode = Op(mamba2.mamba2_decode)
    mamba2_commit = Op(mamba2.mamba2_commit)

    argmax_rows = Op(sampling.argmax_rows, cpu=("naive",), cuda=("draw",))
    best_rows = Op(sampling.best_rows, cpu=("naive",), cuda=("draw",))
    best_draws = Op(sampling.best_draws, cpu=("naive",), cuda=("draw",))
    first_best = Op(sampling.first_best, cpu=("naive",), cuda=("draw",))
    draw_tokens = Op(sampling.draw_tokens, cpu=("naive",), cuda=("draw",))
    mask_tokens = Op(sampling.mask_tokens, cpu=("naive",), cuda=("mask",))
    ranked_logprobs = Op(sampling.ranked_logprobs, cpu=("naive",), cuda=("logprobs", "naive"))

    @composed("linear", cuda=("narrow", "skinny", "swiglu"))
    def linear_silu_and_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`silu_and_mul(linear(x, weight, bias))`: `[tokens, k]`, `weight [2n, k]`, `bias [2n]`
        -> `[tokens, n]`. The gate's n rows come first; both halves are rounded to the model dtype
        before the activation, as in the two separate ops.
        """
        return self.silu_and_mul(self.linear(x, weight, bias))

    @composed("linear", cuda=("narrow", "skinny"))
    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> ResidualStream:
        """`linear(x, weight, bias)`, rounded, onto `residual [tokens, n]`: added, or to be added by
        whoever reads the stream; the bits are the same.
        """
        return ResidualStream(residual, self.linear(x, weight, bias))

    @composed("moe", cuda=("few_tokens", "hopper", "triton"))
    def run_experts_add(self, problem: moe.ExpertsProblem, residual: Tensor) -> ResidualStream:
        """`run_experts`, rounded, as a branch of `residual [tokens, hidden]`, or its slots, for who
        reads the stream to add up; the bits are the same.
        """
        return ResidualStream(residual, self.run_experts(problem))

    def enter(self, stream: ResidualStream, norm: Norm) -> tuple[Tensor, Tensor]:
        """The stream's norm, and the stream added up; both `[tokens, n]`."""
        x, branch = stream.residual, stream.branch
        if branch is None:
            return self.rms_norm(x, norm.weight, norm.eps, one_plus=norm.one_plus), x
        if not isinstance(branch, Tensor):
            return branch.sum_add_norm(x, norm)
        return self.fused_add_rms_norm(branch, x, norm.weight, norm.eps, one_plus=norm.one_plus)

    @composed("linear", cuda=("skinny",))
    def norm_linear(
        self, stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`linear(norm(s), weight, bias) [tokens, n]` and `s`, the stream `[tokens, k]` added up.

        `s` and its norm are rounded as by `fused_add_rms_norm` and `rms_norm`. `s` is not written
        to afterwards and may be captured as is.
        """
        normed, total = self.enter(stream, norm)
        return self.linear(normed, weight, bias), total

    @composed("linear", cuda=("skinny",))
    def norm_linear_silu_and_mul(
        self, stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`norm_linear` with `linear_silu_and_mul` for the matmul."""
        normed, total = self.enter(stream, norm)
        return self.linear_silu_and_mul(normed, weight, bias), total

    @composed("fp8", cuda=("fused",))
    def silu_and_mul_fp8(self, gate_up: Tensor) -> Fp8Rows:
        """`silu_and_mul`, rounded to the dtype of `gate_up` and then made float8 token by token."""
        return as_rows(self.silu_and_mul(gate_up))

    @composed("fp8", cuda=("fused",))
    def fused_add_rms_norm_fp8(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> tuple[Fp8Rows, Tensor]:
        """`fused_add_rms_norm`, its first result made float8 token by token."""
        normed, total = self.fused_add_rms_norm(x, residual, weight, eps, one_plus=one_plus)
        return as_rows(normed), total
