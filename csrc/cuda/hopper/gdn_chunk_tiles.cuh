// SPDX-License-Identifier: Apache-2.0
// A chunk's 64 x 64 matrices as 4 x 4 tiles: places in shared memory, and values per token.
#pragma once

#include "hopper/gdn_chunk_inputs.cuh"

namespace vllm_cuda {

namespace chunk_factors {

// A lane's place in a product's tile: rows `row` and `row + 8`, columns `column`, the next, and
// those 8 further.
struct Fragment {
  int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
};

// A lane's four values of a tile's columns or two of its rows, of one value per token.
struct Columns {
  float v[2][2];
  __device__ Columns(const float* values, int tile, const Fragment& f) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float2 two =
          *reinterpret_cast<const float2*>(values + 16 * tile + f.column + 8 * side);
      v[side][0] = two.x;
      v[side][1] = two.y;
    }
  }
};
struct Rows {
  float v[2];
};
__device__ inline Rows rows_of(const float* values, int tile, const Fragment& f) {
  return {{values[16 * tile + f.row], values[16 * tile + f.row + 8]}};
}

__device__ inline void scale_columns(Sums& x, const Columns& columns) {
#pragma unroll
  for (int e = 0; e < 8; ++e) x.v[e / 4][e % 4] *= columns.v[e / 4][e % 2];
}

__device__ inline Tile rounded(const Sums& x) {
  return {pack(x.v[0][0], x.v[0][1]), pack(x.v[0][2], x.v[0][3]), pack(x.v[1][0], x.v[1][1]),
          pack(x.v[1][2], x.v[1][3])};
}

// Addresses in tiles of split and of plain values.
__device__ inline uint32_t split_address(const char* tile, const Piece& piece) {
  return shared_address(tile) + piece.row * 64 + ((piece.half ^ (piece.row >> 1 & 3)) << 4);
}
__device__ inline uint32_t tile_address(const char* tile, const Piece& piece) {
  return shared_address(tile) + piece.row * 32 + ((piece.half ^ (piece.row >> 2 & 1)) << 4);
}
constexpr int LOW = 32;  // between the pieces of the high and the low halves: addresses XOR this

__device__ inline int below_index(int i, int j) { return i * (i - 1) / 2 + j; }
__device__ inline int lower_index(int i, int j) { return i * (i + 1) / 2 + j; }

// Sixteen rows of a lower triangular 64 x 64 from tiles to memory; zeros above the tiles.
__device__ inline void write_stripe(const char (*tiles)[TILE_BYTES], int stripe, void* matrix) {
  const int lane = threadIdx.x % 32, column = lane / 8, unit = lane % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 2 % 4 + 4 * i;
    uint4 piece = {};
    if (column <= stripe) {
      const char* tile = tiles[lower_index(stripe, column)];
      piece = *reinterpret_cast<const uint4*>(tile + row * 32 + ((unit ^ (row >> 2 & 1)) << 4));
    }
    static_cast<uint4*>(matrix)[(16 * stripe + row) * 8 + 2 * column + unit] = piece;
  }
}

__device__ inline void* matrix_of(void* base, const Work& work, int h) {
  return static_cast<__nv_bfloat16*>(base) + (work.place + h) * CHUNK * CHUNK;
}

}  // namespace chunk_factors

}  // namespace vllm_cuda
