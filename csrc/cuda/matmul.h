// SPDX-License-Identifier: Apache-2.0
// Host interface of the gated matmul of many tokens.
#pragma once

#include <cstdint>

namespace vllm_cuda {

struct MatmulArgs {
  const void* x;       // [m, k], rows x_stride elements apart, 16-byte aligned
  const void* weight;  // [2 n, k] dense, the gate's n rows first
  void* out;           // [m, n] dense
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

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_swiglu(const MatmulArgs& args, const MatmulLaunch& launch);

}  // namespace vllm_cuda
