// SPDX-License-Identifier: Apache-2.0
// Host interface of the skinny matmul.
#pragma once

#include <cstdint>

namespace vllm_cuda {

constexpr int kMaxTokens = 16;
// Columns of x where it is normalised: more than the first, at most the second; at most 8 rows.
constexpr int kNormColumns[] = {512, 3072};

struct SkinnyArgs {
  const void* x;         // [m, k], rows x_stride elements apart, 16-byte aligned
  const void* weight;    // [n, k] dense; when gated the gate's n / 2 rows, then the up projection's
  const void* bias;      // [n] or null
  const void* residual;  // [m, n] dense, added to the rounded result; or null, as when gated
  const void* norm;      // [k], the weight of the RMS norm that x goes through first, or null
  void* out;             // [m, n], or [m, n / 2] when gated
  int64_t x_stride;
  int m, n, k;
  int ring_bytes;  // shared memory of a CTA that weights on their way take up
  float eps;       // of the norm
  bool one_plus;   // the norm scales by 1 + weight
};

struct SkinnyLaunch {
  bool half;        // fp16, else bf16
  bool gated;       // silu(x @ gate^T) * (x @ up^T)
  bool overlap;     // may start, fetching weights only, before the kernels ahead of it are complete
  int variant;      // which of the compiled shapes
  int ctas_per_sm;  // of the grid
  int device;       // the current device
  void* stream;
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_skinny(const SkinnyArgs& args, const SkinnyLaunch& launch);

}  // namespace vllm_cuda
