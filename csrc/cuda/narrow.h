// SPDX-License-Identifier: Apache-2.0
// Host interface of the narrow matmul: 9 to 64 tokens, bound by reading the weight once.
#pragma once

#include <cstdint>

namespace vllm_cuda {

constexpr int kMostNarrowTokens = 64;

// bf16; addresses and strides of x and the weight are multiples of 16 bytes.
struct NarrowArgs {
  const void* x;         // [m, k], rows x_stride elements apart
  const void* weight;    // [n, k] dense; when gated the gate's n / 2 rows, then the up projection's
  const void* bias;      // [n] or null
  const void* residual;  // [m, n] dense, added to the rounded result; or null, as when gated
  void* out;             // [m, n], or [m, n / 2] when gated
  int64_t x_stride;
  int m, n, k;  // n is a multiple of 8, of 16 when gated
};

// How the product is cut up.
struct NarrowCut {
  int rows;          // of the weight that a tile has: a multiple of 8, of 16 when gated; at most 256
  int split;         // CTAs of a cluster that share out a tile's columns: 1, 2, 4 or 8
  int token_bytes;   // shared memory of a CTA for tokens on their way
  int shared_bytes;  // all of it: what tokens and sums leave, the weight has
};

struct NarrowLaunch {
  NarrowCut cut;
  bool gated;    // silu(x @ gate^T) * (x @ up^T)
  bool overlap;  // may start, fetching weights only, before the kernels ahead of it are complete
  int device;    // the current device
  void* stream;
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_narrow(const NarrowArgs& args, const NarrowLaunch& launch);
// How many clusters of so many CTAs the device runs at once; returns what went wrong, or null.
const char* narrow_clusters(int split, int device, int& count);

}  // namespace vllm_cuda
