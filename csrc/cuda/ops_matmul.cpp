// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda.swiglu: gate, up projection and SiLU of many tokens.
#include "matmul.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

constexpr int64_t kMost = int64_t{1} << 30;  // rows of anything

void check_matrix(const char* name, const Tensor& matrix) {
  if (!matrix.is_cuda() || matrix.dim() != 2 || matrix.scalar_type() != ScalarType::BFloat16 ||
      matrix.size(0) >= kMost || matrix.size(1) == 0 || matrix.size(1) >= kMost ||
      matrix.stride(1) != 1 || matrix.stride(0) % 8 != 0 || matrix.stride(0) < matrix.size(1) ||
      !aligned(matrix)) {
    reject(name, matrix, "be bfloat16 [rows, columns] with 16-byte aligned rows");
  }
}

// The gate's rows of the weight come first.
Tensor swiglu(const Tensor& x, const Tensor& weight, bool overlap, int64_t variant,
              int64_t group) {
  check_matrix("x", x);
  check_matrix("weight", weight);
  if (weight.size(1) != x.size(1) || !weight.is_contiguous() || weight.size(0) % 16 != 0) {
    reject("weight", weight, "be dense with x's k and two rows each for a multiple of 8 outputs");
  }
  const bool grouped = group >= 1 && group < kMost;
  throw_if("swiglu", grouped ? nullptr : "a group has at least one row of tiles");
  const int64_t m = x.size(0), n = weight.size(0) / 2;
  Tensor out = empty(m, n, x);
  if (m == 0 || n == 0) return out;
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  MatmulArgs args{};
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.out = out.data_ptr();
  args.x_stride = x.stride(0);
  args.m = static_cast<int>(m);
  args.n = static_cast<int>(n);
  args.k = static_cast<int>(x.size(1));
  MatmulLaunch launch{};
  launch.overlap = overlap;
  launch.variant = static_cast<int>(variant);
  launch.group = static_cast<int>(group);
  launch.device = device;
  launch.stream = current_stream(device);
  throw_if("swiglu", launch_swiglu(args, launch));
  return out;
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def("swiglu(Tensor x, Tensor weight, bool overlap, int variant, int group) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("swiglu", TORCH_BOX(&vllm_cuda::swiglu));
}
