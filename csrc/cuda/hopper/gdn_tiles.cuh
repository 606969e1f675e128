// SPDX-License-Identifier: Apache-2.0
// 16 x 16 tiles of bf16 between shared memory and the registers of a warp, and their products.
//
// A lane's registers 0 to 3 of a tile hold its quadrants (top left, bottom left, top right, bottom
// right), two neighbouring columns each: row lane / 4, columns 2 (lane % 4) and the next. This is
// both the left operand and, register pair by pair, the result of mma.m16n8k16. Its right operand
// is the transpose of a tile whose quadrants are ordered top left, top right, bottom left, bottom
// right, or a tile in the first order read by `load_transposed`.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "hopper/bf16_pairs.cuh"
#include "ptx.cuh"

namespace vllm_cuda {

struct Tile {
  uint32_t r[4];
};

// The row and the 16-byte half of a row that a lane addresses for a tile.
struct Piece {
  int row, half;
};
__device__ inline Piece left_piece() {
  const int lane = threadIdx.x % 32;
  return {lane % 16, lane / 16};
}
__device__ inline Piece right_piece() {
  const int lane = threadIdx.x % 32;
  return {lane % 8 + lane / 16 * 8, lane / 8 % 2};
}

// fp32 results of a tile: columns 0 to 7, then 8 to 15.
struct Sums {
  float v[2][4];
};

__device__ inline Tile load_tile(uint32_t address) {
  Tile t;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(t.r[0]), "=r"(t.r[1]), "=r"(t.r[2]), "=r"(t.r[3])
               : "r"(address)
               : "memory");
  return t;
}

__device__ inline Tile load_transposed(uint32_t address) {
  Tile t;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(t.r[0]), "=r"(t.r[1]), "=r"(t.r[2]), "=r"(t.r[3])
               : "r"(address)
               : "memory");
  return t;
}

__device__ inline void store_tile(uint32_t address, const Tile& t) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(t.r[0]), "r"(t.r[1]), "r"(t.r[2]), "r"(t.r[3])
               : "memory");
}

__device__ inline void store_transposed(uint32_t address, const Tile& t) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   address),
               "r"(t.r[0]), "r"(t.r[1]), "r"(t.r[2]), "r"(t.r[3])
               : "memory");
}

__device__ inline void multiply_add(float (&d)[4], const Tile& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}

// d += a b, of a right operand whose registers hold both halves of b's rows for columns 0 to 7,
// then for columns 8 to 15.
__device__ inline void add_product(Sums& d, const Tile& a, const Tile& b) {
  multiply_add(d.v[0], a, b.r[0], b.r[1]);
  multiply_add(d.v[1], a, b.r[2], b.r[3]);
}

// fp32 values as the sum of two bf16, which keeps 16 of their 24 bits.
struct Split {
  Tile high, low;
};

__device__ inline void split(float x, float y, uint32_t& high, uint32_t& low) {
  high = pack(x, y);
  low = pack(x - low_half(high), y - high_half(high));
}

__device__ inline Split split(const Sums& s) {
  Split out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    split(s.v[i / 2][i % 2 * 2], s.v[i / 2][i % 2 * 2 + 1], out.high.r[i], out.low.r[i]);
  }
  return out;
}

// Starts a copy of `bytes` and zeros up to 16.
__device__ inline void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace vllm_cuda
