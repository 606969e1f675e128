// SPDX-License-Identifier: Apache-2.0
// What a chunk of 32 tokens needs besides the state, by a team of two warps from the copies to the
// last operand. Chunks of a sequence do not wait for one another: teams make one each.
//
// With K, Q and S as seen from the chunk's middle, K' the keys of right operands
// (`kda_prefill_operands.cuh`), n the lengths of the keys, D = beta / n^2 and M the products K K'^T below the diagonal, the values
// that the state gets are W = (I + D M)^-1 (D n v - D K S) and the output is the length of the query
// times Q S + P W, P = Q K'^T on and below the diagonal. So keys and queries are not normalised
// before they are multiplied, and (I + D M)^-1 D = D (I + M D)^-1.
#pragma once

#include "hopper/gdn_chunk_inverse.cuh"
#include "hopper/gdn_chunk_products.cuh"
#include "hopper/kda_prefill_operands.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// A warp's place in its team: it makes the operands of a part, then the products with queries (part
// 0) or keys, which take longer: a multiprocessor's four schedulers have one of those warps each.
struct Role {
  int team, part;
  __device__ explicit Role(int maker)
      : team(maker / 2), part(maker % 2 ^ team % 2 ^ team / 2) {}
  __device__ void sync_team() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM_THREADS) : "memory");
  }
};

// Addresses of a piece of a 16 x 16 tile in 16 rows, and of the one 16 `step` channels further on.
__device__ inline uint32_t piece_address(const char* rows, const Piece& piece) {
  return shared_address(rows) + piece.row * ROW_BYTES + ((piece.half ^ piece.row % 8) << 4);
}
__device__ inline uint32_t step_address(uint32_t piece, int step) { return piece ^ step * 32; }

// The squares of 16 rows, as far as the tensor cores' results have them on their diagonal: rows
// lane / 4 and + 8 of the lanes for which lane / 8 == lane % 4.
struct Squares {
  float upper[2][4] = {}, lower[2][4] = {};
  // `rows`: queries or keys of the first half.
  __device__ explicit Squares(const char* rows) {
    const uint32_t from = piece_address(rows, left_piece());
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Tile x = load_tile(step_address(from, step) + half * static_cast<uint32_t>(sizeof(Half)));
        multiply_add(upper[half], x, x.r[0], x.r[2]);
        multiply_add(lower[half], x, x.r[1], x.r[3]);
      }
    }
  }
  // Where there are any; else a number.
  __device__ Two lengths(int lane) const {
    const int at = lane % 8 / 4;
    const float above = at ? upper[0][1] + upper[1][1] : upper[0][0] + upper[1][0];
    const float below = at ? lower[0][3] + lower[1][3] : lower[0][2] + lower[1][2];
    return {above + 1e-6f, below + 1e-6f};
  }
};

__device__ inline float inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The scales of the output of 16 tokens from `token` on.
__device__ inline void publish_queries(int token, float scale, const Stage& stage,
                                       Scales& scales) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const Squares squares(stage.halves[0].queries + token * ROW_BYTES);
  const Two x = squares.lengths(lane);
  if (row / 2 != lane % 4) return;
  scales.q_scale[token + row] = scale * inverse_root(x.x);
  scales.q_scale[token + row + 8] = scale * inverse_root(x.y);
}

// The lengths of 16 keys from `token` on, and the strengths of updates; `beta` is that of token lane.
__device__ inline void publish_keys(int token, float beta, const Stage& stage, Scales& scales) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const Two betas{__shfl_sync(~0u, beta, row), __shfl_sync(~0u, beta, row + 8)};
  const Squares squares(stage.halves[0].keys + token * ROW_BYTES);
  const Two x = squares.lengths(lane);
  if (row / 2 != lane % 4) return;
  const Two inverse{inverse_root(x.x), inverse_root(x.y)};
  const Two lengths = x * inverse, strengths = betas * inverse * inverse;
  scales.k_norm[token + row] = lengths.x;
  scales.k_norm[token + row + 8] = lengths.y;
  scales.strength[token + row] = strengths.x;
  scales.strength[token + row + 8] = strengths.y;
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

// Clears the tile above the diagonal, from column `unit` * 8 on.
__device__ inline void clear_above(char* rows, int unit) {
  const int lane = threadIdx.x % 32, row = lane / 2;
  *reinterpret_cast<uint4*>(rows + row * ROW_BYTES + ((unit + lane % 2 ^ row % 8) << 4)) = uint4{};
}

