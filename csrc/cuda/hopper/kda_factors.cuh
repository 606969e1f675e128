// SPDX-License-Identifier: Apache-2.0
// The factors of one chunk of 64 tokens and one head of Kimi delta attention; the maths and the
// letters are those of fla/ops/kda/chunk_factors.py.
//
// Of a row of the 4 x 4 tiles one warp computes those of k k^T, another those of q k^T; the inverse
// is that of the gated delta rule.
#pragma once

#include "hopper/kda_factors_operands.cuh"

namespace vllm_cuda {

namespace kda_factors {

// left rows @ right^T, of keys or of queries.
__device__ inline Sums multiply(const Shared& s, const char* right, const Role& role) {
  const Piece left = left_piece(), of_right = right_piece();
  const uint32_t left_at = left.row * 256 + ((left.half ^ (left.row & 7)) << 4);
  const uint32_t right_at = of_right.row * 256 + ((of_right.half ^ (of_right.row & 7)) << 4);
  const char* of_role = role.half == 0 ? s.base.in.k : s.base.in.q;
  const uint32_t rows = shared_address(of_role) + role.sixteen * SIXTEEN_BYTES;
  const uint32_t columns = shared_address(right);
  Sums sums{};
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    add_product(sums, load_tile(rows + (left_at ^ step * 32)),
                load_tile(columns + (right_at ^ step * 32)));
  }
  return sums;
}

// The products within sixteen tokens pair by pair, for decays too strong for any reference: each
// warp adds up half of the channels.
__device__ inline Sums multiply_pairs(const Tokens& tokens, const Role& role, Shared& s) {
  constexpr int PAIRS = SIXTEEN * SIXTEEN;
  float* const found = reinterpret_cast<float*>(s.own[role.sixteen]);
#pragma unroll 1
  for (int j = 0; j < SIXTEEN; ++j) {
    float sums[32];
    Two key{};  // of token j as token i sees it
#pragma unroll
    for (int i = 0; i < SIXTEEN; ++i) {
      const Two own = tokens.key(i);
      if (i > 0) key = key * exp2_of(tokens.G[i] - tokens.G[i - 1]);
      if (i == j) key = own;
      sums[i] = (key * own).sum();
      sums[SIXTEEN + i] = (key * tokens.query(i)).sum();
    }
    found[role.half * 2 * PAIRS + role.lane * SIXTEEN + j] = sum_to_lanes<SIXTEEN>(sums);
  }
  pair_sync();
  const chunk_factors::Fragment f;
  Sums sums;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int pair = (f.row + e % 4 / 2 * 8) * SIXTEEN + f.column + 8 * (e / 4) + e % 2;
    const int at = role.half * PAIRS + pair;
    sums.v[e / 4][e % 4] = found[at] + found[2 * PAIRS + at];
  }
  return sums;
}

// This warp's row of tiles.
__device__ inline void multiply_all(const KdaFactorsArgs& args, const Work& work, const Role& role,
                                    Shared& s, Sums (&tiles)[SIXTEENS]) {
  Sums own{};
  bool strong;
  publish_beta(args, work, s);
  {
    Tokens tokens;
    tokens.load(args, work, role, s);
    store_two(&s.totals[role.sixteen][role.channel()], tokens.G[SIXTEEN - 1]);
    strong = tokens.strong(role);
    if (!strong) {
      make_own_operands(tokens, role, s);
      pair_sync();
      own = multiply(s, s.own[role.sixteen], role);
    }
    __syncthreads();
    make_operands(args, work, tokens, role, s);
  }
  if (strong) {
    // Loaded again: in registers they would be in the way of everything before.
    Tokens tokens;
    tokens.load(args, work, role, s);
    pair_sync();
    own = multiply_pairs(tokens, role, s);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < SIXTEENS; ++j) {
    if (j < role.sixteen) {
      tiles[j] = multiply(s, s.earlier[chunk_factors::below_index(role.sixteen, j)], role);
    } else if (j == role.sixteen) {
      tiles[j] = own;
    }
  }
}

// A row of tiles of P, all the way.
__device__ inline void keep_queries(const KdaFactorsArgs& args, const Work& work, const Role& role,
                                    Sums (&tiles)[SIXTEENS], Shared& s) {
  const chunk_factors::Fragment f;
  auto& out = s.base.res.out[0];
#pragma unroll
  for (int j = 0; j < SIXTEENS; ++j) {
    if (j > role.sixteen) continue;
    if (j == role.sixteen) chunk_factors::clear_above_diagonal(tiles[j], f);
    const char* tile = out[chunk_factors::lower_index(role.sixteen, j)];
    store_tile(chunk_factors::tile_address(tile, left_piece()), chunk_factors::rounded(tiles[j]));
  }
  __syncwarp();
  auto* P = static_cast<__nv_bfloat16*>(args.P) + work.place * CHUNK * CHUNK;
  chunk_factors::write_stripe(out, role.sixteen, P);
}

// A row of tiles of -A into shared memory.
__device__ inline void keep_keys(const Role& role, Sums (&tiles)[SIXTEENS], Shared& s) {
  const chunk_factors::Fragment f;
  auto& res = s.base.res;
#pragma unroll
  for (int j = 0; j < SIXTEENS; ++j) {
    if (j > role.sixteen) continue;
    const chunk_factors::Columns beta(s.base.beta[0], j, f);
#pragma unroll
    for (int e = 0; e < 8; ++e) tiles[j].v[e / 4][e % 4] *= -beta.v[e / 4][e % 2];
    if (j == role.sixteen) {
      chunk_factors::store_diagonal(res.diagonal[0][role.sixteen], tiles[j], 0, f);
    } else {
      const Split parts = split(tiles[j]);
      const char* below = res.below[0][chunk_factors::below_index(role.sixteen, j)];
      const uint32_t to = chunk_factors::split_address(below, left_piece());
      store_tile(to, parts.high);
      store_tile(to ^ chunk_factors::LOW, parts.low);
    }
  }
}

__global__ void __launch_bounds__(THREADS, 2) kernel(const KdaFactorsArgs args) {
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Role role;
  const Work work = find_work(args);
  {
    Sums tiles[SIXTEENS];
    multiply_all(args, work, role, s, tiles);
    __syncthreads();
    if (role.half == 0) {
      keep_keys(role, tiles, s);
    } else {
      keep_queries(args, work, role, tiles, s);
    }
  }
  // The keys' warps make the inverse.
  float x[16];
  auto& res = s.base.res;
  char* diagonal = res.diagonal[0][role.sixteen];
  if (role.half == 0) {
    __syncwarp();
    chunk_factors::substitute(diagonal, 0, x);
    __syncwarp();
    chunk_factors::store_split_row(diagonal, x);
  }
  __syncthreads();
  if (role.half == 0) {
    const int tile = chunk_factors::lower_index(role.sixteen, role.sixteen);
    chunk_factors::store_scaled_column(res.out[0][tile], x, s.base.beta[0] + 16 * role.sixteen);
    chunk_factors::join(s.base, 0, role.sixteen);
  }
  __syncthreads();
  if (role.half == 1) return;
  auto* T = static_cast<__nv_bfloat16*>(args.T) + work.place * CHUNK * CHUNK;
  chunk_factors::write_stripe(res.out[0], role.sixteen, T);
}

}  // namespace kda_factors

}  // namespace vllm_cuda
