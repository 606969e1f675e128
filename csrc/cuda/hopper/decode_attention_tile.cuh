// SPDX-License-Identifier: Apache-2.0
// One warp's arithmetic on a tile of 16 keys and values in shared memory, transposed so that the
// few query rows are the narrow side: scores [keys, rows], output [head dims, rows].
#pragma once

#include <cuda_fp8.h>

#include "bf16_pairs.cuh"
#include "decode_attention.h"
#include "ptx.cuh"

namespace vllm_cuda::decode_attention {

using Fp8 = __nv_fp8_e4m3;

__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_transposed(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
__device__ inline uint32_t transposed(uint32_t matrix) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
  return out;
}

// Where a tile lies: keys, then values, each in chunks of 128 bytes of all 16 rows. Within eight
// rows of a chunk, pieces of 16 bytes change places: rows' like pieces are in different banks.
template <typename KV, int HEAD_DIM>
struct TileLayout {
  static constexpr int kRowBytes = HEAD_DIM * static_cast<int>(sizeof(KV));
  static constexpr int kChunks = kRowBytes / 128, kChunkBytes = 128 * kTileKeys;
  static constexpr int kPart = kChunks * kChunkBytes, kBytes = 2 * kPart;
  static_assert(kRowBytes % 128 == 0);

  // Of a row's first 16 bytes, or its second if `half`.
  __device__ static uint32_t row(uint32_t part, int key, int half) {
    return part + 128 * key + (16 * half ^ key % 8 * 16);
  }
  // The same of the bytes from `byte`, a multiple of 32, on.
  __device__ static uint32_t at(uint32_t row, int byte) {
    return (row ^ byte % 128) + byte / 128 * kChunkBytes;
  }
};

// Query rows as the narrow operand: of step `s` of 16 dims, lane 4 n + t has four of row n. A lane
// takes the dims that the same lane of the wide operand has.
template <typename KV, int HEAD_DIM>
struct Queries {
  static constexpr int kSteps = HEAD_DIM / 16;
  uint32_t words[kSteps][2];

  __device__ static constexpr int first_dim(int step, int t, int word) {
    return sizeof(KV) == 1 ? 16 * step + 4 * t + 2 * word : 16 * step + 8 * word + 2 * t;
  }
  // `row(i)` is query row i, or null for zeros.
  template <typename Row>
  __device__ void load(Row row) {
    const int lane = threadIdx.x % 32;
    const __nv_bfloat16* from = row(lane / 4);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const int d = first_dim(step, lane % 4, word);
        words[step][word] =
            from == nullptr ? 0 : *reinterpret_cast<const uint32_t*>(from + d);
      }
    }
  }
};

// What a warp has seen so far: of rows 2 t and 2 t + 1 of 8 their peak, this lane's part of the
// sum, and the sums of values, dims by rows.
template <typename KV, int HEAD_DIM>
struct Softmax {
  static constexpr int kSteps = HEAD_DIM / 16;
  float peak[2], total[2], acc[kSteps][4];

  // The dim of `acc[step]`, elements 0 and 1 (`half` 0) or 2 and 3.
  __device__ static int dim(int step, int half) {
    const int g = threadIdx.x % 32 / 4;
    return sizeof(KV) == 1 ? 16 * step + 2 * g + half : 16 * step + 8 * half + g;
  }

  __device__ void clear() {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      peak[e] = -INFINITY;
      total[e] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[step][e] = 0.0f;
  }

  // Adds this tile's keys; `visible(e, key)` says which this lane's row `e` sees, if `MASKED`.
  template <bool MASKED, typename Visible>
  __device__ void add(const Queries<KV, HEAD_DIM>& q, uint32_t keys, float scale,
                      Visible visible) {
    float score[4];
    multiply_keys(score, q, keys);
    const int g = threadIdx.x % 32 / 4;
    uint32_t weights[2];
    bool grown = false;
    float fade[2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = score[e];
      x *= scale;
      if (MASKED && !visible(e % 2, g + 8 * (e / 2))) x = -INFINITY;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float top = fmaxf(score[e], score[e + 2]);
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
      top = fmaxf(top, peak[e]);
      // A row that has seen no key yet keeps a peak of -inf.
      const float shift = MASKED && top == -INFINITY ? 0.0f : top;
      fade[e] = exp2_fast(peak[e] - shift);
      grown |= top != peak[e];
      peak[e] = top;
      score[e] = exp2_fast(score[e] - shift);
      score[e + 2] = exp2_fast(score[e + 2] - shift);
      total[e] = total[e] * fade[e] + score[e] + score[e + 2];
    }
    weights[0] = transposed(pack(score[0], score[1]));
    weights[1] = transposed(pack(score[2], score[3]));
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[step][e] *= fade[e % 2];
    }
    add_values(weights, keys + Layout::kPart);
  }

 private:
  using Layout = TileLayout<KV, HEAD_DIM>;

  // Products of neighbouring steps are summed apart: each waits for the one before it.
  __device__ static void multiply_keys(float (&score)[4],
                                       const Queries<KV, HEAD_DIM>& q, uint32_t keys) {
    constexpr int kChains = 4;
    float sums[kChains][4] = {};
    const int lane = threadIdx.x % 32;
    const uint32_t row = Layout::row(keys, lane % 16, lane / 16);
    if constexpr (sizeof(KV) == 2) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t a[4];
        load_matrices(a, Layout::at(row, 32 * step));
        mma<__nv_bfloat16>(sums[step % kChains], a[0], a[1], a[2], a[3],
                           q.words[step][0], q.words[step][1]);
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        uint32_t m[4];
        load_matrices(m, Layout::at(row, 16 * step));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t low = m[2 * i], high = m[2 * i + 1];
          const uint32_t a0 = widen(low), a2 = widen(low >> 16);
          const uint32_t a1 = widen(high), a3 = widen(high >> 16);
          mma<__nv_bfloat16>(sums[(step + i) % kChains], a0, a1, a2, a3,
                             q.words[step + i][0], q.words[step + i][1]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = sums[0][e];
#pragma unroll
      for (int chain = 1; chain < kChains; ++chain) sum += sums[chain][e];
      score[e] = sum;
    }
  }

  __device__ void add_values(const uint32_t (&weights)[2], uint32_t values) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(KV) == 2) {
      const uint32_t row = Layout::row(values, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t a[4];
        load_transposed(a, Layout::at(row, 32 * step));
        mma<__nv_bfloat16>(acc[step], a[0], a[1], a[2], a[3], weights[0],
                           weights[1]);
      }
    } else {
      // Matrices of 16-bit units, two dims each: keys 0 to 7 and 8 to 15 of 16 dims, then the next.
      const uint32_t row = Layout::row(values, lane / 8 % 2 * 8 + lane % 8, lane / 16);
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        uint32_t m[4];
        load_transposed(m, Layout::at(row, 16 * step));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t first = __byte_perm(m[2 * i], 0, 0x3120);
          const uint32_t last = __byte_perm(m[2 * i + 1], 0, 0x3120);
          const uint32_t a0 = widen(first), a1 = widen(first >> 16);
          const uint32_t a2 = widen(last), a3 = widen(last >> 16);
          mma<__nv_bfloat16>(acc[step + i], a0, a1, a2, a3, weights[0],
                             weights[1]);
        }
      }
    }
  }
};

}  // namespace vllm_cuda::decode_attention
