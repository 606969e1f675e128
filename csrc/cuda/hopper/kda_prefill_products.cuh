// SPDX-License-Identifier: Apache-2.0
// Products of a chunk's queries and keys in Kimi delta attention, 16 x 16 tiles by a warp, and what
// multiplies values in the output.
#pragma once

#include "hopper/gdn_chunk_products.cuh"
#include "hopper/kda_prefill_operands.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// Addresses of a piece of a 16 x 16 tile in 16 rows, and of the one 16 `step` channels further on.
__device__ inline uint32_t piece_address(const char* rows, const Piece& piece) {
  return shared_address(rows) + piece.row * ROW_BYTES + ((piece.half ^ piece.row % 8) << 4);
}
__device__ inline uint32_t step_address(uint32_t piece, int step) { return piece ^ step * 32; }

// The squares of rows lane / 4 and + 8 of 16, over both halves; `rows`: of the first. The tensor
// cores, which the scan keeps busy, would let a warp wait for longer than this takes.
__device__ inline Two squares_of(const char* rows) {
  const uint32_t from = piece_address(rows, left_piece());
  Two sums[2]{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t half = i / 4 * static_cast<uint32_t>(sizeof(Half));
    const Tile x = load_tile(step_address(from, i % 4) + half);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const Two above = widen(x.r[2 * side]), below = widen(x.r[2 * side + 1]);
      sums[side].x = fmaf(above.x, above.x, sums[side].x);
      sums[side].y = fmaf(below.x, below.x, sums[side].y);
      sums[side].x = fmaf(above.y, above.y, sums[side].x);
      sums[side].y = fmaf(below.y, below.y, sums[side].y);
    }
  }
  Two sum = sums[0] + sums[1];
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    sum = sum + Two{__shfl_xor_sync(~0u, sum.x, distance), __shfl_xor_sync(~0u, sum.y, distance)};
  }
  return sum;
}

__device__ inline float inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The scales of the output of 16 tokens from `token` on.
__device__ inline void publish_queries(int token, float scale, const Factors& of,
                                       Scales& scales) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const Two x = squares_of(of.halves[0].queries + token * ROW_BYTES);
  if (lane % 4 > 0) return;
  scales.q_scale[token + row] = scale * inverse_root(x.x + 1e-6f);
  scales.q_scale[token + row + 8] = scale * inverse_root(x.y + 1e-6f);
}

// Products of queries or keys with keys: tiles on the diagonal and below.
struct Products {
  Sums first{}, below{}, second{};

  // `rows`: queries or keys of half the channels.
  __device__ void add(const char* rows, const Half& half) {
    const uint32_t left = piece_address(rows, left_piece());
    const uint32_t right = piece_address(half.grown, right_piece());
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t of_left = step_address(left, step), of_right = step_address(right, step);
      const Tile keys = load_tile(of_right), later = load_tile(of_left + PART_BYTES);
      add_product(first, load_tile(of_left), keys);
      add_product(below, later, keys);
      add_product(second, later, load_tile(of_right + PART_BYTES));
    }
  }
  static __device__ void add_pairs(Sums& x, const float* found, int i, int j) {
    const chunk_factors::Fragment f;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      x.v[e / 4][e % 4] += found[(i + f.row + e % 4 / 2 * 8) * CHUNK + j + f.column +
                                 8 * (e / 4) + e % 2];
    }
  }
  __device__ void add_pairs(const float* found) {
    add_pairs(first, found, 0, 0);
    add_pairs(below, found, PART, 0);
    add_pairs(second, found, PART, PART);
  }
};

// Clears a tile, from column `unit` * 8 on.
__device__ inline void clear_tile(char* rows, int unit) {
  const int lane = threadIdx.x % 32, row = lane / 2;
  *reinterpret_cast<uint4*>(rows + row * ROW_BYTES + ((unit + lane % 2 ^ row % 8) << 4)) = uint4{};
}

// Clears what `keep_queries` does not write.
__device__ inline void clear_products(Factors& made) { clear_tile(made.products, 2); }

// What multiplies the values' results in the output.
__device__ inline void keep_queries(Products& products, Factors& made) {
  using namespace chunk_factors;
  const Fragment f;
  clear_above_diagonal(products.first, f);
  clear_above_diagonal(products.second, f);
  const uint32_t to = piece_address(made.products, left_piece());
  store_tile(to, rounded(products.first));
  store_tile(to + PART_BYTES, rounded(products.below));
  store_tile(step_address(to, 1) + PART_BYTES, rounded(products.second));
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
