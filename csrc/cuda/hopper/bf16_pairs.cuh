// SPDX-License-Identifier: Apache-2.0
// Pairs of bf16 in a register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace vllm_cuda {

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ inline float low_half(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ inline float high_half(uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000u);
}

// Four words of each lane of four become the four at its own place of all of them.
__device__ inline void transpose_words(uint32_t (&word)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int i = step == 1 ? 2 * pair : pair;
      const uint32_t kept = upper ? word[i + step] : word[i];
      const uint32_t sent = upper ? word[i] : word[i + step];
      const uint32_t got = __shfl_xor_sync(~0u, sent, step);
      word[i] = upper ? got : kept;
      word[i + step] = upper ? kept : got;
    }
  }
}

// The two e4m3 values of the low half: exact.
__device__ inline uint32_t widen(uint32_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return pack(wide.x, wide.y);
}

}  // namespace vllm_cuda
