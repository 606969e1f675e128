// SPDX-License-Identifier: Apache-2.0
// Host interface of the experts' products of a few tokens.
#pragma once

#include <cstdint>

namespace vllm_cuda {

// Pairs of token and slot; pairs whose expert is not there are left out.
struct FewTokenExpertsArgs {
  const void* x;        // [tokens, hidden] bf16, rows x_stride elements apart, 16-byte aligned
  const void* gate_up;  // [experts, 2 inner, hidden] bf16 or e4m3, dense, an expert's gate first
  const void* down;     // [experts, hidden, inner] of the same type, dense
  // Of e4m3 weights, else null: [experts, 2 inner] and [experts, hidden], or if `grouped`, for each
  // 128 channels of a row, [experts, groups, 2 inner] and [experts, groups, hidden]. x and what is
  // between the products are made e4m3 likewise.
  const float *gate_up_scale, *down_scale;
  const int* experts;  // [tokens, slots], rows experts_stride apart
  void* gated;         // [pairs, inner] bf16, dense: silu(gate(x)) * up(x)
  void* out;           // [pairs, hidden] bf16, dense
  int64_t x_stride, experts_stride;
  int tokens, slots, num_experts;
  int hidden, inner;  // rows of the weights are multiples of 16 bytes
  bool grouped;
};

constexpr int kMostPairs = 128;
constexpr int kMostRowBytes = 8192;  // of the weights

struct FewTokenExpertsLaunch {
  bool overlap;  // may start before the kernels ahead are complete
  int device;    // the current device
  void* stream;
};

// Queues the kernel on the stream; returns what went wrong, or null: so also where what is
// multiplied does not fit in shared memory beside the weights under way.
const char* launch_few_token_experts(const FewTokenExpertsArgs& args,
                                     const FewTokenExpertsLaunch& launch);

}  // namespace vllm_cuda
