// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: the skinny matmuls.
#include <stdexcept>

#include "skinny.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

void check_arguments(const Tensor& x, const Tensor& weight, const OptTensor& bias, bool gated) {
  const ScalarType dtype = x.scalar_type();
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) {
    reject("x", x, "be bfloat16 or float16");
  }
  if (!x.is_cuda() || x.dim() != 2 || x.size(0) > kMaxTokens || x.stride(1) != 1 ||
      x.stride(0) % 8 != 0 || !aligned(x)) {
    reject("x", x, "be at most 16 rows of 16-byte aligned elements");
  }
  if (!weight.is_cuda() || weight.dim() != 2 || weight.scalar_type() != dtype ||
      !weight.is_contiguous() || !aligned(weight) || weight.size(1) != x.size(1) ||
      weight.size(1) % 32 != 0 || weight.size(1) == 0 || weight.size(0) >= 1 << 30) {
    reject("weight", weight, "be dense [n, k] of x's dtype with k a multiple of 32");
  }
  if (gated && weight.size(0) % 2 != 0) reject("weight", weight, "have an even number of rows");
  if (bias && (!bias->is_cuda() || bias->dim() != 1 || bias->scalar_type() != dtype ||
               bias->size(0) != weight.size(0) || bias->stride(0) != 1)) {
    reject("bias", *bias, "be dense [n] of x's dtype");
  }
}

struct Choice {
  bool gated, overlap;
  int64_t variant, ring_bytes, ctas_per_sm;
};

Tensor run(const Tensor& x, const Tensor& weight, const OptTensor& bias, const Choice& choice) {
  check_arguments(x, weight, bias, choice.gated);
  if (choice.ring_bytes < 0 || choice.ring_bytes > 1 << 20 || choice.ctas_per_sm < 1 ||
      choice.ctas_per_sm > 32) {
    throw std::runtime_error("vllm_cuda: skinny matmul: an impossible ring or grid");
  }
  const int64_t n = weight.size(0);
  Tensor out = empty(x.size(0), choice.gated ? n / 2 : n, x);
  if (x.size(0) == 0 || n == 0) return out;
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  SkinnyArgs args{};
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.bias = bias ? bias->data_ptr() : nullptr;
  args.out = out.data_ptr();
  args.x_stride = x.stride(0);
  args.m = static_cast<int>(x.size(0));
  args.n = static_cast<int>(n);
  args.k = static_cast<int>(weight.size(1));
  args.ring_bytes = static_cast<int>(choice.ring_bytes);
  SkinnyLaunch launch{};
  launch.half = x.scalar_type() == ScalarType::Half;
  launch.gated = choice.gated;
  launch.overlap = choice.overlap;
  launch.variant = static_cast<int>(choice.variant);
  launch.ctas_per_sm = static_cast<int>(choice.ctas_per_sm);
  launch.device = device;
  launch.stream = current_stream(device);
  const char* error = launch_skinny(args, launch);
  if (error != nullptr) throw std::runtime_error(std::string("vllm_cuda: skinny matmul: ") + error);
  return out;
}

Tensor skinny_linear(
    const Tensor& x, const Tensor& weight, OptTensor bias, bool overlap, int64_t variant,
    int64_t ring_bytes, int64_t ctas_per_sm) {
  return run(x, weight, bias, {false, overlap, variant, ring_bytes, ctas_per_sm});
}

Tensor skinny_linear_silu_and_mul(
    const Tensor& x, const Tensor& weight, OptTensor bias, bool overlap, int64_t variant,
    int64_t ring_bytes, int64_t ctas_per_sm) {
  return run(x, weight, bias, {true, overlap, variant, ring_bytes, ctas_per_sm});
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "skinny_linear(Tensor x, Tensor weight, Tensor? bias, bool overlap, int variant,"
      " int ring_bytes, int ctas_per_sm) -> Tensor");
  m.def(
      "skinny_linear_silu_and_mul(Tensor x, Tensor weight, Tensor? bias, bool overlap, int variant,"
      " int ring_bytes, int ctas_per_sm) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("skinny_linear", TORCH_BOX(&vllm_cuda::skinny_linear));
  m.impl("skinny_linear_silu_and_mul", TORCH_BOX(&vllm_cuda::skinny_linear_silu_and_mul));
}
