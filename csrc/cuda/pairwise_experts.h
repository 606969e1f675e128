// SPDX-License-Identifier: Apache-2.0
// Host interface of the experts' products of a few tokens.
#pragma once

#include <cstdint>

namespace vllm_cuda {

// Pairs of token and slot; pairs whose expert is not there are left out.
struct PairwiseExpertsArgs {
  const void* x;        // [tokens, hidden] bf16, rows x_stride elements apart, 16-byte aligned
  const void* gate_up;  // [experts, 2 inner, hidden] bf16, dense, an expert's gate first
  const void* down;     // [experts, hidden, inner] bf16, dense
  const int* experts;   // [tokens, slots], rows experts_stride apart
  void* gated;          // [pairs, inner] bf16, dense: silu(gate(x)) * up(x)
  void* out;            // [pairs, hidden] bf16, dense
  int64_t x_stride, experts_stride;
  int tokens, slots, num_experts;
  int hidden, inner;  // multiples of 8
};

constexpr int kMostRowBytes = 8192;  // of the weights
// Of all tokens' x, and of what is between the products; they lie in shared memory.
constexpr int kMostInputBytes = 24 * 1024, kMostGatedBytes = 48 * 1024;

struct PairwiseExpertsLaunch {
  bool overlap;  // may start before the kernels ahead are complete
  int device;    // the current device
  void* stream;
};

// Queues both kernels on the stream; returns what went wrong, or null.
const char* launch_pairwise_experts(const PairwiseExpertsArgs& args,
                                    const PairwiseExpertsLaunch& launch);

}  // namespace vllm_cuda