// What multiplies the values' results in the output.
__device__ inline void keep_queries(Products& products, Stage& stage) {
  using namespace chunk_factors;
  const Fragment f;
  clear_above_diagonal(products.first, f);
  clear_above_diagonal(products.second, f);
  const uint32_t to = piece_address(stage.products, left_piece());
  clear_above(stage.products, 2);
  store_tile(to, rounded(products.first));
  store_tile(to + PART_BYTES, rounded(products.below));
  store_tile(step_address(to, 1) + PART_BYTES, rounded(products.second));
}

// The tile below the diagonal of (I - B)^-1, transposed, of those on it as `Team::diagonal` has
// them, and the one below the diagonal of B.
__device__ inline Sums inverse_below(const Sums& of_b, const Team& team) {
  using namespace chunk_factors;
  const uint32_t first = split_address(team.diagonal[0], left_piece());
  const uint32_t second = split_address(team.diagonal[1], left_piece());
  // Results are right operands once their second and third quadrants change places.
  Split b = split(of_b);
  const auto swap = [](Tile& x) {
    const uint32_t kept = x.r[1];
    x.r[1] = x.r[2];
    x.r[2] = kept;
  };
  swap(b.high);
  swap(b.low);
  Sums between{}, below{};
  add_split_product(between, {load_tile(first), load_tile(first ^ LOW)}, b);
  add_split_product(below, split(between),
                    {load_transposed(second), load_transposed(second ^ LOW)});
  return below;
}

// (I + D M)^-1 D for values, times their keys' lengths, and negated for what the state holds.
__device__ inline void keep_inverse(Products& products, const Scales& scales, Team& team,
                                    Stage& stage) {
  using namespace chunk_factors;
  const Fragment f;
  const int lane = threadIdx.x % 32, tile = lane / PART, column = lane % PART;
  const Columns of_first(scales.strength, 0, f), of_second(scales.strength, 1, f);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    products.first.v[e / 4][e % 4] *= -of_first.v[e / 4][e % 2];
    products.below.v[e / 4][e % 4] *= -of_first.v[e / 4][e % 2];
    products.second.v[e / 4][e % 4] *= -of_second.v[e / 4][e % 2];
  }
  store_diagonal(team.diagonal[0], products.first, 0, f);
  store_diagonal(team.diagonal[1], products.second, 1, f);
  __syncwarp();
  float x[PART];
  substitute(team.diagonal[tile], tile, x);
  __syncwarp();
  store_split_row(team.diagonal[tile], x);
  const float k_norm = scales.k_norm[lane];
#pragma unroll
  for (int i = 0; i < PART; i += 4) {
    const float4 of = *reinterpret_cast<const float4*>(scales.strength + PART * tile + i);
    x[i] *= of.x, x[i + 1] *= of.y, x[i + 2] *= of.z, x[i + 3] *= of.w;
  }
  char* const to = stage.inverse + tile * PART_BYTES + column % 8 * 2;
#pragma unroll
  for (int i = 0; i < PART; ++i) {
    char* const row = to + i * ROW_BYTES;
    const int unit = 2 * tile + column / 8 ^ i % 8;
    *reinterpret_cast<__nv_bfloat16*>(row + (unit << 4)) = __float2bfloat16_rn(x[i] * k_norm);
    *reinterpret_cast<__nv_bfloat16*>(row + ((unit ^ 4) << 4)) = __float2bfloat16_rn(-x[i]);
  }
  clear_above(stage.inverse, 2);
  clear_above(stage.inverse, 6);
  __syncwarp();
  Sums below = inverse_below(products.below, team), negated;
  scale_columns(below, of_second);
  const Rows k_norms = rows_of(scales.k_norm, 0, f);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float& at = below.v[e / 4][e % 4];
    negated.v[e / 4][e % 4] = -at;
    at *= k_norms.v[e % 4 / 2];
  }
  // The quadrants change places as they are transposed.
  const uint32_t at = piece_address(stage.inverse + PART_BYTES, right_piece());
  const Tile for_values = rounded(below), for_state = rounded(negated);
  store_transposed(at, for_values);
  store_transposed(at ^ 64, for_state);
}

