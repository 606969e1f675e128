// SPDX-License-Identifier: Apache-2.0
// The factors of chunks of 64 tokens and one head of Kimi delta attention; the maths and the
// letters are those of fla/ops/kda/chunk_factors.py.
//
// Of a row of the 4 x 4 tiles one warp computes those of k k^T, another those of q k^T; the inverse
// is that of the gated delta rule. A CTA goes from chunk to chunk: the next one's inputs come while
// the keys' warps make the inverse.
#pragma once

#include "hopper/kda_factors_operands.cuh"

namespace vllm_cuda {

namespace kda_factors {

// Row ROW of the tiles of left rows @ right^T, of keys or of queries.
template <int ROW>
__device__ inline void multiply_row(const Shared& s, const Role& role, Sums (&tiles)[SIXTEENS]) {
  const char* rows = role.half == 0 ? s.in.k[0] : s.in.q[0];
  const uint32_t left = piece_address(rows, SIXTEEN * ROW, left_piece());
  uint32_t right[ROW + 1];
#pragma unroll
  for (int j = 0; j < ROW; ++j) {
    right[j] = piece_address(s.later[chunk_factors::below_index(ROW, j)][0], 0, right_piece());
  }
  right[ROW] = piece_address(s.in.a[0], SIXTEEN * ROW, right_piece());
#pragma unroll
  for (int j = 0; j <= ROW; ++j) tiles[j] = {};
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    const Tile of_left = load_tile(step_address(left, step, HALF_BYTES));
#pragma unroll
    for (int j = 0; j < ROW; ++j) {
      add_product(tiles[j], of_left, load_tile(step_address(right[j], step, OWN_BYTES)));
    }
    add_product(tiles[ROW], of_left, load_tile(step_address(right[ROW], step, HALF_BYTES)));
  }
}

// Sums of 2 N values over the lanes, value i to the lanes with i in their last bits.
template <int N>
__device__ inline float sum_to_lanes(const float (&x)[2 * N]) {
  const bool upper = threadIdx.x & N;
  float sums[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float low = x[i], high = x[i + N];
    sums[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, N);
  }
  if constexpr (N > 1) {
    return sum_to_lanes<N / 2>(sums);
  } else {
    return sums[0];
  }
}

// The products within sixteen tokens pair by pair, for decays too strong for a reference: each warp
// adds up half of the channels, and leaves them where its inputs of gates were.
__device__ inline void multiply_pairs(const Two (&G)[SIXTEEN], const Role& role, Shared& s) {
  float* const found = reinterpret_cast<float*>(s.in.a[role.half] + role.sixteen * OWN_BYTES);
#pragma unroll 1
  for (int j = 0; j < SIXTEEN; ++j) {
    float sums[32];
    Two key{};  // of token j as token i sees it
#pragma unroll
    for (int i = 0; i < SIXTEEN; ++i) {
      const Two scale = load_two(s.scales[SIXTEEN * role.sixteen + i]);
      const Two own = widen(*role.word(s.in.k[role.half], i)) * scale.x;
      const Two query = widen(*role.word(s.in.q[role.half], i)) * scale.y;
      if (i > 0) key = key * exp2_of(G[i] - G[i - 1]);
      if (i == j) key = own;
      sums[i] = (key * own).sum();
      sums[SIXTEEN + i] = (key * query).sum();
    }
    found[role.lane * SIXTEEN + j] = sum_to_lanes<SIXTEEN>(sums);
  }
}
__device__ inline Sums found_pairs(const Role& role, const Shared& s) {
  const auto found = [&](int half) {
    return reinterpret_cast<const float*>(s.in.a[half] + role.sixteen * OWN_BYTES) +
           role.half * SIXTEEN * SIXTEEN;
  };
  const chunk_factors::Fragment f;
  Sums sums;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int pair = (f.row + e % 4 / 2 * 8) * SIXTEEN + f.column + 8 * (e / 4) + e % 2;
    sums.v[e / 4][e % 4] = found(0)[pair] + found(1)[pair];
  }
  return sums;
}

