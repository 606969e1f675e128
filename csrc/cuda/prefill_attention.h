// SPDX-License-Identifier: Apache-2.0
// Host interface of the attention of long queries over the paged cache.
#pragma once

#include <cstdint>

namespace vllm_cuda {

constexpr int kBoxKeys = 16;      // that one copy may bring; blocks hold a multiple of them
constexpr int kQueryRows = 64;    // of a warpgroup: tokens by query heads of a kv head

// Elements are bf16 unless typed; strides are in elements.
struct PrefillAttentionArgs {
  const void* query;    // [tokens, heads, head_dim]
  const void* cache;    // [blocks, 2, block_size, kv_heads, head_dim], bf16 or e4m3
  const int* table;     // [num_seqs, max_blocks]
  const int* seq_lens;  // [num_seqs]
  const int* starts;    // [num_seqs + 1]
  void* out;            // like query
  const void* gate;     // like query, or null
  const float* sinks;   // [heads], or null
  int* counter;         // zero between launches
  int64_t q_token, q_head, out_token, out_head, gate_token, gate_head, block_stride, table_stride;
  float scale, v_scale;  // of base-2 scores, of values
  int tokens, num_seqs, kv_heads, group, num_blocks, block_size, window;
};

struct PrefillAttentionLaunch {
  int head_dim;    // 64, 128 or 256
  bool fp8_cache;  // of e4m3, else bf16
  int device;    // the current device
  void* stream;
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_prefill_attention(const PrefillAttentionArgs& args,
                                     const PrefillAttentionLaunch& launch);

}  // namespace vllm_cuda
