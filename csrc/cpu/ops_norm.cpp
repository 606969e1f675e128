// SPDX-License-Identifier: Apache-2.0
#include "ops.h"
#include "table.h"

namespace vllm_cpu {

namespace {

void check_same_shape(const Tensor& tensor, const Tensor& like, Arg arg) {
  bool same = tensor.dim() == like.dim();
  for (int64_t d = 0; same && d < like.dim(); ++d) same = tensor.size(d) == like.size(d);
  if (!same) reject(arg, tensor, "must have the shape of x");
}

GatedArgs gated_args(const char* op, const Tensor& x, const Tensor& gate) {
  check_shape(x, {-1, -1, -1}, 1, {op, "x"});
  check_same_shape(gate, x, {op, "gate"});
  GatedArgs args;
  args.dtype = float_dtype(x, {op, "x"});
  check_dtype(gate, args.dtype, {op, "gate"});
  args.x = rows_of(x, {op, "x"});
  args.gate = rows_of(gate, {op, "gate"});
  args.n = x.size(2);
  return args;
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, bool one_plus) {
  constexpr const char* op = "rms_norm";
  RmsNormArgs args;
  args.dtype = float_dtype(x, {op, "x"});
  args.x = rows_of(x, {op, "x"});
  args.n = x.size(x.dim() - 1);
  args.weight = param(weight, args.n, {op, "weight"});
  args.eps = static_cast<float>(eps);
  args.one_plus = one_plus;
  Tensor out = empty_dense(x);
  args.out = out.data_ptr();
  kernels().rms_norm(args);
  return out;
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, bool one_plus) {
  constexpr const char* op = "fused_add_rms_norm";
  check_shape(x, {-1, -1}, 1, {op, "x"});
  check_same_shape(residual, x, {op, "residual"});
  check_shape(residual, {-1, -1}, 1, {op, "residual"});
  RmsNormArgs args;
  args.dtype = float_dtype(x, {op, "x"});
  check_dtype(residual, args.dtype, {op, "residual"});
  args.x = rows_of(x, {op, "x"});
  args.n = x.size(1);
  args.residual = residual.data_ptr();
  args.residual_stride = residual.stride(0);
  args.weight = param(weight, args.n, {op, "weight"});
  args.eps = static_cast<float>(eps);
  args.one_plus = one_plus;
  Tensor out = empty_dense(x), sum = empty_dense(x);
  args.out = out.data_ptr();
  args.sum = sum.data_ptr();
  kernels().rms_norm(args);
  return {out, sum};
}

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps) {
  constexpr const char* op = "gated_rms_norm";
  GatedArgs args = gated_args(op, x, gate);
  args.weight = param(weight, args.n, {op, "weight"});
  args.eps = static_cast<float>(eps);
  Tensor out = empty({x.size(0), x.size(1) * args.n}, x);
  args.out = out.data_ptr();
  kernels().gated_rms_norm(args);
  return out;
}

Tensor mul_sigmoid(const Tensor& x, const Tensor& gate) {
  GatedArgs args = gated_args("mul_sigmoid", x, gate);
  Tensor out = empty({x.size(0), x.size(1) * args.n}, x);
  args.out = out.data_ptr();
  kernels().mul_sigmoid(args);
  return out;
}

namespace {

// `out` is yet to be made.
GateUpArgs gate_up_args(const char* op, const Tensor& gate_up) {
  const Arg arg{op, "gate_up"};
  check_shape(gate_up, {-1, -1}, 1, arg);
  if (gate_up.size(1) % 2) reject(arg, gate_up, "must have an even last dimension");
  GateUpArgs args{};
  args.dtype = float_dtype(gate_up, arg);
  args.gate_up = gate_up.data_ptr();
  args.stride = gate_up.stride(0);
  args.tokens = gate_up.size(0);
  args.n = gate_up.size(1) / 2;
  return args;
}

}  // namespace

Tensor silu_and_mul(const Tensor& gate_up) {
  GateUpArgs args = gate_up_args("silu_and_mul", gate_up);
  Tensor out = empty({args.tokens, args.n}, gate_up);
  args.out = out.data_ptr();
  kernels().silu_and_mul(args);
  return out;
}

Tensor gelu_tanh_and_mul(const Tensor& gate_up) {
  GateUpArgs args = gate_up_args("gelu_tanh_and_mul", gate_up);
  Tensor out = empty({args.tokens, args.n}, gate_up);
  args.out = out.data_ptr();
  kernels().gelu_tanh_and_mul(args);
  return out;
}

Tensor clamped_swiglu(const Tensor& gate_up, double alpha, double limit, double offset) {
  GateUpArgs args = gate_up_args("clamped_swiglu", gate_up);
  args.alpha = static_cast<float>(alpha);
  args.limit = static_cast<float>(limit);
  args.offset = static_cast<float>(offset);
  Tensor out = empty({args.tokens, args.n}, gate_up);
  args.out = out.data_ptr();
  kernels().clamped_swiglu(args);
  return out;
}

}  // namespace vllm_cpu
