// SPDX-License-Identifier: Apache-2.0
// Host interface of prefills of Kimi delta attention.
#pragma once

#include <cstdint>

namespace vllm_cuda {

struct KdaPrefillArgs {
  // bf16, rows *_stride elements apart, 16-byte aligned
  const void* qkv;      // [tokens, 3, heads, 128]
  const void* a;        // [tokens, heads, 128], decays' projections
  void* out;            // likewise
  const void* b;        // [tokens, heads] bf16
  const float* A_log;   // [heads]
  const float* dt_bias; // [heads, 128]
  void* states;         // [blocks, heads, 128, 128], blocks state_stride elements apart
  const int32_t* state_indices;  // [sequences], negative: none
  const bool* carried;           // [sequences]: the state is read, not zero
  const int32_t* starts;         // [sequences + 1], first token of each
  int64_t qkv_stride, a_stride, out_stride, b_stride, state_stride;
  int64_t tokens;
  int sequences, heads;
  float scale;  // of the queries
};

// Queues the kernel on the stream of the current device; `wide_states`: fp32, else bf16. Returns
// what went wrong, or null.
const char* launch_kda_prefill(const KdaPrefillArgs& args, bool wide_states, int device,
                               void* stream);

}  // namespace vllm_cuda
