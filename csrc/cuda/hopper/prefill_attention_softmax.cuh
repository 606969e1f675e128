// SPDX-License-Identifier: Apache-2.0
// Online softmax of a warpgroup's scores, in registers: FlashAttention-2 (arXiv 2307.08691,
// algorithm 1) in powers of two.
#pragma once

#include <cstdint>

#include "hopper/bf16_pairs.cuh"
#include "hopper/score_rows.cuh"

namespace vllm_cuda::prefill_attention {

constexpr float kLog2E = 1.4426950408889634f;

// `x * sigmoid(gate)` with the same approximations as the Triton kernel of `mul_sigmoid`.
__device__ inline float times_sigmoid(float x, float gate) {
  float power, quotient;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(-gate * 1.4426950408889634f));
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(1.0f), "f"(1.0f + power));
  return x * quotient;
}

__device__ inline uint32_t gated(uint32_t x, uint32_t gate) {
  return pack(times_sigmoid(low_half(x), low_half(gate)),
              times_sigmoid(high_half(x), high_half(gate)));
}

constexpr float kHeadroom = 64.0f;       // binades of a row's first weights below one
constexpr float kMostWeight = 65536.0f;  // of a thread's share of a row's total

// Weights are powers of two of scores less the row's peak, which is so far above the largest score
// of the first tile that the row sees. Other tiles have no maximum taken, which would cost as much
// as the powers do: totals tell where weights grow large, and are infinite where a float cannot
// hold them. Both are rare and follow from the row alone.
template <int KEYS>
struct Softmax : ScoreRows<KEYS> {
  using Rows = ScoreRows<KEYS>;
  static constexpr int N = Rows::N;
  float peak[2];   // infinite: the row has seen nothing
  float total[2];  // a thread's own share of the sum of weights

  __device__ void start() {
    peak[0] = peak[1] = INFINITY;
    total[0] = total[1] = 0.0f;
  }

  // Rows that see their first keys get a peak.
  __device__ void settle(const float (&scores)[N], float scale) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float most = Rows::most_of(scores, row);
      if (peak[row] == INFINITY && most > -INFINITY) peak[row] = fmaf(most, scale, kHeadroom);
    }
  }

  // Makes weights of scores. Returns whether some of this warp's are large: they are lowered next.
  __device__ bool step(float (&scores)[N], float scale) {
#pragma unroll
    for (int row = 0; row < 2; ++row) total[row] += Rows::weigh(scores, row, scale, peak[row]);
    return __any_sync(~0u, fmaxf(total[0], total[1]) > kMostWeight);
  }

  // Raises the peaks of rows with large weights, which makes these and earlier ones' sums smaller.
  template <int SUMS>
  __device__ void lower(float (&scores)[N], float (&sums)[SUMS]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float most = Rows::most_of_row(total[row]);
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

  // The sum of a row's weights.
  __device__ float sum_of(int row) const { return Rows::sum_of_row(total[row]); }
};

}  // namespace vllm_cuda::prefill_attention
