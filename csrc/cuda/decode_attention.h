// SPDX-License-Identifier: Apache-2.0
// Host interface of the attention of short queries over the paged cache.
#pragma once

#include <cstdint>

namespace vllm_cuda {

constexpr int kTileKeys = 16;      // keys that a warp multiplies at once
constexpr int kMaxQueryRows = 8;  // query heads of a kv head times tokens of a sequence
constexpr int kMaxShares = 32;     // of a sequence: a lane each when they are joined

// Elements are bf16 unless typed; strides are in elements.
struct DecodeAttentionArgs {
  const void* query;      // [tokens, heads, head_dim]
  const void* cache;      // [blocks, 2, block_size, kv_heads, head_dim], bf16 or e4m3
  const int* table;       // [num_seqs, max_blocks]
  const int* seq_lens;    // [num_seqs]
  const int* starts;      // [num_seqs + 1]
  void* out;              // like query
  const void* gate;       // like query, or null
  float* part;            // [tokens, heads, splits, head_dim], shares on their way to be joined
  float* lse;             // [tokens, heads, splits]
  int* arrived;           // [num_seqs, kv_heads], zero between launches
  int64_t q_token, q_head, out_token, out_head, gate_token, gate_head, block_stride, table_stride;
  float scale, v_scale;   // of base-2 scores, of values
  int num_seqs, kv_heads, group, rows, num_blocks, block_size, window;
  int splits, split_keys;  // most shares of a sequence; keys that are worth one
};

struct DecodeAttentionLaunch {
  int head_dim;   // 128 or 256
  bool fp8_cache;
  bool overlap;   // may start, and read earlier steps' keys, before the kernels ahead are complete
  int device;     // the current device
  void* stream;
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_decode_attention(const DecodeAttentionArgs& args,
                                    const DecodeAttentionLaunch& launch);

}  // namespace vllm_cuda
