// SPDX-License-Identifier: Apache-2.0
// Host interface of the sorting of (token, slot) pairs by expert.
#pragma once

#include <cstdint>

namespace vllm_cuda {

constexpr int kMostExperts = 1024;

// See `vllm/kernels/moe/blocks.py`: pairs in the order of their experts, each of which begins at a
// multiple of `height` places.
struct ExpertBlocksArgs {
  const int* experts;  // [pairs / slots, slots], tokens `stride` elements apart
  int* pairs;          // [num_blocks * height]
  int* block_experts;  // [num_blocks]
  int* ends;           // [num_experts]
  int64_t stride;
  int num_pairs, slots, num_experts, num_blocks, height;
};

struct ExpertBlocksLaunch {
  bool overlap;  // may start before the kernels ahead are complete
  int device;    // the current device
  void* stream;
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_expert_blocks(const ExpertBlocksArgs& args, const ExpertBlocksLaunch& launch);

}  // namespace vllm_cuda