// The operands of this warp's tokens and channels, and what the scan reads; all threads of the CTA
// meet before the totals are read and when operands are complete. Returns whether decays are
// strong.
__device__ inline bool make_all(const KdaFactorsArgs& args, const Work& work, const Gates& gates,
                                const Role& role, Shared& s) {
  Two G[SIXTEEN];
  sum_decays(gates, role, s, G);
  publish_scales(args, role, s);
  __syncthreads();
  gates.publish_beta(work, s);
  const bool strong = is_strong(role, s);
  const Outputs out(args, work, role);
  if (strong) {
    multiply_pairs(G, role, s);
    make_operands<true>(out, G, role, s);
  } else {
    make_operands<false>(out, G, role, s);
  }
  __syncthreads();
  return strong;
}

// This warp's row of tiles.
__device__ inline void multiply_all(const Shared& s, bool strong, const Role& role,
                                    Sums (&tiles)[SIXTEENS]) {
  switch (role.sixteen) {
    case 0: multiply_row<0>(s, role, tiles); break;
    case 1: multiply_row<1>(s, role, tiles); break;
    case 2: multiply_row<2>(s, role, tiles); break;
    default: multiply_row<3>(s, role, tiles);
  }
  if (!strong) return;
  const Sums own = found_pairs(role, s);
#pragma unroll
  for (int j = 0; j < SIXTEENS; ++j) {
    if (j == role.sixteen) tiles[j] = own;
  }
}

// A row of tiles of P, all the way.
__device__ inline void keep_queries(const KdaFactorsArgs& args, const Work& work, const Role& role,
                                    Sums (&tiles)[SIXTEENS], Shared& s) {
  const chunk_factors::Fragment f;
  auto& out = s.res.P;
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
  auto& res = s.res.inverse;
#pragma unroll
  for (int j = 0; j < SIXTEENS; ++j) {
    if (j > role.sixteen) continue;
    const chunk_factors::Columns beta(s.beta, j, f);
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

// T of the tiles of -A, by the keys' warps.
__device__ inline void invert(const KdaFactorsArgs& args, const Work& work, const Role& role,
                              Shared& s) {
  float x[16];
  auto& res = s.res.inverse;
  char* diagonal = res.diagonal[0][role.sixteen];
  __syncwarp();
  chunk_factors::substitute(diagonal, 0, x);
  __syncwarp();
  chunk_factors::store_split_row(diagonal, x);
  const int tile = chunk_factors::lower_index(role.sixteen, role.sixteen);
  chunk_factors::store_scaled_column(res.out[0][tile], x, s.beta + SIXTEEN * role.sixteen);
  inverse_sync();
  chunk_factors::join(res, s.beta, 0, role.sixteen);
  inverse_sync();
  auto* T = static_cast<__nv_bfloat16*>(args.T) + work.place * CHUNK * CHUNK;
  chunk_factors::write_stripe(res.out[0], role.sixteen, T);
}

__global__ void __launch_bounds__(THREADS, CTAS)
    kernel(const __grid_constant__ Maps maps, const KdaFactorsArgs args) {
  Shared& s = shared();
  const Role role;
  const int count = args.num_chunks * args.heads;
  int index = blockIdx.x;
  Work work(args, index);
  Gates gates(args, work, role);
  if (threadIdx.x == 0) {
    Ring(s.barriers, 1).init(1);
    fetch(maps, work, s);
  }
  __syncthreads();
  for (uint32_t phase = 0;; phase ^= 1) {
    wait_parity(s.barriers, phase);
    if (work.length < CHUNK) clear_rows(work.length, s);
    const bool strong = make_all(args, work, gates, role, s);
    Sums tiles[SIXTEENS];
    multiply_all(s, strong, role, tiles);
    shared_fence();
    __syncthreads();
    index += gridDim.x;
    const Work next = index < count ? Work(args, index) : work;
    if (index < count) {
      if (threadIdx.x == 0) fetch(maps, next, s);
      gates = Gates(args, next, role);
    }
    if (role.half == 0) {
      keep_keys(role, tiles, s);
      invert(args, work, role, s);
    } else {
      keep_queries(args, work, role, tiles, s);
    }
    if (index >= count) break;
    work = next;
  }
}

}  // namespace kda_factors

}  // namespace vllm_cuda
