// SPDX-License-Identifier: Apache-2.0
// Host interface of prefills of Kimi delta attention.
#pragma once

#include <cstdint>

namespace vllm_cuda {

// Of a chunk of 32 tokens and a head.
constexpr int kHandedBytes = 34816;

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
  const int32_t* chunk_offsets;  // [sequences], chunks of 64 tokens before each
  // Of each chunk of 32 tokens and head, where helpers hand over factors, kHandedBytes of 128-byte
  // units, and a zero; only with helpers.
  void* handed;
  int32_t* ready;
  int64_t qkv_stride, a_stride, out_stride, b_stride, state_stride;
  int64_t tokens;
  int sequences, heads;
  // CTAs that make factors for those that scan, or none; no sequence has more chunks of 32 tokens.
  int helpers, most_chunks;
  float scale;  // of the queries
};

// Queues the kernel on the stream of the current device; `wide_states`: fp32, else bf16. Returns
// what went wrong, or null.
const char* launch_kda_prefill(const KdaPrefillArgs& args, bool wide_states, int device,
                               void* stream);

}  // namespace vllm_cuda
