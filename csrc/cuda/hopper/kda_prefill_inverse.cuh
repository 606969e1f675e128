// SPDX-License-Identifier: Apache-2.0
// (I + D M)^-1 D of a chunk in Kimi delta attention, by a warp: blocks of 8 x 8 on its diagonal by
// substitution in fp32, a lane per column, and what is below them by products.
#pragma once

#include "hopper/kda_prefill_products.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// Tiles on the diagonal have half the units of their rows of `inverse`, the last four.
constexpr int LAST_UNITS = 64;  // addresses XOR this

// A tile's blocks on the diagonal, in fp32.
__device__ inline void place_blocks(Blocks& blocks, const Sums& x, int tile,
                                    const chunk_factors::Fragment& f) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    *reinterpret_cast<float2*>(&blocks[2 * tile + i][f.row][f.column]) = {x.v[i][2 * i],
                                                                          x.v[i][2 * i + 1]};
  }
}

// Column lane % 8 of the inverse of I less block lane / 8.
__device__ inline void substitute(const Blocks& blocks, float (&x)[BLOCK]) {
  const int lane = own_lane(), column = lane % BLOCK;
  const auto& block = blocks[lane / BLOCK];
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    x[i] = i == column ? 1.f : 0.f;
#pragma unroll
    for (int unit = 0; unit < (i + 3) / 4; ++unit) {
      const float4 row = *reinterpret_cast<const float4*>(&block[i][4 * unit]);
      const float of_row[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (4 * unit + j < i) x[i] = fmaf(of_row[j], x[4 * unit + j], x[i]);
      }
    }
  }
}

// Clears what `keep_inverse` does not write.
__device__ inline void clear_inverse(Factors& made) {
  clear_tile(made.inverse + PART_BYTES, 0);
  // Left of the second blocks of tiles, with and without D.
  const int lane = own_lane(), row = lane % BLOCK, tile = lane / PART;
  const int unit = lane / BLOCK % 2 ? 4 : 2 * tile;
  char* const rows = made.inverse + tile * PART_BYTES + (BLOCK + row) * ROW_BYTES;
  *reinterpret_cast<uint4*>(rows + ((unit ^ row) << 4)) = uint4{};
}

// Clears what no chunk writes: a team's warp of part 0 that of the products, the other that of the
// inverse.
__device__ inline void clear_zeros(Factors& made, int part) {
  if (part) {
    clear_inverse(made);
  } else {
    clear_products(made);
  }
}

// A column of a block's inverse as a row of its transpose, in unit `unit` or the next of its tile.
__device__ inline void place_row(char* inverse, int unit, const float (&x)[BLOCK]) {
  const int lane = own_lane(), row = lane % BLOCK, second = lane / BLOCK % 2;
  char* const rows = inverse + lane * ROW_BYTES;
  *reinterpret_cast<uint4*>(rows + ((unit + second ^ row) << 4)) = {
      pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
}

// d = a b for rows 0 to 7 of a left operand and 8 of its columns.
__device__ inline float2 multiply_blocks(uint32_t a, uint32_t b) {
  float2 d;
  asm("{\n.reg .f32 e;\n"
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"
      " {%0, %1, e, e}, {%2, %3}, {%4}, {%5, %5, %5, %5};\n}"
      : "=f"(d.x), "=f"(d.y)
      : "r"(a), "r"(0), "r"(b), "f"(0.f));
  return d;
}

// The blocks below the diagonal of both tiles of (I - B)^-1, transposed, of those on it, which
// `inverse` has, and those below that of B, in bf16.
struct BlocksBelow {
  float2 of[2];
  __device__ BlocksBelow(const char* inverse, const uint32_t (&of_b)[2]) {
    // Lanes 0 to 15 say where the rows of both tiles' blocks are.
    const int lane = own_lane(), row = lane % BLOCK;
    const uint32_t rows = shared_address(inverse) + lane / BLOCK % 2 * PART_BYTES + row * ROW_BYTES;
    const uint32_t above = rows + ((4 ^ row) << 4);
    const uint32_t below = rows + BLOCK * ROW_BYTES + ((5 ^ row) << 4);
    uint32_t first[2], second[2];
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(first[0]), "=r"(first[1])
                 : "r"(above)
                 : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(second[0]), "=r"(second[1])
                 : "r"(below)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 between = multiply_blocks(first[i], of_b[i]);
      of[i] = multiply_blocks(pack(between.x, between.y), second[i]);
    }
  }
  // Into unit `unit` of both tiles' first rows.
  __device__ static void place(char* tile, int unit, const float2& x) {
    const int lane = own_lane(), row = lane / 4;
    *reinterpret_cast<uint32_t*>(tile + row * ROW_BYTES + ((unit ^ row) << 4) + lane % 4 * 4) =
        pack(x.x, x.y);
  }
};

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
__device__ inline void keep_inverse(Products& products, const Scales& scales, Blocks& blocks,
                                    Factors& made) {
  using namespace chunk_factors;
  const Fragment f;
  const Columns of_first(scales.strength, 0, f), of_second(scales.strength, 1, f);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    products.first.v[e / 4][e % 4] *= -of_first.v[e / 4][e % 2];
    products.below.v[e / 4][e % 4] *= -of_first.v[e / 4][e % 2];
    products.second.v[e / 4][e % 4] *= -of_second.v[e / 4][e % 2];
  }
  place_blocks(blocks, products.first, 0, f);
  place_blocks(blocks, products.second, 1, f);
  const uint32_t of_b[2] = {pack(products.first.v[0][2], products.first.v[0][3]),
                            pack(products.second.v[0][2], products.second.v[0][3])};
  __syncwarp();
  float x[BLOCK];
  substitute(blocks, x);
  place_row(made.inverse, 4, x);
  const int lane = own_lane();
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) {
    const float4 of =
        *reinterpret_cast<const float4*>(scales.strength + lane / BLOCK * BLOCK + i);
    x[i] *= of.x, x[i + 1] *= of.y, x[i + 2] *= of.z, x[i + 3] *= of.w;
  }
  place_row(made.inverse, 2 * (lane / PART), x);
  __syncwarp();
  const BlocksBelow in_tiles(made.inverse, of_b);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    char* const tile = made.inverse + i * PART_BYTES;
    const float2 x = in_tiles.of[i];
    const auto& by = (i ? of_second : of_first).v[1];
    BlocksBelow::place(tile, 5, x);
    BlocksBelow::place(tile, 2 * i + 1, {x.x * by[0], x.y * by[1]});
  }
  __syncwarp();
  Sums below = inverse_below(products.below, made.inverse);
  scale_columns(below, of_second);
  store_tile(step_address(piece_address(made.inverse, left_piece()), 1), rounded(below));
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
