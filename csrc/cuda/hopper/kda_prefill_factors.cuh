// SPDX-License-Identifier: Apache-2.0
// What a chunk of 16 tokens needs besides the state, by one warp from the copies to the last
// operand. Chunks of a sequence do not wait for one another: as many warps make as many at once.
//
// With K and Q as seen from the chunk's start, K' the keys that grow (`kda_prefill_operands.cuh`),
// n the lengths of the keys, D = beta / n^2 and M the products K K'^T below the diagonal, the values
// that the state gets are W = (I + D M)^-1 (D n v - D K S) and the output is the length of the query
// times Q S + P W, P = Q K'^T on and below the diagonal. So keys and queries are not normalised
// before they are multiplied, and (I + D M)^-1 D = D (I + M D)^-1.
#pragma once

#include "hopper/gdn_chunk_inverse.cuh"
#include "hopper/gdn_chunk_products.cuh"
#include "hopper/kda_prefill_operands.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// Addresses of a piece of a 16 x 16 tile in 16 rows, and of the one 16 `step` channels further on.
__device__ inline uint32_t piece_address(const char* rows, const Piece& piece) {
  return shared_address(rows) + piece.row * ROW_BYTES + ((piece.half ^ piece.row % 8) << 4);
}
__device__ inline uint32_t step_address(uint32_t piece, int step) { return piece ^ step * 32; }

// The squares of 16 rows, as far as the tensor cores' results have them on their diagonal: rows
// lane / 4 and + 8 of the lanes for which lane / 8 == lane % 4.
struct Squares {
  float upper[4] = {}, lower[4] = {};
  __device__ explicit Squares(const char* tile) {
    const uint32_t from = piece_address(tile, left_piece());
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const Tile x = load_tile(step_address(from, step));
      multiply_add(upper, x, x.r[0], x.r[2]);
      multiply_add(lower, x, x.r[1], x.r[3]);
    }
  }
  __device__ Two found(int lane) const {
    return lane % 8 / 4 ? Two{upper[1], lower[3]} : Two{upper[0], lower[2]};
  }
};

// Lengths of keys and queries and the strengths of updates; `beta` is that of token lane.
__device__ inline void publish_lengths(float scale, float beta, int lane, Stage& stage) {
  const int row = lane / 4;
  const float of_row[2] = {__shfl_sync(~0u, beta, row), __shfl_sync(~0u, beta, row + 8)};
#pragma unroll 1
  for (int of_keys = 0; of_keys < 2; ++of_keys) {
    const Squares first(stage.halves[0].queries + of_keys * HALF_BYTES);
    const Squares second(stage.halves[1].queries + of_keys * HALF_BYTES);
    const Two some = first.found(lane), others = second.found(lane);
    const float squares[2] = {some.x + others.x + 1e-6f, some.y + others.y + 1e-6f};
    if (row / 2 != lane % 4) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float inverse = rsqrtf(squares[i]);
      if (of_keys) {
        stage.k_norm[row + 8 * i] = squares[i] * inverse;
        stage.strength[row + 8 * i] = of_row[i] * inverse * inverse;
      } else {
        stage.q_scale[row + 8 * i] = scale * inverse;
      }
    }
  }
}

// Products of a chunk: of keys and of queries with keys.
struct Products {
  Sums keys{}, queries{};

  __device__ void add(const Half& half) {
    const uint32_t k = piece_address(half.keys, left_piece());
    const uint32_t q = piece_address(half.queries, left_piece());
    const uint32_t right = piece_address(half.grown, right_piece());
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const Tile of_right = load_tile(step_address(right, step));
      add_product(keys, load_tile(step_address(k, step)), of_right);
      add_product(queries, load_tile(step_address(q, step)), of_right);
    }
  }
  __device__ void add_pairs(const float* found) {
    const chunk_factors::Fragment f;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int pair = (f.row + e % 4 / 2 * 8) * CHUNK + f.column + 8 * (e / 4) + e % 2;
      keys.v[e / 4][e % 4] += found[pair];
      queries.v[e / 4][e % 4] += found[CHUNK * CHUNK + pair];
    }
  }
};

// What multiplies the values' results in the output.
__device__ inline void keep_queries(Sums& products, Stage& stage) {
  const chunk_factors::Fragment f;
  chunk_factors::clear_above_diagonal(products, f);
  Piece piece = left_piece();
  piece.half += 4;
  store_tile(piece_address(stage.squares, piece), chunk_factors::rounded(products));
}

// Column `lane % 16` of (I - A)^-1 for a strictly lower triangular A, whose columns are rows of
// `triangle`.
constexpr int PITCH = CHUNK + 4;  // of its rows, so that lanes' words lie in different banks
__device__ inline void solve(const float* triangle, int lane, float (&x)[CHUNK]) {
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) x[i] = i == lane % CHUNK ? 1.f : 0.f;
#pragma unroll
  for (int j = 0; j < CHUNK - 1; ++j) {
#pragma unroll
    for (int unit = (j + 1) / 4; unit < CHUNK / 4; ++unit) {
      const float4 column = *reinterpret_cast<const float4*>(triangle + j * PITCH + 4 * unit);
      const float below[4] = {column.x, column.y, column.z, column.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (4 * unit + e > j) x[4 * unit + e] = fmaf(below[e], x[j], x[4 * unit + e]);
      }
    }
  }
}

