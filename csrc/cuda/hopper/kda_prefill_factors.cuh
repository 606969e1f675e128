// SPDX-License-Identifier: Apache-2.0
// What a chunk of 32 tokens needs besides the state, by a team of two warps from the copies to the
// last operand. Chunks of a sequence do not wait for one another: teams make one each.
//
// With K, Q and S as seen from the chunk's middle, K' the keys of right operands
// (`kda_prefill_operands.cuh`), n the lengths of the keys, D = beta / n^2 and M the products K K'^T
// below the diagonal, the values that the state gets are W = (I + D M)^-1 D (n v - K S) and the
// output is the queries' scale times Q S + P W, P = Q K'^T on and below the diagonal. So keys and
// queries are not normalised before they are multiplied; (I + D M)^-1 D = D (I + M D)^-1.
#pragma once

#include "hopper/kda_prefill_inverse.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// A warp's place in its team: it makes the operands of a part, then the products with queries (part
// 0) or keys, which take longer: a multiprocessor's four schedulers have one of those warps each.
struct Role {
  int team, part;
  __device__ explicit Role(int maker)
      : team(maker / 2), part((maker ^ maker / 2 ^ maker / 4) % 2) {}
  __device__ void sync_team() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM_THREADS) : "memory");
  }
};

// Where in a chunk half its channels are seen from, and how far it is from there to its end, in
// base-2 logs. An even chunk is seen from its start and an odd one from its end, so that the state
// decays once in two chunks, between them; where a chunk decays too much for that, from near its
// middle, and where half of it does, from both ends.
struct Reference {
  Two at, rest;
  int when;
  __device__ Reference(bool strong, bool short_way, bool odd, Two middle, Two all)
      : when(strong ? BETWEEN : !short_way ? BEFORE | AFTER : odd ? BEFORE : AFTER) {
    // Whole numbers, for powers of two multiply the state without rounding: its bits do not depend
    // on whether it was stored before this chunk.
    at = choose(short_way && odd, all, whole(middle));
    at = choose(strong || (short_way && !odd), Two{}, at);
    rest = choose(strong, Two{}, all - at);
  }
};

// Of copies.
struct Arrival {
  uint64_t* barrier;
  uint32_t phase;
  __device__ void wait() const { wait_parity(barrier, phase); }
};

// What a team works with.
struct Bench {
  const HeadGates& gates;
  Team& team;
  Factors& factors;
  Scales& scales;
};

// The operands of a part in half the channels of an odd or even chunk; the first half also waits
// for queries and keys. Returns whether decays are strong, which takes `found`; it is `cleared` once
// a half's are.
__device__ inline bool make_half(const Role& role, int index, bool odd, bool cleared, float scale,
                                 const Arrival& others, const Bench& bench) {
  const int lane = own_lane();
  Scales& scales = bench.scales;
  float2(&totals)[2][32] = bench.team.totals[index];
  Half& half = bench.factors.halves[index];
  const Gates gates(bench.gates, index, lane);
  const Words words(half, role.part, lane);
  Two sums[PART];
  sum_decays(gates, words, sums);
  totals[role.part][lane] = {sums[PART - 1].x, sums[PART - 1].y};
  if (index == 0) {
    others.wait();
    publish_queries(PART * role.part, scale, bench.factors, scales);
  }
  role.sync_team();
  const float2 of_other = totals[1 - role.part][lane];
  const Two other{of_other.x, of_other.y}, own = sums[PART - 1];
  const Two middle = choose(role.part, other, own), all = own + other;
  const float least = fminf(fminf(own.x, own.y), fminf(other.x, other.y));
  const bool strong = __any_sync(~0u, least < -STRONGEST);
  const bool short_way = !__any_sync(~0u, fminf(all.x, all.y) < -STRONGEST);
  const Reference from(strong, short_way, odd, middle, all);
  if (role.part == 0) {
    const auto publish = [&](float (&decays)[DIM], const Two& x) {
      const Two by = exp2_of(x);
      *reinterpret_cast<float2*>(decays + HALF * index + decay_place(lane)) = {by.x, by.y};
    };
    publish(scales.before, from.at);
    if (strong) publish(scales.between, all);
    publish(scales.after, from.rest);
    if (lane == 0) scales.when[index] = from.when;
  }
  if (strong) {
    if (!cleared) {
      for (int i = threadIdx.x % TEAM_THREADS; i < 2 * CHUNK * CHUNK; i += TEAM_THREADS) {
        bench.factors.found()[i] = 0.f;
      }
      role.sync_team();
    }
    multiply_pairs(gates, half, role.part, lane, bench.factors.found());
    role.sync_team();
  }
  const Two begin = choose(role.part, middle, Two{});
  make_operands(words, sums, begin - from.at, choose(strong, all, from.at) - begin);
  return strong;
}

template <typename Join>
__device__ inline void make_chunk(const Role& role, float scale, float beta, bool odd,
                                  const Arrival& others, const Bench& bench, const Join& join) {
  Factors& factors = bench.factors;
  Scales& scales = bench.scales;
  bool strong = false;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) strong |= make_half(role, i, odd, strong, scale, others, bench);
  shared_fence();
  role.sync_team();
  Products products;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (scales.when[i] == BETWEEN) continue;
    products.add(factors.halves[i].queries + role.part * HALF_BYTES, factors.halves[i]);
  }
  if (strong) {
    products.add_pairs(factors.found() + role.part * CHUNK * CHUNK);
    __syncwarp();
    clear_zeros(factors, role.part);
  }
  if (role.part) {
    publish_keys(products, beta, scales);
    keep_inverse(products, scales, bench.team.blocks, factors);
  } else {
    keep_queries(products, factors);
    join();
  }
  shared_fence();
}

// What the strength of the update of a chunk's token lane is made of; tokens are the batch's,
// `end`: of its sequence.
__device__ inline __nv_bfloat16 load_beta(const KdaPrefillArgs& args, int head, int token,
                                          int end) {
  const int64_t row = min(token + own_lane(), end - 1);
  return static_cast<const __nv_bfloat16*>(args.b)[row * args.b_stride + head];
}
__device__ inline float strength_of(__nv_bfloat16 b) {
  return __fdividef(1.f, 1.f + __expf(-__bfloat162float(b)));
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
