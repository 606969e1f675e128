// SPDX-License-Identifier: Apache-2.0
// Host interface of the chunk factors of the gated delta rule.
#pragma once

#include <cstdint>

namespace vllm_cuda {

struct ChunkFactorsArgs {
  const void* q;         // [tokens, k heads, 128] bf16, tokens q_stride elements apart
  const void* k;         // likewise
  const void* a;         // [tokens, v heads]: projections, or log decays without A_log
  const void* b;         // [tokens, v heads]: projections, or beta without A_log
  const float* A_log;    // [v heads] or null
  const float* dt_bias;  // [v heads] or null
  const int32_t* starts;  // [sequences + 1], first token of each
  const int32_t* chunks;  // [chunks, 2]: sequence, chunk in sequence
  void* T;                // [chunks, v heads, 64, 64] bf16
  void* P;                // likewise
  float* rows;            // [chunks, v heads, 4, 64]
  int64_t q_stride, k_stride, a_stride, b_stride;
  int num_chunks, k_heads, group;  // `group` value heads per key head
  float scale;                     // of the queries
  bool l2norm;                     // normalise q and k
  bool a_is_float, b_is_float;     // else bf16
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_chunk_factors(const ChunkFactorsArgs& args, void* stream);

}  // namespace vllm_cuda
