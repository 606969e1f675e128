// SPDX-License-Identifier: Apache-2.0
// Host interface of the attention of few queries to a paged cache of latents.
#pragma once

#include <cstdint>

namespace vllm_cuda {

constexpr int kLatentDims = 512;     // of a row of the cache, which are its value too
constexpr int kLatentShared = 64;    // after them, of the key alone
constexpr int kLatentTileKeys = 64;  // keys that are multiplied at once

// Elements are bf16 unless typed; strides are in elements.
struct LatentAttentionArgs {
  const void* query;    // [heads, tokens, 512], which meets the latents
  const void* shared;   // [tokens, heads, 64], which meets the rest of the keys
  const void* cache;    // [blocks, block_size, 576], the rows of a block adjacent
  const int* table;     // [num_seqs, max_blocks]
  const int* seq_lens;  // [num_seqs]
  const int* starts;    // [num_seqs + 1]
  void* out;            // [heads, tokens, 512]
  float* part;          // [tokens, heads, splits, 512], shares that are yet to be joined, or null
  float* lse;           // [tokens, heads, splits], their base-2 log-sum-exp, or null
  int64_t q_head, q_token, shared_token, shared_head, out_head, out_token;
  int64_t block_stride, table_stride;
  float scale;  // of base-2 scores
  int num_seqs, heads, tiles, num_blocks, block_size;  // tiles of the longest query's rows
  int splits, split_keys;  // most shares of a sequence; keys that are worth one
};

struct LatentAttentionLaunch {
  int rows;    // of a tile, 32 or 64: query tokens of a sequence times heads
  int max_query_len;
  int device;  // the current device
  void* stream;
};

// Queues the kernel on the stream, and one that joins shares; returns what went wrong, or null.
const char* launch_latent_attention(const LatentAttentionArgs& args,
                                    const LatentAttentionLaunch& launch);

}  // namespace vllm_cuda
