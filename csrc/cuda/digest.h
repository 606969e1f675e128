// SPDX-License-Identifier: Apache-2.0
// Host interface of XXH3-64 on the device.
#pragma once

#include <cstdint>

namespace vllm_cuda {

struct DigestArgs {
  const uint8_t* data;
  // [count] each: the first byte of every input, its size (more than 240 bytes), and where its
  // blocks begin in `sums`, in order; an input has a block for every 1,024 bytes before its last.
  const int64_t *starts, *sizes, *firsts;
  uint64_t* sums;  // [num_blocks, 8], scratch
  uint64_t* out;   // [count]
  int64_t num_blocks;
  int count;
};

// Queues the kernels on the stream of the current device; returns what went wrong, or null.
const char* launch_digest(const DigestArgs& args, int device, void* stream);

}  // namespace vllm_cuda
