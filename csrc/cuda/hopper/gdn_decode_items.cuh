// SPDX-License-Identifier: Apache-2.0
// How the decode step's work is shared out among the CTAs.
#pragma once

#include "gdn_decode_memory.cuh"

namespace vllm_cuda::gdn_decode {

// The sequences up to the last one that has a block: what pads the batch behind them is nobody's
// work. By all threads of the CTA, which meet here.
__device__ inline int count_sequences(const GdnDecodeArgs& args, int* of_warps) {
  int count = 0;
  for (int i = threadIdx.x; i < args.n; i += kThreads) {
    if (__ldg(args.indices + i) >= 0) count = i + 1;
  }
  count = __reduce_max_sync(~0u, count);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = count;
  __syncthreads();
  for (int i = 0; i < kThreads / 32; ++i) count = max(count, of_warps[i]);
  return count;
}

// An item is a sequence's key head with its group of value heads, or with one of them where every
// CTA has one item. Those of eight sequences follow each other, and each eight begin three
// sequences further than the eight before: a CTA's items differ in what is pending, of which
// commits every eight tokens make eight kinds.
constexpr int kTogether = 8, kShift = 3;

__device__ inline int count_items(const GdnDecodeArgs& args, int sequences) {
  return min(args.n, (sequences + kTogether - 1) / kTogether * kTogether) * args.items;
}

// What is known of an item from the start; `more` is not.
__device__ inline Header look_up(const GdnDecodeArgs& args, int seq, int number) {
  Header found{};
  found.seq = seq;
  found.number = number;
  found.index = args.indices[seq];
  found.commit = true;
  if (args.steps != nullptr) {
    const int4 step = reinterpret_cast<const int4*>(args.steps)[seq];
    found.row = step.x;
    found.first = step.w;
    if (found.index >= 0) found.pending = step.y;
    found.commit = step.z != 0;
    if (found.index >= 0 && args.drafts > 0) found.taken = args.taken[step.x];
  }
  return found;
}

__device__ inline Header look_up(const GdnDecodeArgs& args, int id) {
  const int size = kTogether * args.items, part = id / size;
  const bool whole = (part + 1) * kTogether <= args.n;
  const int in_part = whole ? (id + part % kTogether * kShift * args.items) % size : id % size;
  return look_up(args, part * kTogether + in_part / args.items, in_part % args.items);
}

// A CTA's first items, which are its own for certain: every warp knows them, item `i` in lane `i`.
struct FirstItems {
  static constexpr int COUNT = kBuffers + 1;
  int count;  // of all CTAs' items
  Header own;

  // `most`: at least the number of all items.
  __device__ FirstItems(const GdnDecodeArgs& args, int most) : count(most), own{} {
    const int lane = threadIdx.x % 32;
    if (lane < COUNT && id(lane) < most) own = look_up(args, id(lane));
  }
  __device__ static int id(int turn) { return blockIdx.x + turn * gridDim.x; }
  __device__ bool any() const { return id(0) < count; }
  // Whether item `turn` and what comes after it are known beforehand.
  __device__ bool has(int turn) const { return turn < COUNT - 1; }
  __device__ Header operator[](int turn) const {
    Header item;
    item.index = __shfl_sync(~0u, own.index, turn);
    item.seq = __shfl_sync(~0u, own.seq, turn);
    item.number = __shfl_sync(~0u, own.number, turn);
    item.row = __shfl_sync(~0u, own.row, turn);
    item.first = __shfl_sync(~0u, own.first, turn);
    item.pending = __shfl_sync(~0u, own.pending, turn);
    item.taken = __shfl_sync(~0u, own.taken, turn);
    item.commit = __shfl_sync(~0u, own.commit, turn);
    item.more = id(turn + 1) < count;
    return item;
  }
};

// A CTA's items in one warp. After its first ones a CTA has what it claims, since some
// multiprocessors are nearer to memory and items differ in what is pending. Items are claimed two
// and looked up one before they are taken.
struct Items {
  const GdnDecodeArgs& args;
  const FirstItems& first;
  bool shared;  // whether any are claimed
  int turn = 0;
  int claimed = 0;  // number of item `turn + 1`, in lane 0
  Header header{};  // of item `turn`, once it is beyond the first ones

  __device__ Items(const GdnDecodeArgs& args_, const FirstItems& first_)
      : args(args_), first(first_), shared(first_.count > FirstItems::COUNT * gridDim.x) {}

  __device__ Header take() {
    Header item = turn < FirstItems::COUNT ? first[turn] : header;
    ++turn;
    int id = FirstItems::id(turn);
    if (shared && turn >= FirstItems::COUNT) id = take_claimed();
    item.more = id < first.count;
    if (!item.more) return item;
    if (turn >= FirstItems::COUNT) header = look_up(args, id);
    if (shared && turn + 1 >= FirstItems::COUNT && threadIdx.x % 32 == 0) {
      claimed = FirstItems::COUNT * gridDim.x + atomicAdd(args.counter, 1);
    }
    return item;
  }
  __device__ int take_claimed() const {
    // The last CTA to claim in vain leaves the counter as it was.
    if (threadIdx.x % 32 == 0 && claimed == first.count + gridDim.x - 1) *args.counter = 0;
    return __shfl_sync(~0u, claimed, 0);
  }
};

}  // namespace vllm_cuda::gdn_decode
