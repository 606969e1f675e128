// SPDX-License-Identifier: Apache-2.0
// Attention of a single query row by a warp: for rows whose scores leave the range of the tiles'
// softmax, which is rare.
#pragma once

#include "hopper/prefill_attention_items.cuh"
#include "hopper/prefill_attention_softmax.cuh"

namespace vllm_cuda::prefill_attention {

struct QueryRow {
  int token, position;  // in the batch, in the sequence
  int head, kv_head;
};

// Keys or values of one token and head, two at a time.
template <typename S>
struct CacheRow {
  const unsigned char* data;

  __device__ CacheRow(const PrefillAttentionArgs& args, const QueryRow& row, const int* blocks,
                      int part, int key) {
    const int64_t token = static_cast<int64_t>(args.kv_heads) * S::HEAD_DIM;
    const int block = blocks[key / args.block_size];
    const int64_t at = block * args.block_stride +
                       (part * args.block_size + key % args.block_size) * token +
                       row.kv_head * S::HEAD_DIM;
    data = static_cast<const unsigned char*>(args.cache) + at * (S::FP8 ? 1 : 2);
  }
  __device__ uint32_t pair(int i) const {
    if constexpr (S::FP8) {
      return widen(reinterpret_cast<const uint16_t*>(data)[i]);
    } else {
      return reinterpret_cast<const uint32_t*>(data)[i];
    }
  }
};

// A lane has the score of a key, and pairs lane + 32 * i of the sums.
template <typename S>
__device__ inline void attend_row(const PrefillAttentionArgs& args, const QueryRow& row) {
  constexpr int kPairs = S::HEAD_DIM / 64;
  const int lane = threadIdx.x % 32;
  int seq = 0;
  while (args.starts[seq + 1] <= row.token) ++seq;
  const int* blocks = args.table + seq * args.table_stride;
  const auto* query = reinterpret_cast<const uint32_t*>(
      static_cast<const __nv_bfloat16*>(args.query) + row.token * args.q_token +
      row.head * args.q_head);
  float peak = args.sinks == nullptr ? -INFINITY : args.sinks[row.head] * kLog2E;
  float total = args.sinks != nullptr && lane == 0 ? 1.0f : 0.0f;
  float sums[2 * kPairs] = {};
  int first = args.window > 0 ? max(row.position - args.window + 1, 0) : 0;
  for (; first <= row.position; first += 32) {
    float score = -INFINITY;
    if (first + lane <= row.position) {
      const CacheRow<S> key(args, row, blocks, 0, first + lane);
      score = 0.0f;
      for (int i = 0; i < S::HEAD_DIM / 2; ++i) {
        const uint32_t q = query[i], k = key.pair(i);
        score = fmaf(low_half(q), low_half(k), fmaf(high_half(q), high_half(k), score));
      }
      score *= args.scale;
    }
    float most = fmaxf(peak, score);
    for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float fade = exp2_fast(peak - most), weight = exp2_fast(score - most);
    peak = most;
    total = fmaf(total, fade, weight);
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) sums[i] *= fade;
    for (int j = 0; j < 32 && first + j <= row.position; ++j) {
      const CacheRow<S> value(args, row, blocks, 1, first + j);
      const float by = __shfl_sync(~0u, weight, j);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const uint32_t v = value.pair(lane + 32 * i);
        sums[2 * i] = fmaf(by, low_half(v), sums[2 * i]);
        sums[2 * i + 1] = fmaf(by, high_half(v), sums[2 * i + 1]);
      }
    }
  }
  for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
  const float factor = args.v_scale / total;
  const auto* gate = static_cast<const __nv_bfloat16*>(args.gate);
  if (gate != nullptr) gate += row.token * args.gate_token + row.head * args.gate_head;
  auto* out = static_cast<__nv_bfloat16*>(args.out) + row.token * args.out_token +
              row.head * args.out_head;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int at = lane + 32 * i;
    uint32_t word = pack(sums[2 * i] * factor, sums[2 * i + 1] * factor);
    if (gate != nullptr) word = gated(word, reinterpret_cast<const uint32_t*>(gate)[at]);
    reinterpret_cast<uint32_t*>(out)[at] = word;
  }
}

}  // namespace vllm_cuda::prefill_attention
