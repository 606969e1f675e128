// SPDX-License-Identifier: Apache-2.0
// Host interface of the experts' matrix products.
#pragma once

#include <cstdint>

namespace vllm_cuda {

// Places come in blocks of `height` that have one expert each: place p of block p / height is pair
// pairs[p], its row of x is pairs[p] / slots, and its row of out pairs[p]. Used are the places
// before the expert's end; blocks behind the last one used have expert -1.
struct ExpertsArgs {
  const void* x;       // [num_pairs / slots, k], rows x_stride bytes apart
  const void* weight;  // [experts, n or 2 n, k] dense, with a gate its n rows first
  void* out;           // [num_pairs, n] dense bf16
  const float* x_scale;       // of e4m3 operands, else null: of a row and 128 channels,
  const float* weight_scale;  // or with group strides of 0 of all channels
  int64_t x_scale_row, x_scale_group;
  int64_t weight_scale_expert, weight_scale_group;
  const int *pairs, *block_experts, *ends;
  int64_t x_stride;
  int num_pairs, slots, num_experts, num_blocks;
  int n;
  int row_bytes;  // k elements
};

struct ExpertsLaunch {
  bool gated;    // silu(x @ gate^T) * (x @ up^T) instead of x @ weight^T
  bool overlap;  // may start before the kernels ahead are complete
  int height;    // of a block: 64, 128 or, without scales, 320
  int device;    // the current device
  void* stream;
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_experts(const ExpertsArgs& args, const ExpertsLaunch& launch);

}  // namespace vllm_cuda
