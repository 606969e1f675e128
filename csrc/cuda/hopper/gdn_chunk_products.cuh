// SPDX-License-Identifier: Apache-2.0
// The products of a chunk's keys and queries, their norms, decay, and with it P and -A.
#pragma once

#include "hopper/gdn_chunk_tiles.cuh"

namespace vllm_cuda {

namespace chunk_factors {

// This warp's tiles: `tiles[b]` is tile (w, b) of k k^T for b <= w, else (3 - w, b - w - 1) of
// q k^T. `qq` is the tile on the diagonal of q q^T.
struct Products {
  Sums tiles[5], qq;
};

// Which column of tiles `tiles[b]` is in, and so which keys are its right operand.
__device__ constexpr int key_column(int warp, int b) { return b <= warp ? b : b - warp - 1; }

template <int WARP, int HEADS>
__device__ inline void multiply(const Shared<HEADS>& s, Products& p) {
  constexpr int COLUMNS = (WARP < 2 ? 3 - WARP : WARP) + 1;
  const Piece left = left_piece(), right = right_piece();
  // A row's swizzle is the same in every tile, and steps are multiples of two units.
  const uint32_t of_left = left.row * 256 + ((left.half ^ (left.row & 7)) << 4);
  const uint32_t of_right = right.row * 256 + ((right.half ^ (right.row & 7)) << 4);
  const uint32_t k = shared_address(s.in.k), q = shared_address(s.in.q) + (3 - WARP) * 4096;
  p = {};
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    const uint32_t k_right = k + (of_right ^ step * 32);
    const Tile of_k = load_tile(k + (of_left ^ step * 32) + WARP * 4096);
    const Tile of_q = load_tile(q + (of_left ^ step * 32));
    Tile columns[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) columns[j] = load_tile(k_right + j * 4096);
#pragma unroll
    for (int b = 0; b < 5; ++b) {
      add_product(p.tiles[b], b <= WARP ? of_k : of_q, columns[key_column(WARP, b)]);
    }
    add_product(p.qq, of_q, load_tile(q + (of_right ^ step * 32)));
  }
}

// The lane's two values on the diagonal; only lanes with `on_diagonal` have any.
__device__ inline bool on_diagonal(const Fragment& f) { return f.row / 2 == f.column / 2; }
__device__ inline float2 diagonal_of(const Sums& x, const Fragment& f) {
  return f.row & 1 ? float2{x.v[0][1], x.v[1][3]} : float2{x.v[0][0], x.v[1][2]};
}

template <int WARP, int HEADS>
__device__ inline void scales(const ChunkFactorsArgs& args, const Work& work, const Products& p,
                              Shared<HEADS>& s) {
  const Fragment f;
  if (!on_diagonal(f)) return;
  const float2 kk = diagonal_of(p.tiles[WARP], f), qq = diagonal_of(p.qq, f);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 16 * WARP + f.row + 8 * i, u = 16 * (3 - WARP) + f.row + 8 * i;
    const float of_k = args.l2norm ? rsqrtf((i ? kk.y : kk.x) + 1e-6f) : 1.f;
    const float of_q = args.l2norm ? rsqrtf((i ? qq.y : qq.x) + 1e-6f) : 1.f;
    s.k_scale[t] = t < work.length ? of_k : 0.f;
    s.q_scale[u] = u < work.length ? of_q * args.scale : 0.f;
  }
}

// The warp is a constant here so that operands are chosen by the compiler.
template <int HEADS>
__device__ inline void multiply_by(int warp, const ChunkFactorsArgs& args, const Work& work,
                                   Products& p, Shared<HEADS>& s) {
  switch (warp) {
    case 0:
      multiply<0>(s, p);
      return scales<0>(args, work, p, s);
    case 1:
      multiply<1>(s, p);
      return scales<1>(args, work, p, s);
    case 2:
      multiply<2>(s, p);
      return scales<2>(args, work, p, s);
    default:
      multiply<3>(s, p);
      return scales<3>(args, work, p, s);
  }
}

