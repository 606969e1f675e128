// SPDX-License-Identifier: Apache-2.0
// The warps that make bf16 of the e4m3 keys and values that prefill attention fetches.
#pragma once

#include "hopper/bf16_pairs.cuh"
#include "hopper/prefill_attention_items.cuh"
#include "hopper/tma.cuh"

namespace vllm_cuda::prefill_attention {

template <typename S>
struct Converter {
  static constexpr int kGroupBytes = 16 * S::HEAD_DIM;  // of 8 tokens in bf16
  static constexpr int kPieces = S::HEAD_DIM / 64;      // of 16 bytes, a lane's of a group

  Shared<S>& shared;
  const int warp, lane;
  Ring keys, values, items;
  int from, to;  // a lane's first bytes in a group of e4m3 and of bf16

  // Eight lanes take one column of a group's eight rows: the swizzle puts their pieces of 16 bytes
  // in different banks, where they are read and where they are written.
  __device__ explicit Converter(Shared<S>& shared_)
      : shared(shared_), warp(threadIdx.x / 32 - 1), lane(threadIdx.x % 32),
        keys(shared_.key_barriers, S::STAGES), values(shared_.value_barriers, S::STAGES),
        items(shared_.item_barriers, kItems) {
    const int row = lane % 8, column = lane / 8;
    const int swizzle = S::ROW_BYTES == 64 ? row / 2 : row;
    from = kGroupBytes / 2 + row * S::ROW_BYTES + (column ^ swizzle) * 16;
    to = row * 128 + (2 * column ^ row) * 16;
  }

  // Of a lane's piece `i`, 64 elements after the one before it.
  __device__ int source(int i) const { return (from ^ i % 2 * 64) + i / 2 * 1024; }

  // The bf16 overwrites the e4m3, so all lanes read before any writes.
  __device__ void widen_group(unsigned char* group) const {
    uint4 narrow[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      narrow[i] = *reinterpret_cast<const uint4*>(group + source(i));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 n = narrow[i];
      *reinterpret_cast<uint4*>(group + i * 1024 + to) =
          make_uint4(widen(n.x), widen(n.x >> 16), widen(n.y), widen(n.y >> 16));
      *reinterpret_cast<uint4*>(group + i * 1024 + (to ^ 16)) =
          make_uint4(widen(n.z), widen(n.z >> 16), widen(n.w), widen(n.w >> 16));
    }
  }

  __device__ void convert(Ring& ring, __nv_bfloat16 (&tiles)[S::STAGES][S::KEYS * S::HEAD_DIM]) {
    wait_parity(fetched<S>(ring), ring.phase);
    auto* tile = reinterpret_cast<unsigned char*>(tiles[ring.index]);
    for (int group = warp; group < S::KEYS / 8; group += S::CONVERTERS) {
      widen_group(tile + group * kGroupBytes);
    }
    shared_fence();
    __syncwarp();
    if (lane == 0) arrive(ring.full());
    ring.advance();
  }

  // Tiles come as they are fetched: keys are a tile ahead of values.
  __device__ void run() {
    while (true) {
      items.wait_full();
      const Item item = shared.items[items.index];
      __syncwarp();
      if (lane == 0) arrive(items.empty());
      items.advance();
      if (item.head < 0) break;
      for (int tile = item.last; tile >= item.first; --tile) {
        if (tile > item.first) convert(keys, shared.keys);
        if (tile < item.last) convert(values, shared.values);
      }
    }
  }
};

}  // namespace vllm_cuda::prefill_attention
