// SPDX-License-Identifier: Apache-2.0
// How a scan makes operands of results in registers, and keeps the state.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "hopper/chunk_scan_tiles.cuh"

namespace vllm_cuda::chunk_scan {

// Two values rounded to bf16, the first in the low half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Results as the next product's left operand, 16 columns at a time.
template <int N>
__device__ inline void pack(uint32_t (&packed)[N / 8][4], const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) packed[i / 4][i % 4] = pack_bf16(x[2 * i], x[2 * i + 1]);
}

__device__ inline float2 load_pair(const float* at) { return *reinterpret_cast<const float2*>(at); }
__device__ inline float2 load_pair(const __nv_bfloat16* at) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(at));
}
__device__ inline void store_pair(float* at, float x, float y) {
  *reinterpret_cast<float2*>(at) = float2{x, y};
}
__device__ inline void store_pair(__nv_bfloat16* at, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(at) = __floats2bfloat162_rn(x, y);
}

// A thread's part of 64 rows of S^T [dv, dk]: S[4 i + 2 h + {0, 1}] is at row 8 h, column 8 i from
// `own` on.
template <typename State>
__device__ inline void load_state(float (&S)[64], const State* own, bool carried) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float2 pair = carried ? load_pair(own + i % 2 * 8 * kHead + i / 2 * 8) : float2{};
    S[2 * i] = pair.x;
    S[2 * i + 1] = pair.y;
  }
}
template <typename State>
__device__ inline void store_state(State* own, const float (&S)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    store_pair(own + i % 2 * 8 * kHead + i / 2 * 8, S[2 * i], S[2 * i + 1]);
  }
}

}  // namespace vllm_cuda::chunk_scan
