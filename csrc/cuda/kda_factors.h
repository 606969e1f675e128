// SPDX-License-Identifier: Apache-2.0
// Host interface of the chunk factors of Kimi delta attention.
#pragma once

#include <cstdint>

namespace vllm_cuda {

struct KdaFactorsArgs {
  // [tokens, heads, 128] bf16, rows *_stride elements apart: queries, keys, decays' projections
  const void *q, *k, *a;
  const void* b;                  // [tokens, heads] bf16
  const float* A_log;             // [heads]
  const float* dt_bias;           // [heads, 128]
  const int32_t* starts;          // [sequences + 1], first token of each
  const int32_t* chunks;          // [chunks, 2]: sequence, chunk in sequence
  void *queries, *keys, *ends;    // [chunks, heads, 64, 128] bf16
  void *T, *P;                    // [chunks, heads, 64, 64] bf16
  float* decays;                  // [chunks, heads, 128]
  int64_t q_stride, k_stride, a_stride, b_stride;
  int64_t tokens;
  int num_chunks, heads;
  float scale;  // of the queries
};

// Queues the kernel on the stream of the current device; returns what went wrong, or null.
const char* launch_kda_factors(const KdaFactorsArgs& args, int device, void* stream);

}  // namespace vllm_cuda
