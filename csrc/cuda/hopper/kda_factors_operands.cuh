// SPDX-License-Identifier: Apache-2.0
// The operands of a chunk's products in Kimi delta attention, which has a decay per key channel.
//
// A pair of warps makes those of 16 tokens, two channels per lane, all tokens of a channel in one
// thread. Operands take the place of the inputs they are made of, word by word.
// exp(G_i - G_j) is shared out between both operands at a reference, the start of the later
// token's sixteen. Right operands grow within sixteen alone.
#pragma once

#include "hopper/kda_factors_inputs.cuh"

namespace vllm_cuda {

namespace kda_factors {

// A lane's base-2 log decays of its sixteen tokens, summed up. Publishes their total.
__device__ inline void sum_decays(const Gates& gates, const Role& role, Shared& s,
                                  Two (&G)[SIXTEEN]) {
  const Rate rate(gates.A_log);
  const Two bias = gates.bias * LOG2_E;
  Two sum{};
#pragma unroll
  for (int t = 0; t < SIXTEEN; ++t) {
    const Two a = widen(*role.word(s.in.a[role.half], t));
    sum.x = rate.add(sum.x, fmaf(a.x, LOG2_E, bias.x));
    sum.y = rate.add(sum.y, fmaf(a.y, LOG2_E, bias.y));
    G[t] = sum;
  }
  store_two(&s.totals[role.sixteen][role.channel()], sum);
  // Of positive numbers the largest has the largest bits.
  const float own = fmaxf(fabsf(sum.x), fabsf(sum.y));
  const unsigned most = __reduce_max_sync(~0u, __float_as_uint(own));
  if (role.lane == 0) s.most[role.sixteen][role.half] = __uint_as_float(most);
}

// Whether this sixteen has no reference.
__device__ inline bool is_strong(const Role& role, const Shared& s) {
  return fmaxf(s.most[role.sixteen][0], s.most[role.sixteen][1]) > STRONGEST;
}

// What keys or queries are multiplied with: the tensor cores make the squares of sixteen rows, and
// a diagonal of their products.
__device__ inline void publish_scales(const KdaFactorsArgs& args, const Role& role, Shared& s) {
  const char* rows = role.half == 0 ? s.in.k[0] : s.in.q[0];
  const uint32_t from = piece_address(rows, SIXTEEN * role.sixteen, left_piece());
  float upper[4] = {}, lower[4] = {};
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    const Tile x = load_tile(step_address(from, step, HALF_BYTES));
    multiply_add(upper, x, x.r[0], x.r[2]);
    multiply_add(lower, x, x.r[1], x.r[3]);
  }
  const int row = role.lane / 4;
  if (row / 2 != role.lane % 4) return;
  const float scale = role.half == 0 ? 1.f : args.scale;
  float* const to = &s.scales[SIXTEEN * role.sixteen + row][role.half];
  to[0] = scale * rsqrtf((row % 2 ? upper[1] : upper[0]) + 1e-6f);
  to[2 * 8] = scale * rsqrtf((row % 2 ? lower[3] : lower[2]) + 1e-6f);
}

// Base-2 log decays per channel: of this sixteen, from the chunk's start to it and from its end to
// the chunk's, and of the next sixteen and the next two.
struct Distances {
  Two total, before{}, after{}, skipped[2] = {};

  __device__ Distances(const Role& role, const Shared& s) {
#pragma unroll
    for (int i = 0; i < SIXTEENS; ++i) {
      const Two sum = load_two(&s.totals[i][role.channel()]);
      if (i < role.sixteen) before = before + sum;
      if (i == role.sixteen) total = sum;
      if (i > role.sixteen) after = after + sum;
      if (i == role.sixteen + 1) skipped[0] = sum;
      if (i == role.sixteen + 2) skipped[1] = skipped[0] + sum;
    }
  }
};

// Where a lane writes its channels of its first token, and a chunk's decays.
struct Outputs {
  static constexpr int ROW = DIM / 2;  // words of a token
  uint32_t *queries, *keys, *ends;
  float* decays;

  __device__ Outputs(const KdaFactorsArgs& args, const Work& work, const Role& role) {
    const int64_t at = (work.place * CHUNK + SIXTEEN * role.sixteen) * ROW + role.channel() / 2;
    queries = static_cast<uint32_t*>(args.queries) + at;
    keys = static_cast<uint32_t*>(args.keys) + at;
    ends = static_cast<uint32_t*>(args.ends) + at;
    decays = args.decays + work.place * DIM + role.channel();
  }
};

// Operands of all products, and what the scan reads. Left operands are seen from the start of the
// sixteen; right ones likewise, or as STRONG ones from its end.
template <bool STRONG>
__device__ inline void make_operands(const Outputs& out, const Two (&G)[SIXTEEN],
                                     const Role& role, Shared& s) {
  const Distances to(role, s);
  const Two before = exp2_of(to.before), to_end = exp2_of(to.after);
  const Two end = STRONG ? Two{1.f, 1.f} : exp2_of(to.total);
  const Two of_ends = end * to_end;
  if (role.sixteen == 0) store_two(out.decays, exp2_of(to.total + to.after));
  Two seen[SIXTEEN];
#pragma unroll
  for (int t = 0; t < SIXTEEN; ++t) {
    uint32_t *const k_word = role.word(s.in.k[role.half], t),
                    *const q_word = role.word(s.in.q[role.half], t);
    const Two scale = load_two(s.scales[SIXTEEN * role.sixteen + t]);
    const Two key = widen(*k_word) * scale.x, query = widen(*q_word) * scale.y;
    const Two forward = exp2_of(G[t]), k = key * forward, q = query * forward;
    *k_word = pack(k);
    *q_word = pack(q);
    seen[t] = key * exp2_of(STRONG ? G[SIXTEEN - 1] - G[t] : -G[t]);
    if (!STRONG) *role.word(s.in.a[role.half], t) = pack(seen[t]);
    out.keys[t * Outputs::ROW] = pack(k * before);
    out.queries[t * Outputs::ROW] = pack(q * before);
    out.ends[t * Outputs::ROW] = pack(seen[t] * of_ends);
  }
  Two of_later = end;
#pragma unroll 1
  for (int later = role.sixteen + 1; later < SIXTEENS; ++later) {
    char* const rows = s.later[chunk_factors::below_index(later, role.sixteen)][role.half];
#pragma unroll
    for (int t = 0; t < SIXTEEN; ++t) *role.own_word(rows, t) = pack(seen[t] * of_later);
    of_later = end * exp2_of(later == role.sixteen + 1 ? to.skipped[0] : to.skipped[1]);
  }
}

}  // namespace kda_factors

}  // namespace vllm_cuda
