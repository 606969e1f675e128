// SPDX-License-Identifier: Apache-2.0
// What sums over ranks add, in fp32 in the order of ranks, rounded once; and the norm of such a row.
#pragma once

#include "skinny_norm.cuh"

namespace vllm_cuda {

// 16 bytes of T as fp32.
template <typename T>
struct Chunk {
  static constexpr int kElements = 8;
  float values[kElements];
  __device__ void operator+=(const uint4& words) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Pair<T>::widen(pairs[i]);
      values[2 * i] += pair.x;
      values[2 * i + 1] += pair.y;
    }
  }
  __device__ explicit Chunk(const uint4& words) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Pair<T>::widen(pairs[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
  __device__ uint4 rounded() const {
    return make_uint4(Pair<T>::narrow(values[0], values[1]), Pair<T>::narrow(values[2], values[3]),
                      Pair<T>::narrow(values[4], values[5]), Pair<T>::narrow(values[6], values[7]));
  }
};

template <>
struct Chunk<float> {
  static constexpr int kElements = 4;
  float4 values;
  __device__ explicit Chunk(const uint4& words) {
    values = make_float4(__uint_as_float(words.x), __uint_as_float(words.y),
                         __uint_as_float(words.z), __uint_as_float(words.w));
  }
  __device__ void operator+=(const uint4& words) {
    values.x += __uint_as_float(words.x);
    values.y += __uint_as_float(words.y);
    values.z += __uint_as_float(words.z);
    values.w += __uint_as_float(words.w);
  }
  __device__ uint4 rounded() const {
    return make_uint4(__float_as_uint(values.x), __float_as_uint(values.y),
                      __float_as_uint(values.z), __float_as_uint(values.w));
  }
};

// The norm of a row that the block holds, with the bits of the Triton kernel of
// `fused_add_rms_norm`: a thread's squares in order, then across lanes, then across warps.
__device__ inline float block_inverse(float squares, int columns, float eps, float* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) squares = exchange_add(squares, mask);
  __syncthreads();  // the row before has been read
  if (lane == 0) shared[warp] = squares;
  __syncthreads();
  float sum = lane < warps ? shared[lane] : 0.0f;
  for (int mask = warps / 2; mask > 0; mask /= 2) sum = exchange_add(sum, mask);
  return inverse_norm(__shfl_sync(0xffffffffu, sum, 0), columns, eps);
}

template <typename T>
__device__ uint4 scale_chunk(const uint4& x, const uint4& weight, float inverse, bool one_plus) {
  return make_uint4(scale_pair<T>(x.x, weight.x, inverse, one_plus),
                    scale_pair<T>(x.y, weight.y, inverse, one_plus),
                    scale_pair<T>(x.z, weight.z, inverse, one_plus),
                    scale_pair<T>(x.w, weight.w, inverse, one_plus));
}

}  // namespace vllm_cuda
