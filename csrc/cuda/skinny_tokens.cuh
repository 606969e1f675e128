// SPDX-License-Identifier: Apache-2.0
// How a skinny matmul is cut up: blocks of weight rows, stages of columns, and who holds which x.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"
#include "skinny.h"

namespace vllm_cuda {

// Blocks of at most 8 * TILES weight rows; every one of WARPS takes CHUNKS of 32 columns from a
// stage and keeps x for AHEAD stages in registers.
template <int TILES_, int WARPS_, int CHUNKS_, int AHEAD_>
struct Shape {
  static constexpr int TILES = TILES_, WARPS = WARPS_, CHUNKS = CHUNKS_, AHEAD = AHEAD_;
  static constexpr int ROWS = 8 * TILES;
  static constexpr int COLUMNS = 32 * CHUNKS * WARPS;
  // 64 bytes of padding put neighbouring rows into different banks.
  static constexpr int ROW_BYTES = 2 * COLUMNS + 64;
  static constexpr int THREADS = 32 * (WARPS + 1);
  static constexpr int MAX_STAGES = 16;
  static constexpr int BARRIER_BYTES = 2 * 8 * MAX_STAGES;
  __host__ __device__ static constexpr int sums(int halves) {
    return WARPS * TILES * 64 * halves;
  }
};

// `total` in `parts` that differ by one at most.
struct Parts {
  int size, larger;
  __device__ Parts(int total, int parts) : size(total / parts), larger(total % parts) {}
  __device__ int start(int part) const { return part * size + min(part, larger); }
  __device__ int largest() const { return size + (larger > 0); }
};

// This CTA's output columns, cut into blocks, and the stages that make up a block.
template <typename S, bool GATED>
struct Work {
  static_assert(!GATED || S::TILES % 2 == 0);
  int begin, blocks, per_block, stage_bytes, stages;
  Parts parts;
  __device__ explicit Work(const SkinnyArgs& args)
      : parts(GATED ? args.n / 2 : args.n, gridDim.x) {
    constexpr int CAPACITY = GATED ? S::ROWS / 2 : S::ROWS;
    begin = parts.start(blockIdx.x);
    const int count = parts.start(blockIdx.x + 1) - begin;
    blocks = (count + CAPACITY - 1) / CAPACITY;
    parts = Parts(count, blocks);
    per_block = (args.k + S::COLUMNS - 1) / S::COLUMNS;
    stage_bytes = (GATED ? 2 : 1) * parts.largest() * S::ROW_BYTES;
    stages = min(S::MAX_STAGES, args.ring_bytes / stage_bytes);
  }
  __device__ int first(int block) const { return begin + parts.start(block); }
  __device__ int outputs(int block) const { return first(block + 1) - first(block); }
};

// One stage's columns of x: a thread holds 8 of each chunk, for tokens `lane / 4` and
// `lane / 4 + 8`. An mma pairs the same 16 columns of x and weight, whichever those are, so both
// are loaded 16 bytes at a time.
template <typename S, int HALVES>
struct Tokens {
  uint4 words[S::CHUNKS][HALVES];
  __device__ void load(const SkinnyArgs& args, int column) {
    const int lane = threadIdx.x % 32;
    const char* x = static_cast<const char*>(args.x);
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c) {
      const int at = column + 32 * c + 8 * (lane % 4);
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        const int token = lane / 4 + 8 * h;
        words[c][h] = make_uint4(0, 0, 0, 0);
        if (token < args.m && at < args.k) {
          words[c][h] = *reinterpret_cast<const uint4*>(x + 2 * (token * args.x_stride + at));
        }
      }
    }
  }
};

}  // namespace vllm_cuda
