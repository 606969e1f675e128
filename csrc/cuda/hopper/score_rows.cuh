// SPDX-License-Identifier: Apache-2.0
// What softmaxes of a warpgroup's scores have in common, in registers.
#pragma once

#include "ptx.cuh"

namespace vllm_cuda {

// Of a thread's two rows: scores [4 * g + 2 * row + e] are of key 8 * g + 2 * (lane % 4) + e.
template <int KEYS>
struct ScoreRows {
  static constexpr int N = KEYS / 2;

  // Keys that are hidden(row, key) have no weight; keys count from this thread's first.
  template <typename Hidden>
  __device__ static void hide(float (&scores)[N], Hidden hidden) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (hidden(i / 2 % 2, i / 4 * 8 + i % 2)) scores[i] = -INFINITY;
    }
  }

  // The largest of a row's scores.
  __device__ static float most_of(const float (&scores)[N], int row) {
    float most[2] = {scores[2 * row], scores[2 * row + 1]};
#pragma unroll
    for (int i = 4; i < N; i += 4) {
      most[0] = fmaxf(most[0], scores[i + 2 * row]);
      most[1] = fmaxf(most[1], scores[i + 2 * row + 1]);
    }
    return most_of_row(fmaxf(most[0], most[1]));
  }

  // Over the four threads that share a row.
  __device__ static float most_of_row(float most) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  }
  __device__ static float sum_of_row(float sum) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum;
  }

  // Makes weights of a row's scores: powers of two relative to `shift`. Returns this thread's share
  // of their sum.
  __device__ static float weigh(float (&scores)[N], int row, float scale, float shift) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[i + 2 * row + e];
        score = exp2_fast(fmaf(score, scale, -shift));
        sum[e] += score;
      }
    }
    return sum[0] + sum[1];
  }
};

}  // namespace vllm_cuda
