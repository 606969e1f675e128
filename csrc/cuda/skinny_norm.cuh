// SPDX-License-Identifier: Apache-2.0
// The RMS norm ahead of a skinny matmul, with the bits of the Triton kernel of `rms_norm`.
//
// That one gives each of its threads groups of 8 columns, thread t those of t, t + threads, ..., and
// adds squares within the thread in order, then across lanes (t's bits 4, 3, 2, 1, 0), then across
// warps (from the highest bit down). Here a thread of the matmul already holds whole groups, in
// other places, and the same tree is walked over them.
#pragma once

#include "skinny_tokens.cuh"

namespace vllm_cuda {

struct NormShared {
  static constexpr int STRIDE = 256 + 4;  // floats of a token: neighbours in different banks
  __host__ __device__ static constexpr int floats(int tokens) { return tokens * STRIDE; }
};

template <typename T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static __device__ float2 widen(uint32_t bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
  static __device__ uint32_t narrow(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};
template <>
struct Pair<__half> {
  static __device__ float2 widen(uint32_t bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
  static __device__ uint32_t narrow(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

// sum + the squares of 8 columns, one after another.
template <typename T>
__device__ float add_squares(float sum, const uint4& words) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 value = Pair<T>::widen(pairs[i]);
    sum = __fmaf_rn(value.y, value.y, __fmaf_rn(value.x, value.x, sum));
  }
  return sum;
}

// Sums of squares by token and, within a token, by [t's bits 4..2][bits 7..5][bits 1..0].
template <typename T, typename S, int HALVES>
__device__ void store_squares(float* shared, const Tokens<S, HALVES> (&x)[S::AHEAD], bool wide) {
  static_assert(S::WARPS == 8 && S::CHUNKS == 4 && S::AHEAD == 3);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c) {
      float first = add_squares<T>(0, x[0].words[c][h]), second = 0;
      if (wide) {
        second = add_squares<T>(0, x[1].words[c][h]);
        first = add_squares<T>(first, x[2].words[c][h]);
      } else {
        first = add_squares<T>(first, x[1].words[c][h]);
      }
      float* token = shared + (lane / 4 + 8 * h) * NormShared::STRIDE;
      float* slot = token + ((warp % 2) * 4 + c) * 32 + warp / 2 * 4 + lane % 4;
      slot[0] = first;
      slot[16] = second;
    }
  }
}

__device__ inline float exchange_add(float value, int mask) {
  return value + __shfl_xor_sync(0xffffffffu, value, mask);
}

// Triton knows k when it compiles, and makes of the division and the addition one multiply-add.
__device__ inline float inverse_norm(float squares, int k, float eps) {
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;"
      : "=f"(inverse)
      : "f"(__fmaf_rn(squares, 1.0f / static_cast<float>(k), eps)));
  return inverse;
}

// The whole warp's result: a token's 1 / sqrt(mean(x^2) + eps).
__device__ inline float reduce_squares(const float* token, int k, float eps) {
  const int lane = threadIdx.x % 32;
  float sums[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i] = token[i * 32 + lane];
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) sums[i] += sums[i + step];
  }
  float sum = exchange_add(exchange_add(sums[0], 2), 1);
  sum = exchange_add(exchange_add(exchange_add(sum, 16), 8), 4);
  return inverse_norm(sum, k, eps);
}

template <typename T>
__device__ uint32_t scale_pair(uint32_t bits, uint32_t weight_bits, float inverse, bool one_plus) {
  float2 value = Pair<T>::widen(bits), weight = Pair<T>::widen(weight_bits);
  value.x *= inverse;
  value.y *= inverse;
  if (one_plus) {
    weight.x += 1.0f;
    weight.y += 1.0f;
  } else {
    value = Pair<T>::widen(Pair<T>::narrow(value.x, value.y));
  }
  return Pair<T>::narrow(value.x * weight.x, value.y * weight.y);
}

// By all consumers together; constant, so it is fetched before the wait for x.
template <typename S>
__device__ void fetch_norm_weight(const SkinnyArgs& args, uint4* shared) {
  for (int i = threadIdx.x; i < args.k / 8; i += 32 * S::WARPS) {
    shared[i] = static_cast<const uint4*>(args.norm)[i];
  }
}

// x, held whole by the consumers, becomes its norm. `inverses` has a float for each token. What
// this makes of tokens from m and of columns from k on is never used.
template <typename T, typename S, int HALVES>
__device__ void normalise(const SkinnyArgs& args, Tokens<S, HALVES> (&x)[S::AHEAD], float* squares,
                          float* inverses, const uint4* weights) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  store_squares<T, S, HALVES>(squares, x, args.k > 2 * S::COLUMNS);
  consumers_sync<32 * S::WARPS>();
  for (int token = warp; token < args.m; token += S::WARPS) {
    const float inverse = reduce_squares(squares + token * NormShared::STRIDE, args.k, args.eps);
    if (lane == 0) inverses[token] = inverse;
  }
  consumers_sync<32 * S::WARPS>();
  float inverse[HALVES];
#pragma unroll
  for (int h = 0; h < HALVES; ++h) inverse[h] = inverses[lane / 4 + 8 * h];
#pragma unroll
  for (int i = 0; i < S::AHEAD; ++i) {
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c) {
      const int group = (i * S::COLUMNS + warp * 32 * S::CHUNKS + 32 * c) / 8 + lane % 4;
      const uint4 weight = weights[group];
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        uint4& word = x[i].words[c][h];
        word.x = scale_pair<T>(word.x, weight.x, inverse[h], args.one_plus);
        word.y = scale_pair<T>(word.y, weight.y, inverse[h], args.one_plus);
        word.z = scale_pair<T>(word.z, weight.z, inverse[h], args.one_plus);
        word.w = scale_pair<T>(word.w, weight.w, inverse[h], args.one_plus);
      }
    }
  }
}

}  // namespace vllm_cuda
