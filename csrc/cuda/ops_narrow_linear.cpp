// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda.narrow_linear: matmuls of up to a few hundred tokens.
#include <stdexcept>

#include "narrow_linear.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

constexpr int64_t kMostTokens = 1 << 16, kMostRows = 1 << 24, kMostColumns = 1 << 20;

void check_x(const Tensor& x) {
  if (!x.is_cuda() || x.dim() != 2 || x.scalar_type() != ScalarType::BFloat16 ||
      x.size(0) > kMostTokens || x.stride(1) != 1 || x.stride(0) % 8 != 0 ||
      x.stride(0) < x.size(1) || !aligned(x)) {
    reject("x", x, "be bfloat16 [tokens, k] with dense rows at multiples of 16 bytes");
  }
}

void check_weight(const Tensor& weight, int64_t k) {
  if (!weight.is_cuda() || weight.dim() != 2 || weight.scalar_type() != ScalarType::BFloat16 ||
      !weight.is_contiguous() || !aligned(weight) || weight.size(1) != k || k % 64 != 0 ||
      k > kMostColumns || weight.size(0) % 8 != 0 || weight.size(0) > kMostRows) {
    reject("weight", weight,
           "be dense bfloat16 [n, k], k that of x and a multiple of 64, n a multiple of 8");
  }
}

void check_residual(const Tensor& residual, int64_t m, int64_t n) {
  if (!residual.is_cuda() || residual.dim() != 2 || !residual.is_contiguous() ||
      residual.scalar_type() != ScalarType::BFloat16 || residual.size(0) != m ||
      residual.size(1) != n || !aligned(residual)) {
    reject("residual", residual, "be dense bfloat16 [tokens, n]");
  }
}

void check(const char* error) {
  if (error != nullptr) throw std::runtime_error(std::string("vllm_cuda: narrow matmul: ") + error);
}

}  // namespace

// How many clusters of the compiled cut `device` runs at once.
int64_t narrow_linear_clusters(int64_t cut, int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  int count = 0;
  check(narrow_clusters(static_cast<int>(cut), static_cast<int>(device), count));
  return count;
}

Tensor narrow_linear(const Tensor& x, const Tensor& weight, OptTensor residual, bool overlap,
                     int64_t cut) {
  check_x(x);
  const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  check_weight(weight, k);
  if (residual) check_residual(*residual, m, n);
  Tensor out = empty(m, n, x);
  if (m == 0 || n == 0) return out;
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  NarrowArgs args{};
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.residual = residual ? residual->data_ptr() : nullptr;
  args.out = out.data_ptr();
  args.x_stride = x.stride(0);
  args.m = static_cast<int>(m);
  args.n = static_cast<int>(n);
  args.k = static_cast<int>(k);
  NarrowLaunch launch{};
  launch.cut = static_cast<int>(cut);
  launch.overlap = overlap;
  launch.device = device;
  launch.stream = current_stream(device);
  check(launch_narrow_linear(args, launch));
  return out;
}

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "narrow_linear(Tensor x, Tensor weight, Tensor? residual, bool overlap, int cut) -> Tensor");
  m.def("narrow_linear_clusters(int cut, int device) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CompositeExplicitAutograd, m) {
  m.impl("narrow_linear_clusters", TORCH_BOX(&vllm_cuda::narrow_linear_clusters));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("narrow_linear", TORCH_BOX(&vllm_cuda::narrow_linear));
}
