// SPDX-License-Identifier: Apache-2.0
// The recurrence of a decode step of Kimi delta attention on a warp's tile of a state: sixteen rows
// of dv. Half a warp has eight of them, a lane the columns 4 * member + 64 * j: few lanes share a
// row, so sums are short, and few columns are in one lane, so what a pending token needs of shared
// memory is little.
//
// The order of every sum follows from the head dimension alone.
#pragma once

#include "gdn_decode_tile.cuh"

namespace vllm_cuda::kda_decode {

using gdn_decode::Quad;

constexpr int kRows = 16;         // of a tile
constexpr int R = kRows / 2, C = 8;  // rows and columns of a lane

template <int N>
__device__ void load_words(float (&x)[N], const float* from, int stride) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const float4 word = *reinterpret_cast<const float4*>(from + stride * j);
    x[4 * j] = word.x, x[4 * j + 1] = word.y, x[4 * j + 2] = word.z, x[4 * j + 3] = word.w;
  }
}

// Sums of 2 N values over 2 N lanes, value i to the lanes with i in their last bits.
template <int N>
__device__ float sum_to_lanes(const float (&x)[2 * N]) {
  const bool upper = threadIdx.x & N;
  float sums[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float low = x[i], high = x[i + N];
    sums[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, N);
  }
  if constexpr (N > 1) {
    return sum_to_lanes<N / 2>(sums);
  } else {
    return sums[0];
  }
}

template <typename State>
struct Tile {
  using Word = typename Quad<State>::Word;
  const int half = threadIdx.x / 16 % 2, member = threadIdx.x % 16;
  float S[R][C];

  // Element 4 * j of row r of this lane, in the tile's dense rows.
  __device__ int place(int r, int j) const {
    return (half * R + r) * kHeadDim + 4 * member + 64 * j;
  }
  __device__ void load(const State* rows) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int j = 0; j < C / 4; ++j) {
        const Word word = *reinterpret_cast<const Word*>(rows + place(r, j));
        const float4 x = Quad<State>::widen(word);
        S[r][4 * j] = x.x, S[r][4 * j + 1] = x.y, S[r][4 * j + 2] = x.z, S[r][4 * j + 3] = x.w;
      }
    }
  }
  __device__ void store(State* rows) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int j = 0; j < C / 4; ++j) {
        const float* x = S[r] + 4 * j;
        __stcs(reinterpret_cast<Word*>(rows + place(r, j)),
               Quad<State>::narrow(make_float4(x[0], x[1], x[2], x[3])));
      }
    }
  }
  __device__ void load_columns(float (&x)[C], const float* from) const {
    load_words(x, from + 4 * member, 64);
  }
  __device__ void scale(const float (&decays)[C]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) S[r][c] = __fmul_rn(S[r][c], decays[c]);
    }
  }
  __device__ void add(const float (&d)[R], const float (&k)[C]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        S[r][c] = Quad<State>::rounded(__fmaf_rn(d[r], k[c], S[r][c]));
      }
    }
  }
  // A pending token; `errors`: of the tile's rows.
  __device__ void replay(const float* key, const float* decays, const float* errors) {
    float k[C], decay[C], d[R];
    load_columns(k, key);
    load_columns(decay, decays);
    load_words(d, errors + half * R, 4);
    scale(decay);
    add(d, k);
  }
  // Products of row `member % R` of this lane's half: with k in the lower lanes, with q in the
  // others.
  __device__ float multiply(const float (&k)[C], const float (&q)[C]) const {
    float sums[2 * R] = {};
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        sums[r] = __fmaf_rn(S[r][c], k[c], sums[r]);
        sums[R + r] = __fmaf_rn(S[r][c], q[c], sums[R + r]);
      }
    }
    return sum_to_lanes<R>(sums);
  }
};

}  // namespace vllm_cuda::kda_decode
