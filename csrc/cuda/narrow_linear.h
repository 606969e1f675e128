// SPDX-License-Identifier: Apache-2.0
// Matmul of up to a few hundred tokens whose outputs are shared out, columns and all, among the
// multiprocessors.
#pragma once

#include <cstdint>

namespace vllm_cuda {

// out [m, n] = x [m, k] @ weight [n, k]^T, rounded, + residual [m, n] if that is not null; bf16,
// weight, residual and out dense. k is a multiple of 64, n even, pointers are 16-byte aligned.
struct NarrowArgs {
  const void* x;
  const void* weight;
  const void* residual;
  void* out;
  int64_t x_stride;
  int m, n, k;
};

struct NarrowLaunch {
  int cut;       // which of the compiled ones
  bool overlap;  // with the kernels ahead in the stream; none of them writes the weight
  int device;
  void* stream;
};

// Both return what went wrong, or null.
const char* launch_narrow_linear(const NarrowArgs& args, const NarrowLaunch& launch);
// How many clusters of the cut run at once.
const char* narrow_clusters(int cut, int device, int& count);

}  // namespace vllm_cuda
