// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda.narrow_linear: matmuls of 9 to 64 tokens.
#include <stdexcept>

#include "narrow.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

constexpr int64_t kMost = int64_t{1} << 30;  // rows of anything, and columns

void check_x(const Tensor& x) {
  if (!x.is_cuda() || x.dim() != 2 || x.scalar_type() != ScalarType::BFloat16 ||
      x.size(0) > kMostNarrowTokens || x.size(1) == 0 || x.size(1) >= kMost || x.stride(1) != 1 ||
      x.stride(0) % 8 != 0 || x.stride(0) < x.size(1) || !aligned(x)) {
    reject("x", x, "be at most 64 bfloat16 rows, 16-byte aligned");
  }
}

void check_weight(const Tensor& weight, int64_t k, bool gated) {
  if (!weight.is_cuda() || weight.dim() != 2 || weight.scalar_type() != ScalarType::BFloat16 ||
      !weight.is_contiguous() || !aligned(weight) || weight.size(1) != k || k % 8 != 0 ||
      weight.size(0) >= kMost || weight.size(0) % (gated ? 16 : 8) != 0) {
    reject("weight", weight,
           "be dense bfloat16 [n, k], k that of x and a multiple of 8, n of 8 or, gated, of 16");
  }
}

void check_bias(const Tensor& bias, int64_t n) {
  if (!bias.is_cuda() || bias.dim() != 1 || bias.scalar_type() != ScalarType::BFloat16 ||
      bias.size(0) != n || bias.stride(0) != 1 || !aligned(bias)) {
    reject("bias", bias, "be dense bfloat16 [n], 16-byte aligned");
  }
}

void check_residual(const Tensor& residual, int64_t m, int64_t n, bool gated) {
  if (gated || !residual.is_cuda() || residual.dim() != 2 || !residual.is_contiguous() ||
      residual.scalar_type() != ScalarType::BFloat16 || residual.size(0) != m ||
      residual.size(1) != n || !aligned(residual)) {
    reject("residual", residual, "be dense bfloat16 [tokens, n], of a product that is not gated");
  }
}

int cut_of(int64_t value) {
  if (value < 0 || value > 1 << 20) throw std::runtime_error("vllm_cuda: narrow matmul: no cut");
  return static_cast<int>(value);
}

Tensor narrow_linear(const Tensor& x, const Tensor& weight, OptTensor bias, OptTensor residual,
                     bool gated, bool overlap, int64_t rows, int64_t split, int64_t token_bytes,
                     int64_t shared_bytes) {
  check_x(x);
  const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  check_weight(weight, k, gated);
  if (bias) check_bias(*bias, n);
  if (residual) check_residual(*residual, m, n, gated);
  Tensor out = empty(m, gated ? n / 2 : n, x);
  if (m == 0 || n == 0) return out;
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  NarrowArgs args{};
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.bias = bias ? bias->data_ptr() : nullptr;
  args.residual = residual ? residual->data_ptr() : nullptr;
  args.out = out.data_ptr();
  args.x_stride = x.stride(0);
  args.m = static_cast<int>(m);
  args.n = static_cast<int>(n);
  args.k = static_cast<int>(k);
  NarrowLaunch launch{};
  launch.cut = {cut_of(rows), cut_of(split), cut_of(token_bytes), cut_of(shared_bytes)};
  launch.gated = gated;
  launch.overlap = overlap;
  launch.device = device;
  launch.stream = current_stream(device);
  throw_if("narrow matmul", launch_narrow(args, launch));
  return out;
}

// How many clusters of `split` CTAs the device runs at once.
int64_t clusters(int64_t split, int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  int count = 0;
  throw_if("narrow matmul", narrow_clusters(cut_of(split), static_cast<int>(device), count));
  return count;
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "narrow_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, bool gated,"
      " bool overlap, int rows, int split, int token_bytes, int shared_bytes) -> Tensor");
  m.def("narrow_clusters(int split, int device) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CompositeExplicitAutograd, m) {
  m.impl("narrow_clusters", TORCH_BOX(&vllm_cuda::clusters));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("narrow_linear", TORCH_BOX(&vllm_cuda::narrow_linear));
}
