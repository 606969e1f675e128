// SPDX-License-Identifier: Apache-2.0
// Shapes of prefill attention's tiles, its shared memory, and which query rows come when.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "prefill_attention.h"
#include "ptx.cuh"

namespace vllm_cuda::prefill_attention {

constexpr int kWarpgroup = 128;
constexpr int kItems = 2;   // on their way to the consumers
constexpr int kClaims = 2;  // on their way to a cluster's other CTAs

// CONSUMERS warpgroups of 64 query rows each go through tiles of KEYS keys, of which STAGES are in
// shared memory. Keys and values are e4m3 in the cache if FP8, else bf16.
template <int HEAD_DIM_, int KEYS_, int CONSUMERS_, int STAGES_, bool FP8_>
struct Shape {
  static constexpr int HEAD_DIM = HEAD_DIM_, KEYS = KEYS_;
  static constexpr bool FP8 = FP8_;
  static constexpr int CONSUMERS = CONSUMERS_, STAGES = STAGES_;
  static constexpr int CHUNKS = HEAD_DIM / 64;  // of 128 bytes
  static constexpr int THREADS = kWarpgroup * (1 + CONSUMERS);
  static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
  static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;
  static constexpr int BARRIERS = (FP8 ? 3 : 2) * STAGES;
  static constexpr int CONVERTERS = FP8 ? 3 : 0;        // warps
  static constexpr int BOX_KEYS = FP8 ? 8 : kBoxKeys;  // that one copy brings
  static constexpr int BOX_BYTES = BOX_KEYS * HEAD_DIM * (FP8 ? 1 : 2);
  static constexpr int ROW_BYTES = FP8 && HEAD_DIM == 64 ? 64 : 128;  // of a chunk, as copied
  static_assert(HEAD_DIM % 64 == 0 && KEYS % BOX_KEYS == 0 && KEYS / BOX_KEYS <= 32);
};

// CTAs that share what they fetch of keys and values.
struct Cluster {
  int size, rank;
};

struct Maps {
  CUtensorMap query, keys, values;
};

// A CTA's consecutive tokens of a sequence, all query heads of one kv head. Those of a cluster's
// next CTA follow.
struct Item {
  int head;         // kv head; negative: there are no more
  int token;        // the first in the batch
  int tokens;       // from there to the end of the sequence; there may be none
  int position;     // of the first in the sequence
  int first, last;  // tiles of keys [first, last) that the cluster sees, from the last to the first
  int own_first, own_last;  // those among them that this CTA sees
};

struct Sequence {
  int index, len, queries;
};

// The tiles that `tokens` tokens from `position` on see.
template <typename S>
__device__ inline void seen_tiles(const PrefillAttentionArgs& args, int position, int tokens,
                                  int seq_len, int& first, int& last) {
  first = args.window > 0 ? max(position - args.window + 1, 0) / S::KEYS : 0;
  last = (min(position + tokens, seq_len) + S::KEYS - 1) / S::KEYS;
}

// A tile of keys or values has groups of 8 tokens, each in CHUNKS swizzled squares of 8 rows of 128
// bytes: as copies of 16 tokens leave it. A group of e4m3 lands in the second half of its place.
template <typename S>
struct alignas(1024) Shared {
  __nv_bfloat16 query[S::CONSUMERS][S::CHUNKS][kQueryRows][64];
  __nv_bfloat16 keys[S::STAGES][S::KEYS * S::HEAD_DIM];
  __nv_bfloat16 values[S::STAGES][S::KEYS * S::HEAD_DIM];
  Item items[kItems];
  uint64_t key_barriers[S::BARRIERS], value_barriers[S::BARRIERS];
  uint64_t query_barriers[S::CONSUMERS][2], item_barriers[2 * kItems];
  uint64_t landed[S::STAGES];  // values that the producer completes itself
  uint64_t claim_barriers[2 * kClaims];
  int claims[kClaims];
};

// Where a stage's copies count: its consumers' barrier, unless converters see it first.
template <typename S>
__device__ uint64_t* fetched(Ring& ring) {
  return S::FP8 ? ring.words + 2 * S::STAGES + ring.index : ring.full();
}

// Tokens of a warpgroup's query rows, and of an item.
__host__ __device__ inline int warpgroup_tokens(int group) { return kQueryRows / group; }
template <typename S>
__host__ __device__ int item_tokens(int group) {
  return S::CONSUMERS * warpgroup_tokens(group);
}

// With items of `block` tokens, sequence i owns those from starts[i] / block + i on: enough for any
// lengths, and the number of all follows from the numbers of tokens and sequences.
__host__ __device__ inline int item_rows(int tokens, int num_seqs, int block) {
  return tokens / block + num_seqs;
}

// By all lanes of a warp: the last sequence that begins at or before item row `row`.
__device__ inline int sequence_of(const int* starts, int num_seqs, int row, int block) {
  const int lane = threadIdx.x % 32;
  int found = 0;
  for (int first = 0; first < num_seqs; first += 32) {
    const int seq = first + lane;
    const bool before = seq < num_seqs && starts[seq] / block + seq <= row;
    const int count = __popc(__ballot_sync(~0u, before));
    found += count;
    if (count < 32) break;
  }
  return found - 1;
}

// A CTA's part of the item of place `index`, and its sequence; the item may have no tokens. A
// sequence's last rows, which see the most keys and take longest, come first; heads of the same
// rows go together.
template <typename S>
__device__ Item item_at(const PrefillAttentionArgs& args, const Cluster& cluster, int rows,
                        int index, Sequence& sequence) {
  const int part = item_tokens<S>(args.group), block = cluster.size * part;
  const int row = rows - 1 - index / args.kv_heads;
  const int seq = sequence_of(args.starts, args.num_seqs, row, block);
  const int start = args.starts[seq], end = args.starts[seq + 1], seq_len = args.seq_lens[seq];
  sequence = {seq, seq_len, end - start};
  const int offset = (row - (start / block + seq)) * block, own = offset + cluster.rank * part;
  const int before = seq_len - (end - start);  // tokens
  Item item;
  item.head = index % args.kv_heads;
  item.token = start + own;
  item.tokens = seq_len > 0 ? end - item.token : 0;
  item.position = before + own;
  item.first = item.last = 0;
  if (seq_len > 0 && start + offset < end) {
    seen_tiles<S>(args, before + offset, block, seq_len, item.first, item.last);
  }
  item.own_first = item.own_last = item.last;
  if (item.tokens > 0) {
    seen_tiles<S>(args, item.position, part, seq_len, item.own_first, item.own_last);
  }
  return item;
}

}  // namespace vllm_cuda::prefill_attention