// The operands of a part in half the channels. Returns whether their decays are strong, which takes
// `found`; it is `cleared` once a half's are.
template <int GROUPS>
__device__ inline bool make_half(const Role& role, int index, bool cleared,
                                 Shared<GROUPS>& shared, Stage& stage, Scales& scales) {
  const int lane = own_lane();
  float2(&totals)[2][32] = shared.teams[role.team].totals[index];
  Half& half = stage.halves[index];
  const Gates gates(shared, index, lane);
  const Words words(half, role.part, lane);
  Two sums[PART];
  sum_decays(gates, words, sums);
  totals[role.part][lane] = {sums[PART - 1].x, sums[PART - 1].y};
  role.sync_team();
  const float2 first = totals[0][lane], second = totals[1][lane];
  const float least = fminf(fminf(first.x, first.y), fminf(second.x, second.y));
  const bool strong = __any_sync(~0u, least < -STRONGEST);
  const Two middle{first.x, first.y}, rest{second.x, second.y}, none{}, all = middle + rest;
  if (role.part == 0) {
    const auto publish = [&](float (&decays)[DIM], const Two& x) {
      const Two by = exp2_of(x);
      reinterpret_cast<float2*>(decays)[32 * index + lane] = {by.x, by.y};
    };
    publish(scales.before, choose(strong, none, middle));
    if (strong) publish(scales.between, all);
    publish(scales.after, choose(strong, none, rest));
    if (lane == 0) scales.strong[index] = strong;
  }
  if (strong) {
    if (!cleared) {
      for (int i = threadIdx.x % TEAM_THREADS; i < 2 * CHUNK * CHUNK; i += TEAM_THREADS) {
        stage.found()[i] = 0.f;
      }
      role.sync_team();
    }
    multiply_pairs(gates, half, role.part, lane, stage.found());
    role.sync_team();
  }
  const Two begin = choose(role.part, middle, none);
  make_operands(words, sums, begin - choose(strong, none, middle),
                choose(strong, all, middle) - begin);
  return strong;
}

template <int GROUPS>
__device__ inline void make_chunk(const Role& role, Shared<GROUPS>& shared, float scale,
                                  float beta, Stage& stage, Scales& scales) {
  // The other products take longer.
  if (role.part == 0) {
    publish_queries(0, scale, stage, scales);
    publish_queries(PART, scale, stage, scales);
  }
  publish_keys(PART * role.part, beta, stage, scales);
  bool strong = false;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) strong |= make_half(role, i, strong, shared, stage, scales);
  shared_fence();
  role.sync_team();
  Products products;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (scales.strong[i]) continue;
    products.add(stage.halves[i].queries + role.part * HALF_BYTES, stage.halves[i]);
  }
  if (strong) {
    products.add_pairs(stage.found() + role.part * CHUNK * CHUNK);
    __syncwarp();
  }
  if (role.part) {
    keep_inverse(products, scales, shared.teams[role.team], stage);
  } else {
    keep_queries(products, stage);
  }
  shared_fence();
}

// What the strength of the update of a part's token lane is made of.
__device__ inline __nv_bfloat16 load_beta(const KdaPrefillArgs& args, const Place& place,
                                          int token) {
  const int64_t row = place.first + min(token + own_lane() % PART, place.length - 1);
  return static_cast<const __nv_bfloat16*>(args.b)[row * args.b_stride + place.head];
}

// Every TEAMS-th chunk. The next one is fetched as soon as a stage is free.
template <int GROUPS>
__device__ inline void make(const Maps& maps, const KdaPrefillArgs& args, const Place& place,
                            int maker, Shared<GROUPS>& shared) {
  const Role role(maker);
  if (role.team >= place.chunks) return;
  const bool first = threadIdx.x % 32 == 0;
  Turn turn(role.team);
  if (first && role.part == 0) {
    fetch<GROUPS>(maps, place, role.team, shared.stages[turn.stage], &shared.fetched[turn.stage]);
  }
  __nv_bfloat16 b = load_beta(args, place, role.team * CHUNK + PART * role.part);
  for (int chunk = role.team; chunk < place.chunks; chunk += TEAMS) {
    Stage& stage = shared.stages[turn.stage];
    const float beta = __fdividef(1.f, 1.f + __expf(-__bfloat162float(b)));
    b = load_beta(args, place, (chunk + TEAMS) * CHUNK + PART * role.part);
    wait_parity(&shared.fetched[turn.stage], turn.phase);
    const int length = place.length - chunk * CHUNK;
    if (length < CHUNK) {
      clear_rows<GROUPS>(stage, length);
      role.sync_team();
    }
    make_chunk(role, shared, args.scale, beta, stage, shared.scales[turn.stage]);
    __syncwarp();
    if (first) arrive(&shared.made[turn.stage]);
    turn.advance(TEAMS);
    if (first && role.part == 0 && chunk + TEAMS < place.chunks) {
      // A stage that nobody has used is free.
      wait_parity(&shared.used[turn.stage], turn.phase ^ 1);
      fetch<GROUPS>(maps, place, chunk + TEAMS, shared.stages[turn.stage],
                    &shared.fetched[turn.stage]);
    }
    __syncwarp();
  }
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
