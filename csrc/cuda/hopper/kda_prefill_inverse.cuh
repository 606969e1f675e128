// SPDX-License-Identifier: Apache-2.0
// (I + D M)^-1 D of a chunk in Kimi delta attention, by a warp: the tiles on its diagonal by
// substitution in fp32, a lane per column, and the one below them by products.
#pragma once

#include "hopper/kda_prefill_products.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// Tiles on the diagonal have half the units of their rows of `inverse`, the last four.
constexpr int LAST_UNITS = 64;  // addresses XOR this

// A tile in fp32. Both tiles begin in the same bank: their units lie the other way round.
__device__ inline void place_diagonal(char* tile, const Sums& x, int index,
                                      const chunk_factors::Fragment& f) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int row = f.row + e % 2 * 8, unit = 4 + (e / 2 * 2 + f.column / 4 ^ index);
    *reinterpret_cast<float2*>(tile + row * ROW_BYTES + ((unit ^ row % 8) << 4) +
                               f.column % 4 * 4) = {x.v[e / 2][e % 2 * 2],
                                                    x.v[e / 2][e % 2 * 2 + 1]};
  }
}

// Column lane % 16 of the inverse of I less tile lane / 16.
__device__ inline void substitute(const char* tile, float (&x)[PART]) {
  const int lane = own_lane(), index = lane / PART, column = lane % PART;
  const char* const units[2] = {tile + 16 * index, tile - 16 * index};
#pragma unroll
  for (int i = 0; i < PART; ++i) {
    x[i] = i == column ? 1.f : 0.f;
#pragma unroll
    for (int unit = 0; unit < (i + 3) / 4; ++unit) {
      const int at = i * ROW_BYTES + ((4 + unit ^ i % 8) << 4);
      const float4 row = *reinterpret_cast<const float4*>(units[at / 16 % 2] + at);
      const float of_row[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (4 * unit + j < i) x[i] = fmaf(of_row[j], x[4 * unit + j], x[i]);
      }
    }
  }
}

// A column of an inverse as a row of its transpose, from unit `unit` on.
__device__ inline void place_row(char* tile, int unit, const float (&x)[PART]) {
  const int row = own_lane() % PART;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const from = x + 8 * half;
    *reinterpret_cast<uint4*>(tile + row * ROW_BYTES + ((unit + half ^ row % 8) << 4)) = {
        pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]),
        pack(from[6], from[7])};
  }
}

// The tile below the diagonal of (I - B)^-1, transposed, of those on it that `inverse` has, and the
// one below the diagonal of B.
__device__ inline Sums inverse_below(const Sums& of_b, const char* inverse) {
  using namespace chunk_factors;
  const uint32_t first = piece_address(inverse, left_piece()) ^ LAST_UNITS;
  // Results are right operands once their second and third quadrants change places.
  Tile b = rounded(of_b);
  const uint32_t kept = b.r[1];
  b.r[1] = b.r[2];
  b.r[2] = kept;
  Sums between{}, below{};
  add_product(between, load_tile(first), b);
  add_product(below, rounded(between), load_transposed(first + PART_BYTES));
  return below;
}

// What the keys' products say of their lengths, and the strengths of updates; `beta` is that of
// token lane. As seen from where it is, a key is as long as it is.
__device__ inline void publish_keys(const Products& products, float beta, Scales& scales) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const bool odd = row % 2;
  const auto publish = [&](int token, float square) {
    const float inverse = inverse_root(square + 1e-6f), own = __shfl_sync(~0u, beta, token);
    if (row / 2 != lane % 4) return;
    scales.k_norm[token] = (square + 1e-6f) * inverse;
    scales.strength[token] = own * inverse * inverse;
  };
  publish(row, odd ? products.first.v[0][1] : products.first.v[0][0]);
  publish(row + 8, odd ? products.first.v[1][3] : products.first.v[1][2]);
  publish(row + 16, odd ? products.second.v[0][1] : products.second.v[0][0]);
  publish(row + 24, odd ? products.second.v[1][3] : products.second.v[1][2]);
  __syncwarp();
}

// (I + D M)^-1 D, transposed.
__device__ inline void keep_inverse(Products& products, const Scales& scales, Factors& made) {
  using namespace chunk_factors;
  const Fragment f;
  const int tile = own_lane() / PART;
  const Columns of_first(scales.strength, 0, f), of_second(scales.strength, 1, f);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    products.first.v[e / 4][e % 4] *= -of_first.v[e / 4][e % 2];
    products.below.v[e / 4][e % 4] *= -of_first.v[e / 4][e % 2];
    products.second.v[e / 4][e % 4] *= -of_second.v[e / 4][e % 2];
  }
  char* const own_tile = made.inverse + tile * PART_BYTES;
  place_diagonal(made.inverse, products.first, 0, f);
  place_diagonal(made.inverse + PART_BYTES, products.second, 1, f);
  __syncwarp();
  float x[PART];
  substitute(own_tile, x);
  __syncwarp();
  place_row(own_tile, 4, x);
#pragma unroll
  for (int i = 0; i < PART; i += 4) {
    const float4 of = *reinterpret_cast<const float4*>(scales.strength + PART * tile + i);
    x[i] *= of.x, x[i + 1] *= of.y, x[i + 2] *= of.z, x[i + 3] *= of.w;
  }
  place_row(own_tile, 2 * tile, x);
  clear_tile(made.inverse + PART_BYTES, 0);
  __syncwarp();
  Sums below = inverse_below(products.below, made.inverse);
  scale_columns(below, of_second);
  store_tile(step_address(piece_address(made.inverse, left_piece()), 1), rounded(below));
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
