// SPDX-License-Identifier: Apache-2.0
// Online softmax of a warpgroup's scores, in registers, whose peaks are raised by scores far above
// them: FlashAttention-2 (arXiv 2307.08691, algorithm 1) in powers of two.
#pragma once

#include "score_rows.cuh"

namespace vllm_cuda::latent_attention {

// A row's weights may be so many powers of two above 1: its sums are rarely scaled, and whether
// they are follows from the row alone.
constexpr float kSlack = 8.0f;

template <int KEYS>
struct Softmax : ScoreRows<KEYS> {
  using Rows = ScoreRows<KEYS>;
  float peak[2], total[2];  // about the largest score; a thread's own share of the sum of weights
  float fade[2];            // what the last step multiplies earlier sums by

  __device__ void start(float first, float second) {
    peak[0] = first, peak[1] = second;
    total[0] = total[1] = 0.0f;
  }

  // Makes weights of scores.
  __device__ void step(float (&scores)[Rows::N], float scale) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float peak_here = Rows::most_of(scores, row) * scale;
      const bool grown = peak_here > peak[row] + kSlack;
      fade[row] = grown ? exp2_fast(peak[row] - peak_here) : 1.0f;
      if (grown) peak[row] = peak_here;
      const float shift = peak[row] == -INFINITY ? 0.0f : peak[row];
      total[row] = fmaf(total[row], fade[row], Rows::weigh(scores, row, scale, shift));
    }
  }

  // The sum of a row's weights.
  __device__ float sum_of(int row) const { return Rows::sum_of_row(total[row]); }
};

}  // namespace vllm_cuda::latent_attention
