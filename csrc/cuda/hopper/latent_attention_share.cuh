// SPDX-License-Identifier: Apache-2.0
// Which keys of which sequence a block of threads has next, and for which rows of its query.
#pragma once

#include "latent_attention.h"

namespace vllm_cuda::latent_attention {

__device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Row `r` of a sequence's query is token `r / heads`, head `r % heads`.
struct Share {
  int seq, split, row;             // the first row of the tile
  int q_start, query_len, lowest;  // position of the first query token
  int first, last;                 // keys
  bool exists;                     // else there is nothing to compute or to write

  // Shares are numbered with the tiles of rows innermost: these read the same keys.
  __device__ Share(const LatentAttentionArgs& args, int i, int rows) {
    const int unit = i / args.tiles;
    row = i % args.tiles * rows;
    split = unit % args.splits;
    seq = unit / args.splits;
    const int seq_len = args.seq_lens[seq];
    q_start = args.starts[seq];
    query_len = args.starts[seq + 1] - q_start;
    lowest = seq_len - query_len;
    first = last = 0;
    exists = seq_len > 0 && row < query_len * args.heads;
    if (!exists) return;
    const int wanted = min(ceil_div(seq_len, args.split_keys), args.splits);
    const int size = ceil_div(ceil_div(seq_len, wanted), kLatentTileKeys) * kLatentTileKeys;
    const int newest = min((row + rows - 1) / args.heads, query_len - 1);
    first = split * size;
    last = min(first + size, lowest + newest + 1);
    exists = first < seq_len;
  }

  __device__ int tiles() const { return ceil_div(max(last - first, 0), kLatentTileKeys); }
};

__device__ inline int num_shares(const LatentAttentionArgs& args) {
  return args.num_seqs * args.splits * args.tiles;
}

}  // namespace vllm_cuda::latent_attention
