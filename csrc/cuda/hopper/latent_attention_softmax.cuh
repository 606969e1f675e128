// SPDX-License-Identifier: Apache-2.0
// Online softmax of a warpgroup's scores, in registers, whose peaks are raised by scores far above
// them: FlashAttention-2 (arXiv 2307.08691, algorithm 1) in powers of two.
#pragma once

#include "prefill_attention_softmax.cuh"

namespace vllm_cuda::latent_attention {

// A row's weights may be so many powers of two above 1: its sums are rarely scaled, and whether
// they are follows from the row alone.
constexpr float kSlack = 8.0f;

// Of a thread's two rows: scores [4 * g + 2 * row + e] are of key 8 * g + 2 * (lane % 4) + e.
template <int KEYS>
struct Softmax {
  static constexpr int N = KEYS / 2;
  float peak[2], total[2];  // about the largest score; a thread's own share of the sum of weights
  float fade[2];            // what the last step multiplies earlier sums by

  __device__ void start(float first, float second) {
    peak[0] = first, peak[1] = second;
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

  // Makes weights of scores.
  __device__ void step(float (&scores)[N], float scale) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float most[2] = {scores[2 * row], scores[2 * row + 1]};
#pragma unroll
      for (int i = 4; i < N; i += 4) {
        most[0] = fmaxf(most[0], scores[i + 2 * row]);
        most[1] = fmaxf(most[1], scores[i + 2 * row + 1]);
      }
      float peak_here = fmaxf(most[0], most[1]);
      peak_here = fmaxf(peak_here, __shfl_xor_sync(~0u, peak_here, 1));
      peak_here = fmaxf(peak_here, __shfl_xor_sync(~0u, peak_here, 2));
      peak_here *= scale;
      const bool grown = peak_here > peak[row] + kSlack;
      fade[row] = grown ? prefill_attention::exp2_fast(peak[row] - peak_here) : 1.0f;
      if (grown) peak[row] = peak_here;
      const float shift = peak[row] == -INFINITY ? 0.0f : peak[row];
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < N; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[i + 2 * row + e];
          score = prefill_attention::exp2_fast(fmaf(score, scale, -shift));
          sum[e] += score;
        }
      }
      total[row] = fmaf(total[row], fade[row], sum[0] + sum[1]);
    }
  }

  // The sum of a row's weights.
  __device__ float sum_of(int row) const {
    float sum = total[row];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum;
  }
};

}  // namespace vllm_cuda::latent_attention
