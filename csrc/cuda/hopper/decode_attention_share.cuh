// SPDX-License-Identifier: Apache-2.0
// Which keys of which sequence and kv head a block of threads has next.
#pragma once

#include "decode_attention.h"
#include "ptx.cuh"

namespace vllm_cuda::decode_attention {

__device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Sequence {
  int q_start, query_len, seq_len;
  int first;  // key that any of its tokens looks at, rounded down to a tile
  int keys, used;  // of a share, and shares

  __device__ Sequence(const DecodeAttentionArgs& args, int seq) {
    seq_len = args.seq_lens[seq];
    q_start = args.starts[seq];
    query_len = args.starts[seq + 1] - q_start;
    first = keys = used = 0;
    if (seq_len == 0 || query_len <= 0) return;
    if (args.window > 0)
      first = max(seq_len - query_len - args.window + 1, 0) / kTileKeys * kTileKeys;
    const int wanted = min(ceil_div(seq_len - first, args.split_keys), args.splits);
    keys = ceil_div(ceil_div(seq_len - first, wanted), kTileKeys) * kTileKeys;
    used = ceil_div(seq_len - first, keys);
  }
};

struct Share {
  int seq, head, split, used;
  int q_start, query_len, lowest;  // position of the first query token
  int first, last;                 // keys

  __device__ int tiles() const { return ceil_div(last - first, kTileKeys); }
  // Of those, one in `warps`, beginning with the `warp`-th; `warp` may be too large.
  __device__ int tiles_of(int warp, int warps) const {
    return warp < warps ? (tiles() - warp + warps - 1) / warps : 0;
  }
  __device__ int highest() const { return lowest + query_len - 1; }
};

// The shares of all sequences one after another, kv heads innermost; made by all threads.
template <int WARPS>
class Shares {
 public:
  __host__ __device__ static int bytes(int num_seqs) { return 4 * (num_seqs + 1 + 2 + kWarps); }

  __device__ Shares(const DecodeAttentionArgs& args, int* memory)
      : ends_(memory + 2 + kWarps), flag_(memory), kv_heads_(args.kv_heads),
        num_seqs_(args.num_seqs) {
    int* sums = memory + 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;
    if (threadIdx.x == 0) ends_[0] = 0;
    for (int base = 0; base < num_seqs_; base += 32 * kWarps) {
      const int seq = base + static_cast<int>(threadIdx.x);
      int sum = seq < num_seqs_ ? Sequence(args, seq).used : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      if (lane == 31) sums[warp] = sum;
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) sum += sums[w];
      }
      if (seq < num_seqs_) ends_[seq + 1] = before + sum;
      for (int w = 0; w < kWarps; ++w) before += sums[w];
      __syncthreads();
    }
    count_ = before * kv_heads_;
  }

  __device__ int count() const { return count_; }
  __device__ int* flag() const { return flag_; }

  __device__ Share at(const DecodeAttentionArgs& args, int i) const {
    const int unit = i / kv_heads_;
    int low = 0, high = num_seqs_;  // ends_[low] <= unit < ends_[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (ends_[middle] <= unit) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const Sequence sequence(args, low);
    Share share;
    share.seq = low;
    share.head = i % kv_heads_;
    share.split = unit - ends_[low];
    share.used = sequence.used;
    share.q_start = sequence.q_start;
    share.query_len = sequence.query_len;
    share.lowest = sequence.seq_len - sequence.query_len;
    share.first = sequence.first + share.split * sequence.keys;
    share.last = min(share.first + sequence.keys, sequence.seq_len);
    return share;
  }

 private:
  static constexpr int kWarps = WARPS + 1;
  int *ends_, *flag_;
  int kv_heads_, num_seqs_, count_;
};

}  // namespace vllm_cuda::decode_attention