// Products of normalised vectors; those of keys negated.
template <int HEADS>
__device__ inline void normalise(const Shared<HEADS>& s, int warp, Products& p) {
  const Fragment f;
  const Rows of_k = rows_of(s.k_scale, warp, f), of_q = rows_of(s.q_scale, 3 - warp, f);
#pragma unroll
  for (int b = 0; b < 5; ++b) {
    const Columns columns(s.k_scale, key_column(warp, b), f);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float row = b <= warp ? -of_k.v[i % 4 / 2] : of_q.v[i % 4 / 2];
      p.tiles[b].v[i / 4][i % 4] *= row * columns.v[i / 4][i % 2];
    }
  }
}

template <int HEADS>
__device__ inline void write_rows(const ChunkFactorsArgs& args, const Work& work,
                                  const Shared<HEADS>& s) {
  const int h = threadIdx.x / CHUNK, t = threadIdx.x % CHUNK;
  if (h >= HEADS) return;
  const float G = s.G[h][t], decay = exp2_fast(G), k_scale = s.k_scale[t];
  float* rows = args.rows + (work.place + h) * 4 * CHUNK + t;
  rows[0] = k_scale * decay;
  rows[CHUNK] = s.q_scale[t] * decay;
  rows[2 * CHUNK] = k_scale * exp2_fast(s.G[h][CHUNK - 1] - G);
  rows[3 * CHUNK] = decay;
}

// Products times exp2(Gi - Gj).
__device__ inline Sums decayed(const Sums& x, const Rows& rows, const Columns& columns) {
  Sums y;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float decay = exp2_fast(rows.v[e % 4 / 2] - columns.v[e / 4][e % 2]);
    y.v[e / 4][e % 4] = x.v[e / 4][e % 4] * decay;
  }
  return y;
}

// A tile on the diagonal of -A in fp32, with places permuted by value head (see `substitute`).
__device__ inline void store_diagonal(char* tile, const Sums& x, int h, const Fragment& f) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int row = f.row + e % 2 * 8, unit = (e / 2 * 2 + f.column / 4) ^ h;
    *reinterpret_cast<float2*>(tile + row * 64 + unit * 16 + f.column % 4 * 4) = {
        x.v[e / 2][e % 2 * 2], x.v[e / 2][e % 2 * 2 + 1]};
  }
}

__device__ inline void clear_above_diagonal(Sums& x, const Fragment& f) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int i = f.row + e % 4 / 2 * 8, j = f.column + 8 * (e / 4) + e % 2;
    if (i < j) x.v[e / 4][e % 4] = 0.f;
  }
}

// This warp's tiles of -A for value head h into shared memory, and of P all the way.
template <int HEADS>
__device__ inline void apply_decay(const ChunkFactorsArgs& args, const Work& work, int warp,
                                   const Products& p, int h, Shared<HEADS>& s) {
  const Fragment f;
  const int last = 3 - warp;
  const Rows of_k = rows_of(s.G[h], warp, f), of_q = rows_of(s.G[h], last, f);
#pragma unroll
  for (int b = 0; b < 5; ++b) {
    const int column = key_column(warp, b);
    const Rows rows = {{b <= warp ? of_k.v[0] : of_q.v[0], b <= warp ? of_k.v[1] : of_q.v[1]}};
    Sums x = decayed(p.tiles[b], rows, Columns(s.G[h], column, f));
    if (b > warp) {
      if (b == 4) clear_above_diagonal(x, f);
      store_tile(tile_address(s.res.out[h][lower_index(last, column)], left_piece()), rounded(x));
      continue;
    }
    scale_columns(x, Columns(s.beta[h], column, f));
    if (b == warp) {
      store_diagonal(s.res.diagonal[h][warp], x, h, f);
    } else {
      const Split parts = split(x);
      const uint32_t to = split_address(s.res.below[h][below_index(warp, b)], left_piece());
      store_tile(to, parts.high);
      store_tile(to ^ LOW, parts.low);
    }
  }
  __syncwarp();
  write_stripe(s.res.out[h], last, matrix_of(args.P, work, h));
}

}  // namespace chunk_factors

}  // namespace vllm_cuda
