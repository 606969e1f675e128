// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: the skinny matmuls.
#include <stdexcept>

#include "skinny.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

void check_x(const Tensor& x) {
  const ScalarType dtype = x.scalar_type();
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) {
    reject("x", x, "be bfloat16 or float16");
  }
  if (!x.is_cuda() || x.dim() != 2 || x.size(0) > kMaxTokens || x.stride(1) != 1 ||
      x.stride(0) % 8 != 0 || !aligned(x)) {
    reject("x", x, "be at most 16 rows of 16-byte aligned elements");
  }
}

void check_weight(const char* name, const Tensor& weight, ScalarType dtype, bool gated) {
  if (!weight.is_cuda() || weight.dim() != 2 || weight.scalar_type() != dtype ||
      !weight.is_contiguous() || !aligned(weight) || weight.size(1) % 32 != 0 ||
      weight.size(1) == 0 || weight.size(0) >= 1 << 30) {
    reject(name, weight, "be dense [n, k] of x's dtype with k a multiple of 32");
  }
  if (gated && weight.size(0) % 2 != 0) reject(name, weight, "have an even number of rows");
}

void check_row(const char* name, const OptTensor& row, ScalarType dtype, int64_t size) {
  if (row && (!row->is_cuda() || row->dim() != 1 || row->scalar_type() != dtype ||
              row->size(0) != size || row->stride(0) != 1)) {
    reject(name, *row, "be dense, of x's dtype, and as long as the weight's side");
  }
}

void check_residual(const Tensor& residual, const Tensor& x, int64_t n) {
  if (!residual.is_cuda() || residual.dim() != 2 || !residual.is_contiguous() ||
      residual.scalar_type() != x.scalar_type() || residual.size(0) != x.size(0) ||
      residual.size(1) != n) {
    reject("residual", residual, "be dense [tokens, n] of x's dtype");
  }
}

struct Input {
  const Tensor& x;
  const OptTensor& norm;
  double eps;
  bool one_plus;
};

struct Cut {
  int64_t variant, ring_bytes, ctas_per_sm;
};

bool in_range(int64_t value, int64_t least, int64_t most) {
  return value >= least && value <= most;
}

Tensor run(const Input& input, const Tensor& weight, const OptTensor& bias,
           const OptTensor& residual, bool gated, bool overlap, const Cut& cut) {
  const Tensor& x = input.x;
  check_x(x);
  const ScalarType dtype = x.scalar_type();
  const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  check_weight("weight", weight, dtype, gated);
  if (weight.size(1) != k) reject("weight", weight, "have as many columns as x");
  check_row("bias", bias, dtype, n);
  check_row("norm", input.norm, dtype, k);
  if (input.norm && !aligned(*input.norm)) reject("norm", *input.norm, "be 16-byte aligned");
  if (residual) check_residual(*residual, x, n);
  if (!in_range(cut.ring_bytes, 0, 1 << 20) || !in_range(cut.ctas_per_sm, 1, 32)) {
    throw std::runtime_error("vllm_cuda: skinny matmul: an impossible ring or grid");
  }
  Tensor out = empty(m, gated ? n / 2 : n, x);
  if (m == 0 || n == 0) return out;
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  SkinnyArgs args{};
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.bias = bias ? bias->data_ptr() : nullptr;
  args.residual = residual ? residual->data_ptr() : nullptr;
  args.norm = input.norm ? input.norm->data_ptr() : nullptr;
  args.out = out.data_ptr();
  args.x_stride = x.stride(0);
  args.m = static_cast<int>(m);
  args.n = static_cast<int>(n);
  args.k = static_cast<int>(k);
  args.ring_bytes = static_cast<int>(cut.ring_bytes);
  args.eps = static_cast<float>(input.eps);
  args.one_plus = input.one_plus;
  SkinnyLaunch launch{};
  launch.half = dtype == ScalarType::Half;
  launch.gated = gated;
  launch.overlap = overlap;
  launch.variant = static_cast<int>(cut.variant);
  launch.ctas_per_sm = static_cast<int>(cut.ctas_per_sm);
  launch.device = device;
  launch.stream = current_stream(device);
  throw_if("skinny matmul", launch_skinny(args, launch));
  return out;
}

Tensor skinny_linear(
    const Tensor& x, OptTensor norm, double eps, bool one_plus, const Tensor& weight,
    OptTensor bias, OptTensor residual, bool overlap, int64_t variant, int64_t ring_bytes,
    int64_t ctas_per_sm) {
  return run({x, norm, eps, one_plus}, weight, bias, residual, false, overlap,
             {variant, ring_bytes, ctas_per_sm});
}

Tensor skinny_linear_silu_and_mul(
    const Tensor& x, OptTensor norm, double eps, bool one_plus, const Tensor& weight,
    OptTensor bias, bool overlap, int64_t variant, int64_t ring_bytes, int64_t ctas_per_sm) {
  return run({x, norm, eps, one_plus}, weight, bias, std::nullopt, true, overlap,
             {variant, ring_bytes, ctas_per_sm});
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "skinny_linear(Tensor x, Tensor? norm, float eps, bool one_plus, Tensor weight, Tensor? bias,"
      " Tensor? residual, bool overlap, int variant, int ring_bytes, int ctas_per_sm) -> Tensor");
  m.def(
      "skinny_linear_silu_and_mul(Tensor x, Tensor? norm, float eps, bool one_plus, Tensor weight,"
      " Tensor? bias, bool overlap, int variant, int ring_bytes, int ctas_per_sm) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("skinny_linear", TORCH_BOX(&vllm_cuda::skinny_linear));
  m.impl("skinny_linear_silu_and_mul", TORCH_BOX(&vllm_cuda::skinny_linear_silu_and_mul));
}