// (I + D M)^-1 D for values, times their keys' lengths, and negated for what the state holds.
__device__ inline void keep_inverse(const Sums& products, int lane, Stage& stage) {
  const chunk_factors::Fragment f;
  const chunk_factors::Columns strength(stage.strength, 0, f);
  float* const triangle = reinterpret_cast<float*>(stage.squares);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int i = f.row + e % 4 / 2 * 8, j = f.column + 8 * (e / 4) + e % 2;
    triangle[j * PITCH + i] = -products.v[e / 4][e % 4] * strength.v[e / 4][e % 2];
  }
  __syncwarp();
  float x[CHUNK];
  solve(triangle, lane, x);
  const float column = lane < CHUNK ? stage.k_norm[lane] : -1.f;
#pragma unroll
  for (int i = 0; i < CHUNK; i += 4) {
    const float4 of_rows = *reinterpret_cast<const float4*>(stage.strength + i);
    x[i] *= of_rows.x * column, x[i + 1] *= of_rows.y * column;
    x[i + 2] *= of_rows.z * column, x[i + 3] *= of_rows.w * column;
  }
  __syncwarp();
  char* const to = stage.squares + lane % 8 * 2;
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    *reinterpret_cast<__nv_bfloat16*>(to + i * ROW_BYTES + ((lane / 8 ^ i % 8) << 4)) =
        __float2bfloat16_rn(x[i]);
  }
}

// `poll` is called now and then.
template <int GROUPS, typename Poll>
__device__ inline void make_chunk(const Shared<GROUPS>& shared, float scale, float beta,
                                  Stage& stage, LogDecays& decays, Poll poll) {
  publish_lengths(scale, beta, own_lane(), stage);
  float* const found = reinterpret_cast<float*>(stage.squares);
  int strong = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int lane = own_lane();
    Half& half = stage.halves[i];
    const Gates gates(shared, i, lane);
    const Two total = sum_decays(gates, half, lane, decays);
    const Two all = exp2_of(total);
    reinterpret_cast<float2*>(stage.decays)[32 * i + lane] = {all.x, all.y};
    const bool of_half = __any_sync(~0u, fminf(total.x, total.y) < -STRONGEST);
    if (of_half) {
      if (strong == 0) {
        for (int j = lane; j < 2 * CHUNK * CHUNK; j += 32) found[j] = 0.f;
        __syncwarp();
      }
      strong |= 1 << i;
      multiply_pairs(gates, half, lane, found);
    }
    make_operands(decays, total, of_half, half, lane);
    poll();
  }
  __syncwarp();
  Products products;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if ((strong >> i & 1) == 0) products.add(stage.halves[i]);
  }
  if (strong != 0) products.add_pairs(found);
  stage.strong = strong;
  __syncwarp();
  keep_inverse(products.keys, own_lane(), stage);
  keep_queries(products.queries, stage);
}

// The strength of token lane's update.
__device__ inline float beta_of(const KdaPrefillArgs& args, const Place& place, int chunk,
                                int length) {
  const int lane = own_lane();
  if (lane >= length) return 0.f;
  const int64_t token = place.first + chunk * CHUNK + lane;
  const auto* b = static_cast<const __nv_bfloat16*>(args.b) + token * args.b_stride + place.head;
  return __fdividef(1.f, 1.f + __expf(-__bfloat162float(*b)));
}

// A place in the ring of stages.
struct Turn {
  int stage;
  uint32_t phase;
  __device__ explicit Turn(int chunk) : stage(chunk % STAGES), phase(chunk / STAGES % 2) {}
  __device__ void advance(int chunks) {
    stage += chunks;
    if (stage >= STAGES) {
      stage -= STAGES;
      phase ^= 1;
    }
  }
};

// Every MAKERS-th chunk from `maker` on. The next one is fetched as soon as a stage is free.
template <int GROUPS>
__device__ inline void make(const Maps& maps, const KdaPrefillArgs& args, const Place& place,
                            int maker, Shared<GROUPS>& shared) {
  if (maker >= place.chunks) return;
  const bool first = threadIdx.x % 32 == 0;
  Turn own(maker), next(maker);
  if (first) fetch<GROUPS>(maps, place, maker, shared.stages[maker], &shared.fetched[maker]);
  for (int chunk = maker; chunk < place.chunks; chunk += MAKERS) {
    next.advance(MAKERS);
    bool due = first && chunk + MAKERS < place.chunks;
    const auto fetch_next = [&](bool patient) {
      if (!due) return;
      // A stage that nobody has used is free.
      uint64_t* const used = &shared.used[next.stage];
      if (patient) {
        wait_parity(used, next.phase ^ 1);
      } else if (!passed(used, next.phase ^ 1)) {
        return;
      }
      due = false;
      fetch<GROUPS>(maps, place, chunk + MAKERS, shared.stages[next.stage],
                    &shared.fetched[next.stage]);
    };
    const int length = min(place.length - chunk * CHUNK, CHUNK);
    const float beta = beta_of(args, place, chunk, length);
    Stage& stage = shared.stages[own.stage];
    wait_parity(&shared.fetched[own.stage], own.phase);
    if (length < CHUNK) clear_rows<GROUPS>(stage, length);
    make_chunk(shared, args.scale, beta, stage, shared.decays[maker],
               [&] { fetch_next(false); });
    shared_fence();
    __syncwarp();
    if (first) arrive(&shared.made[own.stage]);
    fetch_next(true);
    __syncwarp();
    own = next;
  }
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
