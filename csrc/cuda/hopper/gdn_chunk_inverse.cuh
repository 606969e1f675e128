// SPDX-License-Identifier: Apache-2.0
// X = (I + A)^-1 of a chunk: the tiles on its diagonal by substitution in fp32, a lane per column
// and a half-warp per value head; the tiles below, a column of tiles per warp, from
// `X_ij = -X_ii sum_m A_im X_mj`. That is done on X^T, whose finished tiles are the left operands
// of the next products without leaving registers. Factors are split into two bf16 (three
// products), which keeps 16 bits of each for a result that is rounded to 8.
#pragma once

#include "hopper/gdn_chunk_tiles.cuh"

namespace vllm_cuda {

namespace chunk_factors {

// Column `lane % 16` of the inverse of a tile on the diagonal, of value head `lane / 16`.
__device__ inline void substitute(const char* tile, int h, float (&x)[16]) {
  const int column = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = i == column ? 1.f : 0.f;
#pragma unroll
    for (int unit = 0; unit < (i + 3) / 4; ++unit) {
      // Both value heads' tiles begin in the same bank: they are read from different units.
      const float4 row = *reinterpret_cast<const float4*>(tile + i * 64 + (unit ^ h) * 16);
      const float of_row[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (4 * unit + j < i) x[i] = fmaf(of_row[j], x[4 * unit + j], x[i]);
      }
    }
  }
}

// A column of the inverse as a row of X^T, split.
__device__ inline void store_split_row(char* tile, const float (&x)[16]) {
  const int row = threadIdx.x % 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 high, low;
    split(x[8 * half], x[8 * half + 1], high.x, low.x);
    split(x[8 * half + 2], x[8 * half + 3], high.y, low.y);
    split(x[8 * half + 4], x[8 * half + 5], high.z, low.z);
    split(x[8 * half + 6], x[8 * half + 7], high.w, low.w);
    char* piece = tile + row * 64;
    const int swizzle = row >> 1 & 3;
    *reinterpret_cast<uint4*>(piece + ((half ^ swizzle) << 4)) = high;
    *reinterpret_cast<uint4*>(piece + ((half ^ 2 ^ swizzle) << 4)) = low;
  }
}

// A column of a tile on T's diagonal.
__device__ inline void store_scaled_column(char* tile, const float (&x)[16], const float* beta) {
  const int column = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int unit = column / 8 ^ (i >> 2 & 1);
    *reinterpret_cast<__nv_bfloat16*>(tile + i * 32 + unit * 16 + column % 8 * 2) =
        __float2bfloat16_rn(beta[i] * x[i]);
  }
}

__device__ inline void add_split_product(Sums& d, const Split& a, const Split& b) {
  add_product(d, a.high, b.low);
  add_product(d, a.low, b.high);
  add_product(d, a.high, b.high);
}

// Column j of X's tiles, below the diagonal, as row j of X^T; beta X^T goes to T's tiles. A tile is
// multiplied into all sums that it is part of at once: they do not wait for one another.
template <int HEADS>
__device__ inline void join(Results<HEADS>& res, const float* beta, int h, int j) {
  const Fragment f;
  const Piece left = left_piece(), right = right_piece();
  const uint32_t diagonal = split_address(res.diagonal[h][j], left);
  Split x = {load_tile(diagonal), load_tile(diagonal ^ LOW)};
  Sums y[3] = {};
#pragma unroll
  for (int above = 0; above < 3; ++above) {
    const int i = j + above + 1;
    if (i > 3) break;
#pragma unroll
    for (int row = above; row < 3; ++row) {
      if (j + row + 1 > 3) break;
      const char* tile = res.below[h][below_index(j + row + 1, j + above)];
      const uint32_t from = split_address(tile, right);
      add_split_product(y[row], x, {load_tile(from), load_tile(from ^ LOW)});
    }
    Sums of_x = {};
    const uint32_t from = split_address(res.diagonal[h][i], left);
    add_split_product(of_x, split(y[above]), {load_transposed(from), load_transposed(from ^ LOW)});
    if (above < 2) x = split(of_x);
    scale_columns(of_x, Columns(beta, i, f));
    // The quadrants of X^T change places as they are transposed.
    store_transposed(tile_address(res.out[h][lower_index(i, j)], right), rounded(of_x));
  }
}

}  // namespace chunk_factors

}  // namespace vllm_cuda
