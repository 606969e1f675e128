// SPDX-License-Identifier: Apache-2.0
// Host interface of the matmuls of many tokens.
#pragma once

#include <cstdint>

namespace vllm_cuda {

struct MatmulArgs {
  const void* x;         // [m, k], rows x_stride elements apart, 16-byte aligned
  const void* weight;    // [n, k] dense; gated [2 n, k], the gate's n rows first
  const void* residual;  // [m, n] dense or null: added to the rounded products
  void* out;             // [m, n] dense
  int64_t x_stride;
  int m, n, k;
};

struct MatmulLaunch {
  bool overlap;  // may start, fetching weights only, before the kernels ahead are complete
  int variant;   // which of the compiled shapes
  int group;     // rows of tiles whose tokens stay in the L2 cache while the weight passes
  int device;    // the current device
  void* stream;
};

// Queue the kernel on the stream; return what went wrong, or null.
const char* launch_swiglu(const MatmulArgs& args, const MatmulLaunch& launch);
const char* launch_wide_linear(const MatmulArgs& args, const MatmulLaunch& launch);

}  // namespace vllm_cuda
