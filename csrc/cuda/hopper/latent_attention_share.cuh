// SPDX-License-Identifier: Apache-2.0
// Which keys of which sequence a block of threads has next, and for which rows of its query.
#pragma once

#include "latent_attention.h"

namespace vllm_cuda::latent_attention {

__device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Keys of a share of a sequence, in whole tiles.
__device__ inline int share_keys(const LatentAttentionArgs& args, int seq_len) {
  const int wanted = min(ceil_div(seq_len, args.split_keys), args.splits);
  return ceil_div(ceil_div(seq_len, wanted), kLatentTileKeys) * kLatentTileKeys;
}

// Row `r` of a sequence's query is token `r / heads`, head `r % heads`.
struct Share {
  int seq, split, row;             // the first row of the tile
  int q_start, query_len, lowest;  // position of the first query token
  int used;                        // shares of the tile, or 0: it does not exist
  int first, last;                 // keys
  bool exists;                     // else there are none

  __device__ Share(const LatentAttentionArgs& args, int i, int rows) {
    const int unit = i / args.splits;
    split = i % args.splits;
    row = unit % args.tiles * rows;
    seq = unit / args.tiles;
    const int seq_len = args.seq_lens[seq];
    q_start = args.starts[seq];
    query_len = args.starts[seq + 1] - q_start;
    lowest = seq_len - query_len;
    used = first = last = 0;
    exists = seq_len > 0 && row < query_len * args.heads;
    if (!exists) return;
    const int size = share_keys(args, seq_len);
    const int newest = min((row + rows - 1) / args.heads, query_len - 1);
    used = ceil_div(seq_len, size);
    first = split * size;
    last = min(first + size, lowest + newest + 1);
    exists = split < used;
  }

  __device__ int tiles() const { return ceil_div(max(last - first, 0), kLatentTileKeys); }
};

__device__ inline int num_shares(const LatentAttentionArgs& args) {
  return args.num_seqs * args.splits * args.tiles;
}

}  // namespace vllm_cuda::latent_attention
