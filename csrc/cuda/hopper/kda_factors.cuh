// SPDX-License-Identifier: Apache-2.0
// The factors of one chunk of 64 tokens and one head of Kimi delta attention; the maths and the
// letters are those of fla/ops/kda/chunk_factors.py.
//
// Warp w computes row w of the 4 x 4 tiles of k k^T and of q k^T; the inverse is that of the gated
// delta rule.
#pragma once

#include "hopper/kda_factors_operands.cuh"

namespace vllm_cuda {

namespace kda_factors {

// This warp's tiles of the products of keys and of queries with keys.
struct Products {
  Sums k[SIXTEENS], q[SIXTEENS];
};

// left rows @ right^T, of keys and queries.
__device__ inline void multiply(const Shared& s, const char* right, Sums& k, Sums& q) {
  const int warp = threadIdx.x / 32;
  const Piece left = left_piece(), of_right = right_piece();
  const uint32_t left_at = left.row * 256 + ((left.half ^ (left.row & 7)) << 4);
  const uint32_t right_at = of_right.row * 256 + ((of_right.half ^ (of_right.row & 7)) << 4);
  const uint32_t k_rows = shared_address(s.base.in.k) + warp * SIXTEEN_BYTES;
  const uint32_t q_rows = shared_address(s.base.in.q) + warp * SIXTEEN_BYTES;
  const uint32_t columns = shared_address(right);
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    const Tile column = load_tile(columns + (right_at ^ step * 32));
    add_product(k, load_tile(k_rows + (left_at ^ step * 32)), column);
    add_product(q, load_tile(q_rows + (left_at ^ step * 32)), column);
  }
}

// The products within sixteen tokens pair by pair, for decays too strong for any reference.
__device__ inline void multiply_pairs(const Tokens& tokens, float* found, Sums& k, Sums& q) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int j = 0; j < SIXTEEN; ++j) {
    float sums[32];
    Four key{};  // of token j as token i sees it
#pragma unroll
    for (int i = 0; i < SIXTEEN; ++i) {
      const Four own = tokens.key(i);
      if (i > 0) key = key * exp2_of(tokens.G[i] - tokens.G[i - 1]);
      if (i == j) key = own;
      sums[i] = (key * own).sum();
      sums[SIXTEEN + i] = (key * tokens.query(i)).sum();
    }
    found[lane * SIXTEEN + j] = sum_to_lanes(sums);
  }
  __syncwarp();
  const chunk_factors::Fragment f;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int at = (f.row + e % 4 / 2 * 8) * SIXTEEN + f.column + 8 * (e / 4) + e % 2;
    k.v[e / 4][e % 4] = found[at];
    q.v[e / 4][e % 4] = found[SIXTEEN * SIXTEEN + at];
  }
}

__device__ inline Products multiply_all(const KdaFactorsArgs& args, const Work& work, Shared& s) {
  const int warp = threadIdx.x / 32;
  Products p{};
  Sums k{}, q{};
  bool strong;
  {
    Tokens tokens;
    tokens.load(args, work);
    tokens.publish(s);
    publish_beta(args, work, s);
    strong = tokens.strong();
    if (!strong) {
      make_own_operands(tokens, s);
      __syncwarp();
      multiply(s, s.own[warp], k, q);
    }
    __syncthreads();
    make_operands(args, work, tokens, s);
  }
  if (strong) {
    // Loaded again: in registers they would be in the way of everything before.
    Tokens tokens;
    tokens.load(args, work);
    multiply_pairs(tokens, reinterpret_cast<float*>(s.own[warp]), k, q);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < SIXTEENS; ++j) {
    if (j < warp) multiply(s, s.earlier[chunk_factors::below_index(warp, j)], p.k[j], p.q[j]);
    if (j == warp) p.k[j] = k, p.q[j] = q;
  }
  return p;
}

// This warp's row of tiles of -A into shared memory, and of P all the way.
__device__ inline void keep_products(const KdaFactorsArgs& args, const Work& work, Products& p,
                                     Shared& s) {
  const int warp = threadIdx.x / 32;
  const chunk_factors::Fragment f;
  auto& res = s.base.res;
#pragma unroll
  for (int j = 0; j < SIXTEENS; ++j) {
    if (j > warp) break;
    if (j == warp) chunk_factors::clear_above_diagonal(p.q[j], f);
    const char* tile = res.out[0][chunk_factors::lower_index(warp, j)];
    store_tile(chunk_factors::tile_address(tile, left_piece()), chunk_factors::rounded(p.q[j]));
    const chunk_factors::Columns beta(s.base.beta[0], j, f);
#pragma unroll
    for (int e = 0; e < 8; ++e) p.k[j].v[e / 4][e % 4] *= -beta.v[e / 4][e % 2];
    if (j == warp) {
      chunk_factors::store_diagonal(res.diagonal[0][warp], p.k[j], 0, f);
    } else {
      const Split parts = split(p.k[j]);
      const char* below = res.below[0][chunk_factors::below_index(warp, j)];
      const uint32_t to = chunk_factors::split_address(below, left_piece());
      store_tile(to, parts.high);
      store_tile(to ^ chunk_factors::LOW, parts.low);
    }
  }
  __syncwarp();
  auto* P = static_cast<__nv_bfloat16*>(args.P) + work.place * CHUNK * CHUNK;
  chunk_factors::write_stripe(res.out[0], warp, P);
}

__global__ void __launch_bounds__(THREADS, 3) kernel(const KdaFactorsArgs args) {
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32;
  const Work work = find_work(args);
  Products p = multiply_all(args, work, s);
  __syncthreads();
  keep_products(args, work, p, s);
  __syncwarp();

  float x[16];
  auto& res = s.base.res;
  char* diagonal = res.diagonal[0][warp];
  chunk_factors::substitute(diagonal, 0, x);
  __syncwarp();
  chunk_factors::store_split_row(diagonal, x);
  __syncthreads();
  chunk_factors::store_scaled_column(res.out[0][chunk_factors::lower_index(warp, warp)], x,
                                     s.base.beta[0] + 16 * warp);
  chunk_factors::join(s.base, 0, warp);
  __syncthreads();
  auto* T = static_cast<__nv_bfloat16*>(args.T) + work.place * CHUNK * CHUNK;
  chunk_factors::write_stripe(res.out[0], warp, T);
}

}  // namespace kda_factors

}  // namespace vllm_cuda
