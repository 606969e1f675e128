// SPDX-License-Identifier: Apache-2.0
// Online softmax of a warpgroup's scores, in registers: FlashAttention-2 (arXiv 2307.08691,
// algorithm 1) in powers of two.
#pragma once

#include <cstdint>

#include "hopper/bf16_pairs.cuh"

namespace vllm_cuda::prefill_attention {

constexpr float kLog2E = 1.4426950408889634f;

__device__ inline float exp2_fast(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// `x * sigmoid(gate)` with the same approximations as the Triton kernel of `mul_sigmoid`.
__device__ inline float times_sigmoid(float x, float gate) {
  float power, quotient;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(-gate * 1.4426950408889634f));
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(1.0f), "f"(1.0f + power));
  return x * quotient;
}

__device__ inline uint32_t gated(uint32_t x, uint32_t gate) {
  return pack(
      times_sigmoid(__uint_as_float(x << 16), __uint_as_float(gate << 16)),
      times_sigmoid(__uint_as_float(x & 0xffff0000u), __uint_as_float(gate & 0xffff0000u)));
}

constexpr float kHeadroom = 64.0f;       // binades of a row's first weights below one
constexpr float kMostWeight = 65536.0f;  // of a thread's share of a row's total

// Weights are powers of two of scores less the row's peak, which is so far above the largest score
// of the first tile that the row sees. Other tiles have no maximum taken, which would cost as much
// as the powers do: totals tell where weights grow large, and are infinite where a float cannot
// hold them. Both are rare and follow from the row alone.
//
// Of a thread's two rows: scores [4 * g + 2 * row + e] are of key 8 * g + 2 * (lane % 4) + e.
template <int KEYS>
struct Softmax {
  static constexpr int N = KEYS / 2;
  float peak[2];   // infinite: the row has seen nothing
  float total[2];  // a thread's own share of the sum of weights

  __device__ void start() {
    peak[0] = peak[1] = INFINITY;
    total[0] = total[1] = 0.0f;
  }

  // Keys that are hidden(row, key) have no weight; keys count from this thread's first.
  template <typename Hidden>
  __device__ static void hide(float (&scores)[N], Hidden hidden) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (hidden(i / 2 % 2, i / 4 * 8 + i % 2)) scores[i] = -INFINITY;
    }
  }

  // Rows that see their first keys get a peak.
  __device__ void settle(const float (&scores)[N], float scale) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float most[2] = {scores[2 * row], scores[2 * row + 1]};
#pragma unroll
      for (int i = 4; i < N; i += 4) {
        most[0] = fmaxf(most[0], scores[i + 2 * row]);
        most[1] = fmaxf(most[1], scores[i + 2 * row + 1]);
      }
      const float most_here = most_of_row(fmaxf(most[0], most[1]));
      if (peak[row] == INFINITY && most_here > -INFINITY) {
        peak[row] = fmaf(most_here, scale, kHeadroom);
      }
    }
  }

  // Makes weights of scores. Returns whether some of this warp's are large: they are lowered next.
  __device__ bool step(float (&scores)[N], float scale) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < N; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[i + 2 * row + e];
          score = exp2_fast(fmaf(score, scale, -peak[row]));
          sum[e] += score;
        }
      }
      total[row] += sum[0] + sum[1];
    }
    return __any_sync(~0u, fmaxf(total[0], total[1]) > kMostWeight);
  }

  // Raises the peaks of rows with large weights, which makes these and earlier ones' sums smaller.
  template <int SUMS>
  __device__ void lower(float (&scores)[N], float (&sums)[SUMS]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float most = most_of_row(total[row]);
      const bool large = most > kMostWeight && most < INFINITY;
      const int binades = large ? min((__float_as_int(most) >> 23) - 127, 126) : 0;
      const float fade = __int_as_float((127 - binades) << 23);
      peak[row] += binades;
      total[row] *= fade;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i / 2 % 2 == row) scores[i] *= fade;
      }
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        if (i / 2 % 2 == row) sums[i] *= fade;
      }
    }
  }

  __device__ static float most_of_row(float most) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  }

  // The sum of a row's weights.
  __device__ float sum_of(int row) const {
    float sum = total[row];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum;
  }
};

}  // namespace vllm_cuda::prefill_attention
